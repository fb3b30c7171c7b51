"""What compression gains is measured in turns, checked, judged, and printed as it is."""

import contextlib
import math
import re
from pathlib import Path

import numpy as np
import pytest

from pmesh.client.mesh import Mesh
from pmesh.testing import SimulatedMesh
from tests.docs.pages import DOCS, read, table_rows
from tools.bench_compression import __main__ as bench
from tools.bench_compression.arrays import arrays_of
from tools.bench_compression.cases import CASES, judge
from tools.bench_compression.measuring import wrong_in
from tools.bench_compression.orders import Answer, Layout, Order
from tools.bench_compression.report import render
from tools.bench_compression.results import (
    Measured,
    Results,
    Round,
    Run,
    Turn,
    merged,
    read_results,
    seconds_of,
    write_results,
)
from tools.bench_compression.schemes import WAYS
from tools.bench_compression.worker import Ours

PAGE = DOCS / "explanation" / "compression-speed.md"
RESULTS = DOCS / "explanation" / "compression"
VALUES = 25_000_000


def turn(seconds: float, wire_bytes: int = 0, *, loss: float = 0.0, picked: str = "") -> Turn:
    return Turn(seconds=seconds, calls=1, wire_bytes=wire_bytes, loss=loss, picked=picked)


def run(*rounds: Round) -> Run:
    command = "python -m tools.bench_compression run 1gbit"
    return Run(command=command, commit="0123abc", machine="2 cores", rounds=rounds)


def measured(case: str, *rounds: Round) -> Measured:
    return Measured(case=case, ranks=4, values=VALUES, runs=(run(*rounds),))


def outcomes(m: Measured) -> list[tuple[str, str]]:
    return [(verdict.what, verdict.outcome) for verdict in judge(m)]


def test_a_scheme_is_judged_by_how_many_times_as_fast_as_uncompressed_it_is() -> None:
    found = {"none": turn(10.0), "int8": turn(3.03), "topk": turn(1.01), "powersgd-4": turn(0.33)}

    assert outcomes(measured("100mbit", found)) == [
        ("int8: times as fast", "met"),
        ("TopK 1 %: times as fast", "MISSED"),
        ("PowerSGD, rank 4: times as fast", "met"),
    ]


def test_a_ratio_compares_the_turns_of_one_round() -> None:
    # The machine slowed down from round to round: medians over rounds would say 6, or 1.5.
    rounds = ({"none": turn(3.0), "int8": turn(1.0)}, {"none": turn(30.0), "int8": turn(10.0)})
    alone = ({"none": turn(3.0)}, {"int8": turn(2.0)})

    assert measured("1gbit", *rounds, *alone).ratio("none", "int8", seconds_of) == 3.0
    assert measured("1gbit", *alone).ratio("none", "int8", seconds_of) is None
    assert judge(measured("1gbit", *alone)) == []


@pytest.mark.parametrize(("compact", "expected"), [(100, "met"), (101, "MISSED")])
def test_bytes_on_the_wire_are_judged_where_they_are_counted(compact: int, expected: str) -> None:
    found = {"none": turn(1.0, 2400), "topk-compact": turn(1.0, compact)}

    assert outcomes(measured("wire", found)) == [("TopK 1 %, compact: times fewer bytes", expected)]
    assert outcomes(measured("100mbit", found)) == []


@pytest.mark.parametrize(("auto", "expected"), [(2.2, "met"), (2.21, "MISSED")])
def test_auto_is_held_against_the_best_of_what_it_may_pick(auto: float, expected: str) -> None:
    found = {"none": turn(3.0), "bf16": turn(2.0), "int8": turn(2.5), "auto": turn(auto)}
    faster = found | {"powersgd-4": turn(0.1)}
    unknown = {name: turn for name, turn in found.items() if name != "bf16"}

    bar = ("Auto of bf16, int8: time over that of bf16, the best", expected)
    assert bar in outcomes(measured("loopback", found))
    assert bar in outcomes(measured("loopback", faster))
    assert outcomes(measured("loopback", unknown)) == []


@pytest.mark.parametrize(
    ("step_s", "loss", "expected"),
    [
        (1.0, 0.504, ["met", "met"]),
        (1.01, 0.51, ["MISSED", "MISSED"]),
        (0.5, 0.1, ["met", "met"]),
    ],
)
def test_training_is_judged_by_time_and_by_the_loss_at_the_end(
    step_s: float, loss: float, expected: list[str]
) -> None:
    begun = {"pmesh": turn(step_s, loss=9.0), "gloo": turn(1.0, loss=1.0)}
    ended = {"pmesh": turn(step_s, loss=loss), "gloo": turn(1.0, loss=0.5)}

    assert [outcome for _, outcome in outcomes(measured("training", begun, ended))] == expected


