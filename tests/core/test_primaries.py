"""V10: what a member remembers of jobs that ask for a majority, so that its vote is worth one."""

from collections.abc import Iterable
from dataclasses import replace

import msgspec

from pmesh.core.messages import Attempt, Flushed, KnownPrimary, Superseded
from pmesh.core.quorum import MAX_REMEMBERED, remember, unresolved
from pmesh.core.standing import Facts
from pmesh.core.views import Primary, Roster, Terms, View
from pmesh.ids import Incarnation, JobName, Member
from tests.core.builders import (
    ANNA,
    BERT,
    CARA,
    DIGITS,
    DORA,
    known_from,
    make_epoch,
    make_proposal,
    make_roster,
    make_view,
    make_waiting,
)
from tests.core.circle import Circle, gathered
from tests.core.one_member import BERTS, commit, promising, sent, told

MAJORITY = Terms(quorum="majority")
TRIO = Primary(make_epoch(5), (ANNA, BERT, CARA))
JOB = make_roster(*TRIO.voters, terms=MAJORITY, primary=TRIO)
BEFORE = make_view(5, *TRIO.voters, rosters=[JOB])
KNOWN = known_from(BEFORE)
LATER = KnownPrimary(DIGITS, JOB.born, make_epoch(7))


def going_on(*members: Member, rosters: Iterable[Roster] = ()) -> View:
    """The next view of the same line."""
    return make_view(8, *members, previous=BEFORE.epoch, rosters=rosters)


def remembered(
    after: View,
    *,
    known: Iterable[KnownPrimary] = KNOWN,
    attempts: tuple[Attempt, ...] = (),
    before: View = BEFORE,
) -> tuple[KnownPrimary, ...]:
    """By Bert."""
    return remember(known, attempts, before, after, BERT)


class TestAPrimaryRoster:
    def test_is_remembered_from_the_view_that_has_it(self) -> None:
        assert remembered(BEFORE, known=()) == (KnownPrimary(DIGITS, JOB.born, make_epoch(5)),)

    def test_is_not_remembered_where_nobody_asks_for_a_majority(self) -> None:
        assert remembered(make_view(8, BERT, rosters=[make_roster(BERT)]), known=()) == ()

    def test_is_replaced_by_a_later_one(self) -> None:
        later = msgspec.structs.replace(JOB, primary=Primary(LATER.epoch, (ANNA, BERT)))
        assert remembered(going_on(ANNA, BERT, rosters=[later])) == (LATER,)

    def test_is_not_replaced_by_an_earlier_one_that_is_overtaken(self) -> None:
        """Else this side would have a quorum in the view after, beside the one that went on."""
        overtaken = msgspec.structs.replace(JOB, quorate=False)
        assert remembered(going_on(BERT, CARA, rosters=[overtaken]), known=[LATER]) == (LATER,)

    def test_is_remembered_by_one_who_falls_out_of_the_view(self) -> None:
        assert remembered(View.of_one(BERT, "mac-b", make_epoch(8, BERT))) == KNOWN

    def test_is_remembered_by_one_who_is_taken_in_elsewhere(self) -> None:
        assert remembered(make_view(8, DORA, BERT)) == KNOWN
        assert remembered(make_view(8, ANNA, BERT)) == KNOWN, "there it may have gone on since"

    def test_is_forgotten_when_the_job_has_ended_before_a_majority(self) -> None:
        assert remembered(going_on(ANNA, BERT)) == ()

    def test_is_remembered_where_the_job_may_go_on_among_others(self) -> None:
        """The last rank here has left, and Anna and Cara are not here."""
        assert remembered(going_on(BERT)) == KNOWN

    def test_is_remembered_where_the_job_has_been_waiting_for_others(self) -> None:
        waiting = msgspec.structs.replace(JOB, quorate=False)
        before = make_view(5, *TRIO.voters, rosters=[waiting])
        assert remembered(going_on(ANNA, BERT), before=before, known=[LATER]) == (LATER,)

    def test_is_remembered_where_a_view_that_was_promised_may_have_it(self) -> None:
        attempt = Attempt(make_epoch(6, CARA), (CARA, BERT))
        assert remembered(going_on(ANNA, BERT), attempts=(attempt,)) == ()
        attempt = Attempt(make_epoch(6, CARA), (CARA,))
        assert remembered(going_on(ANNA, BERT), attempts=(attempt,)) == KNOWN

    def test_of_another_job_is_remembered_beside_it(self) -> None:
        other = KnownPrimary(JobName("other"), make_epoch(2), make_epoch(3))
        again = KnownPrimary(DIGITS, make_epoch(2), make_epoch(4))
        known = [other, again, *KNOWN]
        assert remembered(going_on(ANNA, BERT), known=known) == (other, again)
        assert remembered(going_on(ANNA, BERT, rosters=[JOB]), known=known) == tuple(known)

    def test_of_long_ago_is_forgotten_before_one_of_late(self) -> None:
        many = [
            KnownPrimary(JobName(f"job {i}"), make_epoch(i), make_epoch(i))
            for i in range(100, 100 + MAX_REMEMBERED)
        ]
        after = remembered(make_view(8, DORA, BERT), known=[*many, *KNOWN])
        assert after == tuple(many)


