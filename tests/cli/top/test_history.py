"""How a loss has gone, and its picture."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.agent.schema import JobStatus, RankStatus
from pmesh.cli.top.history import BLOCKS, MOST_VALUES, Losses, Series, loss_of, sparkline
from pmesh.core.jobs.reports import NotFinite
from tests.worlds.fake_status_agent import IDS, NAMES


def job_of(
    *losses: float | NotFinite | None, step: int = 1, name: str = "digits", completed: int = 0
) -> JobStatus:
    ranks = tuple(
        RankStatus(
            rank=rank,
            trainer=rank,
            node=IDS[rank],
            name=NAMES[rank],
            started=completed,
            completed=completed,
            step=step,
            reports={} if loss is None else {"loss": loss},
        )
        for rank, loss in enumerate(losses)
    )
    return JobStatus(
        name=name, state="running", wait_for=None, ranks=ranks, newcomers=(), step=step
    )


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ((0.25, 0.75), 0.5),
        ((0.25, None), 0.25),
        ((0.25, "nan", "inf"), "nan"),
        ((None, None), None),
        ((1.7e308, 1.7e308), 1.7e308),
    ],
)
def test_the_loss_of_a_job_is_the_mean_of_its_ranks(
    losses: tuple[float | NotFinite | None, ...], expected: float | str | None
) -> None:
    assert loss_of(job_of(*losses)) == expected


def test_each_step_adds_the_loss_once() -> None:
    losses = Losses()
    for step, loss in ((1, 4.0), (1, 4.0), (2, 4.0), (2, 3.0), (3, "nan"), (3, None), (4, 2.0)):
        losses.note([job_of(loss, step=step)])  # type: ignore[arg-type] # mypy joins the numbers to object
    assert losses.of(job_of(step=4)) == [4.0, 4.0, 3.0, 2.0]


def test_ops_count_where_a_job_never_syncs() -> None:
    losses = Losses()
    for completed in (1, 1, 2):
        losses.note([job_of(4.0, step=0, completed=completed)])
    assert losses.of(job_of()) == [4.0, 4.0]


def test_a_job_that_ends_or_begins_anew_has_no_history() -> None:
    losses, other = Losses(), job_of(1.0, name="other")
    losses.note([job_of(4.0, step=9), other])
    losses.note([job_of(3.0, step=1), other])
    assert losses.of(job_of()) == [3.0]
    losses.note([other])
    assert losses.of(job_of()) == ()
    losses.note([job_of(2.0, step=5)])
    assert losses.of(job_of()) == [2.0]


def test_a_long_history_is_thinned_out_and_none_of_it_is_forgotten() -> None:
    series = Series()
    for number in range(10 * MOST_VALUES):
        series.add(number)
    assert MOST_VALUES / 2 <= len(series.values) < MOST_VALUES
    gaps = {after - before for before, after in zip(series.values, series.values[1:], strict=False)}
    assert gaps == {16.0}
    assert series.values[0] == 7.5


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False)), st.integers(-1, 20))
def test_a_picture_has_no_more_cells_than_there_are(values: list[float], cells: int) -> None:
    drawn = sparkline(values, cells)
    assert len(drawn) == min(len(values), max(cells, 0))
    assert set(drawn) <= set(BLOCKS)


@given(st.lists(st.integers(-1000, 1000), min_size=2, max_size=20, unique=True))
def test_the_lowest_is_the_lowest_block_and_the_highest_the_highest(values: list[int]) -> None:
    drawn = sparkline(values, len(values))
    assert drawn[values.index(min(values))] == BLOCKS[0]
    assert drawn[values.index(max(values))] == BLOCKS[-1]
    order = sorted(range(len(values)), key=values.__getitem__)
    assert [drawn[i] for i in order] == sorted(drawn)


def test_numbers_of_any_size_have_a_picture() -> None:
    assert sparkline([-1.7e308, 1.7e308], 5) == "▄▄"
    assert sparkline([math.pi] * 3, 5) == "▄▄▄"
    assert msgspec.json.decode(b"3", type=float | NotFinite) == 3.0