def test_a_wrong_result_misses_whatever_the_times_are() -> None:
    wrong = Turn(seconds=1.0, calls=1, wrong="not the same on all ranks")

    assert outcomes(measured("1gbit", {"none": turn(3.0), "int8": wrong})) == [
        ("int8: times as fast", "met"),
        ("turns with wrong results", "MISSED"),
    ]


@pytest.mark.parametrize(
    ("scheme", "digests", "errors", "expected"),
    [
        ("int8", "aa", (0.001, 0.015), ""),
        ("int8", "ab", (0.001, 0.001), "not the same on all ranks"),
        ("int8", "aa", (0.001, 0.016), "an error of 0.016, more than 0.015"),
        ("int8", "aa", (0.001, math.nan), "an error of nan, more than 0.015"),
        ("int8-feedback", "aa", (3.0, 3.0), ""),
    ],
)
def test_results_must_be_the_same_everywhere_and_no_worse_than_the_scheme(
    scheme: str, digests: str, errors: tuple[float, ...], expected: str
) -> None:
    answers = [Answer(digest=d, error=e) for d, e in zip(digests, errors, strict=True)]

    assert wrong_in(Order(what="all_reduce", scheme=scheme), answers) == expected


def test_ranks_reduce_values_whose_exact_mean_they_know() -> None:
    order = Order(what="all_reduce", side=64)
    ranks = [arrays_of(order, rank, 3) for rank in range(3)]
    mean = np.mean([each.own[0] for each in ranks], axis=0)

    np.testing.assert_allclose(ranks[1].right.reshape(64, 64), mean, rtol=0, atol=1e-6)
    np.copyto(ranks[1].out[0], mean)
    assert ranks[1].error() < 1e-6
    ranks[1].out[0][63, 63] += np.linalg.norm(mean) / 2
    assert ranks[1].error() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("scheme", "layout"),
    [
        ("none", "matrix"),
        ("int8", "matrix"),
        ("topk", "matrix"),
        ("powersgd-4", "resnet18"),
        ("auto", "matrix"),
    ],
)
def test_a_worker_says_of_each_call_how_far_off_its_result_is(scheme: str, layout: Layout) -> None:
    order = Order(what="all_reduce", scheme=scheme, layout=layout, side=100, times=2)

    def train(mesh: Mesh) -> Answer:
        return Ours(mesh).carry_out(order)

    answers = SimulatedMesh(2).run(train)

    assert wrong_in(order, answers) == ""
    assert all(len(answer.seconds) == 2 for answer in answers)
    assert (answers[0].error < 1e-6) == (scheme == "none")
    assert answers[0].settled == (scheme != "auto")


def test_each_scheme_that_a_case_measures_is_known_and_each_bar_is_of_a_turn() -> None:
    for case in CASES:
        assert case.kind == "train" or set(case.turns) <= set(WAYS)
        assert {name for name, _ in case.speed_bars + case.wire_bars} <= set(case.turns)


def test_new_results_replace_those_of_the_same_case_and_size_or_stand_beside_them(
    tmp_path: Path,
) -> None:
    path = tmp_path / "new" / "results.json"
    assert read_results(path) == Results()
    first, second = measured("1gbit", {"none": turn(1.0)}), measured("1gbit", {"none": turn(2.0)})
    other = measured("100mbit", {"none": turn(9.0)})

    write_results(path, merged(Results(measured=(first, other)), second, add=False))
    assert [m.turns("none") for m in read_results(path).measured] == [[turn(9.0)], [turn(2.0)]]

    write_results(path, merged(Results(measured=(first, other)), second, add=True))
    assert read_results(path).measured[1].turns("none") == [turn(1.0), turn(2.0)]


