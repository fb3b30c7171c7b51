"""Ops that a simulated rank runs by itself, as `pmesh.agent.jobs.repeats` lets the library do.

The library is a thread beside its agent. So the rank does not know how far the thread has come
until it asks (`catch_up`), and the thread may still end an op while it is being stopped (`recall`).
The threads of one agent's ranks meet, and an op ends for all of them at once. A rank that is
recalled before the last one has come leaves, and its agent has the call. If there are ranks
elsewhere, too, the values of all who have met go there. If one of these ranks is recalled before
the others' values have come, the agent goes on with the op of the first one, and has the calls of
the rest.

The real one takes only calls that its agent has run before, among the same ranks. Here it takes any
op on which no view has decided.
"""

from functools import partial
from typing import TYPE_CHECKING

from pmesh.core.jobs.attempt import MAX_UNSTABLE_OPS
from pmesh.core.ops.kinds import KINDS
from pmesh.core.wire.calls import Call
from pmesh.ids import OpNumber
from simulation import ops
from simulation.invariants import Violation
from simulation.lane_messages import OpResult

if TYPE_CHECKING:
    from simulation.ranks import SimulatedOp, SimulatedRank

READ_AFTER_S = 0.002
"""How long a token may lie there before the thread reads it."""

HELD = 0.1
"""The share of an op's timeout after which the thread leaves the op to its agent."""

TRUST_S = 1.0
"""V8: for how long after the agent has looked whether the machine slept an op may end."""


