"""Rules of the design, each taken out by replacing one function: the simulation must notice.

`python -m simulation.seeds 300 --mutation no_refusal` runs seeds without a rule.
"""
# ruff: noqa: SLF001 - a rule mostly is a private function
# ruff: noqa: ANN401, ARG001 - a replacement takes what the original takes, whatever it needs

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import msgspec

from pmesh.core.jobs import jobs, progress
from pmesh.core.jobs.jobs import JobsState
from pmesh.core.jobs.progress import Progress
from pmesh.core.jobs.rank import RankState
from pmesh.core.links import health
from pmesh.core.topology import graph
from pmesh.core.values import Roster, Trainer, View
from pmesh.core.views import (
    agreement,
    leader,
    op_log,
    outcomes,
    quorum,
    rosters,
    state,
)
from pmesh.core.views.agreement import StallGuard
from pmesh.core.views.op_log import Ledger
from pmesh.core.views.state import FenceJobs, Install, MemberState, MemberStep, Peer
from pmesh.core.wire.views import Propose
from pmesh.ids import Epoch, Incarnation, Member
from simulation import lane_messages, ops
from simulation.agents import SimulatedAgent
from simulation.links import Links
from simulation.repeats import RepeatedCalls
from tests.simulation import op_rules as without

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
                ours = ("pmesh.", "simulation.")
                modules = [m for n, m in list(sys.modules.items()) if n.startswith(ours)]
                places = [m for m in modules if getattr(m, name, None) is original]
                for place in places if self._owner is None else [self._owner]:
                    undo.callback(setattr, place, name, original)
                    setattr(place, name, replacement)
            yield


# --- V1

_receive_proposal = agreement._receive_proposal
_propose = leader.propose
_receive_commit = agreement._receive_commit
_first_state = agreement.first_state


def _accept_below_promise(
    state: MemberState, sender: Member, message: Propose, *rest: Any
) -> MemberStep:
    if message.epoch < state.promised:
        state = replace(state, promised=state.view.epoch)
    return _receive_proposal(state, sender, message, *rest)


def _reuse_counter(state: MemberState, *rest: Any) -> Propose | None:
    message = _propose(state, *rest)
    if message is None:
        return None
    epoch = Epoch(state.view.epoch.counter + 1, *state.me)
    return msgspec.structs.replace(message, epoch=epoch)


def _install_any(state: MemberState, message: Any, now: float) -> MemberStep:
    if message.view.epoch > state.view.epoch:
        state = replace(state, promised=message.view.epoch, flushed_at=now)
    return _receive_commit(state, message, now)


def _same_incarnation(me: Member, *rest: Any, **named: Any) -> MemberState:
    return _first_state(Member(me.node, Incarnation(1)), *rest, **named)


# --- V2

_next_rosters = rosters.next_rosters


def _believe_foreign_reports(base: Any, change: Any, **named: Any) -> Any:
    named["continuing"] = [member for member in base.members if member in change.answers]
    return _next_rosters(base, change, **named)


def _take_for_continuing(base: Any, answers: Any) -> list[Member]:
    return [member for member in base.by_seniority if member in answers]


def _at_once(_: MemberState) -> float:
    return 1.0


_begin = health.begin


def _begin_anew(thresholds: Any, *, now: float, **_: Any) -> Any:
    return _begin(thresholds, now=now)


def _never(*_: Any) -> bool:
    return False


def _yes(*arguments: Any) -> bool:
    return True


# --- V3

_report = op_log.report
_report_on = rosters._report_on
_flush = agreement._flush


def _flush_without_fence(*arguments: Any) -> MemberStep:
    step = _flush(*arguments)
    return MemberStep(step.state, tuple(a for a in step.actions if not isinstance(a, FenceJobs)))


def _report_highest_only(known: Ledger, trainer: Any) -> Any:
    told = _report(known, trainer)
    return msgspec.structs.replace(told, ops=told.ops[-1:])


def _take_for_fenced(*arguments: Any) -> Any:
    report = _report_on(*arguments)
    return None if report is None else msgspec.structs.replace(report, fenced=True)


