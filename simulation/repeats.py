"""Ops that a simulated rank runs by itself, as `pmesh.agent.jobs.repeats` lets the library do.

The library is a thread beside its agent. So the rank does not know how far the thread has come
until it asks (`catch_up`), and the thread may still end an op while it is being stopped (`recall`).

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
        self._trusted_until_s = 0.0

    def serve(self) -> None:
        """Let the thread answer what its trainer calls next, if it may."""
        self.serves = _is_at_rest(self._rank)

    def vouch(self) -> None:
        """V8: the machine has not slept until now."""
        self._trusted_until_s = self._rank.host.now + TRUST_S

    # --- the thread

    def begin(self, call: Call, timeout_s: float) -> bool:
        """Begin the trainer's next op; return False if that is left to the agent."""
        rank = self._rank
        if not (self.serves and _may_repeat(rank, call)):
            return False
        self._op = ops.make_op(rank, call, timeout_s)
        rank.host.op_called(rank, self._op.number)
        rank.host.forget_facts()
        ops.put_in(rank, self._op)
        self._read()
        rank.host.later(HELD * timeout_s, partial(self._give_up, self._op))
        return True

    def token_came(self) -> None:
        """A lane has brought something."""
        if self.serves and self._op is not None:
            self._rank.host.later(self.read_after_s, self._read)

    def _read(self) -> None:
        rank, op = self._rank, self._op
        if not self.serves or op is None:
            return
        differs = any(token.call != op.call for token in rank.tokens[op.number].values())
        if differs or rank.host.now > self._trusted_until_s:
            rank.host.later(0.0, partial(self._give_up, op))
            return
        ops.hand_on_all(rank, op)
        result = ops.result_of(rank, op)
        if result is not None:
            self._op = None
            self.ended[op.number] = op.call, result
            rank.host.forget_facts()
            ops.end(rank, op, result)
            ops.reply(rank, None)

    def _give_up(self, op: "SimulatedOp") -> None:
        if self.serves and self._op is op:
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
        if self._op is not None:
            self._rank.start(self._op.number, self._op.call)
        self._rank.host.later(0.0, self.go_on)

    def go_on(self) -> None:
        """Go on with the op that the thread had begun; without one, the thread may go on."""
        op, self._op = self._op, None
        if op is not None:
            ops.take_over(self._rank, op)
        elif not self.serves:
            self.serve()

    def abandon(self) -> None:
        """The trainer is gone."""
        self.recall()
        self._op = None


def _may_repeat(rank: "SimulatedRank", call: Call) -> bool:
    kind, op = KINDS[call.kind], rank.next_op
    is_open = rank.failure_of(op) is None and rank.result_elsewhere(op) is None
    return kind.barrier and kind.row is None and is_open


def _is_at_rest(rank: "SimulatedRank") -> bool:
    """Whether nothing is to be decided, among several ranks that all have agents of their own."""
    members = {trainer.member for trainer in rank.roster.trainers}
    return (
        1 < rank.size == len(members)
        and rank.running is None
        and rank.ledger.ended == rank.ledger.started
        and len(rank.ledger.ops) <= MAX_UNSTABLE_OPS
        and rank.world == rank.roster.ids
        and rank.may_run
        and not rank.is_short_of_ranks(0)
        and not (rank.fences or rank.leaving)
        and (rank.superseded, rank.late_failure, rank.view_request) == (None, None, None)
    )
