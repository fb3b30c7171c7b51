"""Where the results of a rank's repeated calls lie: in arenas that are held for as long.

If all ranks of the job are at this agent, a result that is the same for all is written once, as
Python writes it (`pmesh.agent.jobs.together`). Rank 0 makes the arenas for that, and the others
take aliases of them.
"""

from collections.abc import Sequence

import trio

from pmesh.agent.grants import Grants
from pmesh.agent.jobs.ranks import LocalRank
from pmesh.agent.jobs.repeated_together import RepeatedTogether
from pmesh.errors import UsageError
from pmesh.native.layout import MOST_SLOTS, OWN_SLOTS
from pmesh.net.lanes.persistent import NO_LIMIT
from pmesh.net.sessions.arenas import Arena


class RepeatedResults:
    """Those of one rank. Nobody writes there while it makes room or forgets."""

    def __init__(self, rank: LocalRank, grants: Grants, together: RepeatedTogether) -> None:
        """Begin without an arena; `together` knows those that ranks of a job share."""
        self._rank = rank
        self._grants = grants
        self._together = together
        self.own = list[Arena]()
        self.shared = list[Arena]()
        """Rank 0's, or aliases of them."""
        self._offer: Sequence[Arena] = ()
        """What rank 0 offered as the shared ones were taken."""
        self._makes_offer = False
        self._no_room_for = NO_LIMIT

    @property
    def arenas(self) -> list[Arena]:
        """All of them, its own first."""
        return [*self.own, *self.shared]

    @property
    def is_out_of_date(self) -> bool:
        """Whether rank 0 has given up what is shared here, or another one has no room for it."""
        return bool(self.shared) and self._offer is not self._together.offer(self._rank.roster)

    def has_room(self, nbytes: int, *, lends: bool, shares: bool) -> bool:
        """Return whether there are enough arenas of this size; no bytes need none."""
        return _suffice(self.shared if shares else self.own, nbytes, lends=lends)

    def may_make_room(self, nbytes: int, *, lends: bool, shares: bool) -> bool:
        """Return whether `make_room` is worth a try: what is shared must be offered first."""
        if not shares or self._rank.rank == 0:
            return nbytes < self._no_room_for
        offer = self._together.offer(self._rank.roster)
        return _suffice(offer, nbytes, lends=lends)

    async def make_room(self, nbytes: int, *, lends: bool, shares: bool) -> bool:
        """Have arenas of this size, known to the trainer; return False if there is no room."""
        roster, is_first = self._rank.roster, self._rank.rank == 0
        has = self.shared if shares else self.own
        count = max(MOST_SLOTS if lends else OWN_SLOTS, len(has))
        size = max(nbytes, min((arena.nbytes for arena in has), default=0))
        self._give_up(has)
        offer = self._together.offer(roster)
        made = list[Arena]()  # which `forget` leaves alone: `acquire` may call it
        try:
            if shares and not is_first:
                await self._adopt(made, offer)
            else:
                await self._acquire(made, count, size)
            await self._grants.report_gone()
            for arena in made:
                await self._grants.grant_output(arena)
        except (UsageError, OSError, trio.BrokenResourceError):  # the last: it leaves, or is gone
            if shares and not is_first:
                self._together.withdraw(offer)
            else:
                self._no_room_for = size
            self._give_up(made)
            return False
        has += made
        if shares:
            self._makes_offer = is_first
            self._offer = self._together.share(roster, has) if is_first else offer
        return True

    async def _acquire(self, into: list[Arena], count: int, nbytes: int) -> None:
        while len(into) < count:
            into.append(await self._rank.arenas.outputs.acquire(nbytes, follows=True))

    async def _adopt(self, into: list[Arena], offer: Sequence[Arena]) -> None:
        outputs = self._rank.arenas.outputs
        for arena in offer:
            alias = outputs.adopt(arena)
            if alias is None:
                await outputs.rest()  # as `acquire` does
                is_there = offer is self._together.offer(self._rank.roster)
                alias = outputs.adopt(arena) if is_there else None
            if alias is None:
                raise UsageError("no room for aliases of the results that ranks share")
            into.append(alias)

    def forget(self) -> None:
        """Have no arena any more."""
        if self._makes_offer and self.is_out_of_date:
            self._no_room_for = min(arena.nbytes for arena in self.shared)
        self._give_up(self.own)
        self._give_up(self.shared)

    def ask_again(self) -> None:
        """Let what was refused be tried once more."""
        self._no_room_for = NO_LIMIT

    def _give_up(self, arenas: list[Arena]) -> None:
        if arenas is self.shared:
            if self._makes_offer:
                self._together.withdraw(self._offer)
            self._offer, self._makes_offer = (), False
        for arena in arenas:
            self._rank.arenas.outputs.release(arena)
        arenas.clear()


def _suffice(arenas: Sequence[Arena], nbytes: int, *, lends: bool) -> bool:
    count = 0 if not nbytes else MOST_SLOTS if lends else OWN_SLOTS
    return len(arenas) >= count and min((a.nbytes for a in arenas), default=0) >= nbytes
