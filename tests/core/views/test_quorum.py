"""V10: of the sides of a partition at most one goes on, where a job asks for a majority."""

from collections.abc import Collection, Iterable, Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.values import Primary, Roster, Terms, View
from pmesh.core.views.quorum import has_majorities, may_run, needed_voters
from pmesh.core.views.rosters import jobs_to_vote_on
from pmesh.core.wire.views import Flushed, JobReport, KnownPrimary
from pmesh.ids import Member
from tests.core.views.settling import NEXT, settle
from tests.worlds.builders import (
    ANNA,
    BERT,
    CARA,
    DIGITS,
    DORA,
    FACES,
    known_from,
    make_call,
    make_epoch,
    make_flushed,
    make_member,
    make_report,
    make_roster,
    make_verdict,
    make_view,
    make_view_request,
    make_waiting,
    running,
)

EMMA = make_member("e")
EVERYONE = [ANNA, BERT, CARA, DORA, EMMA]
PRIMARY = make_epoch(5)
MAJORITY = Terms(quorum="majority")

VOTERS = st.lists(st.sampled_from(EVERYONE), min_size=1, max_size=7).map(tuple)
SIDE = st.sets(st.sampled_from(EVERYONE))


def wins(voters: tuple[Member, ...], side: Collection[Member]) -> bool:
    """By the book: more votes than the others, or as many and the first one's."""
    ours = [voter for voter in voters if voter in side]
    theirs = [voter for voter in voters if voter not in side]
    return len(ours) > len(theirs) or (len(ours) == len(theirs) and voters[0] in side)


class TestAQuorum:
    @given(VOTERS, SIDE)
    def test_is_of_exactly_one_of_two_sides(
        self, voters: tuple[Member, ...], side: set[Member]
    ) -> None:
        assert has_majorities(side, [voters]) == wins(voters, side)
        assert has_majorities(side, [voters]) != has_majorities(set(EVERYONE) - side, [voters])

    @given(st.lists(VOTERS, max_size=3), SIDE)
    def test_is_a_majority_of_each_of_several_voters(
        self, needed: list[tuple[Member, ...]], side: set[Member]
    ) -> None:
        assert has_majorities(side, needed) == all(wins(voters, side) for voters in needed)

    @given(st.lists(VOTERS, max_size=3), SIDE, SIDE)
    def test_is_not_lost_by_those_who_come(
        self, needed: list[tuple[Member, ...]], side: set[Member], more: set[Member]
    ) -> None:
        if has_majorities(side, needed):
            assert has_majorities(side | more, needed)

    @pytest.mark.parametrize(("side", "expected"), [([ANNA], True), ([BERT], False)])
    def test_of_two_halves_goes_to_that_of_the_most_senior(
        self, side: list[Member], *, expected: bool
    ) -> None:
        assert has_majorities(side, [(ANNA, BERT)]) == expected

    def test_counts_no_restarted_agent(self) -> None:
        again = make_member("b", incarnation=99)
        assert has_majorities([BERT, CARA], [(ANNA, BERT, CARA)])
        assert not has_majorities([again, CARA], [(ANNA, BERT, CARA)])

    def test_counts_a_machine_as_often_as_it_has_trainers(self) -> None:
        assert has_majorities([BERT], [(ANNA, BERT, BERT)])
        assert not has_majorities([ANNA], [(ANNA, BERT, BERT)])

    def test_is_of_nobody_where_nobody_may_vote(self) -> None:
        """No honest leader says so."""
        assert not has_majorities([ANNA], [()])


JOB = make_roster(ANNA, BERT, CARA, terms=MAJORITY, primary=Primary(PRIMARY, (ANNA, BERT, CARA)))

PAIR = make_roster(
    ANNA,
    BERT,
    terms=MAJORITY,
    number=6,
    primary=Primary(make_epoch(6), (ANNA, BERT), ((ANNA, BERT, CARA),)),
)
"""What has become of the job where Cara was lost."""

LEFT_BEHIND = make_roster(
    CARA, DORA, ids=[2, 3], terms=MAJORITY, quorate=False, primary=JOB.primary
)
"""Of JOB, without a majority of its voters."""
PAIR_IN_FORCE = KnownPrimary(DIGITS, PAIR.born, PAIR.primary.epoch, in_force=True)


