"""How fast a job trains, and what a rank spends its time on."""

import pytest

from pmesh.core.jobs.speed import MEMORY_S, OwnTime, Speed


def counted(*changes: tuple[float, int]) -> Speed:
    speed = Speed()
    for now, count in changes:
        speed.note(count, now)
    return speed


def test_a_speed_is_unknown_until_the_count_has_changed_twice() -> None:
    assert counted().per_s(1.0) is None
    assert counted((0.0, 5), (1.0, 5)).per_s(1.0) is None


def test_a_speed_is_what_was_counted_by_the_time_it_took() -> None:
    assert counted((0.0, 0), (0.5, 2), (1.0, 4), (1.2, 4)).per_s(1.3) == pytest.approx(4.0)


def test_a_speed_falls_once_nothing_changes() -> None:
    speed = counted((0.0, 0), (0.5, 2), (1.0, 4))
    assert speed.per_s(2.0) == pytest.approx(4.0), "the next change may be on its way"
    assert speed.per_s(100.0) == pytest.approx(0.04)


def test_old_changes_count_no_more_but_for_jobs_whose_steps_are_long() -> None:
    times = [float(n) for n in range(100)]
    early, late = (
        ((now, 10 * int(now)) for now in times),
        ((99 + now, 990 + int(now)) for now in times),
    )
    assert counted(*early, *late).per_s(198.0) == pytest.approx(1.0)
    assert counted((0.0, 0), (60.0, 1), (120.0, 2)).per_s(121.0) == pytest.approx(1 / 60)


def test_a_job_that_begins_anew_is_measured_anew() -> None:
    assert counted((0.0, 100), (1.0, 200), (2.0, 3), (3.0, 4)).per_s(3.0) == pytest.approx(1.0)


def test_before_its_first_call_nothing_is_known_of_a_rank() -> None:
    assert OwnTime().percent(5.0) is None


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_own_time_of_a_rank_is_its_share(share: float) -> None:
    own = OwnTime()
    for step in range(1000):
        own.note(step / 10, calls=True)
        own.note(step / 10 + (1 - share) / 10, calls=False)
    assert own.percent(100.0) == pytest.approx(100 * share, abs=1)


def test_a_rank_that_waits_longer_and_longer_in_a_call_has_ever_less_time_of_its_own() -> None:
    own = OwnTime()
    own.note(0.0, calls=True)
    own.note(0.0, calls=False)
    own.note(MEMORY_S, calls=True)
    shares = [own.percent(MEMORY_S * n) or 0 for n in (1, 2, 5, 100)]
    assert shares[0] == 100
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == 0
