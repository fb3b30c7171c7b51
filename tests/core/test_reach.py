"""No member can use the epoch counters up, and who was led astray comes back."""

from dataclasses import replace

import pytest

from pmesh.core.messages import Propose, Refuse, TellView, Veto
from pmesh.core.proposals import highest_counter
from pmesh.core.reach import SOUND, STEP, is_led_astray
from pmesh.core.standing import Peer, State
from pmesh.core.views import View
from pmesh.errors import ProtocolError
from pmesh.ids import MAX_COUNTER
from tests.core.builders import (
    ANNA,
    BERT,
    CARA,
    all_hearing_each_other,
    make_epoch,
    make_heartbeat,
    make_peer,
    make_proposal,
    make_roster,
    make_state,
    make_view,
)
from tests.core.one_member import BERTS, NOW, TRIO, commit, sent, told

ROSTER = make_roster(ANNA, BERT)
AT_WORK = make_view(5, ANNA, BERT, CARA, rosters=[ROSTER])
BUSY = all_hearing_each_other(BERT, AT_WORK, ANNA, CARA)
ALONE = make_state(BERT, make_view(1, BERT))


@pytest.mark.parametrize("counter", [6 + STEP, SOUND, MAX_COUNTER])
def test_a_view_with_jobs_follows_a_counter_only_in_steps(counter: int) -> None:
    far = make_epoch(counter, CARA)
    with pytest.raises(ProtocolError, match="which no honest member reaches"):
        told(BUSY, CARA, make_heartbeat(AT_WORK, BERT, promised=far))
    further = make_epoch(min(counter + STEP, MAX_COUNTER))
    with pytest.raises(ProtocolError, match="which no honest member reaches"):
        told(BUSY, ANNA, Propose(further, AT_WORK, (ANNA, BERT), (ANNA, BERT), ()))
    with pytest.raises(ProtocolError, match="which no honest member reaches"):
        told(BUSY, CARA, Refuse(AT_WORK.epoch, far))


def test_a_step_is_followed() -> None:
    near = make_epoch(5 + STEP, CARA)
    state = told(BUSY, CARA, make_heartbeat(AT_WORK, BERT, promised=near)).state
    assert highest_counter(state) == 5 + STEP
    refused = told(BUSY, ANNA, Refuse(AT_WORK.epoch, near)).state
    assert highest_counter(refused) == 5 + STEP


def test_who_lies_to_a_leader_lifts_it_by_a_step_at_most_and_its_followers_take_that() -> None:
    near = make_epoch(5 + STEP, CARA)
    leader = all_hearing_each_other(ANNA, AT_WORK, BERT, CARA)
    for _ in range(3):
        leader = told(leader, CARA, make_heartbeat(AT_WORK, ANNA, promised=near)).state
    assert highest_counter(leader) <= 6 + STEP
    proposal = make_proposal(ANNA, 6 + STEP, AT_WORK, ANNA, BERT)
    assert told(BUSY, ANNA, proposal).state.promised == make_epoch(6 + STEP)


def test_what_a_newcomer_followed_does_not_count_in_the_view_that_it_enters() -> None:
    """Else the first view that it leads would be out of the others' reach."""
    newcomer = all_hearing_each_other(BERT, make_view(1, BERT), CARA)
    refused = told(newcomer, CARA, Refuse(TRIO.epoch, make_epoch(SOUND))).state
    assert highest_counter(refused) == SOUND
    entering = replace(refused, promised=make_epoch(6), flushed_at=NOW)
    entered = told(entering, ANNA, commit(make_view(6, ANNA, BERT))).state
    assert entered.highest_counter == 6


def test_a_refusal_by_one_who_is_not_heard_is_measured_by_our_own_view() -> None:
    state = told(BERTS, CARA, Refuse(TRIO.epoch, make_epoch(SOUND))).state
    assert state.highest_counter == SOUND
    unheard = replace(BUSY, peers={})
    with pytest.raises(ProtocolError):
        told(unheard, CARA, Refuse(TRIO.epoch, make_epoch(SOUND)))