class TestARosterInForce:
    def test_lets_the_voters_before_it_go(self) -> None:
        assert needed_voters(PAIR, {PAIR_IN_FORCE}) == ((ANNA, BERT),)

    def test_is_a_job_s_first_at_once(self) -> None:
        assert may_run(JOB, ())
        assert needed_voters(JOB, ()) == ((ANNA, BERT, CARA),)

    def test_is_any_where_nobody_asks_for_a_majority(self) -> None:
        assert may_run(make_roster(ANNA, BERT), ())

    def test_is_not_one_that_is_known_and_not_confirmed(self) -> None:
        known = msgspec.structs.replace(PAIR_IN_FORCE, in_force=False)
        assert not may_run(PAIR, {known})
        assert may_run(PAIR, {PAIR_IN_FORCE})

    def test_does_not_run_without_a_quorum(self) -> None:
        """It is the roster before that has been in force."""
        waiting = msgspec.structs.replace(PAIR, quorate=False)
        assert not may_run(waiting, {PAIR_IN_FORCE})
        assert needed_voters(waiting, {PAIR_IN_FORCE}) == ((ANNA, BERT),)

    def test_is_not_another_of_the_same_epoch(self) -> None:
        """One view may settle several jobs, and a job's name may come again."""
        for other in ({"job": FACES}, {"born": make_epoch(2)}, {"epoch": make_epoch(7)}):
            assert not may_run(PAIR, {msgspec.structs.replace(PAIR_IN_FORCE, **other)})


class TestARosterThatIsNotInForce:
    def test_hands_on_whose_votes_it_has_needed(self) -> None:
        assert needed_voters(PAIR, ()) == ((ANNA, BERT), (ANNA, BERT, CARA))

    def test_hands_on_no_voters_twice(self) -> None:
        again = Primary(make_epoch(7), (ANNA, BERT), ((ANNA, BERT), (ANNA, BERT, CARA)))
        roster = msgspec.structs.replace(PAIR, primary=again)
        assert needed_voters(roster, ()) == ((ANNA, BERT), (ANNA, BERT, CARA))

    def test_is_voted_on_anew_in_each_view(self) -> None:
        """So that whoever installs that view installs it as a roster of that epoch."""
        base = make_view(6, ANNA, BERT, DORA, rosters=[PAIR])
        (after,) = settle(base, answers_of(base, ANNA, BERT, DORA))
        assert after.number == NEXT.counter
        needed = ((ANNA, BERT), (ANNA, BERT, CARA))
        assert after.primary == Primary(NEXT, (ANNA, BERT), needed)

    def test_runs_on_once_anybody_knows_it_to_be_in_force(self) -> None:
        base = make_view(6, ANNA, BERT, DORA, rosters=[PAIR])
        (after,) = settle(base, answers_of(base, ANNA, BERT, DORA, primaries=[PAIR_IN_FORCE]))
        assert after == PAIR

    def test_needs_all_voters_that_it_has_needed(self) -> None:
        """Cara may have gone on with Bert, who then has not installed it."""
        base = make_view(6, ANNA, BERT, DORA, rosters=[PAIR])
        (after,) = settle(base, answers_of(base, ANNA, DORA))
        assert (after.quorate, after.primary) == (False, PAIR.primary)

    def test_needs_them_no_more_once_anybody_knows_it_to_be_in_force(self) -> None:
        base = make_view(6, ANNA, BERT, DORA, rosters=[PAIR])
        (after,) = settle(base, answers_of(base, ANNA, DORA, primaries=[PAIR_IN_FORCE]))
        assert after.primary == Primary(NEXT, (ANNA,), ((ANNA, BERT),))


def answers_of(
    view: View, *members: Member, primaries: Iterable[KnownPrimary] | None = None
) -> dict[Member, Flushed]:
    """Their flush answers; the last of them knows these primary rosters."""
    reports: dict[Member, list[JobReport]] = {
        m: [make_report(r, {t.id: [running(4)] for t in r.trainers_at(m)}) for r in view.rosters]
        for m in members
    }
    return {
        m: make_flushed(m, view, jobs=reports[m], primaries=primaries if m == members[-1] else None)
        for m in members
    }


def settle_among(*members: Member, roster: Roster = JOB) -> Roster:
    base = make_view(5, ANNA, BERT, CARA, DORA, rosters=[roster])
    (after,) = settle(base, answers_of(base, *members))
    return after