class TestAnAttempt:
    """... may still matter while some primary roster is older."""

    ATTEMPT = Attempt(make_epoch(6), (ANNA, BERT))
    ALONE = make_view(8, BERT)

    def test_is_kept_while_it_is_later_than_one_primary_roster(self) -> None:
        assert unresolved([self.ATTEMPT], [LATER, *KNOWN], self.ALONE) == (self.ATTEMPT,)

    def test_is_resolved_when_all_are_later(self) -> None:
        assert unresolved([self.ATTEMPT], [LATER], self.ALONE) == ()

    def test_is_resolved_when_there_are_none(self) -> None:
        assert unresolved([self.ATTEMPT], [], self.ALONE) == ()

    def test_is_resolved_by_whoever_led_it(self) -> None:
        assert unresolved([self.ATTEMPT], KNOWN, make_view(8, BERT, ANNA)) == ()


def test_a_member_remembers_with_the_install_of_a_view_what_that_tells() -> None:
    view = going_on(*TRIO.voters, rosters=[JOB])
    state = told(promising(8), ANNA, commit(view)).state
    assert state.view == view
    assert state.primaries == KNOWN


def test_a_member_tells_with_its_answer_what_it_remembers() -> None:
    state = replace(BERTS, view=BEFORE, primaries=KNOWN)
    state = told(state, ANNA, Superseded(going_on(ANNA, CARA))).state
    assert state.view.members == (BERT,)
    base = make_view(9, ANNA, CARA)
    proposal = make_proposal(ANNA, 20, base, ANNA, CARA, BERT, continuing=[ANNA, CARA])
    ((_, answer),) = sent(told(state, ANNA, proposal))
    assert isinstance(answer, Flushed)
    assert answer.primaries == KNOWN


class TestAMachineThatSlept:
    """It is awake again, and runs the same agent: its vote counts as before."""

    def running(self) -> Circle:
        """A job of three, who ask for a majority."""
        circle = gathered(ANNA, BERT, CARA)
        for member in circle.states:
            circle.facts[member] = Facts(waiting=(make_waiting(3, terms=MAJORITY),))
        circle.pass_time(0.4)
        for member in circle.states:
            circle.facts[member] = Facts()
        return circle

    @staticmethod
    def job(circle: Circle, member: Member) -> Roster:
        (roster,) = circle.states[member].view.rosters
        return roster

    def sleep(self, circle: Circle, sleeper: Member) -> None:
        """The others lose it; it does not notice."""
        for other in circle.linked_with(sleeper):
            circle.cut(sleeper, other)
            circle.lose(other, sleeper)
        circle.deliver_all()
        circle.pass_time(3.0)

    def test_gives_the_others_back_the_majority_that_they_lacked(self) -> None:
        circle = self.running()
        first = self.job(circle, ANNA).trainers[0].member
        second, third = (m for m in (ANNA, BERT, CARA) if m != first)
        circle.stop(third)
        circle.deliver_all()
        circle.pass_time(1.0)
        self.sleep(circle, first)
        assert not self.job(circle, second).quorate, "the senior of two is away"
        circle.recover(within_s=8.0)
        after = self.job(circle, second)
        assert after.quorate
        assert [t.member for t in after.trainers] == [second]

    def test_votes_for_no_side_if_it_knows_that_another_has_gone_on(self) -> None:
        """Without memory there would be two: it and the third are two of the first three."""
        circle = self.running()
        first = self.job(circle, ANNA).trainers[0].member
        second, third = (m for m in (ANNA, BERT, CARA) if m != first)
        self.sleep(circle, third)
        self.sleep(circle, second)
        circle.link(first, second)
        while circle.states[second].view.members != (second,):  # until it has fallen out
            circle.deliver(first, second)
        circle.unlink(first, second)
        circle.lose(third, first)
        circle.link(second, third)
        circle.deliver_all()
        circle.pass_time(4.0)
        assert set(circle.agreed_view((second, third)).members) == {second, third}
        assert self.job(circle, first).quorate
        assert not self.job(circle, third).quorate

    def test_has_no_vote_if_its_agent_was_started_anew(self) -> None:
        circle = self.running()
        first = self.job(circle, ANNA).trainers[0].member
        second, third = (m for m in (ANNA, BERT, CARA) if m != first)
        for gone in (third, first):
            circle.stop(gone)
            circle.deliver_all()
            circle.pass_time(1.0)
        circle.start(Member(first.node, Incarnation(999)))
        circle.recover(within_s=8.0)
        assert not self.job(circle, second).quorate
