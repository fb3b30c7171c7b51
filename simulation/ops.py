"""Runs the op of one simulated rank; what comes next is decided in `pmesh.core.jobs.attempt`.

Only the tensors are small: a rank's value goes round the ring as a token, and an op completes at a
rank once the tokens of all ranks have come by. What the real one writes as a straight line is a
phase here: nothing waits but for a message, a view or the next tick.
"""

from typing import assert_never

from pmesh.core.jobs import attempt as attempts
from pmesh.core.jobs.attempt import (
    Fail,
    Failed,
    FetchResult,
    ReportLate,
    RequestView,
    Run,
    WaitForNews,
)
from pmesh.core.values import OpOutcome, Verdict
from pmesh.core.wire.calls import Call
from pmesh.core.wire.lanes import AskResult
from pmesh.ids import Member
from simulation.invariants import Violation
from simulation.lane_messages import LaneMessage, OpResult, Retained, Token
from simulation.ranks import End, SimulatedOp, SimulatedRank

OP_TIMEOUT_S = 4.0
"""How long a call may take before its rank asks for a verdict."""

ANY_ATTEMPT = 0
"""In the place of a roster's number: what a broadcast brings is the root's in every attempt."""


def call_op(rank: SimulatedRank, call: Call, timeout_s: float = OP_TIMEOUT_S) -> None:
    """A trainer calls its next op; `rank.replied` gets how it ends."""
    if rank.late_failure is not None:
        _reply(rank, attempts.report_late(rank))
        return
    if rank.repeats is not None and rank.repeats.begin(call, timeout_s):
        return
    rank.recall()
    rank.op = make_op(rank, call, timeout_s)
    attempts.start(rank, rank.op, rank.host.now)
    rank.host.op_called(rank, rank.op.number)
    rank.host.facts_changed()
    begin_attempt(rank)


def make_op(rank: SimulatedRank, call: Call, timeout_s: float) -> SimulatedOp:
    """The next op, which all ranks of the roster take part in."""
    root, receivers = attempts.roles_in(rank, call)
    return SimulatedOp(
        number=rank.next_op,
        call=call,
        timeout_s=timeout_s,
        root=root,
        receivers=receivers,
        contributors=rank.roster.ids,
    )


def take_over(rank: SimulatedRank, op: SimulatedOp) -> None:
    """Go on with an op that the rank has begun by itself, and which a view may have settled."""
    if rank.late_failure is not None:
        _reply(rank, attempts.report_late(rank))
        return
    rank.op = op
    attempts.start(rank, op, rank.host.now)
    rank.host.facts_changed()
    if rank.superseded is None and op.staged == rank.roster.number:
        op.phase = "ring"
        _run_ring(rank, op)
    else:
        begin_attempt(rank)


def begin_attempt(rank: SimulatedRank) -> None:
    """An op has been called, or a view has settled the one under way."""
    if rank.op is not None:
        attempts.begin_attempt(rank, rank.op, rank.host.now)
        _go_on(rank, rank.op)


def _go_on(rank: SimulatedRank, op: SimulatedOp) -> None:
    op.phase, op.result, op.broken_at = "waiting", None, None
    step = attempts.next_step(
        rank, op, newcomers=lambda: rank.jobs.newcomers(rank), retained_bytes=0
    )
    match step:
        case Fail(outcome):
            _fail(rank, op, outcome)
        case ReportLate():
            rank.op = None
            _reply(rank, attempts.report_late(rank))
        case WaitForNews():
            pass
        case RequestView(verdict, about):
            _stick(rank, op, verdict, about)
        case FetchResult(outcome):
            _fetch(rank, op, outcome)
        case Run():
            _recall_others(rank)
            op.phase, op.contributors, op.holds = "ring", rank.roster.ids, _will_hold(rank, op)
            _run_ring(rank, op)
        case _:
            assert_never(step)


def _recall_others(rank: SimulatedRank) -> None:
    """Let no rank of this agent wait for one whose op its agent runs."""
    for other in rank.beside():
        if other is not rank:
            other.recall()


def abandon(rank: SimulatedRank) -> None:
    """The trainer is gone in the middle of its call."""
    rank.op = None
    rank.replied = None
    if rank.repeats is not None:
        rank.repeats.abandon()


def unhindered(rank: SimulatedRank) -> None:
    """A fence has been lifted, or the roster has come into force: what waited for that goes on."""
    op = rank.op
    if op is not None and op.phase == "ready" and op.result is not None:
        _ready(rank, op, op.result)
    elif op is not None and op.phase == "waiting":
        _go_on(rank, op)