class TestASideThatMayGoOn:
    def test_forms_the_primary_roster_that_the_next_vote_is_about(self) -> None:
        after = settle_among(BERT, CARA)
        assert after.quorate
        assert after.primary == Primary(NEXT, (BERT, CARA), ((ANNA, BERT, CARA),))

    def test_names_its_voters_in_the_order_of_their_entering(self) -> None:
        """... which is not the ring's: here Cara has entered after Anna, and before Bert."""
        roster = make_roster(ANNA, BERT, CARA, DORA, ids=[1, 7, 2, 0], terms=MAJORITY)
        after = settle_among(ANNA, BERT, CARA, roster=roster)
        assert after.ids == (1, 7, 2)
        assert after.primary.voters == (ANNA, CARA, BERT)

    def test_may_be_any_where_nobody_asks_for_more(self) -> None:
        after = settle_among(CARA, roster=make_roster(ANNA, BERT, CARA))
        assert after.quorate
        assert after.primary == Primary(NEXT, (CARA,))

    def test_counts_those_who_enter_in_the_next_vote_only(self) -> None:
        sync = [running(4, make_call("sync"))]
        base = make_view(5, ANNA, BERT, CARA, DORA, rosters=[JOB])
        answers = {
            m: make_flushed(m, base, jobs=[make_report(JOB, {i: sync})])
            for i, m in ((1, BERT), (2, CARA))
        }
        answers[DORA] = make_flushed(DORA, base, waiting=[make_waiting(1)])
        (after,) = settle(base, answers)
        assert after.primary == Primary(NEXT, (BERT, CARA, DORA), (JOB.primary.voters,))
        alone = {m: a for m, a in answers.items() if m != BERT}
        (after,) = settle(base, alone)
        assert (after.ids, after.quorate) == ((2, 3), False)

    def test_shrinks_step_by_step(self) -> None:
        """Dynamic voting: of three that became two, one half is enough."""
        base = make_view(6, ANNA, BERT, rosters=[PAIR])
        (last,) = settle(base, answers_of(base, ANNA, primaries=[PAIR_IN_FORCE]))
        assert last.quorate
        (other,) = settle(base, answers_of(base, BERT, primaries=[PAIR_IN_FORCE]))
        assert not other.quorate


