"""Runs the op of one simulated rank: the counterpart of `pmesh.agent.jobs.op_task` and `.fetching`.

Only the tensors are small: a rank's value goes round the ring as a token, and an op completes at a
rank once the tokens of all ranks have come by. What the real one writes as a straight line is a
phase here: nothing waits but for a message, a view or the next tick.
"""

from pmesh.core.values import OpOutcome, Verdict
from pmesh.core.views.outcomes import BOUND_KINDS
from pmesh.core.wire.link import AskResult, Call
from pmesh.ids import Member, OpNumber
from simulation.invariants import Violation
from simulation.lane_messages import LaneMessage, OpResult, Retained, Token
from simulation.ranks import End, LocalRank, Op

OP_TIMEOUT_S = 4.0
"""How long a call may take before its rank asks for a verdict."""

LANE_GRACE_S = 1.0
ASK_AGAIN_S = 1.0
LANE_ATTEMPTS = 3
"""As in the real agent."""

ANY_ATTEMPT = 0
"""In the place of a roster's number: what a broadcast brings is the root's in every attempt."""


def call_op(rank: LocalRank, call: Call) -> None:
    """A trainer calls its next op; `rank.replied` hears how it ends."""
    number = OpNumber(rank.ledger.started + 1)
    if rank.owed is not None:
        _tell_late(rank)
        return
    root = rank.world[call.root] if call.kind == "broadcast" else None
    receivers = tuple(rank.world[receiver] for receiver in call.receivers) or rank.world
    rank.start(number, call, is_root=root == rank.id)
    rank.op = Op(number, call, root, receivers, rank.host.now + OP_TIMEOUT_S)
    rank.host.op_called(rank, number)
    rank.host.facts_changed()
    go_on(rank)


def go_on(rank: LocalRank) -> None:
    """Begin an attempt at the op under way, or end it as a view has decided."""
    op = rank.op
    if op is None:
        return
    failure, elsewhere = rank.failure_of(op.number), rank.result_elsewhere(op.number)
    if elsewhere is not None:  # it can't fail any more, so nothing is gained by a view
        op.deadline = rank.host.now + OP_TIMEOUT_S
    if failure is not None:
        _fail(rank, op, failure)
    elif rank.owed is not None and elsewhere is None:
        _tell_late(rank)
    elif not rank.may_run:
        op.phase = "waiting"  # V10: also for what others had completed while all were together
    elif elsewhere is not None:
        _fetch(rank, op, elsewhere)
    else:
        _attempt(rank, op)


def abandon(rank: LocalRank) -> None:
    """The trainer is gone in the middle of its call."""
    rank.op = None
    rank.replied = None


def unhindered(rank: LocalRank) -> None:
    """A fence has been lifted, or the roster has come into force: what waited for that goes on."""
    op = rank.op
    if op is not None and op.phase == "ready" and op.result is not None:
        _ready(rank, op, op.result)
    elif op is not None and op.phase == "waiting" and rank.may_run:
        go_on(rank)


def pass_time(rank: LocalRank) -> None:
    """I6: every wait has a deadline; and what no message tells."""
    op, now = rank.op, rank.host.now
    if op is None:
        return
    if now > op.deadline and op.phase != "stuck":
        _stick(rank, op, Verdict("OpTimedOut", f"op {op.number} at {rank.id}", (rank.id,)))
    elif op.broken_at is not None and now - op.broken_at > LANE_GRACE_S and op.phase != "stuck":
        _lane_is_broken(rank, op)
    elif op.phase == "waiting" and rank.may_run:
        go_on(rank)
    elif op.phase == "fetching" and now - op.asked_at > ASK_AGAIN_S:
        _ask(rank, op)


def lane_broke(rank: LocalRank, peer: Member) -> None:
    """A connection with another agent is lost, and with it what was under way on a lane."""
    op = rank.op
    if op is None or op.phase not in ("ring", "fetching") or rank.rank is None:
        return
    before = rank.previous_in_ring()
    if peer in (before.member, rank.next_in_ring().member) and op.broken_at is None:
        op.broken_at = rank.host.now


