"""The source of a plan where it is a sum that is still to be made."""

from collections.abc import Callable, Coroutine
from typing import Any, Protocol


class SourceFold(Protocol):
    """The source of a plan, as what it is made of."""

    def by_parts(self) -> int:
        """Return what `native.begin` takes as `fold`; 0 if only `finish` can make the source."""
        ...

    async def finish(self) -> None:
        """Make the whole; no thread is at work any more when this ends, however (V3)."""
        ...


async def folded_first(fold: SourceFold, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Make the whole source, and then run the plan."""
    await fold.finish()
    await run()