class TestASideThatMayNotGoOn:
    def test_keeps_the_primary_roster_and_waits(self) -> None:
        after = settle_among(CARA)
        assert (after.ids, after.number) == ((2,), NEXT.counter)
        assert not after.quorate
        assert after.primary == JOB.primary

    def test_has_its_ops_settled_with_every_view_that_might_help(self) -> None:
        waiting = make_roster(ANNA, terms=MAJORITY, quorate=False)
        view = make_view(5, ANNA, BERT, rosters=[waiting, make_roster(ANNA, job=FACES)])
        assert jobs_to_vote_on(view, ()) == (DIGITS,)
        (after, _) = settle(view, answers_of(view, ANNA, BERT))
        assert after.number == NEXT.counter

    def test_may_go_on_when_those_whom_it_lacked_give_up_their_own_history(self) -> None:
        """Bert and Cara have each been alone; where they meet they are two of three."""
        alone = {
            m: make_view(
                8,
                m,
                rosters=[
                    make_roster(
                        m, ids=[i], terms=MAJORITY, quorate=False, number=8, primary=JOB.primary
                    )
                ],
            )
            for i, m in ((1, BERT), (2, CARA))
        }
        answers = {m: make_flushed(m, view) for m, view in alone.items()}
        (after,) = settle(alone[BERT], answers, continuing=[BERT])
        assert (after.ids, after.quorate) == ((1,), True)
        assert after.primary == Primary(NEXT, (BERT,), (JOB.primary.voters,))

    def settle_berts(self, caras: Iterable[KnownPrimary]) -> Roster:
        """Bert waits for a majority; Cara comes, who has no rank any more, and remembers this."""
        berts = make_roster(BERT, ids=[1], terms=MAJORITY, quorate=False, primary=JOB.primary)
        base = make_view(8, BERT, rosters=[berts])
        caras_answer = make_flushed(CARA, make_view(7, CARA), primaries=caras)
        answers = {BERT: make_flushed(BERT, base), CARA: caras_answer}
        (after,) = settle(base, answers, continuing=[BERT])
        return after

    def test_is_helped_by_one_who_has_fallen_out_of_it_and_is_back(self) -> None:
        """A machine that slept: it remembers with whom the job had gone on."""
        after = self.settle_berts(known_from(make_view(5, rosters=[JOB], leader=ANNA)))
        assert (after.ids, after.quorate) == ((1,), True)
        assert after.primary == Primary(NEXT, (BERT,), (JOB.primary.voters,))

    def test_is_not_helped_by_one_who_knows_that_others_have_gone_on(self) -> None:
        after = self.settle_berts([KnownPrimary(DIGITS, JOB.born, make_epoch(7))])
        assert (after.ids, after.quorate, after.primary) == ((1,), False, JOB.primary)

    @pytest.mark.parametrize(
        "other",
        [
            pytest.param(KnownPrimary(FACES, JOB.born, make_epoch(7)), id="of another name"),
            pytest.param(KnownPrimary(DIGITS, make_epoch(6), make_epoch(7)), id="of another run"),
        ],
    )
    def test_is_helped_by_one_who_knows_that_another_job_has_gone_on(
        self, other: KnownPrimary
    ) -> None:
        assert self.settle_berts([other]).quorate

    def test_is_helped_by_one_without_a_vote_whatever_it_knows_of_others(self) -> None:
        """None of the voters here has installed that roster, so that it can't be in force."""
        base = make_view(5, ANNA, BERT, CARA, DORA, rosters=[JOB])
        later = KnownPrimary(DIGITS, JOB.born, make_epoch(7))
        (after,) = settle(base, answers_of(base, BERT, CARA, DORA, primaries=[later]))
        assert after.quorate

    def test_is_helped_a_last_time_by_one_whose_trainer_ends(self) -> None:
        pair = make_roster(ANNA, BERT, terms=MAJORITY, primary=Primary(PRIMARY, (ANNA, BERT)))
        base = make_view(5, ANNA, BERT, rosters=[pair])
        ended = make_view_request(pair, make_verdict("RankLost", 0))
        (after,) = settle(base, answers_of(base, ANNA, BERT), view_requests=[ended])
        assert (after.ids, after.quorate, after.primary.voters) == ((1,), True, (BERT,))

    def test_gives_way_to_a_later_primary_roster_however_small(self) -> None:
        """What it has left over is of no use: the others went on."""
        theirs = make_roster(
            ANNA, terms=MAJORITY, number=7, primary=Primary(make_epoch(7), (ANNA,))
        )
        views: Mapping[Member, View] = {
            ANNA: make_view(7, ANNA, rosters=[theirs]),
            CARA: make_view(8, CARA, DORA, rosters=[LEFT_BEHIND]),
            DORA: make_view(8, CARA, DORA, rosters=[LEFT_BEHIND]),
        }
        answers = {m: make_flushed(m, view) for m, view in views.items()}
        (after,) = settle(views[CARA], answers, continuing=[CARA, DORA])
        assert after.ids == (0,)

    def test_waits_for_a_later_primary_roster_of_which_only_a_trace_is_left(self) -> None:
        theirs = make_roster(
            ANNA, BERT, terms=MAJORITY, primary=Primary(make_epoch(7), (ANNA, BERT))
        )
        base = make_view(8, CARA, DORA, rosters=[LEFT_BEHIND])
        answers = {m: make_flushed(m, base) for m in (CARA, DORA)}
        answers[EMMA] = make_flushed(EMMA, make_view(7, ANNA, BERT, EMMA, rosters=[theirs]))
        (after,) = settle(base, answers, continuing=[CARA, DORA])
        assert (after.ids, after.quorate, after.primary) == ((2, 3), False, JOB.primary)

    def test_gives_way_to_a_later_primary_roster_that_waits_too(self) -> None:
        """Its work is later; more ranks that had been left behind are worth nothing."""
        theirs = make_roster(
            BERT,
            ids=[1],
            terms=MAJORITY,
            number=8,
            quorate=False,
            primary=Primary(make_epoch(7), (ANNA, BERT)),
        )
        base = make_view(8, CARA, DORA, rosters=[LEFT_BEHIND])
        answers = {m: make_flushed(m, base) for m in (CARA, DORA)}
        answers[BERT] = make_flushed(BERT, make_view(8, BERT, rosters=[theirs]))
        (after,) = settle(base, answers, continuing=[CARA, DORA])
        assert (after.ids, after.quorate) == ((1,), False)

    def test_does_not_give_way_where_nobody_asks_for_a_majority(self) -> None:
        """V9: more ranks count then, not later ones."""
        ours = make_roster(CARA, DORA, ids=[2, 3])
        theirs = make_roster(ANNA, number=7, primary=Primary(make_epoch(7), (ANNA,)))
        base = make_view(8, CARA, DORA, rosters=[ours])
        answers = {m: make_flushed(m, base) for m in (CARA, DORA)}
        answers[ANNA] = make_flushed(ANNA, make_view(7, ANNA, rosters=[theirs]))
        (after,) = settle(base, answers, continuing=[CARA, DORA])
        assert after == ours