def test_the_page_prints_what_was_measured_what_was_missed_and_what_was_not_measured() -> None:
    why = "int8: tried on these ranks: none 60 ms, int8 21 ms"
    line = measured(
        "1gbit",
        {
            "none": turn(1.0, 150_000_000),
            "int8": turn(0.5, 39_000_000),
            "auto": turn(0.5, 1, picked=why),
        },
    )
    steps = {"pmesh": turn(0.25, 130_000, loss=0.3), "gloo": turn(0.5, loss=0.3)}

    page = render([Results(measured=(measured("training", steps),)), Results(measured=(line,))])

    rows = list(table_rows(page))
    hosts = "4 hosts, 1 Gbit/s"
    assert rows[0] == [hosts, "25 M", "int8: times as fast", "≥ 2.50", "2.00", "**MISSED**"]
    assert [hosts, "25 M", "int8", "500 ms", "2.00", "39 MB", "3.85", "0", "0.00"] in rows
    ours = ["pmesh, PowerSGD rank 4", "250 ms", "0.50", "130 kB", "0.3000", "0.00"]
    assert ["training, 4 hosts, 100 Mbit/s", *ours] in rows
    assert f"- 4 hosts, 1 Gbit/s, 25 M: Auto of bf16, int8 took {why}." in page
    assert "**2 of 3 bars met; 1 missed. Not measured: 100mbit, loopback, wire, resn" in page
    assert "    python -m tools.bench_compression run 1gbit   # at 0123abc, 2 cores" in page


def test_the_picture_has_a_bar_for_each_scheme_on_each_link_that_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    slow = measured("100mbit", {"none": turn(1.0), "int8": turn(0.25), "auto": turn(0.25)})
    fast = measured("1gbit", {"none": turn(1.0), "int8": turn(0.4), "bf16": turn(0.8)})
    json, plot = tmp_path / "m.json", tmp_path / "m.svg"
    write_results(json, Results(measured=(slow, fast)))

    assert bench.main(["report", str(json), "--plot", str(plot)]) == 0

    assert capsys.readouterr().out.startswith("# What compression gains")
    texts = re.findall(r">([^<>]+)</text>", plot.read_text(encoding="utf-8"))
    assert {"int8", "bf16", "4", "2.5", "1.2"} <= set(texts)
    assert {"4 hosts, 100 Mbit/s", "4 hosts, 1 Gbit/s"} <= set(texts)
    assert not any(text.startswith("Auto") for text in texts)


def test_the_page_is_what_the_tool_writes_of_the_results_beside_it() -> None:
    files = [read_results(path) for path in sorted(RESULTS.glob("*.json"))]

    assert read(PAGE) == render(files)


def test_cases_are_listed_and_unknown_ones_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [case.name for case in CASES]

    assert bench.main(["run", "2gbit"]) == 1
    assert "no case '2gbit'; there are: 100mbit, 1gbit, " in capsys.readouterr().err
    assert bench.main(["run", "1gbit", "--schemes", "none,int4"]) == 1
    assert "no scheme 'int4'; there are: none, bf16, " in capsys.readouterr().err
    assert bench.main(["run", "training", "--schemes", "mlx"]) == 1
    assert "mlx: here train pmesh, gloo" in capsys.readouterr().err


def short(tmp_path: Path, *arguments: str) -> dict[str, Measured]:
    path = tmp_path / "short.json"
    with contextlib.chdir(Path(__file__).parents[2]):
        assert bench.main(["run", *arguments, "--short", "--json", str(path)]) == 0
    return {m.case: m for m in read_results(path).measured}


# How long it took is printed, nothing of it is asserted: this machine may be busy.
@pytest.mark.e2e
def test_the_short_form_runs_all_schemes_and_finds_their_results_right(tmp_path: Path) -> None:
    found = short(tmp_path, "loopback")["loopback"]

    assert len(found.rounds) == 2
    assert all(set(each) == set(found.names) for each in found.rounds)
    assert {"none", "int8", "powersgd-4", "auto-any"} < set(found.names)
    assert not any(turn.wrong for each in found.rounds for turn in each.values())
    assert all("tried on these ranks" in turn.picked for turn in found.turns("auto"))
    assert render([Results(measured=(found,))])


@pytest.mark.e2e
@pytest.mark.netns
def test_the_short_form_counts_the_bytes_between_hosts(tmp_path: Path) -> None:
    found = short(tmp_path, "1gbit", "--schemes", "none,int8")["1gbit"]

    none, int8 = found.turns("none")[0], found.turns("int8")[0]
    assert none.wire_bytes > 1.5 * 4 * found.values
    assert int8.wire_bytes < none.wire_bytes / 3
    assert not none.wrong
    assert not int8.wrong


@pytest.mark.e2e
@pytest.mark.netns
def test_the_short_form_trains_beside_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch")

    found = short(tmp_path, "training", "--rounds", "1")["training"]

    ours, theirs = found.turns("pmesh")[0], found.turns("gloo")[0]
    assert not ours.wrong
    assert not theirs.wrong
    assert ours.calls == theirs.calls == 2
    assert 0 < ours.loss < 2.5
    assert 0 < theirs.loss < 2.5
