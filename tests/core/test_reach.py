"""No member can use the epoch counters up, and who was led astray comes back."""

from dataclasses import replace

import pytest

from pmesh.core.messages import Propose, Refuse, TellView
from pmesh.core.reach import SOUND, STEP, is_led_astray
from pmesh.core.standing import State
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
    make_proposal,
    make_roster,
    make_state,
    make_view,
)
from tests.core.one_member import BERTS, TRIO, told

ROSTER = make_roster(ANNA, BERT)
AT_WORK = make_view(5, ANNA, BERT, CARA, rosters=[ROSTER])
BUSY = all_hearing_each_other(BERT, AT_WORK, ANNA, CARA)
ALONE = make_state(BERT, make_view(1, BERT))


@pytest.mark.parametrize("counter", [6 + STEP, SOUND, MAX_COUNTER])
def test_a_view_with_jobs_follows_a_counter_only_in_steps(counter: int) -> None:
    far = make_epoch(counter, CARA)
    with pytest.raises(ProtocolError, match="which no honest member reaches"):
        told(BUSY, CARA, make_heartbeat(AT_WORK, BERT, promised=far))
    with pytest.raises(ProtocolError, match="which no honest member reaches"):
        told(BUSY, ANNA, Propose(make_epoch(counter), AT_WORK, (ANNA, BERT), (ANNA, BERT), ()))
    with pytest.raises(ProtocolError, match="which no honest member reaches"):
        told(BUSY, CARA, Refuse(AT_WORK.epoch, far))


def test_a_step_is_followed() -> None:
    near = make_epoch(5 + STEP, CARA)
    state = told(BUSY, CARA, make_heartbeat(AT_WORK, BERT, promised=near)).state
    assert state.highest_counter == 5 + STEP
    again = told(state, ANNA, Refuse(AT_WORK.epoch, make_epoch(5 + 2 * STEP))).state
    assert again.highest_counter == 5 + 2 * STEP


def test_a_refusal_by_one_who_is_not_heard_is_measured_by_our_own_view() -> None:
    state = told(BERTS, CARA, Refuse(TRIO.epoch, make_epoch(SOUND))).state
    assert state.highest_counter == SOUND
    unheard = replace(BUSY, peers={})
    with pytest.raises(ProtocolError):
        told(unheard, CARA, Refuse(TRIO.epoch, make_epoch(SOUND)))


def shown(state: State, view: View) -> State:
    """The state after the leader of a view has shown it, and says that it has it."""
    known = told(state, ANNA, TellView(view)).state
    return told(known, ANNA, make_heartbeat(view, BERT)).state


def test_a_view_without_jobs_follows_any_sound_counter() -> None:
    assert shown(ALONE, make_view(SOUND, ANNA)).highest_counter == SOUND
    with pytest.raises(ProtocolError):
        shown(ALONE, make_view(SOUND + 1, ANNA))


def test_a_newcomer_follows_a_mesh_with_jobs_beyond() -> None:
    at_work = [make_roster(ANNA, CARA)]
    mesh = make_view(MAX_COUNTER // 2, ANNA, CARA, rosters=at_work)
    assert shown(ALONE, mesh).highest_counter == MAX_COUNTER // 2
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
    ],
)
def test_who_was_led_astray_is_known_by_its_promise(state: State, astray: bool) -> None:  # noqa: FBT001 - a parameter of the test
    assert is_led_astray(state) == astray
