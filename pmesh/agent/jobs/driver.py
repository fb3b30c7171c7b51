"""All jobs of one agent: who waits for a job to begin, and the ranks that live here.

It follows the views (`pmesh.agent.mesh.membership.Follower`) and surrounds the ops
(`pmesh.agent.jobs.surroundings`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec
import trio

from pmesh.agent.config import Settings
from pmesh.agent.jobs.ranks import LocalRank
from pmesh.agent.jobs.retained import ResultServer
from pmesh.agent.lanes.edge_costs import EdgeBook
from pmesh.agent.lanes.rank_lanes import sum_of
from pmesh.agent.lanes.rendezvous import LaneDesk
from pmesh.agent.mesh.membership import Membership
from pmesh.agent.status.events import EventLog
from pmesh.core.jobs.progress import Marks, lanes_stand_still, of_job
from pmesh.core.jobs.rank import COME_BACK
from pmesh.core.links.health import WIRED
from pmesh.core.values import Roster, Terms, Trainer, Verdict, View
from pmesh.core.views.rosters import is_same_history
from pmesh.core.views.state import Facts
from pmesh.core.wire.link import AskResult, Concern, Heartbeat, JobReport, RankMarks, Waiting
from pmesh.core.wire.local import Connect
from pmesh.ids import JobName, Member, OpNumber, Slot, TrainerId
from pmesh.net.local.arena_pools import SessionArenas

LOOK_S = 0.25  # how often to look for what no message tells
LEAVE_GRACE_S = 1.0  # the others mostly end a leaver's last op by themselves; then they are told
LEFT = "has left the job"


@dataclass(slots=True, kw_only=True)
class Candidate:
    """A trainer that waits for its job to begin."""

    slot: Slot
    job: JobName
    wait_for: int
    program: str
    arenas: SessionArenas
    terms: Terms
    rank: LocalRank | None = None
    joined: trio.Event = field(default_factory=trio.Event)


class Jobs:
    """The jobs of one agent."""

    desk: LaneDesk
    membership: Membership

    def __init__(
        self, me: Member, nursery: trio.Nursery, event_log: EventLog, settings: Settings
    ) -> None:
        self._me = me
        self._nursery = nursery
        self.event_log = event_log
        self._settings = settings
        self._began = trio.current_time()
        self._next_slot = 0
        self.candidates: dict[Slot, Candidate] = {}
        self.ranks: list[LocalRank] = []
        self.marks = Marks(self.ranks)
        self.edge_book = EdgeBook()
        self.results = ResultServer(nursery, self.ranks, self)
        self._absent: list[Concern] = []
        self._stall_guard = False
        self._ended_traffic = (0, 0)

    # --- trainers come and go (`pmesh.agent.jobs.trainer`)

    def enlist(self, request: Connect, arenas: SessionArenas) -> Candidate:
        """A trainer waits for its job to begin, or to enter it."""
        slot = Slot(self._next_slot)
        self._next_slot += 1
        candidate = Candidate(
            slot=slot,
            job=JobName(request.job),
            wait_for=request.wait_for,
            program=request.program,
            arenas=arenas,
            terms=request.terms,
        )
        self.candidates[slot] = candidate
        self.poke()
        return candidate

    def withdraw(self, candidate: Candidate) -> None:
        """The trainer no longer waits; if the job begins all the same, its rank is lost."""
        self.candidates.pop(candidate.slot, None)
        if candidate.rank is not None:
            self.depart(candidate.rank, "is lost: its trainer left")
        self.poke()

    def depart(self, rank: LocalRank, why: str) -> None:
        """The trainer is gone, or has been stopped for too long: the others go on without it."""
        if rank.leaving is None:
            rank.leaving, rank.leaving_since = why, trio.current_time()
        self._announce_leave(rank)

    def waiting_for(self, job: JobName) -> dict[Member, int]:
        """How many trainers wait for the job at each member of the view."""
        peers, roster = self.membership.state.peers, self.membership.view.roster_of(job)
        trainers = () if roster is None else roster.trainers
        inside = {(t.member, t.slot) for t in trainers}
        counts = dict.fromkeys(self.membership.view.members, 0)
        for member in counts:
            beat = peers[member.node].heartbeat if member.node in peers else None
            theirs = beat.waiting if beat else ()
            # It has a place by our view, and does not know it yet.
            counts[member] = sum(w.job == job and (member, w.slot) not in inside for w in theirs)
        ours = [c for c in self.candidates.values() if c.job == job and c.rank is None]
        return counts | {self._me: len(ours)}

    # --- what the agreement reads and decides

    def facts(self) -> Facts:
        """What the local jobs want and have."""
        return Facts(
            reports=tuple(self._reports()),
            waiting=self._waiting(),
            concerns=tuple(self._concerns()),
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

    def install(self, view: View) -> None:
        """The view is in force: jobs begin, go on under another number, or are over."""
        for rank in list(self.ranks):
            self._follow(rank, view.roster_of(rank.roster.job))
        for roster in view.rosters:
            for trainer in roster.trainers_at(self._me):
                self._begin_if_new(roster, trainer)
        self._absent = [c for c in self._absent if self._is_open(c, view)]
        self.marks.forget(view)
        for rank in self.ranks:
            rank.learn(self.membership.state.primaries)
            self._announce_leave(rank)  # the view may not have known of it
        self.results.look_again()

    def marked(self, member: Member, heartbeat: Heartbeat) -> None:
        """A peer has told how far its ranks have come, and what it has installed."""
        for rank in self.ranks:
            rank.learn(self.membership.state.primaries)
        for mark in heartbeat.marks:
            if not self._concerns_us(member, heartbeat, mark):
                continue  # it has ended here; or is about to begin, and the next one tells again
            before = self.marks.hear(mark)
            if mark.stopped != (before is not None and before.stopped):
                self.note_stop(mark)
            for rank in self.ranks:
                if rank.roster.job == mark.job:
                    self._compare(rank, mark)
        self._stabilize()

    def note_stop(self, mark: RankMarks) -> None:
        """A trainer's process has been stopped, here or elsewhere, or runs again."""
        roster = self.membership.view.roster_of(mark.job)
        if roster is None:
            return
        name = f"job {mark.job!r}: the process of {roster.describe(mark.trainer)}"
        if mark.stopped:
            text = f"{name} has been stopped; the others wait for it"
            self.event_log.note("trainer stopped", text, job=mark.job)
        else:
            self.event_log.note("trainer continued", f"{name} runs again", job=mark.job)

    def _concerns_us(self, member: Member, heartbeat: Heartbeat, mark: RankMarks) -> bool:
        """Whether the mark is of a job of ours, and not of its name's other run elsewhere."""
        peer = self.membership.state.peers.get(member.node)
        roster = self.membership.view.roster_of(mark.job)
        if peer is None or peer.view.epoch != heartbeat.view or roster is None:
            return False
        theirs = peer.view.roster_of(mark.job)
        same_run = theirs is not None and theirs.born == roster.born
        trainer = roster.trainer(mark.trainer)
        return same_run and trainer is not None and trainer.member == member

    def look(self) -> None:
        """Every quarter of a second: what no message tells."""
        for rank in list(self.ranks):
            for other in self.ranks:
                if other is not rank and other.roster.job == rank.roster.job:
                    self._compare(rank, other.marks())
            self._announce_leave(rank)
            rank.lanes.look()
            self._watch_edges(rank)
        self._stabilize()
        for rank in list(self.ranks):
            why = rank.superseded
            if why is not None and not rank.is_needed:
                self._end(rank, why)  # nobody asks for its results any more

    # --- what surrounds an op

    def poke(self) -> None:
        """A fact has changed."""
        self.membership.poke()

    def beat(self) -> None:
        """Tell the others how far our ranks have come."""
        self._stabilize()
        self.membership.beat()

    def ask(self, member: Member, message: AskResult) -> None:
        """Send on the link to the member."""
        self.membership.send(member, message)

    def round_trips_s(self, members: Iterable[Member]) -> dict[Member, float]:
        """To those of these that have been measured."""
        return self.membership.round_trips_s(members)

    def neighbour(self, rank: LocalRank, other: TrainerId) -> LocalRank | None:
        """Another trainer of the same job, if it lives here too."""
        return next((r for r in of_job(self.ranks, rank.roster) if r.id == other), None)

    def newcomers(self, rank: LocalRank) -> int:
        """How many trainers wait to enter the job."""
        counts = self.waiting_for(rank.roster.job)
        if not self._may_begin():
            del counts[self._me]
        return sum(counts.values())

    def runs_without_sync(self, job: JobName) -> bool:
        """O6: the job has begun to run ops, and has never called `sync`: nobody can enter it."""
        roster = self.membership.view.roster_of(job)
        return roster is not None and self.marks.show_no_sync(roster)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of tensor data sent and received at the sockets since the agent's start."""
        total = self._ended_traffic
        for rank in self.ranks:
            total = sum_of(total, rank.lanes.traffic)
        return total

    def close(self) -> None:
        """The agent ends: so do all lanes."""
        for rank in self.ranks:
            rank.lanes.close()
        self.desk.close()

    # --- inside

    def _stabilize(self) -> None:
        for rank in self.ranks:
            rank.stabilize(self.marks.stable(rank.roster))

    def _waiting(self) -> tuple[Waiting, ...]:
        if not self._may_begin():
            return ()
        return tuple(
            Waiting(c.job, c.slot, c.wait_for, c.terms)
            for c in self.candidates.values()
            if c.rank is None
        )

    def _may_begin(self) -> bool:
        """Whether our trainers may take part, or enough peers are still to be found."""
        peers = len(self.membership.view.seats) - 1
        up_s = trio.current_time() - self._began
        finds_others = peers == 0 and up_s < self._settings.find_others_s
        return peers >= self._settings.min_peers and not finds_others

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

    def _concerns(self) -> Iterator[Concern]:
        for rank in self.ranks:
            if rank.concern is not None:
                yield rank.concern
        yield from self._absent

    def _follow(self, rank: LocalRank, roster: Roster | None) -> None:
        if roster is not None and is_same_history(rank.roster, roster, rank.trainer):
            if rank.follow(roster):
                rank.lanes.begin(roster, self.desk)
            return
        if roster is None:
            reason = f"job {rank.roster.job!r} has ended here: this machine fell out of its view"
        else:
            reason = f"job {rank.roster.job!r} goes on without this rank"
        self._end(rank, Verdict("HistorySuperseded", f"{reason}; {COME_BACK}"))

    def _end(self, rank: LocalRank, why: Verdict) -> None:
        rank.end(why)
        self.ranks.remove(rank)
        self._ended_traffic = sum_of(self._ended_traffic, rank.lanes.traffic)
        if all(other.roster.job != rank.roster.job for other in self.ranks):
            self.desk.forget(rank.roster.job, below=rank.roster.number + 1)

    def _begin_if_new(self, roster: Roster, trainer: Trainer) -> None:
        if any(r.trainer == trainer for r in of_job(self.ranks, roster)):
            return
        candidate = self.candidates.pop(trainer.slot, None)
        if candidate is None or candidate.job != roster.job:
            self._report_absent(roster, trainer)
            return
        rank = LocalRank(roster, trainer, candidate.arenas, candidate.program)
        if self._stall_guard:
            rank.fence("own stall")
        self.ranks.append(rank)
        candidate.rank = rank
        rank.lanes.begin(roster, self.desk)
        candidate.joined.set()

    def _report_absent(self, roster: Roster, trainer: Trainer) -> None:
        """The roster counts a trainer that gave up while the view was being agreed on."""
        text = f"{roster.describe(trainer.id)} is lost: its trainer left before it had entered"
        verdict = Verdict("RankLost", text, (trainer.id,))
        concern = Concern(roster.job, roster.born, roster.number, verdict)
        if concern not in self._absent:
            self._absent.append(concern)
            self.poke()

    def _is_open(self, concern: Concern, view: View) -> bool:
        roster = view.roster_of(concern.job)
        return roster is not None and roster.number == concern.number

    def _compare(self, rank: LocalRank, mark: RankMarks) -> None:
        """I5: two ranks must call the same as one op, also where no data flows between them.

        Broadcasts of two roots even end: neither root waits for anybody.
        """
        op = OpNumber(rank.ledger.started)
        report = rank.ledger.ops.get(op)
        entered = {t.id for t in rank.roster.trainers if t.enters <= op}
        in_question = report is not None and report.verdict is None and mark.started == op
        if (
            {rank.id, mark.trainer} <= entered
            and in_question
            and mark.number == rank.roster.number
            and mark.fingerprint != rank.fingerprint
            and 0 not in {mark.fingerprint, rank.fingerprint}
            and rank.concern is None
        ):
            text = f"op {op} of job {rank.roster.job!r} differs"
            rank.raise_concern(Verdict("OpMismatch", text), op)
            self.poke()

    def _announce_leave(self, rank: LocalRank) -> None:
        """A trainer that is gone is a lost rank, at once: its op runs again without it.

        Who leaves in order has ended its last op, and waits a moment for the others to end it too.
        """
        if rank.leaving is None or rank.concern or rank.over or rank.rank is None:
            return
        unstable = rank.ledger.stable < rank.ledger.started
        in_order = rank.leaving == LEFT and rank.busy_since is None
        if in_order and unstable and trio.current_time() - rank.leaving_since < LEAVE_GRACE_S:
            return
        roster = rank.roster
        text = f"{roster.describe(rank.id)} {rank.leaving}"
        self.event_log.note("loss noticed", f"job {roster.job!r}: {text}", job=roster.job)
        rank.raise_concern(Verdict("RankLost", text, (rank.id,)))
        self.poke()

    def _watch_edges(self, rank: LocalRank) -> None:
        """V6: the op runs again, over new lanes."""
        if lanes_stand_still(
            rank,
            self.marks,
            newcomers=self.newcomers(rank),
            moved=rank.lanes.traffic,
            now=trio.current_time(),
            patience_s=self._patience_s(rank),
        ):
            rank.raise_concern(None, rank.ledger.started)
            self.poke()

    def _patience_s(self, rank: LocalRank) -> float:
        """How long the peer at the slower of the two edges may be silent before it is gone."""
        peers = () if rank.rank is None else rank.neighbours()
        known = [h for peer in peers if (h := self.membership.health_of(peer.member.node))]
        return max((h.thresholds.gone_after_s for h in known), default=WIRED.gone_after_s)
