"""The jobs of one agent: the trainers that wait for a job, and the ranks that run here.

This is plain state. Two drivers extend it, `pmesh.agent.jobs.driver` and `simulation.local_jobs`;
its methods return what the driver has to do.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from pmesh.core.jobs.progress import AnyRank, Progress, lanes_stand_still, of_job
from pmesh.core.jobs.rank import COME_BACK, RankState
from pmesh.core.ops.kinds import BOUND_KINDS
from pmesh.core.values import Roster, Terms, Trainer, Verdict, View, nbytes_of
from pmesh.core.views import room
from pmesh.core.views.rosters import is_same_history
from pmesh.core.views.state import Facts, MemberState
from pmesh.core.wire.views import (
    MAX_REQUESTS_BYTES,
    MAX_WAITING,
    Candidate,
    Heartbeat,
    JobReport,
    RankProgress,
    ViewRequest,
)
from pmesh.ids import JobName, Member, OpNumber, Slot, TrainerId

LEAVE_GRACE_S = 1.0  # mostly enough for the others to end a leaver's last op before they are told
LEFT = "has left the job"
NO_SLOT = Slot(-1)


@dataclass(slots=True, kw_only=True)
class WaitingTrainer(Generic[AnyRank]):
    """A trainer that waits for its job to begin, or to enter it."""

    job: JobName
    wait_for: int
    terms: Terms
    place: int = -1
    """The rank that `pmesh run` has given to the trainer; -1 for none."""
    begins: bool = False
    """It waits for its job to begin: if that runs, the trainer enters it later, by a `sync`."""
    slot: Slot = NO_SLOT
    rank: AnyRank | None = None


AnyWaiting = TypeVar("AnyWaiting", bound=WaitingTrainer[Any])


@dataclass(frozen=True, slots=True)
class Installed(Generic[AnyWaiting, AnyRank]):
    """What a new view changes for the local ranks."""

    renumbered: tuple[AnyRank, ...]
    """Ranks whose roster has a new number: their running ops start again, over new lanes."""
    ended: tuple[AnyRank, ...]
    """Ranks whose job has ended here, or goes on without them."""
    begun: tuple[tuple[AnyWaiting, AnyRank], ...]
    """The trainers that wait no longer, each with its new rank."""
    leaving: tuple[AnyRank, ...]
    """Ranks that are lost; the leader must be told."""


@dataclass(frozen=True, slots=True)
class NewProgress:
    """What is new in the progress that a heartbeat reports."""

    stops: tuple[RankProgress, ...]
    """The ranks whose trainer's process has been stopped, or runs again."""
    differs: bool
    """Whether ranks have called different ops; the leader must be told."""


@dataclass(frozen=True, slots=True)
class Passed(Generic[AnyRank]):
    """What has become due because time has passed."""

    leaving: tuple[AnyRank, ...]
    stuck: bool
    """Whether calls differ or lanes stand still; the leader must be told."""
    ended: tuple[AnyRank, ...]
    """Lost ranks whose results no other rank needs any more."""


