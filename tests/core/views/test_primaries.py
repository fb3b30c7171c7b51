"""V10: what a member remembers of jobs that ask for a majority, so that its vote is worth one."""

from collections.abc import Iterable
from dataclasses import replace

import msgspec
import pytest

from pmesh.core.values import Primary, Roster, Terms, View
from pmesh.core.views.agreement import lose
from pmesh.core.views.quorum import MAX_REMEMBERED, confirm, remember
from pmesh.core.views.state import Facts, MemberState, heartbeat_of
from pmesh.core.wire.views import Flushed, KnownPrimary, Propose, Superseded, TellView
from pmesh.ids import Incarnation, JobName, Member
from tests.core.views.circle import Circle, gathered
from tests.core.views.one_member import CARA_GONE, NOW, commit, promising, sent, told
from tests.worlds.builders import (
    ANNA,
    BERT,
    CARA,
    DIGITS,
    DORA,
    all_hearing_each_other,
    known_from,
    make_epoch,
    make_heartbeat,
    make_proposal,
    make_roster,
    make_view,
    make_waiting,
    said_by,
)

MAJORITY = Terms(quorum="majority")
TRIO = Primary(make_epoch(5), (ANNA, BERT, CARA))
JOB = make_roster(*TRIO.voters, terms=MAJORITY, primary=TRIO)
BEFORE = make_view(5, *TRIO.voters, rosters=[JOB])
KNOWN = known_from(BEFORE)
LATER = KnownPrimary(DIGITS, JOB.born, make_epoch(7))


def remembered(after: View, *, known: Iterable[KnownPrimary] = KNOWN) -> tuple[KnownPrimary, ...]:
    """By whoever installs the view."""
    return remember(known, after)


class TestAPrimaryRoster:
    def test_is_remembered_from_the_view_that_has_it(self) -> None:
        assert remembered(BEFORE, known=()) == (KnownPrimary(DIGITS, JOB.born, make_epoch(5)),)

    def test_is_not_remembered_where_nobody_asks_for_a_majority(self) -> None:
        assert remembered(make_view(8, BERT, rosters=[make_roster(BERT)]), known=()) == ()

    def test_is_replaced_by_a_later_one(self) -> None:
        later = msgspec.structs.replace(JOB, primary=Primary(LATER.epoch, (ANNA, BERT)))
        assert remembered(make_view(8, ANNA, BERT, rosters=[later])) == (LATER,)

    def test_is_not_replaced_by_an_earlier_one_that_is_overtaken(self) -> None:
        """Else this side would have a quorum in the view after, beside the one that went on."""
        overtaken = msgspec.structs.replace(JOB, quorate=False)
        assert remembered(make_view(8, BERT, CARA, rosters=[overtaken]), known=[LATER]) == (LATER,)

    def test_is_still_known_to_be_in_force_in_the_next_view_that_has_it(self) -> None:
        confirmed = known_from(BEFORE, in_force=True)
        assert remembered(make_view(8, ANNA, BERT, rosters=[JOB]), known=confirmed) == confirmed

    def test_is_remembered_by_one_who_falls_out_of_the_view(self) -> None:
        assert remembered(View.of_one(BERT, said_by(BERT), make_epoch(8, BERT))) == KNOWN

    def test_is_remembered_by_one_who_is_taken_in_elsewhere(self) -> None:
        assert remembered(make_view(8, DORA, BERT)) == KNOWN
        assert remembered(make_view(8, ANNA, BERT)) == KNOWN, "there it may have gone on since"

    def test_of_another_job_is_remembered_beside_it(self) -> None:
        other = KnownPrimary(JobName("other"), make_epoch(2), make_epoch(3))
        again = KnownPrimary(DIGITS, make_epoch(2), make_epoch(4))
        known = [other, again, *KNOWN]
        assert remembered(make_view(8, ANNA, BERT), known=known) == tuple(known)
        assert remembered(make_view(8, ANNA, BERT, rosters=[JOB]), known=known) == tuple(known)

    def test_of_long_ago_is_forgotten_before_one_of_late(self) -> None:
        many = [
            KnownPrimary(JobName(f"job {i}"), make_epoch(i), make_epoch(i))
            for i in range(100, 100 + MAX_REMEMBERED)
        ]
        after = remembered(make_view(8, DORA, BERT), known=[*many, *KNOWN])
        assert after == tuple(many)

    def test_is_remembered_for_as_long_as_its_job_runs_here(self) -> None:
        many = [
            KnownPrimary(JobName(f"job {i}"), make_epoch(i), make_epoch(i))
            for i in range(100, 100 + MAX_REMEMBERED)
        ]
        after = remembered(make_view(8, DORA, BERT, rosters=[JOB]), known=[*many, *KNOWN])
        assert after == (*KNOWN, *many)


