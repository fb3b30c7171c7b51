"""V11: a member that is lost again and again is let back in after a growing time."""

from dataclasses import replace

import pytest

from pmesh.core.views.leader import propose
from pmesh.core.views.state import (
    LONGEST_HOLD_OFF_S,
    STEADY_S,
    Facts,
    MemberFlaps,
    MemberState,
    PendingJoin,
)
from tests.core.views.one_member import BERTS, NOW, TRIO, commit, told
from tests.worlds.builders import (
    ANNA,
    BERT,
    DORA,
    make_heartbeat,
    make_peer,
    make_proposal,
    make_state,
    make_view,
)


def test_the_first_loss_costs_nothing_and_each_further_one_twice_as_much() -> None:
    waits = [
        MemberFlaps(losses, 100.0).held_off_until - 100.0 for losses in (1, 2, 3, 4, 5, 6, 7, 50)
    ]
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_HOLD_OFF_S, LONGEST_HOLD_OFF_S]


@pytest.mark.parametrize(("stays_s", "left"), [(0.0, 3), (STEADY_S, 2), (9 * STEADY_S, 0)])
def test_losses_are_forgotten_while_it_stays(stays_s: float, left: int) -> None:
    assert MemberFlaps(3, 0.0).left(stays_s) == left


def leader_asked_by_dora(flaps: MemberFlaps) -> MemberState:
    view, doras = make_view(5, ANNA, BERT), make_view(3, DORA)
    bert = make_peer(BERT, view, make_heartbeat(view, ANNA, DORA))
    state = make_state(ANNA, view, bert, make_peer(DORA, doras, make_heartbeat(doras, ANNA, BERT)))
    asked = {DORA: PendingJoin(NOW, whole=False)}
    return replace(state, joining=asked, flaps={DORA: flaps})


def test_a_leader_does_not_let_it_in_before() -> None:
    assert propose(leader_asked_by_dora(MemberFlaps(1, NOW)), Facts(), NOW) is not None
    assert propose(leader_asked_by_dora(MemberFlaps(2, NOW)), Facts(), NOW) is None
    assert propose(leader_asked_by_dora(MemberFlaps(2, NOW - 1.0)), Facts(), NOW) is not None


def test_each_member_counts_whom_a_view_leaves_out() -> None:
    proposal = make_proposal(ANNA, 6, TRIO, ANNA, BERT)
    view = make_view(6, ANNA, BERT, previous=TRIO.epoch)
    (lost,) = set(TRIO.members) - {ANNA, BERT}
    for before, losses in (
        (None, 1),
        (MemberFlaps(1, NOW - 1.0), 2),
        (MemberFlaps(1, NOW - STEADY_S), 1),
    ):
        state = replace(BERTS, flaps={} if before is None else {lost: before})
        after = told(told(state, ANNA, proposal).state, ANNA, commit(view)).state
        assert after.flaps == {lost: MemberFlaps(losses, NOW)}
