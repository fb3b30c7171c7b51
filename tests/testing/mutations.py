"""Rules of the design, each taken out by replacing one function: the simulation must notice.

`python -m pmesh.testing.simulate 300 --mutation no_refusal` runs seeds without a rule.
"""
# ruff: noqa: SLF001 - a rule mostly is a private function
# ruff: noqa: ANN401, ARG001 - a replacement takes what the original takes, whatever it needs

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import msgspec

from pmesh.core import agreement, ledger, proposals, rosters, standing
from pmesh.core.ledger import Ledger
from pmesh.core.messages import Propose
from pmesh.core.standing import Fence, Install, Peer, State, Step
from pmesh.core.views import Verdict
from pmesh.ids import Epoch, Incarnation, Member
from pmesh.testing import lane_messages
from pmesh.testing.jobs import LocalJob

Function: TypeAlias = Callable[..., Any]


class Mutation:
    """One rule less, while its context is open."""

    def __init__(
        self, rule: str, *swaps: tuple[Function, Function], owner: type | None = None
    ) -> None:
        """Each swap is a function and its replacement, wherever it has been imported to.

        `owner` is the class, if they are methods.
        """
        self.rule = rule
        self._swaps = swaps
        self._owner = owner

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with ExitStack() as undo:
            for original, replacement in self._swaps:
                name = original.__name__
                modules = [m for n, m in list(sys.modules.items()) if n.startswith("pmesh.")]
                places = [m for m in modules if getattr(m, name, None) is original]
                for place in places if self._owner is None else [self._owner]:
                    undo.callback(setattr, place, name, original)
                    setattr(place, name, replacement)
            yield


# --- V1

_receive_proposal = agreement._receive_proposal
_propose = proposals.propose
_receive_commit = agreement._receive_commit
_first_state = agreement.first_state


def _accept_below_promise(state: State, sender: Member, message: Propose, *rest: Any) -> Step:
    if message.epoch < state.promised:
        state = replace(state, promised=state.view.epoch)
    return _receive_proposal(state, sender, message, *rest)


def _reuse_counter(state: State, *rest: Any) -> Propose | None:
    message = _propose(state, *rest)
    if message is None:
        return None
    epoch = Epoch(state.view.epoch.counter + 1, *state.me)
    return msgspec.structs.replace(message, epoch=epoch)


def _install_any(state: State, sender: Member, message: Any, now: float) -> Step:
    if message.view.epoch > state.view.epoch:
        state = replace(state, promised=message.view.epoch, flushed_at=now)
    return _receive_commit(state, sender, message, now)


def _same_incarnation(me: Member, *rest: Any, **named: Any) -> State:
    return _first_state(Member(me.node, Incarnation(1)), *rest, **named)


# --- V2

_next_rosters = rosters.next_rosters


def _believe_foreign_reports(base: Any, *rest: Any, answers: Any, **named: Any) -> Any:
    named["continuing"] = [member for member in base.members if member in answers]
    return _next_rosters(base, *rest, answers=answers, **named)


def _take_for_continuing(base: Any, answers: Any) -> list[Member]:
    return [member for member in base.by_seniority if member in answers]


def _yes(*arguments: Any) -> bool:
    return True


# --- V3

_report = ledger.report
_report_on = rosters._report_on
_flush = agreement._flush


def _flush_without_fence(*arguments: Any) -> Step:
    step = _flush(*arguments)
    return Step(step.state, tuple(a for a in step.actions if not isinstance(a, Fence)))


def _report_last_only(known: Ledger, rank: Any) -> Any:
    last = max((op for op, report in known.ops.items() if report.completed), default=-1)
    for op in known.ops:
        if op <= last and not known.ops[op].verdict:
            known = ledger.complete(known, op)
    return _report(known, rank)


def _take_for_fenced(*arguments: Any) -> Any:
    report = _report_on(*arguments)
    return None if report is None else msgspec.structs.replace(report, fenced=True)


# --- V4

_age = lane_messages.age


def _drop_early(*arguments: Any) -> int:
    return min(_age(*arguments), 0) or (-1 if _age(*arguments) > 0 else 0)


# --- V5


def _hears(state: State, member: Member) -> bool:
    peer = state.peers.get(member.node)
    return peer is not None and peer.member == member


# --- V6

_receive_heartbeat = agreement._receive_heartbeat


def _wait_for_commit(state: State, sender: Member, beat: Any, now: float) -> Step:
    step = _receive_heartbeat(state, sender, beat, now)
    if any(isinstance(a, Install) and a.view.epoch == state.promised for a in step.actions):
        peer = Peer(member=sender, heartbeat=beat, view=step.state.view)
        return Step(replace(state, peers={**state.peers, sender.node: peer}))
    return step


def _expel_on_old_evidence(state: State, member: Member, now: float) -> bool:
    peer = state.peers[member.node]
    of_our_line = (state.view.epoch, state.view.previous_epoch_of(member))
    return peer.view.epoch in of_our_line or state.me in peer.view.members


# --- ops

_stabilize = ledger.stabilize
_resolve_op = rosters._resolve_op


