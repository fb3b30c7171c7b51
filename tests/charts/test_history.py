"""The hour of numbers that the page charts."""

import gc
import sys

from hypothesis import given
from hypothesis import strategies as st

from pmesh.charts.rules.history import KEPT_SLOTS, MOST_CHARTS, Chart, ChartHistory, ChartReading

NOTES = st.lists(st.tuples(st.integers(0, 500), st.sampled_from("abc"), st.floats(-9, 9)))


@given(NOTES)
def test_each_number_keeps_the_last_value_of_each_slot_of_the_last_hour(
    notes: list[tuple[int, str, float]],
) -> None:
    history, expected, slot = ChartHistory(), dict[str, dict[int, float]](), 0
    for later, name, value in notes:
        slot += later
        history.note(slot, [ChartReading("job", name, value)])
        expected.setdefault(name, {})[slot] = value
    for chart in history.charts():
        kept = {at: value for at, value in expected[chart.name].items() if at > slot - KEPT_SLOTS}
        assert dict(zip(chart.slots, chart.values, strict=True)) == kept
        assert chart.slots == sorted(kept)
    recent = {name for name, values in expected.items() if max(values) > slot - KEPT_SLOTS}
    assert {chart.name for chart in history.charts()} == recent


def test_a_number_that_nobody_has_reported_for_an_hour_is_forgotten() -> None:
    history = ChartHistory()
    history.note(0, [ChartReading("job", "loss", 1.0)])
    history.note(KEPT_SLOTS - 1, [])
    assert history.charts() == [Chart("job", "loss", [0], [1.0])]
    history.note(KEPT_SLOTS, [])
    assert history.charts() == []


def test_of_too_many_numbers_those_that_were_reported_last_are_kept() -> None:
    history = ChartHistory()
    names = [f"n{number}" for number in range(MOST_CHARTS + 3)]
    history.note(0, [ChartReading("job", name, 0.0) for name in names])
    history.note(1, [ChartReading("job", names[5], 1.0)])
    history.note(2, [ChartReading("job", name, 2.0) for name in ("x", "y", "z")])
    kept = {chart.name for chart in history.charts()}
    assert kept == {"x", "y", "z", names[5], *names[7:]}
    assert len(kept) == MOST_CHARTS


def size_of(value: object) -> int:
    """Of it and of all that it refers to, in bytes."""
    seen, left = dict[int, object](), [value]
    while left:
        found = left.pop()
        if id(found) not in seen and not isinstance(found, type):
            seen[id(found)] = found
            left += gc.get_referents(found)
    return sum(map(sys.getsizeof, seen.values()))


def test_a_day_of_as_many_numbers_as_there_may_be_takes_less_than_2_mb() -> None:
    """Every four hours another job begins, with more numbers than are kept."""
    history, sizes = ChartHistory(), list[int]()
    for slot in range(24 * KEPT_SLOTS):
        job = f"job {slot // (4 * KEPT_SLOTS)}"
        names = range(MOST_CHARTS + 1 if slot % (4 * KEPT_SLOTS) == 0 else MOST_CHARTS)
        history.note(slot, [ChartReading(job, f"number {n}", slot / (n + 1)) for n in names])
        if slot % (4 * KEPT_SLOTS) == 4 * KEPT_SLOTS - 1:
            sizes.append(size_of(history))
    assert len(history.charts()) == MOST_CHARTS
    assert all(len(chart.slots) == KEPT_SLOTS for chart in history.charts())
    assert max(sizes) < 2e6