# --- V4

_age = lane_messages.age


def _drop_early(*arguments: Any) -> int:
    return min(_age(*arguments), 0) or (-1 if _age(*arguments) > 0 else 0)


# --- V5


def _hears(state: MemberState, member: Member) -> bool:
    peer = state.peers.get(member.node)
    return peer is not None and peer.member == member


# --- V6

_receive_heartbeat = agreement._receive_heartbeat


def _wait_for_commit(state: MemberState, sender: Member, beat: Any, now: float) -> MemberStep:
    step = _receive_heartbeat(state, sender, beat, now)
    if any(isinstance(a, Install) and a.view.epoch == state.promised for a in step.actions):
        peer = Peer(member=sender, heartbeat=beat, view=step.state.view)
        return MemberStep(replace(state, peers={**state.peers, sender.node: peer}))
    return step


def _expel_on_old_evidence(state: MemberState, member: Member, now: float) -> bool:
    peer = state.peers[member.node]
    of_our_line = (state.view.epoch, state.view.previous_epoch_of(member))
    return peer.view.epoch in of_our_line or state.me in peer.view.members


# --- V8


def _keep_doubts(before: StallGuard, _: MemberState, view: View) -> StallGuard:
    return replace(before, unconfirmed=before.unconfirmed.intersection(view.members))


# --- V13

_weigh_rings = leader.weigh_rings


def _is_any_better(before: int, after: int) -> bool:
    return after < before


def _weigh_at_once(state: MemberState, *rest: Any) -> MemberState:
    return _weigh_rings(replace(state, steady_until=0.0), *rest)


# --- V9 and V10

_weight = rosters._History.weight
_has_majorities = quorum.has_majorities


def _lighter_wins(history: Any) -> tuple[int, ...]:
    return tuple(-part for part in _weight(history))


def _follow_either_side(before: Roster, after: Roster, trainer: Trainer) -> bool:
    return after.born == before.born and after.number >= before.number


def _last_voters_only(roster: Roster, known: Any) -> Any:
    return (roster.primary.voters,)


def _count_restarted(present: Any, needed: Any) -> bool:
    nodes = {member.node for member in present}
    voters = {voter for several in needed for voter in several if voter.node in nodes}
    return _has_majorities({*present, *voters}, needed)


