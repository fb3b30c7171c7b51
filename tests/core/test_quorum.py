"""V10: of the sides of a partition at most one goes on, where a job asks for a majority."""

from collections.abc import Collection, Iterable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.messages import Attempt, Flushed, JobReport, KnownPrimary
from pmesh.core.quorum import has_quorum
from pmesh.core.rosters import jobs_without_quorum
from pmesh.core.views import Primary, Roster, Terms, View
from pmesh.ids import Member
from tests.core.builders import (
    ANNA,
    BERT,
    CARA,
    DIGITS,
    DORA,
    FACES,
    known_from,
    make_call,
    make_concern,
    make_epoch,
    make_flushed,
    make_member,
    make_report,
    make_roster,
    make_verdict,
    make_view,
    make_waiting,
    running,
)
from tests.core.settling import NEXT, settle

EMMA = make_member("e")
EVERYONE = [ANNA, BERT, CARA, DORA, EMMA]
PRIMARY = make_epoch(5)
MAJORITY = Terms(quorum="majority")

VOTERS = st.lists(st.sampled_from(EVERYONE), min_size=1, max_size=7).map(tuple)
SIDE = st.sets(st.sampled_from(EVERYONE))


ATTEMPT = st.builds(
    lambda counter, everyone, count: Attempt(
        make_epoch(counter, everyone[0]), tuple(everyone[:count])
    ),
    st.integers(3, 8),
    st.permutations(EVERYONE),
    st.integers(1, 5),
)
"""A view that somebody has promised, before or after the last primary roster."""

ATTEMPTS = st.lists(ATTEMPT, max_size=3)


def wins(voters: tuple[Member, ...], side: Collection[Member]) -> bool:
    """By the book: more votes than the others, or as many and the first one's."""
    ours = [voter for voter in voters if voter in side]
    theirs = [voter for voter in voters if voter not in side]
    return len(ours) > len(theirs) or (len(ours) == len(theirs) and voters[0] in side)


class TestAQuorum:
    @given(VOTERS, SIDE)
    def test_is_of_exactly_one_of_two_sides_while_nothing_is_unresolved(
        self, voters: tuple[Member, ...], side: set[Member]
    ) -> None:
        primary = Primary(PRIMARY, voters)
        assert has_quorum(primary, side, ()) == wins(voters, side)
        assert has_quorum(primary, side, ()) != has_quorum(primary, set(EVERYONE) - side, ())

    @given(VOTERS, SIDE, ATTEMPTS)
    def test_is_never_of_a_side_from_which_an_unresolved_attempt_could_have_parted(
        self, voters: tuple[Member, ...], side: set[Member], promised: list[Attempt]
    ) -> None:
        """If the attempt has become a primary roster, no majority of it is elsewhere."""
        if not has_quorum(Primary(PRIMARY, voters), side, promised):
            return
        for attempt in promised:
            then = tuple(voter for voter in voters if voter in attempt.members)
            if attempt.epoch > PRIMARY and then:
                assert not wins(then, set(EVERYONE) - side)

    @given(VOTERS, SIDE, ATTEMPTS)
    def test_is_a_majority_of_the_last_primary_and_of_each_later_attempt(
        self, voters: tuple[Member, ...], side: set[Member], promised: list[Attempt]
    ) -> None:
        elections = [voters]
        for attempt in promised:
            then = tuple(voter for voter in voters if voter in attempt.members)
            if attempt.epoch > PRIMARY:
                elections += [then] if then else []
        expected = all(wins(election, side) for election in elections)
        assert has_quorum(Primary(PRIMARY, voters), side, promised) == expected

    @given(VOTERS, SIDE, SIDE, ATTEMPTS)
    def test_is_not_lost_by_those_who_come_nor_won_by_what_was_promised(
        self,
        voters: tuple[Member, ...],
        side: set[Member],
        more: set[Member],
        promised: list[Attempt],
    ) -> None:
        primary = Primary(PRIMARY, voters)
        if has_quorum(primary, side, promised):
            assert has_quorum(primary, side | more, promised)
            assert has_quorum(primary, side, promised[1:])

    @pytest.mark.parametrize(("side", "expected"), [([ANNA], True), ([BERT], False)])
    def test_of_two_halves_goes_to_that_of_the_most_senior(
        self, side: list[Member], *, expected: bool
    ) -> None:
        assert has_quorum(Primary(PRIMARY, (ANNA, BERT)), side, ()) == expected

    def test_counts_no_restarted_agent(self) -> None:
        again = make_member("b", incarnation=99)
        primary = Primary(PRIMARY, (ANNA, BERT, CARA))
        assert has_quorum(primary, [BERT, CARA], ())
        assert not has_quorum(primary, [again, CARA], ())

    def test_counts_a_machine_as_often_as_it_has_trainers(self) -> None:
        primary = Primary(PRIMARY, (ANNA, BERT, BERT))
        assert has_quorum(primary, [BERT], ())
        assert not has_quorum(primary, [ANNA], ())

    def test_is_not_asked_of_what_was_promised_before_the_last_primary(self) -> None:
        primary = Primary(PRIMARY, (ANNA, BERT, CARA))
        earlier, later = (Attempt(make_epoch(counter), (ANNA,)) for counter in (4, 6))
        assert has_quorum(primary, [BERT, CARA], [earlier])
        assert not has_quorum(primary, [BERT, CARA], [later])

    def test_is_not_asked_of_machines_that_had_no_vote(self) -> None:
        """Or an idle machine could outvote the one rank that went on with the attempt."""
        primary = Primary(PRIMARY, (ANNA, BERT, CARA))
        with_dora = Attempt(make_epoch(6), (ANNA, BERT, DORA))
        assert not has_quorum(primary, [BERT, CARA, DORA], [with_dora])
        idle = Attempt(make_epoch(6, DORA), (DORA, EMMA))
        assert has_quorum(primary, [BERT, CARA], [idle])