class JobsState(Generic[AnyWaiting, AnyRank]):
    """The jobs of one agent. Trainers come and go, views and heartbeats arrive, time passes."""

    def __init__(
        self,
        me: Member,
        make_rank: Callable[[Roster, Trainer, AnyWaiting], AnyRank],
        *,
        min_peers: int = 0,
        alone_from: float = 0.0,
    ) -> None:
        """Make the state of an agent that has just started.

        Args:
            me: the agent's member.
            make_rank: makes the driver's rank for a trainer whose job begins.
            min_peers: with fewer peers in the view, no local trainer takes part.
            alone_from: the time from which a job may begin without any peer. Before it the agent
                may still find its mesh, in which the job may run already.
        """
        self.me = me
        self.waiters: dict[Slot, AnyWaiting] = {}
        self.ranks: list[AnyRank] = []
        self.progress = Progress(self.ranks)
        self._make_rank = make_rank
        self._min_peers = min_peers
        self._alone_from = alone_from
        self._next_slot = 0
        self._absent: list[ViewRequest] = []
        self._stall_guard = False

    # --- trainers come and go

    def add(self, waiter: AnyWaiting) -> None:
        """Add a trainer that waits for its job to begin, or to enter it."""
        waiter.slot = Slot(self._next_slot)
        self._next_slot += 1
        self.waiters[waiter.slot] = waiter

    def leave(self, rank: AnyRank, why: str, now: float) -> bool:
        """Note that a trainer is gone, or was stopped for too long: its job goes on without it.

        Returns whether the leader must be told now.
        """
        if rank.leaving is None:
            rank.leaving, rank.leaving_since = why, now
        return announce_leave(rank, now)

    def waiting_at(self, state: MemberState, job: JobName) -> dict[Member, int]:
        """Return how many trainers wait for the job at each member of the view."""
        roster = state.view.roster_of(job)
        trainers = () if roster is None else roster.trainers
        inside = {(t.member, t.slot) for t in trainers}
        counts = dict.fromkeys(state.view.members, 0)
        for member in counts:
            theirs = _waiting_at(state, member)
            # A member may still report as waiting a trainer that has a rank in our view.
            counts[member] = sum(w.job == job and (member, w.slot) not in inside for w in theirs)
        ours = [c for c in self.waiters.values() if c.job == job and c.rank is None]
        return counts | {self.me: len(ours)}

    def newcomers_to(self, state: MemberState, job: JobName, now: float) -> int:
        """Return for how many of the trainers that wait to enter the job it has room."""
        roster = state.view.roster_of(job)
        inside = {(t.member, t.slot) for t in (() if roster is None else roster.trainers)}
        return sum(
            w.job == job and (member, w.slot) not in inside
            for member, theirs in self._admitted(state, now).items()
            for w in theirs
        )

    def lacks_room(self, state: MemberState, waiter: AnyWaiting, now: float) -> bool:
        """Return whether the view has no room for a trainer that waits here."""
        wait = {waiting.slot for waiting in self._waiting(state, now)}
        admitted = {waiting.slot for waiting in self._admitted(state, now)[self.me]}
        return waiter.slot in wait - admitted

    def _admitted(self, state: MemberState, now: float) -> dict[Member, tuple[Candidate, ...]]:
        waiting = {member: _waiting_at(state, member) for member in state.view.members}
        waiting[self.me] = self._waiting(state, now)
        return room.admit(state.view.rosters, waiting, room.names_in(state.view, waiting))

    def _may_begin(self, state: MemberState, now: float) -> bool:
        """Return whether enough peers have been found for local trainers to take part."""
        peers = len(state.view.seats) - 1
        return peers >= self._min_peers and (peers > 0 or now >= self._alone_from)

    # --- what the agreement reads and decides

    def known(self, state: MemberState, now: float) -> Facts:
        """Return what the local jobs want and have; the caller adds what links have measured."""
        view_requests = (rank.view_request for rank in self.ranks if rank.view_request is not None)
        return Facts(
            reports=self._report,
            waiting=self._waiting(state, now),
            view_requests=_first((*view_requests, *self._absent)),
            progress=tuple(rank.progress() for rank in self.ranks),
        )

    def _waiting(self, state: MemberState, now: float) -> tuple[Candidate, ...]:
        waits, runs = self._may_begin(state, now), {roster.job for roster in state.view.rosters}
        waiters = [
            c
            for c in self.waiters.values()
            if waits and c.rank is None and not (c.begins and c.job in runs)
        ]
        return tuple(
            Candidate(c.job, c.slot, c.wait_for, c.terms, c.place) for c in waiters[:MAX_WAITING]
        )

    def _report(self) -> tuple[JobReport, ...]:
        merged: dict[tuple[object, ...], JobReport] = {}
        for rank in self.ranks:
            report = rank.report()
            key = (report.job, report.born)
            if key in merged:
                ranks = merged[key].ranks + report.ranks
                report = msgspec.structs.replace(report, ranks=ranks)
            merged[key] = report
        return tuple(merged.values())

    def fence(self, jobs: tuple[JobName, ...]) -> None:
        """Deliver nothing more of these jobs until the next install (V3)."""
        for rank in self.ranks:
            if rank.roster.job in jobs:
                rank.fence("view change")

    def doubt(self) -> None:
        """V8: this agent has slept: deliver nothing until its view is known to be still valid."""
        self._stall_guard = True
        for rank in self.ranks:
            rank.fence("own stall")

    def trust(self) -> None:
        """V8: the other members still have our view: deliver again."""
        self._stall_guard = False
        for rank in self.ranks:
            rank.lift("own stall")

    def follow(self, state: MemberState, view: View, now: float) -> Installed[AnyWaiting, AnyRank]:
        """Follow a view that is in force: jobs begin, go on under another number, or end."""
        renumbered, ended = list[AnyRank](), list[AnyRank]()
        for rank in list(self.ranks):
            roster = view.roster_of(rank.roster.job)
            if roster is None or not is_same_history(rank.roster, roster, rank.trainer):
                self._end(rank, _why_ended(rank, roster))
                ended.append(rank)
            elif rank.follow(roster):
                renumbered.append(rank)
        self._absent = [c for c in self._absent if _is_open(c, view)]
        begun = [
            begun
            for roster in view.rosters
            for trainer in roster.trainers_at(self.me)
            if (begun := self._begin_if_new(roster, trainer)) is not None
        ]
        self.progress.forget(view)
        for rank in self.ranks:
            rank.learn(state.primaries)
        leaving = self._announce_leaves(now)  # the view may have been made without these losses
        return Installed(tuple(renumbered), tuple(ended), tuple(begun), leaving)

    def _end(self, rank: AnyRank, why: Verdict) -> None:
        rank.end(why)
        self.ranks.remove(rank)

    def _begin_if_new(self, roster: Roster, trainer: Trainer) -> tuple[AnyWaiting, AnyRank] | None:
        if any(r.trainer == trainer for r in of_job(self.ranks, roster)):
            return None
        waiter = self.waiters.get(trainer.slot)
        if waiter is None or waiter.job != roster.job:
            self._report_absent(roster, trainer)
            return None
        del self.waiters[trainer.slot]
        rank = self._make_rank(roster, trainer, waiter)
        if self._stall_guard:  # V8: the view in which it begins may be outdated, too
            rank.fence("own stall")
        self.ranks.append(rank)
        waiter.rank = rank
        return waiter, rank

    def _report_absent(self, roster: Roster, trainer: Trainer) -> None:
        """Report a trainer of the roster that gave up while the view was being agreed on."""
        text = f"{roster.describe(trainer.id)} is lost: its trainer left before it had entered"
        verdict = Verdict("RankLost", text, (trainer.id,))
        view_request = ViewRequest(roster.job, roster.born, roster.number, verdict)
        if view_request not in self._absent:
            self._absent.append(view_request)

    def _announce_leaves(self, now: float) -> tuple[AnyRank, ...]:
        return tuple(rank for rank in self.ranks if announce_leave(rank, now))

    # --- how far the ranks have come

    def hear(self, state: MemberState, member: Member, heartbeat: Heartbeat) -> NewProgress:
        """Note what a peer's heartbeat says of its ranks, and which views it has installed."""
        stops, differs = list[RankProgress](), False
        for rank in self.ranks:
            rank.learn(state.primaries)
        for mark in heartbeat.progress:
            if not _concerns_us(state, member, heartbeat, mark):
                continue  # the run is over here, or about to begin: the next heartbeat repeats it
            before = self.progress.hear(mark)
            if mark.stopped != (before is not None and before.stopped):
                stops.append(mark)
            for rank in self.ranks:
                differs |= rank.roster.job == mark.job and compare_calls(rank, mark)
        self.stabilize()
        return NewProgress(tuple(stops), differs)

    def stabilize(self) -> None:
        """O2: release the results that no rank will ask for any more."""
        for rank in self.ranks:
            rank.stabilize(self.progress.stable(rank.roster))

    def pass_time(self, state: MemberState, now: float) -> Passed[AnyRank]:
        """Do what is due; the driver sets each rank's `moved` and `patience_s` before the call."""
        stuck = False
        for rank in self.ranks:
            for other in self.ranks:
                if other is not rank and other.roster.job == rank.roster.job:
                    stuck |= compare_calls(rank, other.progress())
        leaving = self._announce_leaves(now)
        for rank in self.ranks:
            newcomers = self.newcomers_to(state, rank.roster.job, now)
            if lanes_stand_still(rank, self.progress, newcomers=newcomers, now=now):
                rank.request_view(None, rank.ledger.started)  # V6: it runs again, over new lanes
                stuck = True
        self.stabilize()
        ended = tuple(rank for rank in self.ranks if not rank.is_needed)
        for rank in ended:
            self._end(rank, rank.why_superseded)
        return Passed(leaving, stuck, ended)

    def neighbour(self, rank: AnyRank, other: TrainerId) -> AnyRank | None:
        """Return another rank of the same job, if it runs here too."""
        return next((r for r in of_job(self.ranks, rank.roster) if r.id == other), None)