def receive(rank: LocalRank, message: LaneMessage) -> None:
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


def serve(rank: LocalRank, ask: AskResult) -> Retained | None:
    """O2: a retained result for a rank that missed the end of its op."""
    result, report = rank.results.get(ask.op), rank.ledger.ops.get(ask.op)
    if result is None or report is None:
        return None
    host = rank.trainer.member
    return Retained(ask.job, ask.born, ask.number, host, ask.receiver, ask.op, report.call, result)


def _is_of_our_ring(rank: LocalRank, token: Token) -> bool:
    """V4: two views may settle a roster under one number; we are in one, and in both rosters."""
    return token.host == rank.previous_in_ring().member


# --- one attempt


def _attempt(rank: LocalRank, op: Op) -> None:
    """V10 and `min_ranks` wait; O6 and a lost root are for a view; else the ring runs."""
    op.phase, op.result, op.broken_at = "waiting", None, None
    if rank.fences:
        return  # V3: the flush answer has not named it, so nothing of it may reach others either
    newcomers = rank.siblings.newcomers(rank)
    if _too_few(rank, newcomers):
        return
    if op.call.kind == "sync" and newcomers:
        _stick(rank, op, None)
    elif op.call.kind in BOUND_KINDS and rank.world != rank.roster.ids:
        _stick(rank, op, Verdict("RosterChanged", f"op {op.number}: its ranks have changed"))
    elif op.root is not None and rank.roster.rank_of(op.root) is None:
        _stick(rank, op, Verdict("RankLost", f"op {op.number}: its root is lost"))
    else:
        op.phase, op.contributors, op.holds = "ring", rank.roster.ids, _will_hold(rank, op)
        _run_ring(rank, op)


def _too_few(rank: LocalRank, newcomers: int) -> bool:
    """Those who wait for the next sync count, or it might never come."""
    return rank.size + newcomers < rank.roster.terms.min_ranks


def _will_hold(rank: LocalRank, op: Op) -> bool:
    """A broadcast goes along the ring as far as somebody lacks it; beyond goes only the news."""
    if op.root is None:
        return True
    ids = rank.roster.ids
    root = ids.index(op.root)
    reach = max((ids.index(r) - root) % rank.size for r in (op.root, *op.receivers) if r in ids)
    return (ids.index(rank.id) - root) % rank.size <= reach


def _run_ring(rank: LocalRank, op: Op) -> None:
    op.staged = rank.roster.number
    if op.root in (None, rank.id):
        rank.tokens.setdefault(op.number, {})[rank.id] = _token(rank, op)
    # All are handed on before any can end the op: the others need them too.
    for token in list(rank.tokens.get(op.number, {}).values()):
        _hand_on(rank, op, token)
    _look_whether_all_came(rank, op)


def _token(rank: LocalRank, op: Op) -> Token:
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


def _take(rank: LocalRank, op: Op, token: Token) -> None:
    """A token has come by, and this rank has called the op."""
    _hand_on(rank, op, token)
    _look_whether_all_came(rank, op)


def _hand_on(rank: LocalRank, op: Op, token: Token) -> None:
    if token.call != op.call:  # O8: the first to see it asks for a verdict
        _differ(rank, op)
        return
    following = rank.next_in_ring()
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


def _look_whether_all_came(rank: LocalRank, op: Op) -> None:
    tokens = rank.tokens.get(op.number, {})
    number, ids = rank.roster.number, rank.roster.ids
    if op.phase != "ring":
        return
    if op.root is not None:
        if op.root in tokens:
            _ready(rank, op, OpResult(ANY_ATTEMPT, ids, (tokens[op.root].value,)))
    elif len(tokens) == rank.size:
        if set(tokens) != set(ids):
            raise Violation(f"I3: op {op.number} at {rank.id} mixes {set(tokens)} into {ids}")
        _ready(rank, op, OpResult(number, ids, tuple(tokens[id_].value for id_ in ids)))