PAIR = make_roster(
    BERT,
    CARA,
    number=8,
    terms=MAJORITY,
    primary=Primary(make_epoch(8), (BERT, CARA), (TRIO.voters,)),
)
NEXT = make_view(8, BERT, CARA, previous=BEFORE.epoch, leader=ANNA, rosters=[PAIR])
VOTED = known_from(NEXT)
IN_FORCE = known_from(NEXT, in_force=True)


class TestARosterWithAQuorum:
    """... comes into force for a member by what it sees and is told."""

    def confirmed(
        self, *there: Member, told: Iterable[KnownPrimary] = (), view: View = NEXT
    ) -> tuple[KnownPrimary, ...]:
        """What is known once these have installed the view that settled the roster."""
        installed = dict.fromkeys(there, NEXT.epoch) | {DORA: NEXT.epoch, ANNA: BEFORE.epoch}
        return confirm(VOTED, view, installed, set(told))

    def test_when_a_majority_of_whom_it_needed_has_installed_its_view(self) -> None:
        assert self.confirmed(BERT, CARA) == IN_FORCE

    def test_not_while_only_others_have(self) -> None:
        assert self.confirmed(BERT) is VOTED

    def test_not_by_a_later_view_that_it_is_still_in(self) -> None:
        """Who installs that one may have promised another roster between the two."""
        later = make_view(9, BERT, CARA, leader=ANNA, rosters=[PAIR])
        installed = dict.fromkeys((BERT, CARA), later.epoch)
        assert confirm(VOTED, later, installed, set()) is VOTED

    def test_when_somebody_else_says_so(self) -> None:
        assert self.confirmed(told=IN_FORCE) == IN_FORCE

    def test_not_when_somebody_says_so_of_another(self) -> None:
        assert self.confirmed(told=known_from(BEFORE, in_force=True)) is VOTED

    def test_beside_others_that_it_does_not_change(self) -> None:
        other = KnownPrimary(JobName("other"), make_epoch(2), make_epoch(3))
        installed = dict.fromkeys((BERT, CARA), NEXT.epoch)
        assert confirm((other, *VOTED), NEXT, installed, set()) == (other, *IN_FORCE)

    def test_never_where_a_later_one_is_known(self) -> None:
        later = KnownPrimary(DIGITS, JOB.born, make_epoch(9))
        installed = dict.fromkeys((BERT, CARA), NEXT.epoch)
        assert confirm((later,), NEXT, installed, set()) == (later,)


class TestAMember:
    def install(self) -> MemberState:
        state = replace(promising(8), primaries=KNOWN)
        view = make_view(8, *TRIO.voters, previous=BEFORE.epoch, rosters=[PAIR])
        return told(state, ANNA, commit(view)).state

    def test_waits_until_it_has_seen_the_others_install_its_view(self) -> None:
        state = self.install()
        assert state.primaries == VOTED
        assert heartbeat_of(state, Facts(), NOW).in_force == ()
        state = told(state, CARA, make_heartbeat(state.view, BERT)).state
        assert state.primaries == IN_FORCE
        assert heartbeat_of(state, Facts(), NOW).in_force == IN_FORCE

    def test_is_told_by_whoever_has_seen_it(self) -> None:
        state = self.install()
        other = make_view(9, ANNA, CARA)
        state = told(state, CARA, TellView(other)).state
        state = told(state, CARA, make_heartbeat(other, BERT, in_force=IN_FORCE)).state
        assert state.primaries == IN_FORCE

    def test_tells_nobody_of_a_job_that_is_not_in_its_view(self) -> None:
        state = replace(self.install(), primaries=IN_FORCE, view=make_view(9, BERT))
        assert heartbeat_of(state, Facts(), NOW).in_force == ()

    @pytest.mark.parametrize(("known", "jobs"), [(VOTED, (DIGITS,)), (IN_FORCE, ())])
    def test_has_a_job_stopped_for_any_view_until_it_is_in_force(
        self, known: tuple[KnownPrimary, ...], jobs: tuple[JobName, ...]
    ) -> None:
        """V7: from then on a view that does not view request it lets it run."""
        view = make_view(8, BERT, CARA, DORA, rosters=[PAIR])
        state = replace(all_hearing_each_other(BERT, view, CARA, DORA), primaries=known)
        step = lose(state, DORA.node, "closed", Facts(), now=NOW)
        ((_, proposal),) = sent(step)
        assert isinstance(proposal, Propose)
        assert proposal.jobs == jobs


def test_a_member_remembers_with_the_install_of_a_view_what_that_tells() -> None:
    view = make_view(8, *TRIO.voters, previous=BEFORE.epoch, rosters=[JOB])
    state = told(promising(8), ANNA, commit(view)).state
    assert state.view == view
    assert state.primaries == KNOWN


def test_a_member_tells_with_its_answer_what_it_remembers() -> None:
    state = replace(CARA_GONE, view=BEFORE, primaries=KNOWN)
    after = make_view(8, ANNA, CARA, previous=BEFORE.epoch)
    state = told(state, ANNA, Superseded(after)).state
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
