"""V9: the two sides of a partition both go on with a job; where they meet, one of them is it."""

from collections.abc import Iterable, Mapping

import msgspec
import pytest

from pmesh.core.values import Roster, Terms, View
from pmesh.core.views.rosters import is_same_history
from pmesh.ids import Member
from tests.core.views.settling import NEXT, settle
from tests.worlds.builders import (
    ANNA,
    BERT,
    CARA,
    DORA,
    FACES,
    make_epoch,
    make_flushed,
    make_member,
    make_report,
    make_roster,
    make_trainer,
    make_view,
    running,
)

EMMA = make_member("e")
OURS = make_roster(ANNA, BERT, CARA, number=7)
ONE = OURS.trainers[0]


class TestATrainerKnowsItsOwnHistory:
    def test_by_the_same_roster(self) -> None:
        assert is_same_history(OURS, make_roster(ANNA, BERT, CARA, number=7), ONE)

    def test_by_one_that_was_settled_later_and_has_it(self) -> None:
        later = make_roster(ANNA, CARA, ids=[0, 2], number=9)
        assert is_same_history(OURS, later, ONE)

    def test_by_one_that_was_settled_later_and_has_its_results(self) -> None:
        later = make_roster(BERT, CARA, ids=[1, 2], number=9, lost_holders=[ONE])
        assert is_same_history(OURS, later, ONE)

    def test_not_by_the_name_of_another_run(self) -> None:
        assert not is_same_history(OURS, make_roster(ANNA, born=make_epoch(8), number=8), ONE)

    def test_not_by_a_number_under_which_the_other_side_settled_something_else(self) -> None:
        theirs = make_roster(ANNA, BERT, number=7)
        assert not is_same_history(OURS, theirs, ONE)

    def test_not_by_what_was_settled_before(self) -> None:
        theirs = msgspec.structs.replace(OURS, number=6)
        assert not is_same_history(OURS, theirs, ONE)

    def test_not_by_a_later_roster_that_has_lost_it(self) -> None:
        theirs = make_roster(BERT, CARA, ids=[1, 2], number=9)
        assert not is_same_history(OURS, theirs, ONE)

    def test_not_by_another_trainer_that_was_given_its_number_there(self) -> None:
        """Both sides went on counting."""
        theirs = make_roster(BERT, CARA, DORA, ids=[1, 2, 0], number=9)
        assert not is_same_history(OURS, theirs, ONE)


def meet(
    *sides: tuple[View, Iterable[Member]], stable: Mapping[Member, int] | None = None
) -> Roster:
    """The roster that goes on where these meet, each with its view; the first one leads."""
    answers = {}
    for view, members in sides:
        for member in members:
            reports = [
                make_report(
                    roster,
                    {t.id: [running(9)] for t in roster.trainers_at(member)},
                    stable=(stable or {}).get(member, -1),
                )
                for roster in view.rosters
            ]
            answers[member] = make_flushed(member, view, jobs=reports)
    base, continuing = sides[0]
    (after,) = settle(base, answers, continuing=continuing)
    return after


def side(counter: int, *members: Member, roster: Roster) -> tuple[View, tuple[Member, ...]]:
    return make_view(counter, *members, rosters=[roster]), members