def pass_time(rank: SimulatedRank) -> None:
    """I6: every wait has a deadline; and what no message reports."""
    op, now = rank.op, rank.host.now
    if op is None:
        return
    if now > op.deadline and op.phase != "timed out":
        op.phase = "timed out"
        rank.request_view(rank.jobs.timed_out(rank, op), op.number)
    elif op.phase in ("ring", "fetching") and op.broken_at is not None:
        if now - op.broken_at > attempts.LANE_GRACE_S:
            _stick(rank, op, attempts.break_lanes(rank, op, "a lane has ended"))
    elif op.phase == "waiting":
        _go_on(rank, op)
    elif op.phase == "fetching" and now - op.asked_at > attempts.ASK_AGAIN_S:
        _ask(rank, op)


def lane_broke(rank: SimulatedRank, peer: Member) -> None:
    """A connection with another agent is lost, and with it what was under way on a lane."""
    if rank.repeats is not None and rank.repeats.serves:
        rank.recall()
        rank.repeats.go_on()
    op = rank.op
    if op is None or op.phase not in ("ring", "fetching") or rank.rank is None:
        return
    before = rank.neighbours()[0]
    if peer in (before.member, rank.neighbours()[1].member) and op.broken_at is None:
        op.broken_at = rank.host.now


def receive(rank: SimulatedRank, message: LaneMessage) -> None:
    """A lane has brought a message of this roster's number."""
    op = rank.op
    if isinstance(message, Retained):
        rank.moved += 1
        if op is not None and op.phase == "fetching" and op.number == message.op:
            _take_retained(rank, op, message.call, message.result)
        return
    if not _is_of_our_ring(rank, message):
        return
    rank.moved += 1
    rank.tokens.setdefault(message.op, {})[message.origin] = message
    if op is not None and op.phase == "ring" and op.number == message.op:
        _take(rank, op, message)
    elif rank.repeats is not None:
        rank.repeats.token_came()


def serve(rank: SimulatedRank, ask: AskResult) -> Retained | None:
    """O2: a retained result for a rank that missed the end of its op."""
    result, report = rank.results.get(ask.op), rank.ledger.ops.get(ask.op)
    if result is None or report is None:
        return None
    host = rank.trainer.member
    return Retained(ask.job, ask.born, ask.number, host, ask.receiver, ask.op, report.call, result)


def _is_of_our_ring(rank: SimulatedRank, token: Token) -> bool:
    """V4: two views may settle a roster under one number; we are in one, and in both rosters."""
    return token.host == rank.neighbours()[0].member


# --- one attempt


def _will_hold(rank: SimulatedRank, op: SimulatedOp) -> bool:
    """A broadcast goes along the ring as far as somebody lacks it; beyond goes only the news."""
    if op.root is None:
        return True
    ids = rank.roster.ids
    root = ids.index(op.root)
    reach = max((ids.index(r) - root) % rank.size for r in (op.root, *op.receivers) if r in ids)
    return (ids.index(rank.id) - root) % rank.size <= reach


def _run_ring(rank: SimulatedRank, op: SimulatedOp) -> None:
    put_in(rank, op)
    # All are handed on before any can end the op: the others need them too.
    hand_on_all(rank, op)
    _look_whether_all_came(rank, op)


def put_in(rank: SimulatedRank, op: SimulatedOp) -> None:
    """Begin an attempt, if it has not begun, with this rank's own token."""
    if op.staged != rank.roster.number:
        op.staged, op.sent = rank.roster.number, set()
    if op.root in (None, rank.id):
        rank.tokens.setdefault(op.number, {})[rank.id] = _token(rank, op)


def hand_on_all(rank: SimulatedRank, op: SimulatedOp) -> None:
    """Hand on what has come, each token once."""
    for token in list(rank.tokens.get(op.number, {}).values()):
        _hand_on(rank, op, token)


def _token(rank: SimulatedRank, op: SimulatedOp) -> Token:
    roster, value = rank.roster, rank.value(op.number)
    return Token(
        roster.job,
        roster.born,
        roster.number,
        rank.trainer.member,
        rank.id,
        op.number,
        rank.id,
        op.call,
        value,
    )


def _take(rank: SimulatedRank, op: SimulatedOp, token: Token) -> None:
    """A token has come by, and this rank has called the op."""
    _hand_on(rank, op, token)
    _look_whether_all_came(rank, op)


def _hand_on(rank: SimulatedRank, op: SimulatedOp, token: Token) -> None:
    if token.call != op.call:  # O8: the first to see it asks for a verdict
        _differ(rank, op)
        return
    if token.origin in op.sent:
        return
    op.sent.add(token.origin)
    following = rank.neighbours()[1]
    if following.id != token.origin:
        rank.moved += 1
        onward = Token(
            token.job,
            token.born,
            token.number,
            rank.trainer.member,
            following.id,
            token.op,
            token.origin,
            token.call,
            token.value,
        )
        rank.host.send_on_lane(following.member, onward)