def _fail_alone(job: LocalJob, op: Any, verdict: Verdict | None) -> None:
    for rank, known in job.ledgers.items():
        report = known.ops.get(op)
        if verdict and report and not (report.completed or report.verdict):
            job.ledgers[rank] = ledger.fail(known, op, verdict)
            job._end(rank, op, verdict)


def _fetch_whatever(job: LocalJob, message: Any) -> None:
    if (message.to_rank, message.op) in job._asked:
        job._complete(message.to_rank, message.op, message.result)


def _prefer_verdict(roster: Any, op: Any, reports: Any, stuck: Any) -> Any:
    verdict = roster.lost[0] if roster.lost else stuck
    if verdict is not None:
        reports = {
            r: msgspec.structs.replace(report, completed=False) for r, report in reports.items()
        }
    return _resolve_op(roster, op, reports, stuck)


def _forget_verdicts(roster: Any, op: Any, reports: Any, stuck: Any) -> Any:
    reports = {r: msgspec.structs.replace(report, verdict=None) for r, report in reports.items()}
    return _resolve_op(roster, op, reports, stuck)


def _nothing(*arguments: Any, **named: Any) -> tuple[()]:
    return ()


def _unchanged(state: State, *arguments: Any) -> State:
    return state


def _no_step(state: State, *arguments: Any) -> Step:
    return Step(state)


def _never(*arguments: Any) -> bool:
    return False


def _own_view(state: State, answers: Any) -> Any:
    return state.view


def _stable_at_once(known: Ledger, mark: int) -> Ledger:
    return _stabilize(known, known.ended)


MUTATIONS = {
    "no_refusal": Mutation(
        "V1: a proposal must exceed the promise", (_receive_proposal, _accept_below_promise)
    ),
    "same_counter": Mutation("V1: each proposal takes a fresh counter", (_propose, _reuse_counter)),
    "commit_any": Mutation(
        "V1: only what was promised is installed", (_receive_commit, _install_any)
    ),
    "same_incarnation": Mutation(
        "V1: an epoch names a process start", (_first_state, _same_incarnation)
    ),
    "foreign_reports": Mutation(
        "V2: a newcomer's reports are ignored", (_next_rosters, _believe_foreign_reports)
    ),
    "own_view_base": Mutation("V2: the base is the highest view", (proposals._base, _own_view)),
    "false_lineage": Mutation(
        "V2: only who installed the base, or what came before it, continues",
        (proposals._continuing, _take_for_continuing),
    ),
    "no_lineage": Mutation(
        "V2: both checks of the lineage, the member's and the leader's",
        (agreement._of_one_line, _yes),
        (proposals._continuing, _take_for_continuing),
    ),
    "follow_anyone": Mutation(
        "V2: only a proposer of our line is followed", (agreement._of_one_line, _yes)
    ),
    "never_superseded": Mutation(
        "V2: who is left behind starts anew", (agreement._leave_if_superseded, _no_step)
    ),
    "no_fence": Mutation(
        "V3: after the answer nothing is delivered", (_flush, _flush_without_fence)
    ),
    "last_op_only": Mutation("V3: the answer lists the set of ops", (_report, _report_last_only)),
    "unfenced_settled": Mutation(
        "V3: what is not fenced everywhere waits", (_report_on, _take_for_fenced)
    ),
    "drop_early": Mutation("V4: early is not late", (_age, _drop_early)),
    "hears_is_enough": Mutation("V5: it hears me, and says so", (standing.hears_me, _hears)),
    "no_clique": Mutation("V5: members hear each other", (standing.hear_each_other, _yes)),
    "old_evidence": Mutation(
        "V5: evidence older than an install expels nobody",
        (standing.follows, _expel_on_old_evidence),
    ),
    "no_veto": Mutation(
        "V5: a junior leaves out no living senior", (agreement._passes_over_a_senior, _never)
    ),
    "no_flush_deadline": Mutation(
        "V6: flush answers have a deadline", (agreement._give_up_on_silent, _unchanged)
    ),
    "no_forward": Mutation(
        "V6: a lost commit is forwarded", (_receive_heartbeat, _wait_for_commit)
    ),
    "no_needs": Mutation(
        "V6: who waits in vain asks for a new epoch", (standing.needs_epoch, _never)
    ),
    "no_retention": Mutation("O2: results are kept until stable", (_stabilize, _stable_at_once)),
    "one_sided": Mutation(
        "O3: nobody fails alone", (LocalJob._trouble, _fail_alone), owner=LocalJob
    ),
    "unchecked_fetch": Mutation(
        "O8: a fetched result is checked against the call, as any record",
        (LocalJob._take_retained, _fetch_whatever),
        owner=LocalJob,
    ),
    "prefer_verdict": Mutation(
        "I4: what one completed, all complete", (_resolve_op, _prefer_verdict)
    ),
    "always_rerun": Mutation(
        "I4: what one completed is not run again", (rosters._resolve_ops, _nothing)
    ),
    "forget_verdicts": Mutation("O3: a failed op stays failed", (_resolve_op, _forget_verdicts)),
    "lost_results": Mutation(
        "I6: who waits for a result that is gone is told", (rosters._lost_results, _nothing)
    ),
}
