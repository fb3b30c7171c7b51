"""Shared memory as a trainer's two connections report it: arenas that are granted or gone."""

from pmesh.core.wire.session import ArenaGone, ArenaGranted
from pmesh.errors import UsageError
from pmesh.net.sessions.arena_pools import SessionArenas
from pmesh.net.sessions.arenas import Arena
from pmesh.net.sessions.sessions import Session, refuse

SAY_EVERY_S = 10.0  # I6: how often a waiting call reports the ranks for which it waits


class Grants:
    """The arenas of one connection that its trainer has mapped."""

    def __init__(self, session: Session, arenas: SessionArenas) -> None:
        self._session = session
        self._arenas = arenas
        self._outputs: set[int] = set()

    async def grant_input(self, nbytes: int, *, lasting: bool = False) -> None:
        """Grant an arena to write to, or refuse the request."""
        try:
            arena = await self._arenas.inputs.create(nbytes, lasting=lasting)
        except (UsageError, OSError) as e:  # OSError: the system has no memory or descriptor left
            await refuse(self._session, "UsageError", str(e))
            return
        await self._grant(arena)

    def lacks(self, arena: Arena | None) -> bool:
        """Return whether the trainer must hear of this result's arena, or of one that is gone."""
        is_new = arena is not None and arena.number not in self._outputs
        return is_new or bool(self._arenas.outputs.gone)

    async def report_gone(self) -> None:
        """Report the output arenas that are gone since the last call."""
        for number in self._arenas.outputs.take_gone():
            self._outputs.discard(number)
            await self._session.send(ArenaGone(number))

    async def grant_output(self, arena: Arena | None) -> None:
        """Grant the arena of a result, if it has one that the trainer does not know yet."""
        if arena is not None and arena.number not in self._outputs:
            self._outputs.add(arena.number)
            await self._grant(arena)

    async def _grant(self, arena: Arena) -> None:
        granted = ArenaGranted(arena.number, arena.kind, arena.nbytes)
        await self._session.send(granted, (arena.descriptor,))
