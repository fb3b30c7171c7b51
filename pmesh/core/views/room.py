"""The room in a view: which waiting trainers get some, and what a view leaves out if it is short.

A view must fit into a message, or its leader could not send it. Its parts come from all members, so
each may fill only a share: its waiting trainers beyond that wait for a later view, and nobody
else's do. What view changes add (outcomes, losses, lanes) has room of its own. If even that is
used up, jobs end: first those of the members that use the most.

All members decide alike who is admitted. A rank lets newcomers in for which the leader has room: it
would ask for a view again and again for any other.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Final, NamedTuple

import msgspec

from pmesh.core.values import (
    MAX_JOBS,
    MAX_ROSTERS_BYTES,
    MAX_TRAINERS,
    Roster,
    Verdict,
    View,
    cut_text,
    nbytes_of,
)
from pmesh.core.wire.views import Candidate, Flushed, OpReport
from pmesh.ids import MAX_NAME, JobName, Member, Slot

ADMITTED_BYTES: Final = 64 * 1024
"""Of jobs and trainers; the rest of MAX_ROSTERS_BYTES is for what view changes add."""

SHARE_BYTES: Final = 32 * 1024
"""Of one member: more than the 128 trainers that an agent serves need in a few jobs."""

SHORT_TEXT_BYTES: Final = 64
"""Of an error's text where there is no room: its beginning names the rank or the op."""

_LONGEST_NAME = "\N{CAT FACE}" * MAX_NAME
_JOB_BYTES = 192  # a roster without its name and trainers: three epochs or so
_TRAINER_BYTES = 200  # a trainer without the name of its machine, and it as a voter


class _Occupant(NamedTuple):
    member: Member
    waiting: Candidate


class _Room:
    """What is left while trainers are admitted one after the other."""

    def __init__(self, rosters: Sequence[Roster]) -> None:
        self.left = ADMITTED_BYTES - sum(roster.lasting_bytes for roster in rosters)
        self.taken = _bytes_by_member(rosters, lambda roster: roster.lasting_bytes)
        self.trainers = {roster.job: len(roster.trainers) for roster in rosters}
        self.inside = {
            (roster.job, trainer.member, trainer.slot)
            for roster in rosters
            for trainer in roster.trainers
        }

    def take(self, entry: _Occupant, name: str) -> bool:
        """Take the room for a trainer of a machine with this name; False if there is none."""
        member, waiting = entry
        if (waiting.job, member, waiting.slot) in self.inside:
            return True  # it missed the view that has let it in
        count, cost = self.trainers.get(waiting.job, 0), _TRAINER_BYTES + len(name.encode())
        if count == 0:
            cost += _JOB_BYTES + len(waiting.job.encode())
        if (
            cost > self.left
            or self.taken[member] + cost > SHARE_BYTES
            or count >= MAX_TRAINERS
            or (count == 0 and len(self.trainers) >= MAX_JOBS)
        ):
            return False
        self.trainers[waiting.job] = count + 1
        self.left -= cost
        self.taken[member] += cost
        return True


def admit(
    rosters: Iterable[Roster],
    waiting: Mapping[Member, Sequence[Candidate]],
    names: Mapping[Member, str],
) -> dict[Member, tuple[Candidate, ...]]:
    """Return the waiting trainers for which a view with these rosters has room.

    Args:
        rosters: Those of the view before.
        waiting: The trainers that wait at each member.
        names: The names of the members' machines.
    """
    admitted: dict[Member, list[Candidate]] = {member: [] for member in waiting}
    if any(waiting.values()):
        room = _Room(tuple(rosters))
        for entry in _in_turns(waiting):
            if room.take(entry, names[entry.member]):
                admitted[entry.member].append(entry.waiting)
    return {member: tuple(theirs) for member, theirs in admitted.items()}


