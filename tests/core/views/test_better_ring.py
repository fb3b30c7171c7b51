"""V13: a view is made for a better ring alone, if that is worth it and fails no op."""

from collections.abc import Mapping
from dataclasses import replace

import msgspec
import pytest

from pmesh.core.values import Roster
from pmesh.core.views.agreement import pass_time
from pmesh.core.views.rosters import is_reordered
from pmesh.core.views.state import RING_PAUSE_S, RING_RETRY_S, Facts, MemberState, SendOnLink
from pmesh.core.wire.views import Commit, Flushed, MeasuredEdge, OpReport, Propose, RankProgress
from pmesh.ids import Incarnation, Member, OpNumber, TrainerId
from tests.core.views.one_member import NOW, told
from tests.worlds.builders import (
    ANNA,
    BERT,
    CARA,
    DIGITS,
    DORA,
    completed,
    make_call,
    make_flushed,
    make_heartbeat,
    make_peer,
    make_report,
    make_roster,
    make_state,
    make_view,
    running,
)

EVERYONE = (ANNA, BERT, CARA, DORA)
RING = make_roster(*EVERYONE)
BETTER = (ANNA, CARA, BERT, DORA)
FAST = MeasuredEdge(500, 940)


def measured(me: Member, slow: MeasuredEdge) -> dict[Incarnation, MeasuredEdge]:
    """Anna and Bert, and Cara and Dora, are far from each other."""
    apart = [{ANNA, BERT}, {CARA, DORA}]
    return {m.incarnation: slow if {me, m} in apart else FAST for m in EVERYONE if m != me}


def facts(slow: MeasuredEdge, *, busy: bool = True) -> Facts:
    started = OpNumber(4 if busy else 3)
    progress = RankProgress(DIGITS, RING.number, TrainerId(0), started, OpNumber(3))
    return Facts(edges=measured(ANNA, slow), progress=(progress,))


def anna(slow: MeasuredEdge, *, roster: Roster = RING) -> MemberState:
    view = make_view(5, *EVERYONE, rosters=[roster])
    beats = {
        m: msgspec.structs.replace(make_heartbeat(view), heard=measured(m, slow)) for m in EVERYONE
    }
    return make_state(ANNA, view, *[make_peer(m, view, beats[m]) for m in EVERYONE[1:]], now=NOW)


def proposed(
    state: MemberState, known: Facts, now: float = NOW
) -> tuple[MemberState, Propose | None]:
    step = pass_time(state, known, now=now)
    sent = [a.message for a in step.actions if isinstance(a, SendOnLink)]
    return step.state, next((m for m in sent if isinstance(m, Propose)), None)


def after_answers(state: MemberState, ops: Mapping[int, list[OpReport]]) -> MemberState:
    """Everyone answers, with these ops of each trainer."""
    for id_, member in enumerate(EVERYONE):
        report = make_report(RING, {id_: ops[id_]})
        answer: Flushed = make_flushed(member, state.view, jobs=(report,), epoch=state.promised)
        if member == ANNA:
            assert state.proposal is not None
            proposal = replace(state.proposal, answers={ANNA: answer})
            state = replace(state, proposal=proposal)
        else:
            step = told(state, member, answer)
            state = step.state
    assert any(isinstance(a, SendOnLink) and isinstance(a.message, Commit) for a in step.actions)
    return state


SLOW = MeasuredEdge(500, 94)


def test_the_leader_proposes_where_the_slowest_edge_gets_much_better() -> None:
    state, message = proposed(anna(SLOW), facts(SLOW))
    assert message is not None
    assert message.jobs == (DIGITS,)
    settled = after_answers(state, {id_: [running(4)] for id_ in range(4)})
    assert [t.member for t in settled.view.rosters[0].trainers] == [*BETTER]
    assert settled.view.rosters[0].outcomes == ()  # the op runs again
    assert settled.steady_until == NOW + RING_PAUSE_S
    _, again = proposed(replace(settled, steady_until=0.0), facts(SLOW))
    assert again is None  # it is the best ring


@pytest.mark.parametrize(
    ("slow", "busy"),
    [
        pytest.param(MeasuredEdge(500, 800), True, id="17 % are not worth it"),
        pytest.param(SLOW, False, id="no op is under way in which ranks could change places"),
    ],
)
def test_else_it_does_not(slow: MeasuredEdge, *, busy: bool) -> None:
    assert proposed(anna(slow), facts(slow, busy=busy))[1] is None


def test_what_nobody_has_measured_is_no_reason() -> None:
    state, known = anna(SLOW), facts(SLOW)
    peers = {
        node: replace(peer, heartbeat=msgspec.structs.replace(peer.heartbeat, heard={}))
        for node, peer in state.peers.items()
    }
    edges = {ANNA.incarnation: FAST, BERT.incarnation: SLOW}
    assert proposed(replace(state, peers=peers), replace(known, edges=edges))[1] is None


def test_within_a_minute_of_the_last_one_it_waits() -> None:
    state = replace(anna(SLOW), steady_until=NOW + 1.0)
    assert proposed(state, facts(SLOW))[1] is None
    assert proposed(state, facts(SLOW), NOW + 1.0)[1] is not None


def test_it_weighs_the_same_costs_once() -> None:
    state, _ = proposed(anna(SLOW), facts(SLOW, busy=False))
    assert state.reorder == (DIGITS,)
    assert proposed(state, facts(SLOW, busy=False))[0].reorder is state.reorder
    cleared, _ = proposed(replace(state, steady_until=NOW + 1.0), facts(SLOW))
    assert (cleared.reorder, cleared.weighed) == ((), ())


def test_a_job_that_waits_for_another_view_is_left_alone() -> None:
    gone = make_roster(*EVERYONE, Member(DORA.node, Incarnation(5)))
    state, _ = proposed(anna(SLOW, roster=gone), facts(SLOW))
    assert state.reorder == ()


@pytest.mark.parametrize(
    "ops",
    [
        pytest.param([[completed(4)], [running(4)], [running(4)], [running(4)]], id="it has ended"),
        pytest.param([[]] * 4, id="it was over before"),
        pytest.param([[running(4, make_call("all_gather"))]] * 4, id="it is bound to its ranks"),
        pytest.param(
            [[completed(3, call=make_call("all_gather")), running(4)]]
            + [[running(3, make_call("all_gather"))]] * 3,
            id="the one before is bound, and has not ended everywhere",
        ),
    ],
)
def test_an_op_that_would_fail_keeps_the_ring_and_it_is_tried_again_soon(
    ops: list[list[OpReport]],
) -> None:
    state, message = proposed(anna(SLOW), facts(SLOW))
    assert message is not None
    settled = after_answers(state, dict(enumerate(ops)))
    assert settled.view.rosters == (RING,)  # V7: it runs on
    assert settled.steady_until == NOW + RING_RETRY_S


def test_a_job_is_reordered_if_the_same_trainers_have_other_places() -> None:
    turned = msgspec.structs.replace(RING, trainers=RING.trainers[::-1])
    assert is_reordered(RING, turned)
    assert not is_reordered(RING, RING)
    assert not is_reordered(None, turned)
    assert not is_reordered(RING, msgspec.structs.replace(turned, trainers=turned.trainers[1:]))
    assert not is_reordered(RING, make_roster(*EVERYONE[::-1], born=make_view(9, ANNA).epoch))