JOB = make_roster(ANNA, BERT, CARA, terms=MAJORITY, primary=Primary(PRIMARY, (ANNA, BERT, CARA)))


def answers_of(
    view: View, *members: Member, attempts: Iterable[Attempt] = ()
) -> dict[Member, Flushed]:
    """Their flush answers; the first of them has promised these."""
    reports: dict[Member, list[JobReport]] = {
        m: [make_report(r, {t.id: [running(4)] for t in r.trainers_at(m)}) for r in view.rosters]
        for m in members
    }
    return {
        m: make_flushed(m, view, jobs=reports[m], attempts=attempts if m == members[0] else ())
        for m in members
    }


def settle_among(
    *members: Member, roster: Roster = JOB, attempts: Iterable[Attempt] = ()
) -> Roster:
    base = make_view(5, ANNA, BERT, CARA, DORA, rosters=[roster])
    (after,) = settle(base, answers_of(base, *members, attempts=attempts))
    return after


class TestASideThatMayGoOn:
    def test_forms_the_primary_roster_that_the_next_vote_is_about(self) -> None:
        after = settle_among(BERT, CARA)
        assert after.quorate
        assert after.primary == Primary(NEXT, (BERT, CARA))

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
        assert after.primary == Primary(NEXT, (BERT, CARA, DORA))
        alone = {m: a for m, a in answers.items() if m != BERT}
        (after,) = settle(base, alone)
        assert (after.ids, after.quorate) == ((2, 3), False)

    def test_shrinks_step_by_step(self) -> None:
        """Dynamic voting: of three that became two, one half is enough."""
        pair = settle_among(ANNA, BERT)
        base = make_view(6, ANNA, BERT, rosters=[pair])
        (last,) = settle(base, answers_of(base, ANNA))
        assert last.quorate
        (other,) = settle(base, answers_of(base, BERT))
        assert not other.quorate


