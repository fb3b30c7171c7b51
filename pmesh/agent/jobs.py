"""All jobs of one agent: who waits for a job to begin, and the ranks that live here.

It follows the views (`pmesh.agent.membership.Follower`) and surrounds the ops
(`pmesh.agent.ops.Surroundings`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import trio

from pmesh.agent.lane_desk import LaneDesk
from pmesh.agent.membership import Membership
from pmesh.agent.ops import serve_result
from pmesh.agent.ranks import LocalRank
from pmesh.core.health import WIRED
from pmesh.core.messages import (
    AskResult,
    Concern,
    Heartbeat,
    JobReport,
    RankMarks,
    Waiting,
)
from pmesh.core.rosters import is_same_history
from pmesh.core.standing import Facts
from pmesh.core.views import Roster, Verdict, View
from pmesh.errors import LaneBroken
from pmesh.ids import JobName, Member, OpNumber, Rank, Slot
from pmesh.net.arena_pools import SessionArenas
from pmesh.net.lanes import CallsDiffer

LEAVE_GRACE_S = 1.0  # a gone trainer's last op may still help the others; then they are told


@dataclass(slots=True, kw_only=True)
class Candidate:
    """A trainer that waits for its job to begin."""

    slot: Slot
    job: JobName
    wait_for: int
    program: str
    arenas: SessionArenas
    rank: LocalRank | None = None
    joined: trio.Event = field(default_factory=trio.Event)


class Jobs:
    """The jobs of one agent."""

    desk: LaneDesk
    membership: Membership

    def __init__(self, me: Member, nursery: trio.Nursery, *, min_peers: int) -> None:
        self._me = me
        self._nursery = nursery
        self._min_peers = min_peers
        self._next_slot = 0
        self.candidates: dict[Slot, Candidate] = {}
        self.ranks: list[LocalRank] = []
        self._marks: dict[tuple[JobName, Rank], RankMarks] = {}
        self._serving: set[AskResult] = set()
        self._absent: list[Concern] = []
        self._ended_traffic = (0, 0)

    # --- trainers come and go (`pmesh.agent.trainers`)

    def enlist(self, job: JobName, wait_for: int, program: str, arenas: SessionArenas) -> Candidate:
        """A trainer waits for its job to begin."""
        slot = Slot(self._next_slot)
        self._next_slot += 1
        candidate = Candidate(slot=slot, job=job, wait_for=wait_for, program=program, arenas=arenas)
        self.candidates[slot] = candidate
        self.poke()
        return candidate

    def withdraw(self, candidate: Candidate) -> None:
        """The trainer no longer waits; if the job begins all the same, its rank is lost."""
        self.candidates.pop(candidate.slot, None)
        if candidate.rank is not None:
            candidate.rank.leaving = ("is lost: its trainer left", trio.current_time())
        self.poke()

    def waiting_for(self, job: JobName) -> dict[Member, int]:
        """How many trainers wait for the job at each member of the view."""
        peers = self.membership.state.peers
        counts = dict.fromkeys(self.membership.view.members, 0)
        for member in counts:
            beat = peers[member.node].heartbeat if member.node in peers else None
            theirs = self._waiting() if member == self._me else beat.waiting if beat else ()
            counts[member] = sum(waiting.job == job for waiting in theirs)
        return counts

    # --- what the agreement reads and decides

    def facts(self) -> Facts:
        """What the local jobs want and have."""
        return Facts(
            reports=tuple(self._reports()),
            waiting=self._waiting() if self._enough_peers() else (),
            concerns=tuple(self._concerns()),
            marks=tuple(rank.marks() for rank in self.ranks),
        )

    def fence(self, jobs: tuple[JobName, ...]) -> None:
        """Deliver nothing more of these jobs until the next install (V3)."""
        for rank in self.ranks:
            if rank.roster.job in jobs:
                rank.fence()

    def install(self, view: View) -> None:
        """The view is in force: jobs begin, go on under another number, or are over."""
        for rank in list(self.ranks):
            self._follow(rank, view.roster_of(rank.roster.job))
        for roster in view.rosters:
            for number in roster.ranks_of(self._me):
                self._begin_if_new(roster, number)
        self._absent = [c for c in self._absent if self._is_open(c, view)]
        self._marks = {at: m for at, m in self._marks.items() if view.roster_of(at[0]) is not None}

    def marked(self, member: Member, heartbeat: Heartbeat) -> None:
        """A peer has told how far its ranks have come."""
        for mark in heartbeat.marks:
            if not self._concerns_us(member, heartbeat, mark):
                continue  # it has ended here; or is about to begin, and the next one tells again
            self._marks[mark.job, mark.rank] = mark
            for rank in self.ranks:
                if rank.roster.job == mark.job:
                    self._compare(rank, mark)
        self._stabilize()

    def _concerns_us(self, member: Member, heartbeat: Heartbeat, mark: RankMarks) -> bool:
        """Whether the mark is of a job of ours, and not of its name's other run elsewhere."""
        peer = self.membership.state.peers.get(member.node)
        roster = self.membership.view.roster_of(mark.job)
        if peer is None or peer.view.epoch != heartbeat.view or roster is None:
            return False
        theirs = peer.view.roster_of(mark.job)
        same_run = theirs is not None and theirs.born == roster.born
        return same_run and mark.rank in roster.ranks_of(member)

    def look(self) -> None:
        """Every quarter of a second: what no message tells."""
        for rank in self.ranks:
            for other in self.ranks:
                if other is not rank and other.roster.job == rank.roster.job:
                    self._compare(rank, other.marks())
            self._announce_leave(rank)
            self._watch_edges(rank)
        self._stabilize()

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

    def answer(self, ask: AskResult) -> None:
        """A peer's rank asks for a result that is retained here (O2)."""
        for rank in self.ranks:
            same_job = (rank.roster.job, rank.roster.born) == (ask.job, ask.born)
            sensible = rank.rank == ask.holder and 0 <= ask.to_rank < rank.size
            if (
                same_job and sensible and ask not in self._serving
            ):  # they ask again if it takes long
                self._nursery.start_soon(self._serve, rank, ask)

    def neighbour(self, rank: LocalRank, other: Rank) -> LocalRank | None:
        """Another rank of the same job, if it lives here too."""
        return next((r for r in self._of_job(rank) if r.rank == other), None)

    def late_ranks(self, rank: LocalRank, op: OpNumber) -> tuple[Rank, ...]:
        """The ranks that are not known to have started the op."""
        return tuple(
            other
            for other in self._live(rank)
            if other != rank.rank and self._mark_of(rank, other)[0] < op
        )

    def stable_mark(self, rank: LocalRank) -> int:
        """Every live rank is known to have ended the ops up to this one (O2)."""
        return min((self._mark_of(rank, other)[1] for other in self._live(rank)), default=-1)

    def mark_of(self, roster: Roster, rank: Rank) -> tuple[int, int]:
        """How far any rank of a job is known to have come: started, completed."""
        here = (r for r in self.ranks if (r.roster.job, r.roster.born) == (roster.job, roster.born))
        for local in here:
            if local.rank == rank:
                return local.ledger.started, local.ledger.ended
        mark = self._marks.get((roster.job, rank))
        if mark is None or mark.number < roster.born.counter:
            return -1, -1  # of an earlier job of this name
        return mark.started, mark.completed

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of tensor data sent and received at the sockets since the agent's start."""
        total = self._ended_traffic
        for rank in self.ranks:
            total = _sum_of(total, rank.traffic)
        return total

    def close(self) -> None:
        """The agent ends: so do all lanes."""
        for rank in self.ranks:
            rank.close_lanes()
        self.desk.close()

    # --- inside

    def _of_job(self, rank: LocalRank) -> Iterator[LocalRank]:
        wanted = rank.roster.job, rank.roster.born
        return (r for r in self.ranks if (r.roster.job, r.roster.born) == wanted)

    def _live(self, rank: LocalRank) -> Iterator[Rank]:
        lost = rank.roster.lost_ranks
        return (Rank(i) for i in range(rank.size) if i not in lost)

    def _mark_of(self, rank: LocalRank, other: Rank) -> tuple[int, int]:
        return self.mark_of(rank.roster, other)

    def _stabilize(self) -> None:
        for rank in self.ranks:
            rank.stabilize(self.stable_mark(rank))

    def _waiting(self) -> tuple[Waiting, ...]:
        return tuple(
            Waiting(c.job, c.slot, c.wait_for) for c in self.candidates.values() if c.rank is None
        )

    def _enough_peers(self) -> bool:
        return len(self.membership.view.seats) > self._min_peers

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
        left = rank.leaving is not None  # then that it counts as lost is our own word
        if roster is not None and (
            is_same_history(rank.roster, roster, rank.rank)
            or (left and roster.born == rank.roster.born)
        ):
            rank.follow(roster, self.desk)
            return
        if roster is None:
            reason = f"job {rank.roster.job!r} has ended here: this machine fell out of its view"
        else:
            reason = f"another run of job {rank.roster.job!r} goes on; this one has ended"
        rank.end(Verdict("HistorySuperseded", reason))
        self.ranks.remove(rank)
        self._ended_traffic = _sum_of(self._ended_traffic, rank.traffic)
        self.desk.forget(rank.roster.job, below=rank.roster.number + 1)

    def _begin_if_new(self, roster: Roster, number: Rank) -> None:
        slot = roster.trainers[number].slot
        job = roster.job, roster.born
        if any((r.roster.job, r.roster.born) == job and r.rank == number for r in self.ranks):
            return
        candidate = self.candidates.pop(slot, None)
        if candidate is None or candidate.job != roster.job:
            self._report_absent(roster, number)
            return
        rank = LocalRank(roster, number, candidate.arenas, candidate.program)
        self.ranks.append(rank)
        candidate.rank = rank
        rank.begin_lanes(self.desk)
        candidate.joined.set()

    def _report_absent(self, roster: Roster, number: Rank) -> None:
        """The roster counts a trainer that gave up while the view was being agreed on."""
        if number in roster.lost_ranks:
            return
        name = roster.names[number]
        text = f"rank {number} ({name}) is lost: its trainer left before the job began"
        verdict = Verdict("RankLost", text, (number,))
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
        in_question = report is not None and report.verdict is None and mark.started == op
        same_roster = mark.number == rank.roster.number
        differs = mark.fingerprint != rank.fingerprint
        if in_question and same_roster and differs and rank.concern is None:
            roster = rank.roster
            verdict = Verdict("OpMismatch", f"op {op} of job {roster.job!r} differs", ())
            rank.concern = Concern(roster.job, roster.born, roster.number, verdict, op)
            self.poke()

    def _announce_leave(self, rank: LocalRank) -> None:
        """A gone trainer is a lost rank: as soon as its ops are stable, or after a second."""
        if rank.leaving is None or rank.concern or rank.rank in rank.roster.lost_ranks:
            return
        why, since = rank.leaving
        still_helps = rank.ledger.stable < rank.ledger.started
        if still_helps and trio.current_time() - since < LEAVE_GRACE_S:
            return
        roster, number = rank.roster, rank.rank
        verdict = Verdict("RankLost", f"rank {number} ({roster.names[number]}) {why}", (number,))
        rank.concern = Concern(roster.job, roster.born, roster.number, verdict)
        self.poke()

    def _watch_edges(self, rank: LocalRank) -> None:
        """V6: lanes without progress are broken, even while heartbeats flow: the op runs again."""
        op = OpNumber(rank.ledger.started)
        waits = rank.size > 1 and rank.ledger.ended < op and rank.concern is None
        if not waits or self.late_ranks(rank, op):
            rank.progress = None  # on whom it waits is no matter of lanes
            return
        now, moved = trio.current_time(), rank.traffic
        if rank.progress is None or rank.progress[0] != moved:
            rank.progress = moved, now
        elif now - rank.progress[1] >= self._patience_s(rank):
            roster = rank.roster
            rank.concern = Concern(roster.job, roster.born, roster.number, None, op)
            self.poke()

    def _patience_s(self, rank: LocalRank) -> float:
        """How long the peer at the slower of the two edges may be silent before it is gone."""
        sides = (rank.rank - 1) % rank.size, (rank.rank + 1) % rank.size
        peers = [rank.roster.trainers[side].member.node for side in sides]
        known = [health for peer in peers if (health := self.membership.health_of(peer))]
        return max((h.thresholds.gone_after_s for h in known), default=WIRED.gone_after_s)

    async def _serve(self, rank: LocalRank, ask: AskResult) -> None:
        self._serving.add(ask)
        try:
            await serve_result(rank, ask, self)
        except (LaneBroken, CallsDiffer):
            return  # the asker notices, and asks for a view in which it may ask again
        finally:
            self._serving.discard(ask)


def _sum_of(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] + other[0], one[1] + other[1]
