"""One rank that lives on this machine: its ledger, fence, lanes and retained results."""

from dataclasses import dataclass, replace

import trio

from pmesh.agent.lane_desk import Edge, End, LaneDesk
from pmesh.core import ledger as ledgers
from pmesh.core.ledger import Ledger
from pmesh.core.messages import Call, Concern, JobReport, RankMarks
from pmesh.core.records import fingerprint
from pmesh.core.views import Roster, Verdict
from pmesh.ids import OpNumber, Rank
from pmesh.net.arena_pools import SessionArenas
from pmesh.net.arenas import Arena
from pmesh.net.collectives import RingPosition
from pmesh.net.lanes import Lane


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What an op has left in shared memory: the agent's until the op is stable (O2)."""

    arena: Arena | None
    """None when there are no values."""
    nbytes: int
    is_input: bool = False
    """It is the trainer's own input: a broadcast's root."""

    @property
    def memory(self) -> memoryview:
        """The bytes of the result."""
        return memoryview(b"") if self.arena is None else self.arena.memory[: self.nbytes]


class LocalRank:
    """A rank whose trainer is connected here. Its op task runs ops, the views steer it."""

    def __init__(self, roster: Roster, rank: Rank, arenas: SessionArenas, program: str) -> None:
        self.roster = roster
        self.rank = rank
        self.arenas = arenas
        self.program = program
        self.ledger = Ledger()
        self.fingerprint = 0
        self.concern: Concern | None = None
        self.over: Verdict | None = None
        """Why the whole job has ended for this rank."""
        self.owed: Verdict | None = None
        """Of an op that had already returned here when it failed: raised by the next call (I5)."""
        self.leaving: tuple[str, float] | None = None
        """Why, and since when, the trainer is gone."""
        self.busy_since: float | None = None
        """Since when the op that runs has been running."""
        self.progress: tuple[tuple[int, int], float] | None = None
        """What had moved on its lanes, and since when no more, while an op waits for them."""
        self.released = trio.Event()
        """The job is over, so nobody will ask for results."""
        self.stable_moved = trio.Event()
        self.data_sent_bytes = 0
        self.data_received_bytes = 0
        self._outcomes = {outcome.op: outcome for outcome in roster.outcomes}
        self._results: dict[OpNumber, Result] = {}
        self._unfenced = trio.Event()
        self._unfenced.set()
        self._attempt: trio.CancelScope | None = None
        self._running: OpNumber | None = None
        self._to_next: Lane | None = None
        self._from_previous: Lane | None = None

    def __repr__(self) -> str:
        return f"<LocalRank {self.rank} of {self.roster.job!r}, roster {self.roster.number}>"

    @property
    def size(self) -> int:
        """The number of ranks, lost ones included: an op's ring does not shrink."""
        return len(self.roster.trainers)

    @property
    def retained_bytes(self) -> int:
        """What results that are not yet stable hold."""
        return sum(result.nbytes for result in self._results.values())

    # --- what the agreement reads and decides

    def report(self) -> JobReport:
        """For the flush answer (V3)."""
        roster, ranks = self.roster, (ledgers.report(self.ledger, self.rank),)
        return JobReport(roster.job, roster.born, roster.number, fenced=False, ranks=ranks)

    def marks(self) -> RankMarks:
        """For every heartbeat (O2)."""
        roster, ledger = self.roster, self.ledger
        return RankMarks(
            roster.job, roster.number, self.rank, ledger.started, ledger.ended, self.fingerprint
        )

    def fence(self) -> None:
        """V3: from here on no completion is delivered, until a view is installed."""
        if self._unfenced.is_set():
            self._unfenced = trio.Event()

    async def unfenced(self) -> None:
        """Wait until a completion may be delivered. Returns at once while there is no fence.

        The view that ends the fence may cancel the attempt that waits here, which then must not go
        on, also if it was about to run already.
        """
        while not self._unfenced.is_set():
            await self._unfenced.wait()
        await trio.lowlevel.checkpoint_if_cancelled()

    def follow(self, roster: Roster, desk: LaneDesk) -> None:
        """A view has been installed that has this job."""
        if roster.number == self.roster.number:
            self._unfenced.set()
            return
        self.roster = roster
        self.concern = None
        self._outcomes = {outcome.op: outcome for outcome in roster.outcomes}
        for outcome in roster.outcomes:
            if outcome.verdict is not None and self._has_returned(outcome.op):
                self.owed = outcome.verdict
        self.ledger = ledgers.apply_failures(self.ledger, roster.outcomes)
        self._stop_attempt()
        self.begin_lanes(desk)

    def end(self, verdict: Verdict) -> None:
        """The job is over for this rank: another history of it goes on, or none."""
        self.over = self.over or verdict
        self._stop_attempt()
        self.released.set()

    def _has_returned(self, op: OpNumber) -> bool:
        """Whether the trainer took the op for a success. A stable one would not fail otherwise."""
        report = self.ledger.ops.get(op)
        return op <= self.ledger.stable if report is None else report.completed

    def _stop_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt.cancel()
        self._unfenced.set()
        self.close_lanes()

    # --- what the op task asks

    def attempt(self) -> trio.CancelScope:
        """The scope of one try at an op; the next view change that resolves ops cancels it."""
        self._attempt = trio.CancelScope()
        return self._attempt

    def verdict_on(self, op: OpNumber) -> Verdict | None:
        """Why the op fails; None while it may succeed."""
        outcome = self._outcomes.get(op)
        if outcome is not None:
            return outcome.verdict
        if self.roster.lost:
            return self.roster.lost[0]
        return self.over

    def holders_of(self, op: OpNumber) -> tuple[Rank, ...]:
        """Who has the result of an op that others completed; empty if it must be run."""
        outcome = self._outcomes.get(op)
        return () if outcome is None else outcome.holders

    def start(self, op: OpNumber, call: Call) -> None:
        """The trainer has called the op."""
        self._running = op
        self.fingerprint = fingerprint(call)
        self.ledger = ledgers.start(self.ledger, op, call)

    def take_back(self, op: OpNumber) -> None:
        """The call is as if it had never been made."""
        self._running = None
        others = {number: r for number, r in self.ledger.ops.items() if number != op}
        self.ledger = replace(self.ledger, ops=others)

    def complete(self, op: OpNumber, result: Result) -> None:
        """The op's result is there, and may be delivered."""
        self._running = None
        self.ledger = ledgers.complete(self.ledger, op)
        self._results[op] = result

    def fail(self, op: OpNumber, verdict: Verdict) -> None:
        """The op has failed, here as everywhere."""
        self._running = None
        self.ledger = ledgers.fail(self.ledger, op, verdict)

    def result_of(self, op: OpNumber) -> Result | None:
        """The retained result of an op."""
        return self._results.get(op)

    def stabilize(self, mark: int) -> None:
        """Every rank has ended the ops up to `mark`: nobody will ask for their results."""
        if self._running is not None:  # a view may have failed it, and its trainer not know yet
            mark = min(mark, self._running - 1)
        if self.concern is not None and self.concern.op >= 0:  # I5: the leader asks who called what
            mark = min(mark, self.concern.op - 1)
        before = self.ledger.stable
        self.ledger = ledgers.stabilize(self.ledger, mark)
        if self.ledger.stable == before:
            return
        for op in [op for op in self._results if op <= self.ledger.stable]:
            self.let_go(self._results.pop(op))
        self._outcomes = {op: o for op, o in self._outcomes.items() if op > self.ledger.stable}
        self.stable_moved.set()
        self.stable_moved = trio.Event()

    def let_go(self, result: Result) -> None:
        """Give the result's arena back."""
        if result.arena is not None and result.is_input:
            self.arenas.inputs.release(result.arena)
        elif result.arena is not None:
            self.arenas.outputs.release(result.arena)

    def give_up_results(self) -> None:
        """The session's memory goes: nobody can be served from it any more."""
        self._results.clear()

    # --- lanes

    def edge(self, from_rank: int, to_rank: int, op: int = -1) -> Edge:
        """The name of a lane under the current number."""
        roster = self.roster
        return Edge(roster.job, roster.born, roster.number, Rank(from_rank), Rank(to_rank), op)

    def begin_lanes(self, desk: LaneDesk) -> None:
        """Have the lane to the next rank opened; the previous rank offers us the other."""
        desk.forget(self.roster.job, below=self.roster.number)
        if self.size > 1 and not self.roster.lost:
            after = (self.rank + 1) % self.size
            desk.offer(self.edge(self.rank, after), self.roster.trainers[after].member)

    async def ring(self, desk: LaneDesk) -> RingPosition:
        """This rank's place in the ring, as soon as both its lanes are open."""
        number = self.roster.number
        if self.size > 1 and self._to_next is None:
            after = (self.rank + 1) % self.size
            self._to_next = await desk.take(End(self.edge(self.rank, after), sending=True))
        if self.size > 1 and self._from_previous is None:
            before = (self.rank - 1) % self.size
            self._from_previous = await desk.take(End(self.edge(before, self.rank), sending=False))
        return RingPosition(
            rank=self.rank,
            size=self.size,
            roster=number,
            to_next=self._to_next,
            from_previous=self._from_previous,
        )

    def close_lanes(self) -> None:
        """Their roster is over, or one of them broke."""
        for lane in (self._to_next, self._from_previous):
            if lane is not None:
                self.count(lane)
                lane.close()
        self._to_next = self._from_previous = None

    def count(self, lane: Lane) -> None:
        """Add a lane that ends to this rank's traffic."""
        self.data_sent_bytes += lane.bytes_sent
        self.data_received_bytes += lane.bytes_received

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of tensor data sent and received at the sockets, headers in."""
        lanes = [lane for lane in (self._to_next, self._from_previous) if lane is not None]
        return (
            self.data_sent_bytes + sum(lane.bytes_sent for lane in lanes),
            self.data_received_bytes + sum(lane.bytes_received for lane in lanes),
        )