def _fetch(rank: LocalRank, op: Op, outcome: OpOutcome) -> None:
    """O2: the op has been completed by others."""
    op.phase, op.result, op.broken_at = "fetching", None, None
    op.contributors, op.holds, op.asked = outcome.contributors, True, 0
    if op.root == rank.id:  # I8: its input is never written, and has the result all along
        value = rank.value(op.number)
        _ready(rank, op, OpResult(ANY_ATTEMPT, outcome.contributors, (value,)))
        return
    near = rank.siblings.neighbour(rank, outcome.holders[0])
    if near is None:
        _ask(rank, op)
        return
    result, report = near.results.get(op.number), near.ledger.ops.get(op.number)
    if result is not None and report is not None:
        _take_retained(rank, op, report.call, result)
    else:
        op.broken_at = rank.host.now


def _ask(rank: LocalRank, op: Op) -> None:
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


def _take_retained(rank: LocalRank, op: Op, call: Call, result: OpResult) -> None:
    if call == op.call:
        _ready(rank, op, result)
    else:
        _differ(rank, op)


# --- how an attempt ends


def _ready(rank: LocalRank, op: Op, result: OpResult) -> None:
    """V3 and V8: behind a fence nothing is delivered."""
    op.phase, op.result = "ready", result
    if not rank.fences:
        _deliver(rank, op, result)


def _deliver(rank: LocalRank, op: Op, result: OpResult) -> None:
    rank.op = None
    rank.complete(op, result)
    if op.call.kind == "sync":
        rank.synced = op.number
    rank.see(op.contributors)
    _end(rank, op, result)
    if rank.size == 1:
        rank.stabilize(op.number)
    elif op.call.kind != "broadcast":
        rank.stabilize(op.number - 1)
    _reply(rank, None)


def _fail(rank: LocalRank, op: Op, failure: OpOutcome) -> None:
    rank.op = None
    consumed = rank.superseded is None
    cause = (rank.owed or failure).verdict  # an earlier op's failure is this one's cause
    rank.owed = None
    rank.see(failure.contributors)
    if consumed and failure.verdict is not None:
        rank.fail(failure)
        _end(rank, op, failure.verdict)
    else:
        rank.take_back(op.number)
        rank.host.superseded(rank)
    _reply(rank, cause)


def _tell_late(rank: LocalRank) -> None:
    """I5: it had returned here before another rank called it differently."""
    owed, rank.owed, rank.op = rank.owed, None, None
    if owed is not None:
        if owed.op == rank.ledger.started:  # O5: else a later op has told who is in the job
            rank.see(owed.contributors)
        _reply(rank, owed.verdict)


def _end(rank: LocalRank, op: Op, outcome: OpResult | Verdict) -> None:
    rank.ends[op.number] = End(op.call, outcome, rank.world, op.staged)
    rank.host.op_ended(rank, op.number)


def _reply(rank: LocalRank, error: Verdict | None) -> None:
    rank.host.facts_changed()
    replied, rank.replied = rank.replied, None
    if replied is not None:
        replied(error)


def _stick(rank: LocalRank, op: Op, verdict: Verdict | None) -> None:
    """It waits for a view."""
    op.phase = "stuck"
    rank.raise_concern(verdict, op.number)


def _differ(rank: LocalRank, op: Op) -> None:
    _stick(rank, op, Verdict("OpMismatch", f"op {op.number}", (rank.id,)))


def _lane_is_broken(rank: LocalRank, op: Op) -> None:
    op.broken += 1
    give_up = op.broken >= LANE_ATTEMPTS
    verdict = Verdict("LaneBroken", f"op {op.number}", (rank.id,)) if give_up else None
    _stick(rank, op, verdict)
