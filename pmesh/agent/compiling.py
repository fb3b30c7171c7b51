"""The codecs' faster twins are compiled beside the first ops that use them, which do without."""

from collections.abc import Callable

import trio

from pmesh.agent.containment import Contain
from pmesh.compression.codecs import codec_of


class Compiler:
    """Compiles for one session; its nursery is that of the session, and may be cancelled."""

    def __init__(self, nursery: trio.Nursery, contain: Contain) -> None:
        self._nursery = nursery
        self._contain = contain
        self._asked: set[str] = set()

    def want(self, codec: str) -> None:
        """An op has been called that uses the codec of that name, and more will."""
        if codec in self._asked:
            return
        self._asked.add(codec)
        try:
            prepare = codec_of(codec).prepare
        except ValueError:
            return  # an earlier op's failure was told instead; called again, it is refused
        self._nursery.start_soon(self._compile, codec, prepare)

    async def _compile(self, codec: str, prepare: Callable[[], bool]) -> None:
        with self._contain(f"the compilation of {codec}"):  # ops do without it
            # It takes seconds: nobody who leaves, or ends the agent, waits for it.
            await trio.to_thread.run_sync(prepare, abandon_on_cancel=True)
