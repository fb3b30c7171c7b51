"""O6: a trainer enters a running job in a `sync` that is under way, and in nothing else."""

from collections.abc import Iterable, Mapping

import pytest

from pmesh.core.values import Roster, Terms
from pmesh.core.views.outcomes import gather, op_to_enter
from pmesh.core.wire.link import JobReport, OpReport, Waiting
from pmesh.ids import Member
from tests.worlds.builders import (
    ANNA,
    BERT,
    CARA,
    DORA,
    FACES,
    completed,
    failed,
    make_call,
    make_flushed,
    make_member,
    make_outcome,
    make_report,
    make_roster,
    make_trainer,
    make_verdict,
    make_view,
    make_view_request,
    make_waiting,
    running,
)
from tests.worlds.settling import TIMED_OUT, settle

PAIR = make_roster(ANNA, BERT)
BASE = make_view(5, ANNA, BERT, CARA, rosters=[PAIR])
SYNC = running(6, make_call("sync"))
SYNCING = {ANNA: [SYNC], BERT: [SYNC]}
Ops = Mapping[Member, Iterable[OpReport]]


def settle_with(
    waiting: Mapping[Member, Iterable[Waiting]],
    ops: Ops = SYNCING,
    *,
    roster: Roster = PAIR,
    members: tuple[Member, ...] = (ANNA, BERT, CARA),
) -> Roster:
    """The next roster of the job, which a `sync` asks for, where these wait."""
    base = make_view(5, *members, rosters=[roster])
    reports: dict[Member, list[JobReport]] = {
        trainer.member: [make_report(roster, {trainer.id: ops.get(trainer.member, [])}, stable=5)]
        for trainer in roster.trainers
    }
    answers = {
        m: make_flushed(m, base, jobs=reports.get(m, []), waiting=waiting.get(m, []))
        for m in base.members
    }
    (after,) = settle(base, answers, view_requests=[make_view_request(roster, None, op=6)])
    return after


class TestATrainerThatWaits:
    def test_enters_with_the_sync_that_is_under_way(self) -> None:
        after = settle_with({CARA: [make_waiting(1)]})
        assert after.trainers == (*PAIR.trainers, make_trainer(2, CARA, enters=6))
        assert (after.next_id, after.losses) == (3, ())

    def test_has_the_sync_run_again_with_it(self) -> None:
        assert settle_with({CARA: [make_waiting(1)]}).outcomes == ()

    def test_takes_its_machines_place_in_the_ring(self) -> None:
        waiting = {CARA: [make_waiting(1)], ANNA: [make_waiting(1, slot=7)]}
        after = settle_with(waiting, members=(CARA, ANNA, BERT))
        assert after.trainers == (
            make_trainer(0, ANNA),
            make_trainer(3, ANNA, slot=7, enters=6),
            make_trainer(1, BERT),
            make_trainer(2, CARA, enters=6),
        )

    def test_enters_together_with_others_also_of_one_machine(self) -> None:
        waiting = {
            CARA: [make_waiting(1, slot=3), make_waiting(1, slot=2)],
            DORA: [make_waiting(4)],
        }
        after = settle_with(waiting, members=(ANNA, BERT, CARA, DORA))
        assert after.trainers[2:] == (
            make_trainer(2, CARA, slot=2, enters=6),
            make_trainer(3, CARA, slot=3, enters=6),
            make_trainer(4, DORA, enters=6),
        )
        assert after.next_id == 5

    def test_gets_a_number_that_nobody_has_had(self) -> None:
        roster = make_roster(ANNA, BERT, ids=[3, 8])
        after = settle_with({CARA: [make_waiting(1)]}, roster=roster)
        assert after.ids == (3, 8, 9)

    def test_enters_its_own_job_only(self) -> None:
        after = settle_with({CARA: [make_waiting(2, job=FACES)]})
        assert after.trainers == PAIR.trainers

    def test_makes_its_terms_everybodys(self) -> None:
        strict = Terms(2, "raise", "majority")
        after = settle_with({CARA: [make_waiting(1, terms=strict)]})
        assert after.terms == strict
        elsewhere = make_waiting(2, slot=1, job=FACES, terms=strict)
        assert settle_with({CARA: [make_waiting(1), elsewhere]}).terms == Terms()

    def test_comes_in_also_with_a_newcomer_to_the_view(self) -> None:
        base = make_view(5, ANNA, BERT, rosters=[PAIR])
        answers = {
            m: make_flushed(m, base, jobs=[make_report(PAIR, {i: [SYNC]})])
            for i, m in enumerate((ANNA, BERT))
        }
        alone = make_view(1, DORA)
        answers[DORA] = make_flushed(DORA, alone, waiting=[make_waiting(1)])
        view_request = make_view_request(PAIR, None, op=6)
        (after,) = settle(base, answers, continuing=[ANNA, BERT], view_requests=[view_request])
        assert after.ids == (0, 1, 2)

    def test_comes_in_also_when_a_rank_is_lost(self) -> None:
        """Whatever a view settles, it need not be followed by another for the same sync."""
        roster = make_roster(ANNA, BERT, make_member("e"))
        after = settle_with({CARA: [make_waiting(1)]}, roster=roster)
        assert (after.ids, after.next_id) == ((0, 1, 3), 4)
        assert [loss.trainers for loss in after.losses] == [(2,)]

    def test_does_not_enter_twice_if_it_missed_the_view_that_took_it_in(self) -> None:
        """Its agent still says that it waits."""
        entered = settle_with({CARA: [make_waiting(1)]})
        view = make_view(6, ANNA, BERT, CARA, previous=BASE.epoch, rosters=[entered])
        answers = {
            m: make_flushed(m, view, jobs=[make_report(entered, {i: [SYNC]})])
            for i, m in enumerate((ANNA, BERT))
        }
        answers[CARA] = make_flushed(CARA, BASE, waiting=[make_waiting(1), make_waiting(1, slot=1)])
        (after,) = settle(view, answers, view_requests=[make_view_request(entered, None, op=6)])
        assert after.trainers == (
            *entered.trainers,
            make_trainer(3, CARA, slot=1, enters=6),
        )


