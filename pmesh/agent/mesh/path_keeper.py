"""Keeps the paths of each link: asks whether they live, drops the dead, and dials others."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

import structlog
import trio

from pmesh.agent.mesh.links import Link, LivePath
from pmesh.core.links import paths
from pmesh.core.links.addresses import LocalAddress
from pmesh.core.links.paths import Attempts, Way
from pmesh.core.wire.link import PeerInterface
from pmesh.errors import PmeshError
from pmesh.net.links.interfaces import AddressWatch

TICK_S = 0.05  # a path that fails is noticed no later than this
QUIET_TICK_S = 0.3  # while no job runs: well before a silent peer is gone
_log = structlog.get_logger()

LinkEnds: TypeAlias = tuple[tuple[LocalAddress, ...], tuple[PeerInterface, ...]]
"""The addresses of this machine, and the interfaces of the peer."""


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
        for key in list(paths.failed(link.states(), now=now)):
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
        """Dial each way by itself, as one may hang for 5 s; there are at most eight."""
        pause_s = paths.SECOND_S if second else 0.0
        kept: dict[Way, trio.CancelScope] = {}
        async with trio.open_nursery() as nursery:
            while True:
                facts = self._facts(link)
                ways = link.ways(facts[0])
                for way in kept.keys() - set(ways):
                    kept.pop(way).cancel()
                for way in ways:
                    if way not in kept:
                        scope = kept[way] = trio.CancelScope()
                        nursery.start_soon(self._keep_way, link, way, scope, pause_s)
                await self._other_facts(link, facts)

    async def _keep_way(
        self, link: Link, way: Way, scope: trio.CancelScope, first_pause_s: float
    ) -> None:
        """Dial the way whenever it is not a path, after growing pauses."""
        attempts, known = Attempts(), None
        with scope:
            while True:
                facts = self._facts(link)
                if facts != known:  # a cable was plugged in: each way is worth another try
                    attempts, known = Attempts(due=trio.current_time() + first_pause_s), facts
                with trio.move_on_at(attempts.due):
                    await self._other_facts(link, facts)
                    continue
                live = link.paths.get(way.key)
                if live is not None:
                    await link.changed.wait()
                    if link.paths.get(way.key) is not live:
                        lasted_s = trio.current_time() - live.since
                        attempts = paths.lost_after(attempts, lasted_s=lasted_s)
                    continue
                longest_s = paths.LONGEST_REDIAL_S if link.is_direct else paths.LONGEST_RELAYED_S
                now = trio.current_time()
                attempts = paths.tried_again(attempts, now=now, longest_s=longest_s)
                await self._dial_one(link, way)

    async def _dial_one(self, link: Link, way: Way) -> None:
        try:
            await self._dial(way)
        except PmeshError as e:
            _log.debug("no path", peer=link.peer.name, interface=way.key.interface, reason=str(e))

    def _facts(self, link: Link) -> LinkEnds:
        return self._watch.current, link.peer.interfaces

    async def _other_facts(self, link: Link, known: LinkEnds) -> None:
        """Wait until the interfaces of either side differ from the known ones."""
        while self._facts(link) == known:
            await self._any_change(link.changed, known[0])

    async def _any_change(self, changed: trio.Event, seen: tuple[LocalAddress, ...]) -> None:
        """Wait until the link's paths change, or the interfaces of either side."""
        async with trio.open_nursery() as nursery:

            async def wait(for_what: Callable[[], Awaitable[object]]) -> None:
                await for_what()
                nursery.cancel_scope.cancel()

            nursery.start_soon(wait, changed.wait)
            nursery.start_soon(wait, partial(self._watch.changed_from, seen))
