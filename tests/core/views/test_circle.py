"""Agents that hear each other, by their own messages."""

from dataclasses import replace

import pytest

from pmesh.core.views.state import Facts, Install, Step
from pmesh.ids import Incarnation, Member
from tests.worlds.builders import (
    ANNA,
    BERT,
    CARA,
    DIGITS,
    DORA,
    make_epoch,
    make_member,
    make_report,
    make_verdict,
    make_view,
    make_view_request,
    make_waiting,
    running,
)
from tests.worlds.circle import Circle, gathered


class TestTogether:
    def test_two_who_meet_make_one_view(self) -> None:
        view = gathered(ANNA, BERT).agreed_view()
        assert set(view.members) == {ANNA, BERT}

    def test_many_who_meet_at_once_end_in_one_view(self) -> None:
        everyone = [make_member(letter) for letter in "abcdefgh"]
        assert len(gathered(*everyone).agreed_view().members) == len(everyone)

    def test_in_peace_no_view_follows_another(self) -> None:
        circle = gathered(ANNA, BERT, CARA)
        count = len(circle.views)
        circle.pass_time(30.0)
        assert len(circle.views) == count

    def test_the_others_go_on_when_one_is_lost_and_take_it_in_again(self) -> None:
        circle = gathered(ANNA, BERT, CARA)
        circle.stop(CARA)
        circle.deliver_all()
        assert set(circle.agreed_view().members) == {ANNA, BERT}
        again = make_member("c", incarnation=99)
        circle.start(again)
        view = circle.recover(within_s=2.0)
        assert view.by_seniority[-1] == again

    def test_two_halves_come_together_again(self) -> None:
        circle = gathered(ANNA, BERT, CARA, DORA)
        for one in (ANNA, BERT):
            for other in (CARA, DORA):
                circle.unlink(one, other)
        circle.pass_time(3.0)
        assert set(circle.view_of(ANNA).members) == {ANNA, BERT}
        assert set(circle.view_of(CARA).members) == {CARA, DORA}
        circle.recover(within_s=5.0)

    def test_of_two_who_are_cut_off_from_each_other_the_senior_stays(self) -> None:
        """V5: Bert hears both, and still only a clique is a view."""
        circle = gathered(ANNA, BERT, CARA)
        leader, second, third = circle.agreed_view().by_seniority
        circle.unlink(second, third)
        circle.pass_time(3.0)
        assert set(circle.agreed_view([leader, second]).members) == {leader, second}
        circle.recover(within_s=5.0)

    def test_a_job_begins_when_its_trainers_wait_and_fails_one_way_for_all(self) -> None:
        """O3: who timed out only asks; the commit tells everyone the same."""
        circle = gathered(ANNA, BERT, CARA)
        for member in circle.states:
            circle.facts[member] = Facts(waiting=(make_waiting(3),))
        circle.pass_time(1.0)
        (roster,) = circle.agreed_view().rosters
        for member in circle.states:
            (trainer,) = roster.trainers_at(member)
            report = make_report(roster, {trainer.id: [running(0)]}, fenced=False)
            circle.facts[member] = Facts(reports=(report,))
        circle.facts[BERT] = replace(
            circle.facts[BERT],
            view_requests=(make_view_request(roster, make_verdict("OpTimedOut", 2), op=0),),
        )
        circle.pass_time(1.0)
        (settled,) = circle.agreed_view().rosters
        assert settled.number > roster.number
        assert [outcome.verdict for outcome in settled.outcomes] == [make_verdict("OpTimedOut", 2)]
        assert {m for m, fence in circle.fences if fence.jobs == (DIGITS,)} == set(circle.states)

    def test_a_restarted_leader_never_uses_an_epoch_again(self) -> None:
        """V1: without incarnations it would."""
        circle = gathered(ANNA, BERT)
        leader = circle.agreed_view().by_seniority[0]
        used = set(circle.views)
        circle.stop(leader)
        circle.start(Member(leader.node, Incarnation(leader.incarnation + 1000)))
        circle.recover(within_s=5.0)
        assert used < set(circle.views)


def test_the_circle_itself_sees_what_it_is_there_to_see() -> None:
    """A test that can't fail is a defect."""
    circle = Circle(ANNA, BERT)
    state = circle.states[ANNA]
    with pytest.raises(AssertionError, match="V1"):
        circle.take(ANNA, Step(replace(state, promised=make_epoch(0))))
    with pytest.raises(AssertionError, match="I2: only upwards"):
        circle.take(ANNA, Step(state, (Install(state.view),)))
    with pytest.raises(AssertionError, match="I2: only where"):
        circle.take(ANNA, Step(state, (Install(make_view(9, BERT)),)))
    promised = replace(state, promised=make_epoch(9))
    circle.states[ANNA] = promised
    with pytest.raises(AssertionError, match="V1: nothing below"):
        circle.take(ANNA, Step(promised, (Install(make_view(8, ANNA)),)))
    circle = Circle(ANNA, BERT)
    with pytest.raises(AssertionError, match="V2"):
        circle.take(ANNA, Step(state, (Install(make_view(8, ANNA, previous=make_epoch(7))),)))
    circle.views[make_epoch(8)] = make_view(8, ANNA)
    with pytest.raises(AssertionError, match="I1"):
        circle.take(ANNA, Step(state, (Install(make_view(8, ANNA, BERT)),)))
