"""Keeps the paths of each link: asks whether they live, drops the dead, and dials others."""

from collections.abc import Awaitable, Callable
from functools import partial

import structlog
import trio

from pmesh.agent.mesh.links import Link, LivePath
from pmesh.core.links import paths
from pmesh.core.links.addresses import LocalAddress
from pmesh.core.links.paths import Attempts, PathKey, Way
from pmesh.errors import PmeshError
from pmesh.net.links.interfaces import AddressWatch

TICK_S = 0.05  # a path that fails is noticed no later than this
QUIET_TICK_S = 0.3  # while no job runs: well before a silent peer is gone
_log = structlog.get_logger()


class PathKeeper:
    """Looks after the paths of one agent's links.

    Args:
        watch: This machine's addresses.
        is_quiet: Whether no job runs and all peers are well.
        dial: Adds the path of a way to its link; may raise PmeshError.
        lose: Ends a path that has failed, and is told why; the link goes on without it.
        improved: Is told of a link that has chosen a better path.
    """

    def __init__(
        self,
        watch: AddressWatch,
        *,
        is_quiet: Callable[[], bool],
        dial: Callable[[Way], Awaitable[None]],
        lose: Callable[[Link, LivePath, str], None],
        improved: Callable[[Link, str], None],
    ) -> None:
        self._watch = watch
        self._is_quiet = is_quiet
        self._dial = dial
        self._lose = lose
        self._improved = improved

    async def keep(self, link: Link, *, second: bool) -> None:
        """Keep the paths of a link until it ends.

        Args:
            link: A new one.
            second: The peer dials first; this side dials only the ways that the peer can't.
        """
        with link.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._judge, link)
                nursery.start_soon(self._dial_others, link, second)

    # --- the paths that there are

    async def _judge(self, link: Link) -> None:
        while True:
            while len(link.paths) < 2:  # noqa: PLR2004 - there is nothing to choose
                await link.changed.wait()
            tick_s = QUIET_TICK_S if self._is_quiet() else TICK_S
            began = trio.current_time()
            await trio.sleep(tick_s)
            if trio.current_time() - began < 2 * tick_s:  # else the stall may be our own
                self._judge_now(link)

    def _judge_now(self, link: Link) -> None:
        now, quiet = trio.current_time(), self._is_quiet()
        for live in link.paths.values():
            live.judge()
        for key in list(paths.failed([live.state() for live in link.paths.values()], now=now)):
            live = link.paths[key]
            self._lose(link, live, f"{live} is silent")
        doubted = any(live.asked_at is not None for live in link.paths.values())
        for live in link.paths.values():
            in_use = live is link.current or not quiet
            if paths.to_ask(live.state(), in_use=in_use, doubted=doubted, now=now):
                live.ask()
        if link.choose():
            self._improved(link, "it is better")

    # --- the ways that are not yet paths

    async def _dial_others(self, link: Link, second: bool) -> None:  # noqa: FBT001 - for start_soon
        attempts: dict[PathKey, Attempts] = {}
        fresh, known = Attempts(), None
        while True:
            changed, local = link.changed, self._watch.current
            facts = local, link.peer.interfaces
            if facts != known:  # a cable was plugged in: all is worth another try
                pause_s = paths.SECOND_S if second else 0.0
                fresh, known = Attempts(due=trio.current_time() + pause_s), facts
                attempts = {}
            ways = {way.key: way for way in link.ways(local) if way.key not in link.paths}
            due = [key for key in ways if attempts.get(key, fresh).due <= trio.current_time()]
            longest_s = paths.LONGEST_REDIAL_S if link.is_direct else paths.LONGEST_RELAYED_S
            async with trio.open_nursery() as nursery:
                for key in due:
                    before = attempts.get(key, fresh)
                    attempts[key] = paths.failed_again(
                        before, now=trio.current_time(), longest_s=longest_s
                    )
                    nursery.start_soon(self._dial_one, link, ways[key])
            next_due = min((attempts.get(key, fresh).due for key in ways), default=float("inf"))
            with trio.move_on_at(next_due):
                await self._any_change(changed, local)

    async def _dial_one(self, link: Link, way: Way) -> None:
        try:
            await self._dial(way)
        except PmeshError as e:
            _log.debug("no path", peer=link.peer.name, interface=way.key.interface, reason=str(e))

    async def _any_change(self, changed: trio.Event, seen: tuple[LocalAddress, ...]) -> None:
        """Wait until the link's paths change, or the interfaces of either side."""
        async with trio.open_nursery() as nursery:

            async def wait(for_what: Callable[[], Awaitable[object]]) -> None:
                await for_what()
                nursery.cancel_scope.cancel()

            nursery.start_soon(wait, changed.wait)
            nursery.start_soon(wait, partial(self._watch.changed_from, seen))
