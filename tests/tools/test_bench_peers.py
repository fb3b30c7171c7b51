"""What is measured is checked, judged by its bars, kept in files, and printed as it is."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.docs.pages import DOCS, read, table_rows
from tools.bench_peers import __main__ as bench
from tools.bench_peers.cases import (
    CASES,
    CONTROL_SHARE,
    GROWTH,
    LAG_P99,
    MIB,
    PSS,
    Outcome,
    judge,
    judge_flatness,
)
from tools.bench_peers.orders import Order
from tools.bench_peers.places import Place
from tools.bench_peers.report import render, time_text
from tools.bench_peers.results import Measured, Results, Series, keep, read_results
from tools.bench_peers.systems import BenchError, Process
from tools.bench_peers.worker import System, Values, carry_out

PAGE = DOCS / "explanation" / "benchmarks.md"
RESULTS = DOCS / "explanation" / "benchmarks"


def measured(case: str = "loopback-2", op_bytes: int = 16 * MIB, **more: object) -> Measured:
    known: dict[str, object] = {
        "command": f"python -m tools.bench_peers run {case}",
        "commit": "0123abc",
        "machine": "2 cores",
        "ranks": 2,
    }
    return Measured(case=case, op_bytes=op_bytes, **(known | more))  # type: ignore[arg-type]


def series(seconds: float, cpu_s_per_gb: float = 1.0, **more: int) -> Series:
    return Series(seconds=(seconds,) * 3, cpu_s_per_gb=(cpu_s_per_gb,) * 3, checked=6, **more)


def outcomes(m: Measured) -> list[Outcome]:
    return [verdict.outcome for verdict in judge(m)]


@pytest.mark.parametrize(
    ("pmesh_s", "mlx_s", "cpu", "expected"),
    [
        (1.0, 1.3, 1.5, ["met", "met", "met"]),
        (1.01, 1.4, 1.51, ["goal missed", "met", "goal missed"]),
        (1.25, 1.7, 2.0, ["goal missed", "met", "goal missed"]),
        (1.26, 1.6, 2.01, ["MISSED", "MISSED", "MISSED"]),
    ],
)
def test_speed_and_cpu_are_judged_by_goal_and_floor(
    pmesh_s: float, mlx_s: float, cpu: float, expected: list[Outcome]
) -> None:
    found = {"pmesh": series(pmesh_s, cpu), "gloo": series(1.0), "mlx": series(mlx_s)}

    assert outcomes(measured(series=found)) == expected


@pytest.mark.parametrize(("pmesh_s", "expected"), [(1.0, "met"), (1.01, "MISSED")])
def test_the_latency_of_small_ops_is_judged_with_two_ranks_only(
    pmesh_s: float, expected: Outcome
) -> None:
    found = {"pmesh": series(pmesh_s), "gloo": series(1.0), "mlx": series(1.0)}

    assert outcomes(measured(op_bytes=4096, series=found)) == [expected]
    assert outcomes(measured("loopback-4", 4096, ranks=4, series=found)) == []


def test_a_ratio_is_the_median_of_neighbouring_turns_not_a_ratio_of_medians() -> None:
    ours = Series(seconds=(1.0, 20.0, 3.0))
    gloo = Series(seconds=(1.0, 10.0, 1.0))

    assert measured(series={"pmesh": ours, "gloo": gloo}).ratio("pmesh", "gloo") == 2.0


def test_bus_bandwidth_is_held_against_the_line_of_the_same_turn() -> None:
    # Four ranks carry 1.5 times the bytes of an array over each line.
    ours = Series(seconds=(0.15, 0.3), cpu_s_per_gb=(1.0, 1.0))
    m = measured(
        "gigabit-4",
        10_000_000,
        ranks=4,
        series={"pmesh": ours},
        ceiling=(100e6, 50e6),
        facts={CONTROL_SHARE: 0.00101},
    )

    assert m.share_of_ceiling("pmesh") == pytest.approx(1.0)
    assert outcomes(m) == ["met", "MISSED"]


def test_bus_bandwidth_must_stay_the_same_with_more_hosts() -> None:
    def hosts(ranks: int, seconds: float) -> Measured:
        return measured(f"megabit-{ranks}", ranks=ranks, series={"pmesh": series(seconds)})

    flat = list(judge_flatness([hosts(2, 1.0), hosts(4, 1.5), hosts(8, 1.75 * 1.05)]))
    steep = list(judge_flatness([hosts(2, 1.0), hosts(4, 1.5), hosts(8, 1.75 * 1.06)]))

    assert [v.outcome for v in flat] == ["met"]
    assert [v.outcome for v in steep] == ["MISSED"]
    assert list(judge_flatness([hosts(2, 1.0), measured(series={"pmesh": series(1.0)})])) == []


@pytest.mark.parametrize(
    ("case", "facts", "expected"),
    [
        ("memory", {PSS: 248.0, GROWTH: 4.0}, ["met", "met"]),
        ("memory", {PSS: 248.1, GROWTH: 4.1}, ["MISSED", "MISSED"]),
        ("lag", {LAG_P99: 20.0}, ["met"]),
        ("lag", {LAG_P99: 20.1}, ["MISSED"]),
    ],
)
def test_what_soaking_shows_is_judged(
    case: str, facts: dict[str, float], expected: list[Outcome]
) -> None:
    assert outcomes(measured(case, facts=facts)) == expected


def test_gradients_may_take_a_little_longer_than_one_array() -> None:
    def tree(seconds: float) -> Measured:
        found = {"all_reduce": series(1.0), "average_gradients": series(seconds)}
        return measured("gradients", series=found)

    assert outcomes(tree(1.15)) == ["met"]
    assert outcomes(tree(1.16)) == ["MISSED"]


def test_a_wrong_result_misses_whatever_the_times_are() -> None:
    found = {"pmesh": series(1.0, wrong=1), "gloo": series(1.0), "mlx": series(2.0)}

    assert outcomes(measured(series=found))[-1] == "MISSED"


def alone(all_reduce: Callable[[Values], Values]) -> System:
    def average(tree: Any) -> Any:  # noqa: ANN401 - as workers have it
        return [all_reduce(x) for x in tree]

    return System(rank=0, own=np.copy, all_reduce=all_reduce, barrier=lambda: None, average=average)


def test_a_worker_compares_every_value_of_every_result() -> None:
    calls = 0

    def sometimes_wrong(x: Values) -> Values:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            x[-1] += 1
        return x[:-1] if calls % 5 == 0 else x

    answer = carry_out(alone(sometimes_wrong), 1, Order(what="all_reduce", count=100_000, times=10))

    assert (len(answer.seconds), answer.wrong) == (10, 5)


def test_a_worker_deals_values_over_the_arrays_of_a_tree() -> None:
    sizes: list[int] = []

    def record(x: Values) -> Values:
        sizes.append(x.size)
        return x

    answer = carry_out(alone(record), 1, Order(what="average_gradients", count=103, arrays=4))

    assert sizes == [25, 26, 26, 26]
    assert answer.wrong == 0


def test_a_worker_takes_arrays_that_need_not_be_copied_where_there_are_such() -> None:
    shapes: list[tuple[int, int]] = []

    def empty(shape: tuple[int, int]) -> Values:
        shapes.append(shape)
        return np.empty(shape, np.float32)

    plain = alone(lambda x: x)
    ours = replace(plain, empty=empty, all_reduce_shared=lambda x: x + (x[3] == 0))
    order = Order(what="all_reduce_shared", count=100, times=5)

    answer = carry_out(ours, 1, order)
    assert (shapes, len(answer.seconds), answer.wrong) == ([(5, 100)], 5, 0)
    with pytest.raises(ValueError, match="no all_reduce_shared"):
        carry_out(plain, 1, order)


def test_the_bars_are_held_against_ordinary_arrays_too() -> None:
    found = {"pmesh": series(1.0), "ordinary": series(1.3), "gloo": series(1.0), "mlx": series(1.5)}
    m = measured(series=found)

    assert outcomes(m) == ["met", "met", "met"]
    assert [v.outcome for v in judge(m, "ordinary")] == ["MISSED", "MISSED", "met"]


def test_a_worker_that_dies_is_named_with_what_it_said(tmp_path: Path) -> None:
    command = ["sh", "-c", "read line; echo $line is too much >&2; exit 3"]
    log = tmp_path / "gloo-1.log"
    with Process(Place(ranks=2), 1, command, environment={}, log=log) as process:
        process.tell("all_reduce")
        with pytest.raises(BenchError, match=r"gloo-1 .*\nall_reduce is too much"):
            process.hear()


def test_new_results_replace_those_of_the_same_case_and_size_or_are_added(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    small, large = series(1.0), series(2.0)
    keep(path, measured(op_bytes=1, series={"pmesh": small}, ceiling=(1.0,)))
    keep(path, measured(op_bytes=2, series={"pmesh": small}))

    keep(path, measured(op_bytes=2, series={"pmesh": large}))
    keep(path, measured(op_bytes=1, series={"pmesh": large}, ceiling=(2.0,)), add=True)

    found = {m.op_bytes: m for m in read_results(path).measured}
    assert found[2].series["pmesh"].seconds == (2.0,) * 3
    assert found[1].series["pmesh"].seconds == (1.0,) * 3 + (2.0,) * 3
    assert found[1].series["pmesh"].checked == 12
    assert found[1].ceiling == (1.0, 2.0)


def test_the_page_prints_what_was_measured_what_was_missed_and_what_was_not_measured() -> None:
    found = {
        "pmesh": series(0.02, 3.0),
        "ordinary": series(0.025, 2.0),
        "gloo": series(0.01),
        "mlx": series(0.03),
    }
    slow = measured(series=found, ceiling=(2e9,) * 3)
    busy = measured("lag", 256 * MIB, facts={LAG_P99: 3.25})

    page = render([Results(measured=(busy,)), Results(measured=(slow,))])

    rows = list(table_rows(page))
    assert ["2 ranks on loopback", "16 MiB", "speed over gloo's", *rows[0][3:]] == rows[0]
    assert rows[0][3:] == ["≥ 1.00, floor 0.80", "0.50", "**MISSED**", "0.40, **MISSED**"]
    assert rows[2][5:] == ["**MISSED**", "2.00, **goal missed**"]
    assert rows[3][4:] == ["3.2", "met", ""]
    assert ["2 ranks on loopback", "16 MiB", "pmesh", "20 ms", "838.9 MB/s", "0.42", "3.00"] in rows
    assert (
        "**2 of 4 bars met; 2 missed. With ordinary arrays 1 of 4 bars met; 1 more reach their "
        "floor, not their goal; 2 missed. Not measured: loopback-4, gigabit-2, " in page
    )
    assert "loop lag p99, ms: 3.25." in page
    assert "python -m tools.bench_peers run loopback-2   # 3 turns, at 0123abc, 2 cores" in page


def test_the_page_is_what_the_tool_writes_of_the_results_beside_it() -> None:
    files = [read_results(path) for path in sorted(RESULTS.glob("*.json"))]

    assert read(PAGE) == render(files)


def test_times_have_three_digits_and_a_unit() -> None:
    assert [time_text(s) for s in (0.0009999, 0.001, 1.0)] == ["1e+03 µs", "1 ms", "1 s"]


def test_cases_are_listed_and_an_unknown_one_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [case.name for case in CASES]
    assert len(set(listed)) == len(listed)

    assert bench.main(["run", "loopback-3"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("bench_peers: no case 'loopback-3'; there are: loopback-2, ")


def test_a_missing_library_is_named_with_the_command_that_gets_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    assert bench.main(["run", "loopback-2"]) == 1
    assert "gloo needs torch: pip install 'pmesh[torch,mlx]'" in capsys.readouterr().err


def short(tmp_path: Path, *cases: str) -> dict[str, Measured]:
    path = tmp_path / "short.json"
    with contextlib.chdir(Path(__file__).parents[2]):
        assert bench.main(["run", *cases, "--short", "--json", str(path)]) == 0
    return {m.case: m for m in read_results(path).measured}


@pytest.mark.e2e
def test_the_short_form_runs_all_systems_and_finds_their_results_right(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("mlx.core")

    found = short(tmp_path, "loopback-2", "gradients", "memory", "lag")

    # How long it took is printed, nothing of it is asserted: this machine may be busy.
    assert set(found) == {"loopback-2", "gradients", "memory", "lag"}
    assert set(found["loopback-2"].series) == {"pmesh", "ordinary", "gloo", "mlx"}
    assert all(s.checked > 0 for m in found.values() for s in m.series.values())
    assert all(s.wrong == 0 for m in found.values() for s in m.series.values())
    assert len(found["loopback-2"].ceiling) == 2
    assert render([Results(measured=tuple(found.values()))])


@pytest.mark.e2e
@pytest.mark.netns
def test_the_short_form_runs_between_hosts(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("mlx.core")

    (found,) = short(tmp_path, "gigabit-2").values()

    assert all(s.wrong == 0 and s.checked > 0 for s in found.series.values())
    assert found.facts[CONTROL_SHARE] > 0
