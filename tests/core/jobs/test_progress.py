"""What is known of all ranks: what is stable, on whom an op waits, which lanes stand still."""

import msgspec
import pytest

from pmesh.core.jobs.progress import Progress, lanes_stand_still
from pmesh.core.jobs.rank import RankState
from pmesh.core.values import OpOutcome, Roster, Terms, View
from pmesh.core.wire.views import RankProgress
from pmesh.ids import OpNumber
from tests.worlds.builders import unsigned
from tests.worlds.ranks import BARRIER, ME, OTHER, RESULT, ZERO, A, rank_of, roster, trainer


def mark_of(
    rank: RankState[str], number: int, ended: int, *, stopped: bool = False
) -> RankProgress:
    job, started = rank.roster.job, max(ended, 0)
    return RankProgress(job, number, OTHER, started, ended, 1, -1, stopped)


def ranks_in_an_op() -> tuple[RankState[str], Progress]:
    """Both have started it."""
    rank = rank_of()
    rank.start(ZERO, BARRIER)
    progress = Progress([rank])
    progress.hear(mark_of(rank, 2, -1))
    return rank, progress


def stand_still(rank: RankState[str], progress: Progress, now: float) -> bool:
    return lanes_stand_still(rank, progress, newcomers=0, now=now)


def test_nothing_is_known_of_a_rank_before_it_tells() -> None:
    rank = rank_of()
    progress = Progress([rank])
    assert progress.of(rank.roster, ME) == rank.progress()
    assert progress.of(rank.roster, OTHER) is None
    assert progress.stable(rank.roster) == -1


def test_marks_of_an_earlier_run_mean_nothing() -> None:
    rank = rank_of()
    progress = Progress([rank])
    progress.hear(mark_of(rank, rank.roster.born.counter - 1, 7))
    assert progress.of(rank.roster, OTHER) is None
    assert progress.stable(rank.roster) == -1
    assert progress.late(rank, ZERO) == (OTHER,)


def test_what_has_ended_under_a_later_roster_is_not_stable_here_yet() -> None:
    """O2, I5: it may have failed there, and we are still to be told (seed 236502)."""
    rank = rank_of()
    rank.start(ZERO, BARRIER)
    rank.complete(ZERO, RESULT, (ME, OTHER))
    progress = Progress([rank])
    for later, stable in ((1, -1), (0, 0)):
        progress.hear(mark_of(rank, rank.roster.number + later, 0))
        assert progress.stable(rank.roster) == stable


def test_a_wait_is_described_by_who_is_late_and_whether_its_process_is_stopped() -> None:
    rank = rank_of()
    rank.start(ZERO, BARRIER)
    progress = Progress([rank])
    assert progress.describe_wait(rank, ZERO, 0) == "missing: rank 1 (mac-1)"
    mark = mark_of(rank, 2, -1, stopped=True)
    progress.hear(msgspec.structs.replace(mark, started=-1))
    assert progress.stopped(rank, ZERO) == {OTHER}
    stopped = "missing: rank 1 (mac-1), whose process is stopped"
    assert progress.describe_wait(rank, ZERO, 0) == stopped


def test_a_wait_for_nobody_is_described_by_its_step() -> None:
    """I6: never "nobody in particular"."""
    rank, progress = ranks_in_an_op()
    assert "on their way" in progress.describe_wait(rank, ZERO, 0)
    rank.request_view(None, ZERO)
    assert "agreeing on who takes part" in progress.describe_wait(rank, ZERO, 0)
    rank.follow(roster(3, OpOutcome(ZERO, (ME, OTHER), holders=(OTHER,))))
    assert "being fetched" in progress.describe_wait(rank, ZERO, 0)


def test_a_wait_for_more_ranks_says_how_many() -> None:
    few = msgspec.structs.replace(roster(2), terms=Terms(min_ranks=3))
    rank = RankState[str](few, trainer(ME))
    rank.start(ZERO, BARRIER)
    assert "min_ranks" in Progress([rank]).describe_wait(rank, ZERO, 0)


def test_a_job_that_runs_ops_without_a_sync_lets_nobody_in() -> None:
    rank = rank_of()
    progress = Progress([rank])
    assert not progress.show_no_sync(rank.roster)
    rank.start(ZERO, BARRIER)
    assert progress.show_no_sync(rank.roster)
    rank.synced = 0
    assert not progress.show_no_sync(rank.roster)


def test_a_rank_that_has_just_entered_shows_that_the_job_syncs() -> None:
    """An agent that starts anew may know of no other rank yet, and another trainer waits there."""
    rank = rank_of(enters=OpNumber(5))
    assert not Progress([rank]).show_no_sync(rank.roster)


@pytest.mark.parametrize("left", [(), (roster(3, trainers=[trainer(ME)]),)])
def test_marks_of_jobs_that_are_over_and_of_lost_ranks_are_forgotten(
    left: tuple[Roster, ...],
) -> None:
    rank = rank_of()
    progress = Progress([rank])
    progress.hear(mark_of(rank, 2, 0))
    progress.forget(View.of_one(A, unsigned("mac-0"), rank.roster.born, (rank.roster,)))
    assert progress.of(rank.roster, OTHER) is not None
    progress.forget(View.of_one(A, unsigned("mac-0"), rank.roster.born, left))
    assert progress.of(rank.roster, OTHER) is None


def test_lanes_stand_still_once_nothing_has_moved_for_too_long() -> None:
    rank = rank_of()
    progress = Progress([rank])

    def unmoved(now: float, moved: int) -> bool:
        rank.moved = moved
        return stand_still(rank, progress, now)

    assert not unmoved(0.0, 0)  # no op is under way
    rank.start(ZERO, BARRIER)
    assert not unmoved(3.0, 0)  # the other has not started it
    progress.hear(mark_of(rank, 2, -1))
    assert not unmoved(4.0, 0)
    assert not unmoved(5.0, 1)
    assert not unmoved(6.5, 1)
    assert unmoved(7.0, 1)
    rank.request_view(None, ZERO)
    assert not unmoved(7.5, 1)  # the leader has been asked


def test_new_lanes_have_the_whole_time_that_lanes_may_stand_still() -> None:
    rank, progress = ranks_in_an_op()
    assert not stand_still(rank, progress, 0.0)
    rank.follow(roster(rank.roster.number + 1))
    assert not stand_still(rank, progress, rank.patience_s)
    assert stand_still(rank, progress, 2 * rank.patience_s)


def test_a_lone_rank_has_no_lanes() -> None:
    me = trainer(ME)
    rank = RankState[str](roster(2, trainers=[me]), me)
    rank.start(ZERO, BARRIER)
    for now in (0.0, 9.0):
        assert not lanes_stand_still(rank, Progress([rank]), newcomers=0, now=now)


def test_lanes_that_stood_still_in_an_op_may_do_so_for_twice_as_long() -> None:
    rank, progress = ranks_in_an_op()
    assert not stand_still(rank, progress, 0.0)
    assert stand_still(rank, progress, rank.patience_s)
    rank.last_move = None
    assert not stand_still(rank, progress, 10.0)
    assert not stand_still(rank, progress, 10.0 + rank.patience_s)
    assert stand_still(rank, progress, 10.0 + 2 * rank.patience_s)
