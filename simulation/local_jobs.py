"""All jobs of one simulated agent: who waits for a job, and the ranks that live here.

The counterpart of `pmesh.agent.jobs.driver`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from pmesh.core.jobs.attempt import timed_out
from pmesh.core.jobs.progress import Marks, lanes_stand_still, of_job
from pmesh.core.links.health import WIRED
from pmesh.core.values import Roster, Terms, Trainer, Verdict, View
from pmesh.core.views.rosters import is_same_history
from pmesh.core.views.state import Facts
from pmesh.core.wire.link import AskResult, Concern, Heartbeat, JobReport, RankMarks, Waiting
from pmesh.ids import JobName, Member, OpNumber, Slot, TrainerId
from simulation import ops
from simulation.job_host import JobHost
from simulation.lane_messages import LaneMessage, age
from simulation.ranks import LocalRank, Op

LEAVE_GRACE_S = 1.0
"""As in the real agent."""

LEFT = "has left the job"


@dataclass(slots=True, kw_only=True)
class Candidate:
    """A trainer that waits for its job to begin, or to enter it."""

    slot: Slot
    job: JobName
    wait_for: int
    terms: Terms
    value: Callable[[OpNumber], int]
    joined: Callable[[LocalRank], None]
    rank: LocalRank | None = None


class LocalJobs:
    """The jobs of one agent."""

    def __init__(self, host: JobHost) -> None:
        self.ranks: list[LocalRank] = []
        self.candidates: dict[Slot, Candidate] = {}
        self._host = host
        self._me = host.state.me
        self._next_slot = 0
        self._marks = Marks(self.ranks)
        self._absent: list[Concern] = []
        self._early: list[LaneMessage] = []
        self._stall_guard = False

    # --- trainers come and go

    def enlist(
        self,
        job: JobName,
        wait_for: int,
        terms: Terms,
        value: Callable[[OpNumber], int],
        joined: Callable[[LocalRank], None],
    ) -> Candidate:
        """A trainer waits for its job to begin, or to enter it."""
        slot = Slot(self._next_slot)
        self._next_slot += 1
        candidate = Candidate(
            slot=slot, job=job, wait_for=wait_for, terms=terms, value=value, joined=joined
        )
        self.candidates[slot] = candidate
        self._host.facts_changed()
        return candidate

    def withdraw(self, candidate: Candidate) -> None:
        """The trainer no longer waits; if the job begins all the same, its rank is lost."""
        self.candidates.pop(candidate.slot, None)
        if candidate.rank is not None:
            self.depart(candidate.rank, "is lost: its trainer left")
        self._host.facts_changed()

    def depart(self, rank: LocalRank, why: str) -> None:
        """The trainer is gone, or has been stopped for too long: the others go on without it."""
        if rank.leaving is None:
            rank.leaving, rank.leaving_since = why, self._host.now
        self._announce_leave(rank)

    # --- what the agreement reads and decides

    def facts(self) -> Facts:
        """What the local jobs want and have; without round trips."""
        return Facts(
            reports=tuple(self._reports()),
            waiting=tuple(
                Waiting(c.job, c.slot, c.wait_for, c.terms)
                for c in self.candidates.values()
                if c.rank is None
            ),
            concerns=(*(r.concern for r in self.ranks if r.concern is not None), *self._absent),
            marks=tuple(rank.marks() for rank in self.ranks),
        )

    def fence(self, jobs: tuple[JobName, ...]) -> None:
        """Deliver nothing more of these jobs until the next install (V3)."""
        for rank in self.ranks:
            if rank.roster.job in jobs:
                rank.fence("view change")

    def doubt(self) -> None:
        """V8: we have slept; deliver nothing until it is known that nobody went on without us."""
        self._stall_guard = True
        for rank in self.ranks:
            rank.fence("own stall")

    def trust(self) -> None:
        """V8: our view is still everybody's."""
        self._stall_guard = False
        for rank in self.ranks:
            rank.lift("own stall")
        for rank in list(self.ranks):
            ops.unhindered(rank)

    def install(self, view: View) -> list[LocalRank]:
        """The view is in force; those are returned whose op under way must begin anew."""
        again: list[LocalRank] = []
        for rank in list(self.ranks):
            roster = view.roster_of(rank.roster.job)
            if roster is None or not is_same_history(rank.roster, roster, rank.trainer):
                if roster is not None:
                    self._host.roster_settled(rank, roster)
                self._end(rank, "the job goes on without this rank")
                again.append(rank)
            elif rank.follow(roster):
                again.append(rank)
        for roster in view.rosters:
            for trainer in roster.trainers_at(self._me):
                self._begin_if_new(roster, trainer)
        self._absent = [c for c in self._absent if _is_open(c, view)]
        self._marks.forget(view)
        for rank in self.ranks:
            rank.learn(self._host.state.primaries)
            self._announce_leave(rank)
        self._host.facts_changed()
        return again

    def marked(self, member: Member, heartbeat: Heartbeat) -> None:
        """A peer has told how far its ranks have come."""
        for mark in heartbeat.marks:
            if not self._concerns_us(member, heartbeat, mark):
                continue
            self._marks.hear(mark)
            for rank in self.ranks:
                if rank.roster.job == mark.job:
                    self._compare(rank, mark)
        self._stabilize()

    def look(self) -> None:
        """At every tick: what no message tells."""
        for rank in list(self.ranks):
            for other in self.ranks:
                if other is not rank and other.roster.job == rank.roster.job:
                    self._compare(rank, other.marks())
            self._announce_leave(rank)
            self._watch_edges(rank)
            ops.pass_time(rank)
        self._stabilize()
        for witness in [rank for rank in self.ranks if not rank.is_needed]:
            self._end(witness, "nobody asks for its results any more")

    # --- lanes

    def receive(self, message: LaneMessage) -> None:
        """A lane has brought a message."""
        by = age(message, self._host.state.view.roster_of(message.job))
        if by > 0:
            self._early.append(message)
        elif by == 0:
            for rank in self.ranks:
                if (rank.id, rank.roster.job) == (message.receiver, message.job):
                    ops.receive(rank, message)

    def receive_early(self) -> None:
        """V4: what came before its view is due now, or still early, or late by now."""
        early, self._early = self._early, []
        for message in early:
            self.receive(message)

    def asked_of(self, ask: AskResult) -> LocalRank | None:
        """Who is asked for a result; None while one side lacks the other's view."""
        asked = (ask.job, ask.born, ask.number, ask.holder)
        return next((r for r in self.ranks if _identity(r) == asked), None)

    def lane_broke(self, peer: Member) -> None:
        """A connection with another agent is lost."""
        for rank in self.ranks:
            ops.lane_broke(rank, peer)

    # --- what surrounds an op

    def newcomers(self, rank: LocalRank) -> int:
        """How many trainers wait to enter the job."""
        state, job = self._host.state, rank.roster.job
        count = sum(c.job == job and c.rank is None for c in self.candidates.values())
        inside = {(t.member, t.slot) for t in rank.roster.trainers}
        for member in state.view.members:
            if member.node in state.peers:
                waiting = state.peers[member.node].heartbeat.waiting
                count += sum(w.job == job and (member, w.slot) not in inside for w in waiting)
        return count

    def timed_out(self, rank: LocalRank, op: Op) -> Verdict:
        """Why an op has not ended by its deadline."""
        return timed_out(rank, op, self._marks, self.newcomers(rank))

    def neighbour(self, rank: LocalRank, other: TrainerId) -> LocalRank | None:
        """Another trainer of the same job, if it lives here too."""
        return next((r for r in of_job(self.ranks, rank.roster) if r.id == other), None)

    # --- inside

    def _stabilize(self) -> None:
        for rank in self.ranks:
            rank.stabilize(self._marks.stable(rank.roster))

    def _concerns_us(self, member: Member, heartbeat: Heartbeat, mark: RankMarks) -> bool:
        """Whether the mark is of a job of ours, and not of its name's other run elsewhere."""
        state = self._host.state
        peer, roster = state.peers.get(member.node), state.view.roster_of(mark.job)
        if peer is None or peer.view.epoch != heartbeat.view or roster is None:
            return False
        theirs, trainer = peer.view.roster_of(mark.job), roster.trainer(mark.trainer)
        same_run = theirs is not None and theirs.born == roster.born
        return same_run and trainer is not None and trainer.member == member

    def _reports(self) -> Iterator[JobReport]:
        merged: dict[tuple[object, ...], JobReport] = {}
        for rank in self.ranks:
            report = rank.report()
            key = (report.job, report.born)
            if key in merged:
                ranks = merged[key].ranks + report.ranks
                report = msgspec.structs.replace(report, ranks=ranks)
            merged[key] = report
        yield from merged.values()

    def _end(self, rank: LocalRank, reason: str) -> None:
        self.ranks.remove(rank)
        rank.end(Verdict("HistorySuperseded", reason))
        self._host.facts_changed()

    def _begin_if_new(self, roster: Roster, trainer: Trainer) -> None:
        if any(r.trainer == trainer for r in of_job(self.ranks, roster)):
            return
        candidate = self.candidates.pop(trainer.slot, None)
        if candidate is None or candidate.job != roster.job:
            text = f"{trainer.id} is lost: its trainer left before it had entered"
            verdict = Verdict("RankLost", text, (trainer.id,))
            concern = Concern(roster.job, roster.born, roster.number, verdict)
            self._absent += [] if concern in self._absent else [concern]
            return
        rank = LocalRank(self._host, self, roster, trainer, candidate.value)
        if self._stall_guard:  # the view that it begins in has come while we slept, too
            rank.fence("own stall")
        self.ranks.append(rank)
        candidate.rank = rank
        self._host.rank_began(rank)
        candidate.joined(rank)

    def _compare(self, rank: LocalRank, mark: RankMarks) -> None:
        """I5: two ranks must call the same as one op, also where no data flows between them."""
        op = OpNumber(rank.ledger.started)
        report = rank.ledger.ops.get(op)
        in_question = report is not None and report.verdict is None and mark.started == op
        same_roster = mark.number == rank.roster.number
        known = 0 not in {mark.fingerprint, rank.fingerprint}
        differs = known and mark.fingerprint != rank.fingerprint
        both = {rank.id, mark.trainer} <= set(rank.roster.ids)
        if both and in_question and same_roster and differs and rank.concern is None:
            rank.raise_concern(Verdict("OpMismatch", f"op {op} differs"), op)

    def _announce_leave(self, rank: LocalRank) -> None:
        """A trainer that is gone is a lost rank, at once: its op runs again without it.

        Who leaves in order has ended its last op, and waits a moment for the others to end it too.
        """
        if rank.leaving is None or rank.concern or rank.over or rank.rank is None:
            return
        unstable = rank.ledger.stable < rank.ledger.started
        in_order = rank.leaving == LEFT and rank.op is None
        if in_order and unstable and self._host.now - rank.leaving_since < LEAVE_GRACE_S:
            return
        verdict = Verdict("RankLost", f"{rank.id} {rank.leaving}", (rank.id,))
        rank.raise_concern(verdict)

    def _watch_edges(self, rank: LocalRank) -> None:
        """V6: lanes without progress are broken, even while heartbeats flow: the op runs again."""
        if lanes_stand_still(
            rank,
            self._marks,
            newcomers=self.newcomers(rank),
            moved=rank.moved,
            now=self._host.now,
            patience_s=WIRED.gone_after_s,
        ):
            rank.raise_concern(None, rank.ledger.started)


def _identity(rank: LocalRank) -> tuple[object, ...]:
    return rank.roster.job, rank.roster.born, rank.roster.number, rank.id


def _is_open(concern: Concern, view: View) -> bool:
    roster = view.roster_of(concern.job)
    return roster is not None and roster.number == concern.number