class RepeatedCalls:
    """The calls of one rank that are answered without its agent."""

    def __init__(self, rank: "SimulatedRank") -> None:
        self.ended: dict[OpNumber, tuple[Call, OpResult]] = {}
        """What has ended and is not noted in the rank."""
        self.serves = False
        """Whether the thread may begin and end ops."""
        self.read_after_s = READ_AFTER_S
        self._rank = rank
        self._op: SimulatedOp | None = None
        """What the thread has begun and not ended."""
        self._waits: SimulatedOp | None = None
        """The op for which it waits for the other ranks of its agent."""
        self._exchanges: SimulatedOp | None = None
        """The op whose values all ranks of its agent have brought, and sent to those elsewhere."""
        self._unread: SimulatedOp | None = None
        """What the trainer has called and nobody has begun."""
        self._trusted_until_s = 0.0

    def serve(self) -> None:
        """Let the thread answer what its trainer calls next, if it may."""
        self.serves = _is_at_rest(self._rank) and not _is_awaited(self._rank)

    def vouch(self) -> None:
        """V8: the machine has not slept until now."""
        self._trusted_until_s = self._rank.host.now + TRUST_S

    # --- the thread

    def begin(self, call: Call, timeout_s: float) -> bool:
        """Begin the trainer's next op; return False if that is left to the agent."""
        rank = self._rank
        if not (self.serves and _may_repeat(rank, call)):
            return False
        op = ops.make_op(rank, call, timeout_s)
        rank.host.op_called(rank, op.number)
        rank.host.forget_facts()
        if len(rank.mates()) > 1:
            self._waits = op
            rank.host.later(self.read_after_s, self._read)
        else:
            self._op = op
            ops.put_in(rank, op)
            self._read()
        rank.host.later(HELD * timeout_s, partial(self.give_up, op))
        return True

    def token_came(self) -> None:
        """A lane has brought something."""
        if self.serves and (self._op or self._exchanges) is not None:
            self._rank.host.later(self.read_after_s, self._read)

    def _read(self) -> None:
        rank = self._rank
        if self._waits is not None:
            self._meet(self._waits)
        op = self._op or self._exchanges
        if not self.serves or op is None:
            return
        differs = any(token.call != op.call for token in rank.tokens[op.number].values())
        if differs or rank.host.now > self._trusted_until_s:
            rank.host.later(0.0, partial(self.give_up, op))
            return
        ops.hand_on_all(rank, op)
        result = ops.result_of(rank, op)
        if result is not None and op is self._op:
            self.end(op, result)
        elif result is not None:
            self._end_exchange(result)

    def _end_exchange(self, result: OpResult) -> None:
        """End the op for all ranks of the agent, if all values have come to each."""
        here = [other.repeats for other in self._rank.mates() if other.repeats is not None]
        parts = [(repeats, part) for repeats in here if (part := repeats.part_exchanged())]
        if len(parts) == len(self._rank.mates()):
            for repeats, part in parts:
                repeats.end(part, result)

    def part_exchanged(self) -> "SimulatedOp | None":
        """What this rank has exchanged, once the values of all ranks have come here."""
        rank, op = self._rank, self._exchanges
        if op is None or ops.result_of(rank, op) is None:
            return None
        ops.hand_on_all(rank, op)
        return op

    def exchange(self, op: "SimulatedOp") -> None:
        """All ranks of the agent have come: send their values to those elsewhere."""
        self._waits, self._exchanges = None, op
        ops.put_in(self._rank, op)
        self._rank.host.later(self.read_after_s, self._read)

    def _meet(self, op: "SimulatedOp") -> None:
        """End the op for all ranks of the agent, if all have come, or send their values."""
        rank = self._rank
        here = rank.mates()
        parts = [(r.repeats, part) for r in here if r.repeats and (part := r.repeats.part_in(op))]
        if len(parts) < len(here):
            return
        if not rank.has_all_here:
            for repeats, part in parts:
                repeats.exchange(part)
            return
        is_trusted = rank.host.now <= self._trusted_until_s
        values = {other.id: other.value(op.number) for other in here}
        number, ids = rank.roster.number, rank.roster.ids
        result = OpResult(number, ids, tuple(values[id_] for id_ in ids))
        for repeats, part in parts:
            if is_trusted:
                part.staged = number
                repeats.end(part, result)
            else:
                rank.host.later(0.0, partial(repeats.give_up, part))

    def part_in(self, op: "SimulatedOp") -> "SimulatedOp | None":
        """What this rank has come for, if another one has come for the same."""
        waits = self._waits
        is_same = waits is not None and (waits.number, waits.call) == (op.number, op.call)
        return waits if is_same else None

    def end(self, op: "SimulatedOp", result: OpResult) -> None:
        """The op has ended, and the trainer is answered."""
        if self._rank.running is not None:
            raise Violation(f"V3: {self._rank.id} ends op {op.number}, and its agent runs it")
        self._op = self._waits = self._exchanges = None
        self.ended[op.number] = op.call, result
        self._rank.host.forget_facts()
        ops.end(self._rank, op, result)
        ops.reply(self._rank, None)

    def give_up(self, op: "SimulatedOp") -> None:
        """The op is left to the agent, if it has not ended."""
        if self.serves and any(op is own for own in (self._op, self._waits, self._exchanges)):
            self.recall()

    # --- its agent

    def catch_up(self) -> None:
        """Note in the rank what has ended."""
        if self.ended:
            last, (call, result) = self.ended.popitem()
            self.ended.clear()
            self._rank.complete_barriers(last, call, result)

    def recall(self) -> None:
        """Stop the thread; the agent goes on with what has begun, in its next turn."""
        if not self.serves:
            return
        self._read()  # as late as it can be
        self.serves = False
        self.catch_up()
        if self._exchanges is not None:
            self._end_in_vain(self._exchanges)
        if self._op is not None:
            self._rank.start(self._op.number, self._op.call)
        if self._waits is not None:
            self.leave_meeting(self._waits)
        self._rank.host.later(0.0, self.go_on)

    def _end_in_vain(self, op: "SimulatedOp") -> None:
        """Leave an exchange to the agent, for all of its ranks."""
        self._exchanges, others = None, self._rank.mates()
        if self._rank is others[0]:
            self._op = op
        else:
            self._unread = op
        for other in others:
            other.recall()

    def leave_meeting(self, op: "SimulatedOp") -> None:
        """Wait for the others no longer: the op has not begun."""
        self._waits, self._unread = None, op

    def go_on(self) -> None:
        """Go on with what the thread has left; if that is nothing, the thread may go on."""
        op, self._op = self._op, None
        unread, self._unread = self._unread, None
        if op is not None:
            ops.take_over(self._rank, op)
        elif unread is not None:
            ops.call_op(self._rank, unread.call, unread.timeout_s)
        elif not self.serves:
            self.serve()

    def abandon(self) -> None:
        """The trainer is gone."""
        self.recall()
        self._op = self._unread = None


def _may_repeat(rank: "SimulatedRank", call: Call) -> bool:
    kind, op = KINDS[call.kind], rank.next_op
    is_open = rank.failure_of(op) is None and rank.result_elsewhere(op) is None
    return kind.barrier and kind.row is None and is_open


def _is_at_rest(rank: "SimulatedRank") -> bool:
    """Whether nothing is to be decided."""
    return (
        rank.size > 1
        and rank.running is None
        and rank.ledger.ended == rank.ledger.started
        and len(rank.ledger.ops) <= MAX_UNSTABLE_OPS
        and rank.world == rank.roster.ids
        and rank.may_run
        and not rank.is_short_of_ranks(0)
        and not (rank.fences or rank.leaving)
        and (rank.superseded, rank.late_failure, rank.view_request) == (None, None, None)
    )


def _is_awaited(rank: "SimulatedRank") -> bool:
    """Whether the agent has begun the next op of another rank that would meet this one."""
    running = (other.running for other in rank.mates() if other is not rank)
    return any(op is not None and op > rank.ledger.started for op in running)
