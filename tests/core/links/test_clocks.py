"""What heartbeats tell of another machine's clock, with honest peers and with liars."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.links.clocks import DRIFT, KEPT, WINDOW_S, PeerClock, Reading, by_our_clock

OFFSETS_US = st.integers(-(10**12), 10**12)
TRIPS_US = st.tuples(st.integers(0, 50_000), st.integers(0, 50_000))
"""There, and back."""


def clock_of(beats: list[tuple[int, int]], offset_us: int, drift: float = 0.0) -> PeerClock:
    """What five heartbeats a second show of a clock; each with how long it and its echo took."""
    clock = PeerClock()
    for number, (there_us, back_us) in enumerate(beats):
        now_us = 10**9 + number * 200_000
        true_us = now_us - back_us
        clock.note_untrusted(
            now_us=now_us,
            sent_us=round(true_us * (1 + drift)) + offset_us,
            round_trip_s=(there_us + back_us) / 1e6,
        )
    return clock


@given(st.lists(TRIPS_US, min_size=1, max_size=60), OFFSETS_US, st.floats(0, 1))
def test_a_time_is_never_further_from_the_truth_than_its_error(
    beats: list[tuple[int, int]], offset_us: int, share: float
) -> None:
    clock = clock_of(beats, offset_us)
    true_us = 10**9 + round(share * 200_000 * len(beats))

    found = by_our_clock(clock.readings, true_us + offset_us)

    assert abs(found.us - true_us) <= found.error_us + 1e-3


@given(st.lists(TRIPS_US, min_size=15, max_size=60), st.floats(-DRIFT / 2, DRIFT / 2))
def test_clocks_that_drift_apart_are_followed(beats: list[tuple[int, int]], drift: float) -> None:
    clock = clock_of(beats, 0, drift)
    for true_us in range(10**9, 10**9 + 200_000 * len(beats), 333_333):
        found = by_our_clock(clock.readings, round(true_us * (1 + drift)))
        assert abs(found.us - true_us) <= found.error_us + 2


def test_of_each_window_the_quickest_heartbeat_is_kept() -> None:
    quick, slow = (100, 100), (30_000, 100)
    clock = clock_of([slow, slow, quick, slow, *[slow] * 20], 0)

    assert [reading.error_us for reading in clock.readings] == [101, 15_051, 15_051]


def test_two_minutes_of_readings_are_kept() -> None:
    clock = PeerClock()
    for number in range(3 * KEPT):
        now_us = round(number * WINDOW_S * 1e6)
        clock.note_untrusted(now_us=now_us, sent_us=now_us, round_trip_s=0.001)

    assert len(clock.readings) == KEPT
    assert clock.readings[-1].at_us == now_us


def test_a_time_outside_the_readings_is_less_certain_the_further_away_it_is() -> None:
    readings = [Reading(10**6, 0, 10), Reading(2 * 10**6, 10**6, 10)]

    assert by_our_clock(readings, 0) == (-(10**6), 10 + 100)
    assert by_our_clock(readings, 3 * 10**6) == (2 * 10**6, 10 + 100)


@given(st.lists(st.integers(0, 2**62), min_size=1), st.integers(0, 2**62))
def test_a_peer_that_lies_about_its_clock_only_gets_other_times(said: list[int], at: int) -> None:
    clock = PeerClock()
    for number, sent_us in enumerate(said):
        clock.note_untrusted(now_us=number * 900_000, sent_us=sent_us, round_trip_s=0.0)

    assert by_our_clock(clock.readings, at).error_us >= 0


def test_without_a_reading_there_is_no_time() -> None:
    with pytest.raises(ValueError, match="no reading"):
        by_our_clock([], 0)