def _look_whether_all_came(rank: SimulatedRank, op: SimulatedOp) -> None:
    result = result_of(rank, op)
    if op.phase == "ring" and result is not None:
        _ready(rank, op, result)


def result_of(rank: SimulatedRank, op: SimulatedOp) -> OpResult | None:
    """What the tokens make once all have come; None until then."""
    tokens = rank.tokens.get(op.number, {})
    number, ids = rank.roster.number, rank.roster.ids
    if op.root is not None:
        value = tokens.get(op.root)
        return None if value is None else OpResult(ANY_ATTEMPT, ids, (value.value,))
    if len(tokens) < rank.size:
        return None
    if set(tokens) != set(ids):
        raise Violation(f"I3: op {op.number} at {rank.id} mixes {set(tokens)} into {ids}")
    return OpResult(number, ids, tuple(tokens[id_].value for id_ in ids))


def _fetch(rank: SimulatedRank, op: SimulatedOp, outcome: OpOutcome) -> None:
    """O2: the op has been completed by others."""
    op.phase = "fetching"
    op.contributors, op.holds, op.asked = outcome.contributors, True, 0
    if op.root == rank.id:  # I8: its input is never written, and has the result all along
        value = rank.value(op.number)
        _ready(rank, op, OpResult(ANY_ATTEMPT, outcome.contributors, (value,)))
        return
    near = rank.jobs.neighbour(rank, outcome.holders[0])
    if near is None:
        _ask(rank, op)
        return
    result, report = near.results.get(op.number), near.ledger.ops.get(op.number)
    if result is not None and report is not None:
        _take_retained(rank, op, report.call, result)
    else:
        op.broken_at = rank.host.now


def _ask(rank: SimulatedRank, op: SimulatedOp) -> None:
    """Each time another of the holders, so that one who is slow does not stop us."""
    outcome, roster = rank.result_elsewhere(op.number), rank.roster
    if outcome is None:
        return
    holder = outcome.holders[op.asked % len(outcome.holders)]
    op.asked, op.asked_at = op.asked + 1, rank.host.now
    host = roster.trainer(holder)
    if host is not None:
        ask = AskResult(roster.job, roster.born, roster.number, op.number, holder, rank.id)
        rank.host.ask(host.member, ask)


def _take_retained(rank: SimulatedRank, op: SimulatedOp, call: Call, result: OpResult) -> None:
    if call == op.call:
        _ready(rank, op, result)
    else:
        _differ(rank, op)


# --- how an attempt ends


def _ready(rank: SimulatedRank, op: SimulatedOp, result: OpResult) -> None:
    """V3 and V8: behind a fence nothing is delivered."""
    op.phase, op.result = "ready", result
    if not rank.fences:
        _deliver(rank, op, result)


def _deliver(rank: SimulatedRank, op: SimulatedOp, result: OpResult) -> None:
    rank.op = None
    kept = result if op.holds else None
    rank.complete(op.number, kept, op.contributors, holds=op.holds)
    rank.see(op.contributors)
    end(rank, op, result)
    rank.pass_barrier(op.number, op.call.kind)
    if rank.repeats is not None:
        rank.repeats.serve()
    rank.host.facts_changed()
    reply(rank, None)


def _fail(rank: SimulatedRank, op: SimulatedOp, failure: OpOutcome) -> None:
    rank.op = None
    failed = attempts.end_failed(rank, op, failure)
    if failed.consumed and failure.verdict is not None:
        end(rank, op, failure.verdict)
    else:
        rank.host.superseded(rank)
    _reply(rank, failed)


def end(rank: SimulatedRank, op: SimulatedOp, outcome: OpResult | Verdict) -> None:
    """Note for the invariants how the op ends for its trainer."""
    rank.ends[op.number] = End(op.call, outcome, rank.world, op.staged)
    rank.host.op_ended(rank, op.number)


def _reply(rank: SimulatedRank, failed: Failed) -> None:
    rank.host.facts_changed()
    reply(rank, failed)


def reply(rank: SimulatedRank, failed: Failed | None) -> None:
    """Answer the trainer's call."""
    replied, rank.replied = rank.replied, None
    if replied is not None:
        replied(None if failed is None else failed.verdict)


def _stick(
    rank: SimulatedRank, op: SimulatedOp, verdict: Verdict | None, about: int | None = None
) -> None:
    """It waits for a view."""
    op.phase = "stuck"
    rank.request_view(verdict, op.number if about is None else about)


def _differ(rank: SimulatedRank, op: SimulatedOp) -> None:
    _stick(rank, op, attempts.differs(rank, op.number, "another rank has called something else"))
