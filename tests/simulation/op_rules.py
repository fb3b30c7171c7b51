"""What an op is like when one of its rules is taken out: replacements for `mutations`."""
# ruff: noqa: SLF001 - a rule mostly is a private function
# ruff: noqa: ANN401, ARG001 - a replacement takes what the original takes, whatever it needs

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import msgspec

from pmesh.core.jobs import attempt
from pmesh.core.jobs.attempt import NextStep, OpState
from pmesh.core.jobs.rank import RankState
from pmesh.core.values import OpOutcome, Roster
from pmesh.core.views import leader, op_log, outcomes
from pmesh.core.views.op_log import Ledger
from pmesh.core.views.state import MemberState, MemberStep
from pmesh.core.wire.views import JobReport
from pmesh.ids import Member, OpNumber
from simulation import ops
from simulation.ranks import SimulatedOp, SimulatedRank
from simulation.repeats import RepeatedCalls

Function: TypeAlias = Callable[..., Any]


stabilize = op_log.stabilize
resolve_op = outcomes._resolve_op
op_to_enter = outcomes.op_to_enter
follow = RankState.follow
next_step = attempt.next_step
request_view = RankState.request_view
fetch = ops._fetch


def fail_alone(rank: Any, verdict: Any, op: int = -1) -> None:
    request_view(rank, verdict, op)
    if verdict is not None and rank.op is not None and op == rank.op.number:
        rank._outcomes[op] = OpOutcome(OpNumber(op), rank.roster.ids, verdict=verdict)
        rank.op.phase = "waiting"  # so that the driver asks again what comes next


def fetch_whatever(rank: SimulatedRank, op: Any, call: Any, result: Any) -> None:
    ops._ready(rank, op, result)


def stage_anew(rank: SimulatedRank, op: Any, outcome: OpOutcome) -> None:
    op.staged = rank.roster.number
    fetch(rank, op, outcome)


def prefer_verdict(after: Roster, op: Any, reports: Any, stuck: Any) -> Any:
    verdict = after.losses[0] if after.losses else stuck
    if verdict is not None:
        reports = {
            t: msgspec.structs.replace(report, completed=False) for t, report in reports.items()
        }
    return resolve_op(after, op, reports, stuck)


def forget_verdicts(after: Roster, op: Any, reports: Any, stuck: Any) -> Any:
    reports = {t: msgspec.structs.replace(report, verdict=None) for t, report in reports.items()}
    return resolve_op(after, op, reports, stuck)


def stable_for_anybody(op: OpNumber, roster: Roster, known: Any) -> Any:
    return [known.stable >= op and op not in known.ops]


def forget_outcomes(before: Roster, *rest: Any) -> Any:
    return resolve_ops(msgspec.structs.replace(before, outcomes=()), *rest)


resolve_ops = outcomes.resolve_ops


report = RankState.report
fence = RankState.fence
complete_barriers = RankState.complete_barriers
leave_meeting = RepeatedCalls.leave_meeting


@contextmanager
def _running_on(rank: RankState[Any]) -> Iterator[None]:
    """Let it run ops by itself although it is recalled."""
    rank.recall = rank.catch_up  # type: ignore[method-assign]
    yield
    del rank.recall


def report_running(rank: RankState[Any]) -> JobReport:
    with _running_on(rank):
        return report(rank)


def fence_running(rank: RankState[Any], why: Any) -> None:
    with _running_on(rank):
        fence(rank, why)


def stays_in_meeting(repeats: RepeatedCalls, op: SimulatedOp) -> None:
    leave_meeting(repeats, op)
    repeats._waits = op


def last_barrier_stable(rank: RankState[Any], *arguments: Any) -> tuple[Any, ...]:
    released = complete_barriers(rank, *arguments)
    return released + rank.stabilize(rank.ledger.ended)


def name_survivors(after: Roster, op: Any, reports: Any, stuck: Any) -> Any:
    outcome = resolve_op(after, op, reports, stuck)
    if outcome is None:
        return None
    return msgspec.structs.replace(outcome, contributors=after.ids)


def living_holders(after: Roster, reports: Any) -> Any:
    return tuple(t for t, report in sorted(reports.items()) if report.completed and t in after.ids)


def all_holders(after: Roster, reports: Any) -> Any:
    return tuple(t for t, report in sorted(reports.items()) if report.completed)


def enter_at_any_op(known: Any, after: Any) -> OpNumber:
    return OpNumber(known.highest + 1)


def enter_a_completed_sync(known: Any, after: Any) -> OpNumber | None:
    reports = known.ops.get(known.highest, {}).values()
    is_sync = any(report.call.kind == "sync" for report in reports)
    return OpNumber(known.highest) if is_sync else None


def enter_without_sync(rank: SimulatedRank, call: Any, *rest: Any) -> None:
    if rank.trainer.enters and not rank.ends:
        call = msgspec.structs.replace(call, kind="barrier")
    call_op(rank, call, *rest)


call_op = ops.call_op


def see_at_install(rank: RankState[Any], roster: Roster) -> bool:
    again = follow(rank, roster)
    rank.world = rank.roster.ids
    return again


def bind_root_late(rank: Any, op: OpState, **facts: Any) -> NextStep:
    if op.root is not None:
        op.root = rank.roster.ids[op.call.root % rank.size]
    return next_step(rank, op, **facts)


def nothing(*arguments: Any, **named: Any) -> tuple[()]:
    return ()


def no_list(*arguments: Any, **named: Any) -> list[Any]:
    return []


def none(*arguments: Any, **named: Any) -> None:
    return None


def zero(*arguments: Any, **named: Any) -> int:
    return 0


def unchanged(state: MemberState, *arguments: Any) -> MemberState:
    return state


def no_step(state: MemberState, *arguments: Any) -> MemberStep:
    return MemberStep(state)


def never(*arguments: Any, **named: Any) -> bool:
    return False


def own_view(state: MemberState, answers: Any) -> Any:
    return state.view


def only_who_asked(state: MemberState, now: float) -> tuple[Member, ...]:
    asked = leader._requests(state, now)
    return tuple(member for member in sorted(asked) if leader._may_join(state, member, now))


def as_they_come(state: MemberState, joined: Any, now: float) -> Any:
    return joined


def stable_at_once(known: Ledger, mark: int) -> Ledger:
    return stabilize(known, known.ended)
