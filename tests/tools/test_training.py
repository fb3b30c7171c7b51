"""Trainings are the same for all schemes, judged by their bar, kept, and printed as they are."""

import dataclasses
import itertools
import math
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("sklearn")

from tests.docs.pages import DOCS, read, table_rows
from tests.worlds.faults import Faults
from tools.__main__ import main
from tools.bench import training as tool
from tools.bench.models import MODELS, Model
from tools.bench.training import (
    CASES,
    RANKS,
    UNCOMPRESSED,
    LossCurve,
    Many,
    SchemeLosses,
    finite,
    render,
    train,
)
from tools.lab.results import read_results

pytestmark = pytest.mark.slow

PAGE = DOCS / "explanation" / "compression-training.md"
RESULTS = DOCS / "explanation" / "compression-training"
INFINITE = None  # as JSON has it


def row(*losses: float | None, case: str = "INT8()", feedback: bool = True) -> SchemeLosses:
    return SchemeLosses(
        case=case, feedback=feedback, is_judged="warmed" not in case, losses=losses, curve=(2.0,)
    )


def measured(*rows: SchemeLosses) -> LossCurve:
    return LossCurve(
        model="mlp",
        what="digits, a perceptron",
        weights=26122,
        ranks=RANKS,
        batch=32,
        steps=500,
        rate=0.5,
        seeds=(1, 2, 3),
        command="python -m tools run losses mlp",
        commit="0123abc",
        machine="2 cores",
        plain=row(1.0, 2.0, 3.0, case=UNCOMPRESSED, feedback=False),
        rows=rows,
    )


def uncompressed(_step: int, _steps: int) -> str:
    return UNCOMPRESSED


def test_the_short_form_trains_with_every_scheme(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    json, plot = (tmp_path / name for name in ("m.json", "m.svg"))

    assert main(["run", "losses", "mlp", "--short", "--json", str(json)]) == 0
    shown = capsys.readouterr().out
    assert main(["report", "compression-training", str(json), "--plot", str(plot)]) == 0

    (found,) = read_results(json, Many)
    fed = {r.case for r in found.rows if r.feedback}
    bare = {r.case for r in found.rows if not r.feedback}
    assert fed == {case.name for case in CASES}
    assert bare == {case.name for case in CASES if case.is_judged}
    assert all(0 < r.mean < math.log(10) * 1.2 for r in found.rows)
    assert [cells[0] for cells in table_rows(shown)] == [
        *("uncompressed", *(case.name for case in CASES))
    ]
    assert capsys.readouterr().out == render([found])
    assert plot.read_text().startswith("<?xml")


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_training_gets_better_and_is_the_same_each_time(name: str) -> None:
    model = MODELS[name]()

    once, curve = train(model, 1, steps=8, compression=uncompressed)
    again, _ = train(model, 1, steps=8, compression=uncompressed)
    other, _ = train(model, 2, steps=8, compression=uncompressed)

    assert once == again != other
    assert once < curve[0]
    assert len(curve) == 8


def test_a_training_whose_ranks_end_with_different_weights_is_an_error(faults: Faults) -> None:
    begin, seeds = Model.begin, itertools.count()
    faults.instead(Model, "begin", lambda model, _: begin(model, next(seeds)))

    with pytest.raises(RuntimeError, match="mlp, seed 1: the ranks' weights differ"):
        train(MODELS["mlp"](), 1, steps=1, compression=uncompressed)


def test_a_training_that_diverges_has_an_infinite_loss() -> None:
    wild = dataclasses.replace(MODELS["mlp"](), rate=1e30)

    loss, _ = train(wild, 1, steps=4, compression=uncompressed)

    assert loss == math.inf
    assert finite(loss) is INFINITE


def test_a_warm_up_sends_more_in_the_first_tenth() -> None:
    (case,) = [case for case in CASES if case.warms_up]
    choice = case.compression(feedback=True)
    ratios = [getattr(choice(step, 400), "ratio", None) for step in (0, 9, 10, 20, 30, 39, 40, 399)]

    assert ratios == [0.25, 0.25, 0.0625, 0.015625, 0.01, 0.01, 0.01, 0.01]


def test_feedback_is_on_or_off_as_the_row_says() -> None:
    for case in CASES:
        assert case.compression(feedback=True)(0, 10).feeds_back
        assert not case.compression(feedback=False)(0, 10).feeds_back


def test_ratios_are_of_the_same_seeds() -> None:
    plain = measured().plain

    assert row(1.1, 2.0, 3.0).ratio_to(plain) == pytest.approx(6.1 / 6)
    assert row(1.1, 2.0, 3.0).worst_ratio_to(plain) == pytest.approx(1.1)
    assert row(1.1, feedback=False).ratio_to(plain) == pytest.approx(1.1)
    assert row(1.1, INFINITE, 3.0).ratio_to(plain) == math.inf


@pytest.mark.parametrize(
    ("losses", "met"),
    [((1.0, 2.0, 3.06), True), ((1.0, 2.0, 3.07), False), ((0.5, 2.0, INFINITE), False)],
)
def test_the_bar_is_one_percent_of_the_mean(
    losses: tuple[float | None, ...],
    met: bool,  # noqa: FBT001 - a table of cases
) -> None:
    assert row(*losses).is_met(measured().plain) is met


def test_a_measurement_goes_on_where_it_was_stopped(faults: Faults) -> None:
    began: list[object] = []

    def trained(_: Model, seed: int, **more: object) -> tuple[float, tuple[float, ...]]:
        began.append((seed, more["steps"]))
        return 1.0, (1.0,)

    faults.instead(tool, "train", trained)
    model = MODELS["mlp"]()
    *_, whole = tool.measure(model)
    rows = len(whole.rows)
    assert len(began) == 3 * (rows + 1) - 2 * sum(case.is_judged for case in CASES)
    part = msgspec.structs.replace(whole, rows=whole.rows[:-1])
    other = msgspec.structs.replace(whole, steps=model.steps + 1)

    began.clear()
    *_, again = tool.measure(model, [other, part])

    assert began == [(seed, model.steps) for seed in tool.SEEDS]  # of the last row
    assert again.rows == whole.rows
    assert list(tool.measure(model, [whole])) == [whole]


def test_the_page_is_what_the_tool_writes_of_the_results_beside_it() -> None:
    found = [each for path in sorted(RESULTS.glob("*.json")) for each in read_results(path, Many)]

    assert read(PAGE) == render(found)