def _waiting_at(state: MemberState, member: Member) -> tuple[Candidate, ...]:
    peer = state.peers.get(member.node)
    return () if peer is None else peer.heartbeat.waiting


def _first(view_requests: tuple[ViewRequest, ...]) -> tuple[ViewRequest, ...]:
    """Return the first ones that fit into a heartbeat; the others follow once these are settled.

    A leader may say that far more trainers live here than any agent serves.
    """
    left = MAX_REQUESTS_BYTES - 5  # the prefix
    for place, view_request in enumerate(view_requests):
        left -= nbytes_of(view_request)
        if left < 0:
            return view_requests[:place]
    return view_requests


def _why_ended(rank: RankState[Any], roster: Roster | None) -> Verdict:
    if roster is not None:
        return rank.why_superseded
    text = f"job {rank.roster.job!r} has ended here: this machine fell out of its view"
    return Verdict("HistorySuperseded", f"{text}; {COME_BACK}")


def _is_open(view_request: ViewRequest, view: View) -> bool:
    roster = view.roster_of(view_request.job)
    return roster is not None and roster.number == view_request.number


def _concerns_us(
    state: MemberState, member: Member, heartbeat: Heartbeat, mark: RankProgress
) -> bool:
    """Return whether the progress is of the run in our view, not of another of the same name."""
    peer, roster = state.peers.get(member.node), state.view.roster_of(mark.job)
    if peer is None or peer.view.epoch != heartbeat.view or roster is None:
        return False
    theirs, trainer = peer.view.roster_of(mark.job), roster.trainer(mark.trainer)
    same_run = theirs is not None and theirs.born == roster.born
    return same_run and trainer is not None and trainer.member == member