class TestASideThatMayNotGoOn:
    def test_keeps_the_primary_roster_and_waits(self) -> None:
        after = settle_among(CARA)
        assert (after.ids, after.number) == ((2,), NEXT.counter)
        assert not after.quorate
        assert after.primary == JOB.primary

    def test_waits_where_an_attempt_may_have_gone_on_elsewhere(self) -> None:
        attempt = Attempt(make_epoch(6), (ANNA, BERT))
        assert settle_among(BERT, CARA).quorate
        assert not settle_among(BERT, CARA, attempts=[attempt]).quorate

    def test_does_not_wait_for_what_its_leader_can_tell(self) -> None:
        by_dora = Attempt(make_epoch(6, DORA), (DORA, ANNA, CARA))
        assert not settle_among(CARA, BERT, attempts=[by_dora]).quorate
        assert settle_among(CARA, BERT, DORA, attempts=[by_dora]).quorate

    def test_has_its_ops_settled_with_every_view_that_might_help(self) -> None:
        waiting = make_roster(ANNA, terms=MAJORITY, quorate=False)
        view = make_view(5, ANNA, BERT, rosters=[waiting, make_roster(ANNA, job=FACES)])
        assert jobs_without_quorum(view) == (DIGITS,)
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
        assert after.primary == Primary(NEXT, (BERT,))

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
        assert after.primary == Primary(NEXT, (BERT,))

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

    def test_is_helped_a_last_time_by_one_whose_trainer_ends(self) -> None:
        pair = make_roster(ANNA, BERT, terms=MAJORITY, primary=Primary(PRIMARY, (ANNA, BERT)))
        base = make_view(5, ANNA, BERT, rosters=[pair])
        ended = make_concern(pair, make_verdict("RankLost", 0))
        (after,) = settle(base, answers_of(base, ANNA, BERT), concerns=[ended])
        assert (after.ids, after.quorate, after.primary.voters) == ((1,), True, (BERT,))

    def test_gives_way_to_a_later_primary_roster_however_small(self) -> None:
        """What it has left over is of no use: the others went on."""
        ours = make_roster(
            CARA, DORA, ids=[2, 3], terms=MAJORITY, quorate=False, primary=JOB.primary
        )
        theirs = make_roster(
            ANNA, terms=MAJORITY, number=7, primary=Primary(make_epoch(7), (ANNA,))
        )
        views: Mapping[Member, View] = {
            ANNA: make_view(7, ANNA, rosters=[theirs]),
            CARA: make_view(8, CARA, DORA, rosters=[ours]),
            DORA: make_view(8, CARA, DORA, rosters=[ours]),
        }
        answers = {m: make_flushed(m, view) for m, view in views.items()}
        (after,) = settle(views[CARA], answers, continuing=[CARA, DORA])
        assert after.ids == (0,)

    def test_waits_for_a_later_primary_roster_of_which_only_a_trace_is_left(self) -> None:
        ours = make_roster(
            CARA, DORA, ids=[2, 3], terms=MAJORITY, quorate=False, primary=JOB.primary
        )
        theirs = make_roster(
            ANNA, BERT, terms=MAJORITY, primary=Primary(make_epoch(7), (ANNA, BERT))
        )
        base = make_view(8, CARA, DORA, rosters=[ours])
        answers = {m: make_flushed(m, base) for m in (CARA, DORA)}
        answers[EMMA] = make_flushed(EMMA, make_view(7, ANNA, BERT, EMMA, rosters=[theirs]))
        (after,) = settle(base, answers, continuing=[CARA, DORA])
        assert (after.ids, after.quorate, after.primary) == ((2, 3), False, JOB.primary)

    def test_gives_way_to_a_later_primary_roster_that_waits_too(self) -> None:
        """Its work is later; more ranks that had been left behind are worth nothing."""
        ours = make_roster(
            CARA, DORA, ids=[2, 3], terms=MAJORITY, quorate=False, primary=JOB.primary
        )
        theirs = make_roster(
            BERT,
            ids=[1],
            terms=MAJORITY,
            number=8,
            quorate=False,
            primary=Primary(make_epoch(7), (ANNA, BERT)),
        )
        base = make_view(8, CARA, DORA, rosters=[ours])
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
