"""A settled bandwidth follows changes that last, and nothing else."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.links.bandwidth import CHANGED, STEADY_S, Bandwidth, SpeedSource, measured

NOISE = st.floats(-0.13, 0.13)  # 1.13 / 0.87 is just less than 1.3
GAPS_S = st.floats(0.01, 30.0)
SPEEDS = st.integers(100, 40_000)


def settle(samples: list[tuple[float, float]], first: Bandwidth | None = None) -> list[Bandwidth]:
    """What is settled after each of the samples: seconds since the one before, and Mbit/s."""
    history, now = [first or Bandwidth()], 0.0
    for gap_s, mbit_s in samples:
        now += gap_s
        history.append(measured(history[-1], mbit_s, "data", now=now))
    return history[1:]


@given(SPEEDS, st.lists(st.tuples(GAPS_S, NOISE), min_size=1))
def test_noise_never_changes_what_is_settled(
    speed: int, samples: list[tuple[float, float]]
) -> None:
    history = settle([(gap_s, speed * (1 + noise)) for gap_s, noise in samples])
    assert len({each.settled_mbit_s for each in history}) == 1


@given(
    SPEEDS,
    st.floats(1.8, 50.0),
    st.sampled_from([1, -1]),
    st.lists(st.tuples(st.floats(0.01, 5.0), NOISE), min_size=1),
)
def test_a_change_that_lasts_is_followed_once_and_never_taken_back(
    speed: int,
    factor: float,
    direction: int,
    samples: list[tuple[float, float]],
) -> None:
    after = max(20.0, speed * factor**direction)
    history = settle(
        [(gap_s, after * (1 + noise)) for gap_s, noise in samples],
        Bandwidth(settled_mbit_s=speed, source="data"),
    )
    changes = [a for a, b in pairwise(history) if a.settled_mbit_s != b.settled_mbit_s]
    assert len(changes) <= 1
    lasted_s = sum(gap_s for gap_s, _ in samples[1:])
    assert (history[-1].settled_mbit_s != speed) == (lasted_s >= STEADY_S)
    if lasted_s >= STEADY_S:
        assert history[-1].settled_mbit_s == pytest.approx(after, rel=0.14, abs=1)


@given(st.lists(st.tuples(GAPS_S, st.floats(0.0, 1e5)), min_size=1))
def test_whatever_is_measured_it_changes_at_most_every_ten_seconds(
    samples: list[tuple[float, float]],
) -> None:
    history, now, changed_at = settle(samples), 0.0, -STEADY_S
    for (gap_s, _), before, after in zip(samples[1:], history, history[1:], strict=False):
        now += gap_s
        assert after.settled_mbit_s >= 1
        if after.settled_mbit_s != before.settled_mbit_s:
            assert now - changed_at >= STEADY_S
            changed_at = now


@given(SPEEDS, st.lists(st.tuples(st.floats(0.01, 9.0), st.floats(0.0, 1e5))))
def test_one_measurement_as_before_within_ten_seconds_keeps_it(
    speed: int, samples: list[tuple[float, float]]
) -> None:
    mixed = [each for gap_s, mbit_s in samples for each in ((gap_s, mbit_s), (0.5, float(speed)))]
    history = settle(mixed, Bandwidth(settled_mbit_s=speed, source="data"))
    assert {each.settled_mbit_s for each in history} <= {speed}


def test_measurements_on_both_sides_settle_nothing() -> None:
    history = settle([(4.0, mbit_s) for mbit_s in (100, 300, 30, 300, 30, 300, 30)])
    assert {each.settled_mbit_s for each in history} == {100}
    assert history[-1].is_changing


@pytest.mark.parametrize(
    ("measurements", "settled"),
    [
        pytest.param([(1000, "nominal")], (1000, "nominal"), id="nominal before any other"),
        pytest.param([(1000, "nominal"), (94, "probe")], (94, "probe"), id="a probe at once"),
        pytest.param([(94, "probe"), (1000, "nominal")], (94, "probe"), id="nominal after it"),
        pytest.param([(94, "probe"), (90, "data")], (94, "data"), id="data that agree"),
        pytest.param([(0.2, "data")], (1, "data"), id="hardly anything is not unknown"),
        pytest.param([(94, "probe"), (94 * CHANGED, "data")], (94, "data"), id="just noise"),
        pytest.param([(94, "probe"), (930, "data")], (930, "data"), id="faster data at once"),
        pytest.param([(930, "probe"), (94, "data")], (930, "probe"), id="slower data not yet"),
        pytest.param([(94, "probe"), (930, "probe")], (94, "probe"), id="a faster probe not yet"),
        pytest.param([(94, "data"), (930, "data")], (94, "data"), id="once only"),
    ],
)
def test_the_first_measurement_counts_at_once_and_what_is_nominal_only_before_it(
    measurements: list[tuple[float, SpeedSource]], settled: tuple[int, SpeedSource]
) -> None:
    bandwidth = Bandwidth()
    for mbit_s, source in measurements:
        bandwidth = measured(bandwidth, mbit_s, source, now=0.0)
    assert (bandwidth.settled_mbit_s, bandwidth.source) == settled