class TestOfTwoHistories:
    """... of one job, one goes on; whichever side leads."""

    @staticmethod
    def winner(
        one: tuple[View, tuple[Member, ...]],
        other: tuple[View, tuple[Member, ...]],
        stable: Mapping[Member, int] | None = None,
    ) -> Roster:
        after = meet(one, other, stable=stable)
        assert meet(other, one, stable=stable) == after
        return after

    def test_the_one_with_more_ranks_goes_on(self) -> None:
        pair = make_roster(ANNA, BERT, born=make_epoch(8), number=8)
        trio = make_roster(CARA, DORA, EMMA, born=make_epoch(9), number=9)
        assert (
            self.winner(side(8, ANNA, BERT, roster=pair), side(9, CARA, DORA, EMMA, roster=trio))
            == trio
        )

    def test_more_ranks_count_for_more_than_more_ops(self) -> None:
        pair = make_roster(ANNA, BERT, born=make_epoch(8), number=8)
        one = make_roster(CARA, born=make_epoch(7), number=7)
        sides = side(8, ANNA, BERT, roster=pair), side(7, CARA, roster=one)
        assert self.winner(*sides, stable={CARA: 8}) == pair

    def test_only_ranks_that_are_still_there_count(self) -> None:
        pair = make_roster(ANNA, BERT, born=make_epoch(8), number=8)
        trio = make_roster(CARA, DORA, EMMA, born=make_epoch(9), number=9)
        theirs = make_view(9, CARA, DORA, EMMA, rosters=[trio])
        after = self.winner(side(8, ANNA, BERT, roster=pair), (theirs, (CARA,)))
        assert after == pair

    def test_the_one_that_may_run_goes_before_a_larger_one_that_may_not(self) -> None:
        """V10."""
        majority = Terms(quorum="majority")
        finn = make_member("f")
        one = make_roster(finn, born=make_epoch(9), number=9, terms=majority)
        pair = make_roster(
            ANNA, BERT, CARA, DORA, EMMA, born=make_epoch(8), number=8, terms=majority
        )
        theirs = make_view(8, ANNA, BERT, CARA, DORA, EMMA, rosters=[pair])
        assert self.winner((theirs, (ANNA, BERT)), side(9, finn, roster=one)) == one

    def test_of_as_many_ranks_the_one_whose_ops_have_come_further(self) -> None:
        young = make_roster(ANNA, BERT, born=make_epoch(9), number=9)
        old = make_roster(CARA, DORA, born=make_epoch(8), number=8)
        sides = side(9, ANNA, BERT, roster=young), side(8, CARA, DORA, roster=old)
        assert self.winner(*sides, stable={ANNA: 3, BERT: 8, CARA: 7, DORA: 7}) == young
        assert self.winner(*sides, stable={ANNA: 3, BERT: 7, CARA: 8, DORA: 3}) == old

    def test_of_as_many_ops_the_older_job(self) -> None:
        young = make_roster(ANNA, BERT, born=make_epoch(9), number=9)
        old = make_roster(CARA, DORA, born=make_epoch(8), number=11)
        assert (
            self.winner(side(9, ANNA, BERT, roster=young), side(11, CARA, DORA, roster=old)) == old
        )

    def test_of_one_job_the_one_that_was_settled_longer_ago(self) -> None:
        """Fewer of its ops are in question."""
        early = make_roster(ANNA, BERT, number=6)
        late = make_roster(CARA, DORA, ids=[2, 3], number=7)
        assert (
            self.winner(side(6, ANNA, BERT, roster=early), side(7, CARA, DORA, roster=late))
            == early
        )

    def test_the_others_trainers_are_no_ranks_of_it(self) -> None:
        """They come back in a sync, with numbers of their own."""
        early = make_roster(ANNA, BERT, number=6)
        late = make_roster(CARA, ids=[2], number=7)
        after = self.winner(side(6, ANNA, BERT, roster=early), side(7, CARA, roster=late))
        assert [is_same_history(late, after, t) for t in late.trainers] == [False]
        assert [is_same_history(early, after, t) for t in early.trainers] == [True, True]


class TestNewcomers:
    """... bring along the jobs that run among them."""

    IDLE = make_view(5, ANNA, BERT), (ANNA, BERT)

    def test_with_all_their_ranks_as_they_were(self) -> None:
        job = make_roster(CARA, DORA)
        assert meet(self.IDLE, side(6, CARA, DORA, roster=job)) == job

    def test_with_the_ranks_that_come(self) -> None:
        """Who stays behind is lost to the job like any other."""
        job = make_roster(CARA, DORA)
        after = meet(self.IDLE, (make_view(6, CARA, DORA, rosters=[job]), (CARA,)))
        assert (after.number, after.ids) == (NEXT.counter, (0,))
        assert [loss.trainers for loss in after.losses] == [(1,)]

    def test_beside_other_jobs(self) -> None:
        ours, theirs = make_roster(ANNA), make_roster(CARA, job=FACES)
        base, newcomer = make_view(5, ANNA, rosters=[ours]), make_view(6, CARA, rosters=[theirs])
        answers = {ANNA: make_flushed(ANNA, base), CARA: make_flushed(CARA, newcomer)}
        assert settle(base, answers, continuing=[ANNA]) == (ours, theirs)

    def test_each_with_the_history_of_its_own_view(self) -> None:
        """Of different views they are not the ranks of one roster."""
        split = make_roster(CARA, DORA)
        after = meet(self.IDLE, side(6, CARA, roster=split), side(7, DORA, roster=split))
        assert after.trainers == (make_trainer(0, CARA),)

    @pytest.mark.parametrize("leads", [0, 1, 2])
    def test_may_be_three_sides_at_once(self, leads: int) -> None:
        small = make_roster(ANNA, born=make_epoch(6), number=6)
        large = make_roster(BERT, CARA, born=make_epoch(7), number=7)
        middle = make_roster(DORA, DORA, born=make_epoch(8), number=8)
        sides = [
            side(6, ANNA, roster=small),
            side(7, BERT, CARA, roster=large),
            side(8, DORA, roster=middle),
        ]
        assert meet(sides[leads], *(s for i, s in enumerate(sides) if i != leads)) == large