def test_who_shows_a_view_without_jobs_is_not_heard_but_not_accused() -> None:
    """It may be honest, and led astray: it begins anew when it hears us."""
    astray = make_view(SOUND - 1, CARA)
    state = told(BUSY, CARA, TellView(astray)).state
    state = told(state, CARA, make_heartbeat(astray, BERT)).state
    assert CARA.node not in state.peers
    far = make_proposal(CARA, SOUND, astray, CARA, BERT, continuing=[CARA])
    assert sent(told(BUSY, CARA, far)) == [(CARA, Veto(far.epoch))]
    heard = replace(BUSY, peers={**BUSY.peers, CARA.node: idle_peer(astray)})
    refused = told(heard, CARA, Refuse(TRIO.epoch, make_epoch(SOUND))).state
    assert refused.highest_counter == 5


def idle_peer(view: View) -> Peer:
    return make_peer(CARA, view, make_heartbeat(view, BERT))


def shown(state: State, view: View) -> State:
    """The state after the leader of a view has shown it, and says that it has it."""
    known = told(state, ANNA, TellView(view)).state
    return told(known, ANNA, make_heartbeat(view, BERT)).state


def test_a_view_without_jobs_follows_any_sound_counter() -> None:
    assert highest_counter(shown(ALONE, make_view(SOUND, ANNA))) == SOUND
    assert highest_counter(shown(ALONE, make_view(SOUND + 1, ANNA))) == 1


def test_a_newcomer_follows_a_mesh_with_jobs_beyond() -> None:
    at_work = [make_roster(ANNA, CARA)]
    mesh = make_view(MAX_COUNTER // 2, ANNA, CARA, rosters=at_work)
    assert highest_counter(shown(ALONE, mesh)) == MAX_COUNTER // 2
    base = make_view(MAX_COUNTER // 2 - 1, ANNA, CARA, rosters=at_work)
    proposal = make_proposal(ANNA, MAX_COUNTER // 2, base, ANNA, BERT, continuing=[ANNA])
    assert told(shown(ALONE, base), ANNA, proposal).state.promised.counter == MAX_COUNTER // 2
    with pytest.raises(ProtocolError):
        shown(ALONE, make_view(MAX_COUNTER // 2 + 1, ANNA, rosters=[make_roster(ANNA)]))


@pytest.mark.parametrize(
    ("state", "astray"),
    [
        pytest.param(ALONE, False, id="an ordinary counter"),
        pytest.param(replace(ALONE, promised=make_epoch(SOUND)), False, id="a sound one"),
        pytest.param(replace(ALONE, promised=make_epoch(SOUND + 1)), True, id="one beyond"),
        pytest.param(replace(BERTS, promised=make_epoch(SOUND + 1)), True, id="with others"),
        pytest.param(replace(BUSY, promised=make_epoch(SOUND + 1)), False, id="with a job"),
        pytest.param(
            replace(ALONE, promised=make_epoch(SOUND + 1), flushed_at=1.0),
            False,
            id="while a commit may come",
        ),
        pytest.param(
            replace(ALONE, promised=make_epoch(SOUND + 1), installed_at=NOW - 1),
            False,
            id="just after it has begun",
        ),
        pytest.param(
            replace(BUSY, view=make_view(1, BERT), promised=make_epoch(6 + STEP)),
            True,
            id="beyond the reach of others with a job",
        ),
        pytest.param(
            replace(BUSY, view=make_view(1, BERT), promised=make_epoch(5 + STEP)),
            False,
            id="within the reach of others with a job",
        ),
    ],
)
def test_who_was_led_astray_is_known_by_its_promise(state: State, astray: bool) -> None:  # noqa: FBT001 - a parameter of the test
    assert is_led_astray(state, now=NOW) == astray