def compare_calls(rank: RankState[Any], mark: RankProgress) -> bool:
    """I5: check that two ranks call the same as one op, also if no data flows between them.

    Two broadcasts from different roots would even end, as neither root waits for another rank.
    Returns whether the leader must be told now.
    """
    op = OpNumber(rank.ledger.started)
    report = rank.ledger.ops.get(op)
    entered = {t.id for t in rank.roster.trainers if t.enters <= op}
    in_question = report is not None and report.verdict is None and mark.started == op
    differs = (
        {rank.id, mark.trainer} <= entered
        and in_question
        and mark.number == rank.roster.number
        and mark.fingerprint != rank.fingerprint
        and 0 not in {mark.fingerprint, rank.fingerprint}
        and rank.view_request is None
    )
    if differs:
        text = f"op {op} of job {rank.roster.job!r} differs"
        rank.request_view(Verdict("OpMismatch", text), op)
    return differs


def announce_leave(rank: RankState[Any], now: float) -> bool:
    """Report a trainer that is gone as a lost rank, so that its op runs again without it.

    A rank that leaves in order has ended its last op. It stays until the others have ended that op
    too: for LEAVE_GRACE_S, or for as long as it takes if the op is bound to its ranks, since a view
    without this rank would fail such an op where it still runs (O4).
    Returns whether the leader must be told now.
    """
    if rank.leaving is None or rank.view_request or rank.over or rank.rank is None:
        return False
    if rank.leaving == LEFT and rank.ledger.stable < rank.ledger.started:
        is_bound = any(report.call.kind in BOUND_KINDS for report in rank.ledger.ops.values())
        if is_bound or now - rank.leaving_since < LEAVE_GRACE_S:
            return False
    text = f"{rank.roster.describe(rank.id)} {rank.leaving}"
    rank.request_view(Verdict("RankLost", text, (rank.id,)))
    return True
