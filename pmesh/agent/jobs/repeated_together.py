"""Calls that all ranks of one agent repeat, so that the threads of the library may meet in them.

If their job has ranks elsewhere, the first of those here then exchanges what all have brought.
A rank says which call it repeats; once all have said so, the library knows what is done, and each
rank gets the place where they meet. A rank that still makes the call in Python recalls the others.
"""

from collections.abc import Sequence
from typing import TypeAlias
from weakref import WeakValueDictionary

from pmesh import native
from pmesh.agent.jobs.ranks import LocalRank
from pmesh.core.ops.machines import of_machine, plan_fold
from pmesh.core.ops.reductions import WIRE_DTYPES
from pmesh.core.ops.together import plan_together
from pmesh.core.values import Roster
from pmesh.core.wire.calls import Call
from pmesh.core.wire.trainer import StartOp
from pmesh.ids import Epoch, JobName
from pmesh.net.sessions.arenas import Arena
from pmesh.net.sessions.combining import Meeting, adds

_MOST_WAITING = 256
"""Calls that some ranks repeat and others do not, of all jobs."""

_Job: TypeAlias = tuple[JobName, Epoch, int]
_Where: TypeAlias = tuple[JobName, Epoch, int, Call, str, int, tuple[int, ...]]


class RepeatedTogether:
    """The calls of all jobs."""

    def __init__(self) -> None:
        self._meetings: WeakValueDictionary[_Where, Meeting] = WeakValueDictionary()
        self._waiting: dict[_Where, dict[int, StartOp]] = {}  # the oldest first
        self._offers: dict[_Job, Sequence[Arena]] = {}

    def meeting(self, rank: LocalRank, request: StartOp, *, shares: bool) -> Meeting | None:
        """Return where all ranks meet in a call; None as long as some do not repeat it.

        A meeting is the same for all ranks while one of them has it. Those that it does not fit,
        since a trainer has lied of its sizes, do not meet, but go through Python. If it `shares`,
        the result is written once, as that of rank 0, for all.
        """
        where = _where(rank.roster, request)
        found = self._meetings.get(where)
        if found is not None:
            return found
        requests = self._waiting.setdefault(where, {})
        requests[rank.place_here] = request
        if len(requests) < len(rank.mates):
            if len(self._waiting) > _MOST_WAITING:
                del self._waiting[next(iter(self._waiting))]
            return None
        del self._waiting[where]
        ordered = [requests[place] for place in range(len(rank.mates))]
        made = _make(ordered, shares=shares, has_others=not rank.has_all_here)
        if made is not None:
            self._meetings[where] = made
        return made

    def forget(self, job: JobName, *, below: int) -> None:
        """Drop what ranks have said under earlier rosters."""
        self._waiting = {
            at: said for at, said in self._waiting.items() if at[0] != job or at[2] >= below
        }

    # --- arenas for results that all ranks have

    def share(self, roster: Roster, arenas: Sequence[Arena]) -> Sequence[Arena]:
        """Offer rank 0's arenas to the others, until they are withdrawn; return the offer."""
        offer = self._offers[_job_of(roster)] = tuple(arenas)
        return offer

    def offer(self, roster: Roster) -> Sequence[Arena]:
        """Return what rank 0 offers, the same object each time; nothing if it offers nothing."""
        return self._offers.get(_job_of(roster), ())

    def withdraw(self, offer: Sequence[Arena]) -> None:
        """End an offer; who has taken aliases keeps the memory. Any rank may do so."""
        self._offers = {at: other for at, other in self._offers.items() if other is not offer}


def _where(roster: Roster, request: StartOp) -> _Where:
    count = 0 if request.parts else request.count  # with parts, each rank has its own
    return *_job_of(roster), request.call, request.wire_dtype, count, request.parts


def _job_of(roster: Roster) -> _Job:
    return roster.job, roster.born, roster.number


def _make(requests: list[StartOp], *, shares: bool, has_others: bool) -> Meeting | None:
    first = requests[0]
    dtype, reduction = first.wire_dtype, first.call.reduction or "sum"
    try:
        if has_others:
            nbytes = first.count * WIRE_DTYPES[dtype].itemsize
            plan, reduction = plan_fold(nbytes, len(requests), into=0), of_machine(reduction)
        else:
            plan = plan_together(requests, root=0, once=shares)
    except ValueError:  # a trainer has lied: Python says so
        return None
    library = native.library()
    if library is None or (plan.reduces and not adds(library, dtype, reduction)):
        return None
    try:
        return Meeting(
            library, plan, dtype=dtype, reduction=reduction, shares=shares, has_others=has_others
        )
    except OSError:
        return None