def _count_later_marks(told: Progress, roster: Roster) -> int:
    progress = [(trainer, told.of(roster, trainer.id)) for trainer in roster.trainers]
    return min(t.enters - 1 if mark is None else mark.completed for t, mark in progress)


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
    "own_view_base": Mutation("V2: the base is the highest view", (leader._base, without.own_view)),
    "false_lineage": Mutation(
        "V2: only who installed the base, or what came before it, continues",
        (leader._continuing, _take_for_continuing),
    ),
    "no_lineage": Mutation(
        "V2: both checks of the lineage, the member's and the leader's",
        (agreement._of_one_line, _yes),
        (leader._continuing, _take_for_continuing),
    ),
    "follow_anyone": Mutation(
        "V2: only a proposer of our line is followed", (agreement._of_one_line, _yes)
    ),
    "never_superseded": Mutation(
        "V2: who is left behind starts anew", (agreement._leave_if_superseded, without.no_step)
    ),
    "believe_anyone": Mutation(
        "V2: one member's word parts nobody else", (agreement._others_continue, _never)
    ),
    "no_fence": Mutation(
        "V3: after the answer nothing is delivered", (_flush, _flush_without_fence)
    ),
    "highest_op_only": Mutation(
        "V3: the answer lists the set of ops", (_report, _report_highest_only)
    ),
    "unfenced_settled": Mutation(
        "V3: what is not fenced everywhere waits", (_report_on, _take_for_fenced)
    ),
    "report_running": Mutation(
        "V3: a rank that is reported runs nothing by itself",
        (without.report, without.report_running),
        owner=RankState,
    ),
    "stays_in_meeting": Mutation(
        "V3: who is recalled before the last rank has come has not begun",
        (RepeatedCalls.leave_meeting, without.stays_in_meeting),
        owner=RepeatedCalls,
    ),
    "lanes_of_anyone": Mutation(
        "V4: a lane is taken from its sender's own agent only", (ops._is_of_our_ring, _yes)
    ),
    "drop_early": Mutation("V4: early is not late", (_age, _drop_early)),
    "impatient": Mutation("V11: deadlines follow the network", (state.patience, _at_once)),
    "forget_links": Mutation(
        "V12: what was measured of a peer outlives its link", (health.begin, _begin_anew)
    ),
    "unread_is_silent": Mutation("V11: who has not read is waited for", (state.has_read, _yes)),
    "no_voucher": Mutation("V12: whom another hears is alive", (state.is_vouched_for, _never)),
    "ring_follows_noise": Mutation(
        "V13: only a much better ring is worth a view", (graph.is_much_better, _is_any_better)
    ),
    "no_ring_pause": Mutation(
        "V13: a minute lies between two views for a better ring", (_weigh_rings, _weigh_at_once)
    ),
    "hears_is_enough": Mutation("V5: it hears me, and says so", (state.hears_me, _hears)),
    "no_clique": Mutation("V5: members hear each other", (state.hear_each_other, _yes)),
    "no_relay": Mutation(
        "V5: a third forwards between two that can't reach each other",
        (Links.relay_missing, without.none),
        owner=Links,
    ),
    "old_evidence": Mutation(
        "V5: evidence older than an install expels nobody",
        (state.follows, _expel_on_old_evidence),
    ),
    "no_veto": Mutation(
        "V5: a junior leaves out no living senior",
        (agreement._passes_over_a_senior, without.never),
    ),
    "no_flush_deadline": Mutation(
        "V6: flush answers have a deadline", (agreement._give_up_on_silent, without.unchanged)
    ),
    "no_forward": Mutation(
        "V6: a lost commit is forwarded", (_receive_heartbeat, _wait_for_commit)
    ),
    "no_needs": Mutation(
        "V6: who waits in vain asks for a new epoch", (state.needs_epoch, without.never)
    ),
    "no_edge_watch": Mutation(
        "V6: a lane without progress is a broken edge",
        (progress.lanes_stand_still, without.never),
    ),
    "no_doubt": Mutation(
        "V8: who has slept delivers nothing before it is confirmed",
        (SimulatedAgent._doubt, without.none),
        owner=SimulatedAgent,
    ),
    "fence_running": Mutation(
        "V8: a rank behind a fence runs nothing by itself",
        (without.fence, without.fence_running),
        owner=RankState,
    ),
    "trust_old_promises": Mutation(
        "V8: a view that was promised before the sleep is as old",
        (StallGuard.install, _keep_doubts),
        owner=StallGuard,
    ),
    "join_in_parts": Mutation(
        "V9: a view's members come together",
        (leader._candidates, without.only_who_asked),
        (leader._whole_views, without.as_they_come),
    ),
    "lighter_history": Mutation(
        "V9: the history of more live ranks goes on",
        (_weight, _lighter_wins),
        owner=rosters._History,
    ),
    "either_side": Mutation(
        "V9: a trainer follows one side only", (rosters.is_same_history, _follow_either_side)
    ),
    "no_quorum": Mutation("V10: a majority of the last primary", (_has_majorities, _yes)),
    "in_force_at_once": Mutation(
        "V10: ops run once a majority is seen to have installed the roster",
        (quorum.is_in_force, _yes),
    ),
    "last_voters_only": Mutation(
        "V10: a roster that is not in force hands on whose votes it has needed",
        (quorum.needed_voters, _last_voters_only),
    ),
    "restarted_votes": Mutation(
        "V10: a restarted agent has no vote", (_has_majorities, _count_restarted)
    ),
    "never_overtaken": Mutation(
        "V10: a roster gives way to a later one with a quorum",
        (rosters._is_overtaken, without.never),
    ),
    "no_retention": Mutation(
        "O2: results are kept until stable", (without.stabilize, without.stable_at_once)
    ),
    "last_barrier_stable": Mutation(
        "O2: the last barrier that has ended here may not have ended elsewhere",
        (without.complete_barriers, without.last_barrier_stable),
        owner=RankState,
    ),
    "no_lost_holders": Mutation(
        "O2: a lost trainer's agent still holds its results",
        (outcomes._holders, without.living_holders),
    ),
    "stable_for_newcomers": Mutation(
        "O3, O6: what a newcomer had no part in is not stable for all",
        (outcomes._stable_marks, without.stable_for_anybody),
    ),
    "out_of_reach": Mutation(
        "O6: what nobody can give any more fails", (outcomes._is_out_of_reach, without.never)
    ),
    "torn_when_forgotten": Mutation(
        "O2, O4: who has forgotten a stable op has ended it", (outcomes._is_past, without.never)
    ),
    "all_holders": Mutation(
        "O2: who lives is asked before who is lost", (outcomes._holders, without.all_holders)
    ),
    "one_sided": Mutation(
        "O3: nobody fails alone",
        (RankState.request_view, without.fail_alone),
        owner=RankState,
    ),
    "forget_verdicts": Mutation(
        "O3: a failed op stays failed, by the roster and by each who has seen it fail",
        (without.resolve_op, without.forget_verdicts),
        (without.resolve_ops, without.forget_outcomes),
    ),
    "bind_root_late": Mutation(
        "O4, O5: a root is bound to its trainer at the call",
        (without.next_step, without.bind_root_late),
    ),
    "see_at_install": Mutation(
        "O5: a trainer sees another world only when a call returns",
        (without.follow, without.see_at_install),
        owner=RankState,
    ),
    "name_survivors": Mutation(
        "O5: contributors are those of the attempt that succeeded",
        (without.resolve_op, without.name_survivors),
    ),
    "enter_at_any_op": Mutation(
        "O6: who enters does so in a sync", (without.op_to_enter, without.enter_at_any_op)
    ),
    "enter_a_completed_sync": Mutation(
        "O6: nobody enters in a sync that somebody has completed",
        (without.op_to_enter, without.enter_a_completed_sync),
    ),
    "enter_without_sync": Mutation(
        "O6: who enters begins with the sync", (without.call_op, without.enter_without_sync)
    ),
    "nobody_let_in": Mutation(
        "O6: a sync waits for who wants to enter",
        (JobsState.newcomers_to, without.zero),
        owner=JobsState,
    ),
    "no_announcement": Mutation(
        "a trainer that is gone is told to the others",
        (jobs.announce_leave, without.never),
    ),
    "no_min_ranks": Mutation(
        "min_ranks: with fewer, ops wait",
        (RankState.is_short_of_ranks, without.never),
        owner=RankState,
    ),
    "no_raise": Mutation(
        'on_loss="raise": what is under way fails',
        (outcomes._ops_that_a_loss_fails, without.no_list),
    ),
    "stage_anew": Mutation(
        "O9: who fetches a result keeps the residual of its own part in it",
        (ops._fetch, without.stage_anew),
    ),
    "unchecked_fetch": Mutation(
        "O8: a fetched result is checked against the call, as any record",
        (ops._take_retained, without.fetch_whatever),
    ),
    "uncompared": Mutation(
        "I5: calls are compared also where no data flows",
        (jobs.compare_calls, without.never),
    ),
    "prefer_verdict": Mutation(
        "I4: what one completed, all complete", (without.resolve_op, without.prefer_verdict)
    ),
    "always_rerun": Mutation(
        "I4: what one completed is not run again", (outcomes.resolve_ops, without.nothing)
    ),
    "later_marks": Mutation(
        "O2: stable under our roster is what has ended under it",
        (Progress.stable, _count_later_marks),
        owner=Progress,
    ),
    "lost_results": Mutation(
        "I6: who waits for a result that is gone is told",
        (outcomes.lost_results, without.nothing),
    ),
}