def names_in(view: View, members: Iterable[Member]) -> dict[Member, str]:
    """Return the names of the members' machines; of those without a seat the longest possible."""
    seats = {seat.member: seat.said.name for seat in view.seats}
    return {member: seats.get(member, _LONGEST_NAME) for member in members}


def _in_turns(waiting: Mapping[Member, Sequence[Candidate]]) -> Iterable[_Occupant]:
    """Yield one trainer of each member, the longest there, then the next one of each."""
    slot: Callable[[_Occupant], Slot] = lambda entry: entry.waiting.slot  # noqa: E731 - the key twice
    lists = [
        sorted((_Occupant(member, w) for w in theirs), key=slot)
        for member, theirs in sorted(waiting.items())
    ]
    return (entry for turn in zip_longest(*lists) for entry in turn if entry is not None)


def fit(rosters: Sequence[Roster], before: Mapping[JobName, Roster]) -> tuple[Roster, ...]:
    """Return those of the rosters for which a view has room, with less of each if need be.

    Args:
        rosters: Those of the next view.
        before: Those of the view that it follows, by job.
    """
    if _has_room(rosters):
        return tuple(rosters)
    kept = [_shortened(roster) for roster in rosters]

    def added(roster: Roster) -> int:
        known = before.get(roster.job)
        same = known is not None and known.born == roster.born
        return roster.nbytes - roster.lasting_bytes if same else roster.nbytes

    used = _bytes_by_member(kept, added)

    def burden(roster: Roster) -> tuple[int, int, JobName]:
        """Whoever uses little keeps its jobs, also those that others have entered."""
        return min(used[member] for member in _machines(roster)), added(roster), roster.job

    kept.sort(key=burden)
    while not _has_room(kept):
        kept.pop()
    return tuple(sorted(kept, key=lambda roster: roster.job))


def _has_room(rosters: Sequence[Roster]) -> bool:
    nbytes = sum(roster.nbytes for roster in rosters)
    return nbytes <= MAX_ROSTERS_BYTES and len(rosters) <= MAX_JOBS


def _machines(roster: Roster) -> dict[Member, int]:
    return Counter(trainer.member for trainer in roster.trainers)


def _bytes_by_member(
    rosters: Iterable[Roster], bytes_of: Callable[[Roster], int]
) -> Counter[Member]:
    """Return how many bytes each member has filled: a roster's are shared by its trainers."""
    taken = Counter[Member]()
    for roster in rosters:
        for member, count in _machines(roster).items():
            taken[member] += bytes_of(roster) * count // len(roster.trainers)
    return taken


def _shortened(roster: Roster) -> Roster:
    """V4: lanes that a view does not name are made anew."""
    return msgspec.structs.replace(
        roster,
        lanes=(),
        losses=tuple(_with_short_text(loss) for loss in roster.losses),
        outcomes=tuple(
            msgspec.structs.replace(outcome, verdict=_with_short_text(outcome.verdict))
            if outcome.verdict
            else outcome
            for outcome in roster.outcomes
        ),
    )


def _with_short_text(verdict: Verdict) -> Verdict:
    return msgspec.structs.replace(verdict, message=cut_text(verdict.message, SHORT_TEXT_BYTES))


def fit_answer(answer: Flushed) -> Flushed:
    """Return a flush answer that fits into a message.

    What ranks report of their ops decides what their trainers get, so of that only texts can go.
    """
    if nbytes_of(answer) <= Flushed.most_bytes:
        return answer

    def short(op: OpReport) -> OpReport:
        verdict = op.verdict
        return (
            op
            if verdict is None
            else msgspec.structs.replace(op, verdict=_with_short_text(verdict))
        )

    jobs = tuple(
        msgspec.structs.replace(
            job,
            ranks=tuple(
                msgspec.structs.replace(rank, ops=tuple(map(short, rank.ops))) for rank in job.ranks
            ),
        )
        for job in answer.jobs
    )
    return msgspec.structs.replace(answer, jobs=jobs, waiting=())