class TestASyncLetsNobodyIn:
    """... unless all who have come to it wait in it, and nobody has its result."""

    def entering(self, ops: Ops) -> tuple[int, ...]:
        return settle_with({CARA: [make_waiting(1)]}, ops).ids[2:]

    def test_if_one_rank_is_still_on_its_way_to_it_all_the_same(self) -> None:
        """Whoever called it has ended all ops before."""
        assert self.entering({ANNA: [completed(5), SYNC], BERT: [running(5)]}) == (2,)

    @pytest.mark.parametrize(
        "ops",
        [
            pytest.param({ANNA: [running(6)], BERT: [running(6)]}, id="it is no sync"),
            pytest.param({}, id="nothing is under way"),
            pytest.param({ANNA: [SYNC, running(7)], BERT: [SYNC]}, id="it is not the last"),
            pytest.param({ANNA: [SYNC], BERT: [running(6)]}, id="another rank calls it otherwise"),
            pytest.param(
                {ANNA: [SYNC], BERT: [completed(6, call=make_call("sync"))]}, id="one has ended it"
            ),
            pytest.param({ANNA: [SYNC], BERT: [failed(6, TIMED_OUT)]}, id="it has failed"),
        ],
    )
    def test_if(self, ops: Ops) -> None:
        assert self.entering(ops) == ()

    def test_if_this_very_view_fails_it(self) -> None:
        """A loss that is to raise: who waits enters in the next sync."""
        roster = make_roster(ANNA, BERT, make_member("e"), terms=Terms(on_loss="raise"))
        after = settle_with({CARA: [make_waiting(1)]}, roster=roster)
        assert (after.ids, after.next_id) == ((0, 1), 3)
        assert [outcome.op for outcome in after.outcomes] == [6]

    def test_if_only_a_lost_rank_has_ended_it(self) -> None:
        roster = make_roster(ANNA, BERT, DORA)
        base = make_view(5, ANNA, BERT, CARA, DORA, rosters=[roster])
        done = completed(6, call=make_call("sync"))
        reports = {ANNA: {0: [SYNC]}, BERT: {1: [SYNC]}, DORA: {2: [done]}}
        answers = {
            m: make_flushed(m, base, jobs=[make_report(roster, reports[m])]) for m in reports
        }
        answers[CARA] = make_flushed(CARA, base, waiting=[make_waiting(1)])
        ended = make_view_request(roster, make_verdict("RankLost", 2))
        (after,) = settle(base, answers, view_requests=[ended])
        assert after.ids == (0, 1)
        assert after.outcomes == (make_outcome(6, 0, 1, 2, holders=[2]),)

    def test_if_no_view_change_settles_its_job(self) -> None:
        """V7."""
        answers = {
            m: make_flushed(m, BASE, jobs=[make_report(PAIR, {i: [SYNC]}, fenced=False)])
            for i, m in enumerate((ANNA, BERT))
        }
        answers[CARA] = make_flushed(CARA, BASE, waiting=[make_waiting(1)])
        assert settle(BASE, answers) == (PAIR,)


class TestAnOpBeforeTheSync:
    """... was ended by whoever called the sync; the others fetch it, since it can't run again."""

    PAIR = settle_with(
        {CARA: [make_waiting(1)]}, {ANNA: [completed(5, 0, 1), SYNC], BERT: [running(5)]}
    )
    VIEW = make_view(9, ANNA, BERT, CARA, rosters=[PAIR])

    def test_is_fetched_also_while_somebody_enters(self) -> None:
        assert self.PAIR.ids == (0, 1, 2)
        assert self.PAIR.outcomes == (make_outcome(5, 0, 1, holders=[0]),)

    def test_fails_if_its_result_is_lost(self) -> None:
        """With the newcomer in the ring, which has no part in it, it would wait for ever."""
        reports = {BERT: {1: [running(5)]}, CARA: {2: [SYNC]}}
        answers = {
            m: make_flushed(m, self.VIEW, jobs=[make_report(self.PAIR, ops, stable=3)])
            for m, ops in reports.items()
        }
        (after,) = settle(self.VIEW, answers)
        (outcome,) = after.outcomes
        assert (outcome.op, outcome.contributors) == (5, (1,))
        assert outcome.verdict is not None
        assert (outcome.verdict.error, outcome.verdict.trainers) == ("RankLost", (0,))


def test_the_op_to_enter_is_the_highest_that_anybody_has_called() -> None:
    reports = [make_report(PAIR, {0: [SYNC]}), make_report(PAIR, {1: [running(5)]})]
    assert op_to_enter(gather(reports), PAIR) == 6
    assert op_to_enter(gather([]), PAIR) is None
