"""What is measured is checked, judged by its bars, and printed as it is."""

import contextlib
import math
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pmesh.client.mesh import Mesh
from pmesh.testing import SimulatedMesh
from tests.docs.pages import DOCS, read
from tools.__main__ import main
from tools.bench.cases import (
    CASES,
    CONTROL_SHARE,
    FASTEST,
    GROWTH,
    LAG_P99,
    PSS,
    find_case,
    judge,
    judge_flatness,
)
from tools.bench.compressed import WAYS, Ours, arrays_of
from tools.bench.measuring import fault_in
from tools.bench.report import render
from tools.bench.results import (
    BenchTurn,
    CaseResult,
    CaseResults,
    CaseRun,
    Layout,
    Order,
    RankAnswer,
    seconds_of,
)
from tools.bench.systems import place_of
from tools.bench.worker import System, Values, carry_out
from tools.lab.commands import LabError
from tools.lab.program import LabProgram
from tools.lab.report import Outcome
from tools.lab.results import read_results
from tools.lab.units import MIB

pytestmark = pytest.mark.slow

BYTES = 100_000_000


def measured(
    case: str,
    *rounds: dict[str, BenchTurn],
    op_bytes: int = BYTES,
    ranks: int = 2,
    ceiling: tuple[float, ...] = (),
    **more: Any,  # noqa: ANN401 - of a Measured
) -> CaseResult:
    run = CaseRun(command="c", commit="0123abc", machine="2 cores", rounds=rounds, ceiling=ceiling)
    return CaseResult(case=case, ranks=ranks, op_bytes=op_bytes, runs=(run,), **more)


def turn(seconds: float, wire_bytes: int = 0, **more: Any) -> BenchTurn:  # noqa: ANN401 - of a Turn
    return BenchTurn(seconds=seconds, wire_bytes=wire_bytes, **more)


def outcomes(m: CaseResult, ours: str = "pmesh") -> list[Outcome]:
    return [verdict.outcome for verdict in judge(m, ours)]


def named_outcomes(m: CaseResult) -> list[tuple[str, str]]:
    return [(verdict.what, verdict.outcome) for verdict in judge(m)]


@pytest.mark.parametrize(
    ("pmesh_s", "mlx_s", "cpu", "expected"),
    [
        (1.0, 1.3, 1.5, ["met", "met", "met"]),
        (1.01, 1.4, 1.51, ["goal missed", "met", "goal missed"]),
        (1.25, 1.7, 2.0, ["goal missed", "met", "goal missed"]),
        (1.26, 1.6, 2.01, ["MISSED", "MISSED", "MISSED"]),
    ],
)
def test_speed_and_cpu_are_judged_by_goal_and_floor_for_both_kinds_of_arrays(
    pmesh_s: float, mlx_s: float, cpu: float, expected: list[Outcome]
) -> None:
    found = {"gloo": turn(1.0, cpu_s=1.0), "mlx": turn(mlx_s, cpu_s=1.0)}
    ours, good = turn(pmesh_s, cpu_s=cpu), turn(0.5, cpu_s=1.0)

    m = measured("loopback-2", found | {"pmesh": ours, "ordinary": good})
    assert (outcomes(m), outcomes(m, "ordinary")) == (expected, ["met"] * 3)
    m = measured("loopback-2", found | {"pmesh": good, "ordinary": ours})
    assert (outcomes(m), outcomes(m, "ordinary")) == (["met"] * 3, expected)


def small(pmesh_s: float, case: str = "loopback-2", ranks: int = 2) -> CaseResult:
    found = {"pmesh": turn(pmesh_s), "gloo": turn(1.0), "mlx": turn(1.0)}
    return measured(case, found, op_bytes=4096, ranks=ranks)


def beside(others: str, op_bytes: int = MIB) -> CaseResult:
    names = ("pmesh", *others.split())
    return measured("loopback-2", {name: turn(1.0) for name in names}, op_bytes=op_bytes)


def tree(seconds: float) -> CaseResult:
    return measured("gradients", {"all_reduce": turn(1.0), "average_gradients": turn(seconds)})


def soaked(case: str, **facts: float) -> CaseResult:
    names = {"pss": PSS, "growth": GROWTH, "lag": LAG_P99}
    facts = {names[name]: value for name, value in facts.items()}
    return measured(case, facts=facts, op_bytes=16 * MIB)


def trained(step_s: float, loss: float) -> CaseResult:
    begun = {"pmesh": turn(step_s, loss=9.0), "gloo": turn(1.0, loss=1.0)}
    ended = {"pmesh": turn(step_s, loss=loss), "gloo": turn(1.0, loss=0.5)}
    return measured("training", begun, ended)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (small(1.0), ["met"]),
        (small(1.01), ["MISSED"]),
        (small(1.01, "loopback-4", ranks=4), []),  # latency is a bar of two ranks only
        (beside("gloo"), ["met"]),  # what had no turn has no bar
        (beside("mlx"), ["MISSED"]),
        (beside("", op_bytes=4096), []),
        (tree(1.15), ["met"]),
        (tree(1.16), ["MISSED"]),
        (soaked("memory", pss=248.0, growth=4.0), ["met", "met"]),
        (soaked("memory", pss=248.1, growth=4.1), ["MISSED", "MISSED"]),
        (soaked("lag", lag=20.0), ["met"]),
        (soaked("lag", lag=20.1), ["MISSED"]),
        (trained(1.0, 0.504), ["met", "met"]),
        (trained(1.01, 0.51), ["MISSED", "MISSED"]),
        (trained(0.5, 0.1), ["met", "met"]),
    ],
)
def test_each_bar_is_met_up_to_its_limit(found: CaseResult, expected: list[Outcome]) -> None:
    assert outcomes(found) == expected


def test_a_ratio_compares_the_turns_of_one_round() -> None:
    # The machine slowed down from round to round: medians over rounds would say 6, or 1.5.
    rounds = ({"none": turn(3.0), "int8": turn(1.0)}, {"none": turn(30.0), "int8": turn(10.0)})
    alone = ({"none": turn(3.0)}, {"int8": turn(2.0)})

    assert measured("1gbit", *rounds, *alone).ratio("none", "int8", seconds_of) == 3.0
    assert measured("1gbit", *alone).ratio("none", "int8", seconds_of) is None
    assert judge(measured("1gbit", *alone)) == []


def test_bus_bandwidth_is_held_against_the_line_of_the_same_turn() -> None:
    # Four ranks carry 1.5 times the bytes of an array over each line.
    m = measured(
        "gigabit-4",
        {"pmesh": turn(0.15)},
        {"pmesh": turn(0.3)},
        op_bytes=10_000_000,
        ranks=4,
        ceiling=(100e6, 50e6),
        facts={CONTROL_SHARE: 0.00101},
    )

    assert m.share_of_ceiling("pmesh") == pytest.approx(1.0)
    assert outcomes(m) == ["met", "MISSED"]


def test_hosts_with_several_trainers_each_carry_what_as_many_ranks_as_hosts_would() -> None:
    m = measured(
        "gigabit-2x2",
        {"pmesh": turn(0.103)},
        op_bytes=10_000_000,
        ranks=4,
        machines=2,
        ceiling=(100e6,),
    )

    assert outcomes(m) == ["met"]
    assert list(judge_flatness([m, measured("gigabit-4", {"pmesh": turn(1.0)}, ranks=4)])) == []


@pytest.mark.parametrize(
    ("case", "ranks", "seconds", "expected"),
    [
        ("unequal-2", 2, 0.1, ["met", "met", "met"]),  # of 110 MB/s, 100 on the faster cable
        ("unequal-2", 2, 0.102, ["MISSED", "met", "met"]),
        ("unequal-2", 2, 0.104, ["MISSED", "MISSED", "met"]),
        ("chain-3", 3, 0.099, ["met", "met"]),  # each edge carries the array once each way
        ("chain-3", 3, 0.102, ["MISSED", "met"]),
        ("mixed-8", 8, 0.165, ["met"]),  # 1.75 times the array over each line
        ("mixed-8", 8, 0.167, ["MISSED"]),
    ],
)
def test_a_network_of_several_ways_is_held_against_its_lines(
    case: str, ranks: int, seconds: float, expected: list[Outcome]
) -> None:
    m = measured(
        case,
        {"pmesh": turn(seconds)},
        op_bytes=9_900_000,
        ranks=ranks,
        ceiling=(110e6,),
        facts={} if case == "mixed-8" else {CONTROL_SHARE: 0.0001, FASTEST: 100.0},
    )

    assert outcomes(m) == expected


def test_bus_bandwidth_must_stay_the_same_with_more_hosts() -> None:
    def hosts(ranks: int, seconds: float) -> CaseResult:
        return measured(f"megabit-{ranks}", {"pmesh": turn(seconds)}, ranks=ranks)

    flat = list(judge_flatness([hosts(2, 1.0), hosts(4, 1.5), hosts(8, 1.75 * 1.05)]))
    steep = list(judge_flatness([hosts(2, 1.0), hosts(4, 1.5), hosts(8, 1.75 * 1.06)]))

    assert [v.outcome for v in flat] == ["met"]
    assert [v.outcome for v in steep] == ["MISSED"]
    other = measured("loopback-2", {"pmesh": turn(1.0)})
    assert list(judge_flatness([hosts(2, 1.0), other])) == []


def test_a_scheme_is_judged_by_how_many_times_as_fast_as_uncompressed_it_is() -> None:
    found = {"none": turn(10.0), "int8": turn(3.03), "topk": turn(1.01), "powersgd-4": turn(0.33)}

    assert named_outcomes(measured("100mbit", found)) == [
        ("int8: times as fast", "met"),
        ("TopK 1 %: times as fast", "MISSED"),
        ("PowerSGD, rank 4: times as fast", "met"),
    ]


@pytest.mark.parametrize(("compact", "expected"), [(100, "met"), (101, "MISSED")])
def test_bytes_on_the_wire_are_judged_where_they_are_counted(compact: int, expected: str) -> None:
    found = {"none": turn(1.0, 2400), "topk-compact": turn(1.0, compact)}

    assert named_outcomes(measured("wire", found)) == [
        ("TopK 1 %, compact: times fewer bytes", expected)
    ]
    assert named_outcomes(measured("100mbit", found)) == []


@pytest.mark.parametrize(("auto", "expected"), [(2.2, "met"), (2.21, "MISSED")])
def test_auto_is_held_against_the_best_of_what_it_may_pick(auto: float, expected: str) -> None:
    found = {"none": turn(3.0), "bf16": turn(2.0), "int8": turn(2.5), "auto": turn(auto)}
    faster = found | {"powersgd-4": turn(0.1)}
    unknown = {name: turn for name, turn in found.items() if name != "bf16"}

    bar = ("Auto of bf16, int8: time over that of bf16, the best", expected)
    assert bar in named_outcomes(measured("loopback", found))
    assert bar in named_outcomes(measured("loopback", faster))
    assert named_outcomes(measured("loopback", unknown)) == []


@pytest.mark.parametrize("case", ["loopback-2", "1gbit", "memory"])
def test_a_wrong_result_misses_whatever_the_times_are(case: str) -> None:
    good = {name: turn(1.0, cpu_s=1.0) for name in ("pmesh", "gloo", "mlx")}
    facts = {PSS: 1.0, GROWTH: 1.0}

    wrong = measured(case, good | {"pmesh": turn(1.0, cpu_s=1.0, wrong=1)}, facts=facts)

    assert named_outcomes(wrong)[-1] == ("wrong results", "MISSED")
    assert "wrong results" not in dict(named_outcomes(measured(case, good, facts=facts)))


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
    answers = [RankAnswer(digest=d, error=e) for d, e in zip(digests, errors, strict=True)]

    assert fault_in(Order(what="compressed", scheme=scheme), answers) == expected


def test_ranks_reduce_values_whose_exact_mean_they_know() -> None:
    order = Order(what="compressed", side=64)
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
    order = Order(what="compressed", scheme=scheme, layout=layout, side=100, times=2)

    def train(mesh: Mesh) -> RankAnswer:
        return Ours(mesh).carry_out(order)

    answers = SimulatedMesh(2).run(train)

    assert fault_in(order, answers) == ""
    assert all(len(answer.seconds) == 2 for answer in answers)
    assert (answers[0].error < 1e-6) == (scheme == "none")
    assert answers[0].settled == (scheme != "auto")


def test_each_scheme_that_a_case_measures_is_known_and_each_bar_is_of_a_turn() -> None:
    for case in CASES:
        assert case.kind != "compressed" or set(case.turns) <= set(WAYS)
        assert {name for name, _ in case.speed_bars + case.wire_bars} <= set(case.turns)


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


def test_a_worker_that_dies_is_named_with_what_it_said(tmp_path: Path) -> None:
    command = ["sh", "-c", "read line; echo $line is too much >&2; exit 3"]
    log = tmp_path / "gloo-1.log"
    started = LabProgram.start("gloo-1", command, environment={}, errors=log, told=True)
    with started as program:
        program.tell("all_reduce")
        with pytest.raises(LabError, match=r"gloo-1 .*\nall_reduce is too much"):
            program.hear()


@pytest.mark.parametrize("page", ["benchmarks", "compression-speed"])
def test_the_page_is_what_the_tool_writes_of_the_results_beside_it(
    page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", page]) == 0

    assert read(DOCS / "explanation" / f"{page}.md") == capsys.readouterr().out


def test_cases_are_listed_and_unknown_ones_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = [line.split()[0] for line in lines if line.startswith(" ")]
    assert [name for name in listed if name in {case.name for case in CASES}] == [
        case.name for case in CASES
    ]
    assert len(set(listed)) == len(listed)

    assert main(["run", "bench", "2gbit"]) == 1
    assert "no case '2gbit'; there are: loopback-2, " in capsys.readouterr().err
    assert main(["run", "1gbit", "--schemes", "none,int4"]) == 1
    assert "no scheme 'int4'; there are: none, bf16, " in capsys.readouterr().err
    assert main(["run", "training", "--schemes", "mlx"]) == 1
    assert "mlx: here take turns pmesh, gloo" in capsys.readouterr().err


def short(tmp_path: Path, *arguments: str) -> dict[str, CaseResult]:
    path = tmp_path / "short.json"
    with contextlib.chdir(Path(__file__).parents[2]):
        assert main(["run", *arguments, "--short", "--json", str(path)]) == 0
    found = read_results(path, CaseResults).measured
    turns = [turn for m in found for each in m.rounds for turn in each.values()]
    assert all(turn.checked > 0 and not turn.wrong for turn in turns)
    return {m.case: m for m in found}


# How long it took is printed, nothing of it is asserted: this machine may be busy.
@pytest.mark.e2e
def test_the_short_form_runs_all_systems_and_finds_their_results_right(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("mlx.core")

    found = short(tmp_path, "loopback-2", "gradients", "memory", "lag")

    assert set(found) == {"loopback-2", "gradients", "memory", "lag"}
    assert found["loopback-2"].names == ["pmesh", "ordinary", "gloo", "mlx"]
    assert len(found["loopback-2"].ceiling) == 2
    assert render("benchmarks", [CaseResults(measured=tuple(found.values()))])


@pytest.mark.e2e
@pytest.mark.netns
@pytest.mark.skipif(shutil.which("iperf3") is None, reason="iperf3 measures the lines")
def test_the_short_form_measures_hosts_with_two_cables(tmp_path: Path) -> None:
    (m,) = short(tmp_path, "unequal-2").values()

    assert m.names == ["pmesh", "ordinary"]
    assert len(m.ceiling) == 2
    assert min(m.ceiling) / 1e6 > m.facts[FASTEST]


@pytest.mark.netns
def test_the_host_in_the_middle_of_a_chain_has_two_cables() -> None:
    with place_of(find_case("chain-3")) as place:
        rates = [host.run(["tc", "class", "show", "dev", "eth0"]) for host in place.hosts]
        assert [shown.count("rate 1Gbit") for shown in rates] == [1, 2, 1]


@pytest.mark.netns
def test_each_draw_of_a_mixed_network_names_the_slowest_edge_of_its_best_ring() -> None:
    for draw in range(2):
        with place_of(find_case("mixed-8"), draw=draw) as place:
            ((rank, address),) = place.lines
            host = place.hosts[rank]
            ask = f"import socket; socket.socket().connect_ex(({address!r}, 9))"
            host.run([sys.executable, "-SE", "-c", ask])
            classes = host.run(["tc", "-s", "class", "show", "dev", "eth0"])
            number = address.rpartition(".")[2]
            assert re.search(rf"class htb 1:{number} .*\n Sent [1-9]", classes)


@pytest.mark.e2e
def test_the_short_form_runs_all_schemes_and_finds_their_results_right(tmp_path: Path) -> None:
    found = short(tmp_path, "loopback")["loopback"]

    assert len(found.rounds) == 2
    assert {"none", "int8", "powersgd-4", "auto-any"} < set(found.names)
    # Trials begin anew where the ring has changed meanwhile, as it may between busy machines (V13),
    # so they need not have ended: that they do is tested in tests/client/feedback.
    picked = [turn.picked for name in ("auto", "auto-any") for turn in found.turns(name)]
    assert all(re.search(r"tried on these ranks|: trial \d+ of \d+", each) for each in picked)
    assert render("compression-speed", [CaseResults(measured=(found,))])


@pytest.mark.timeout(300)
@pytest.mark.e2e
@pytest.mark.netns
def test_the_short_form_runs_between_hosts_and_counts_their_bytes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("mlx.core")

    assert short(tmp_path, "gigabit-2", "--schemes", "pmesh")["gigabit-2"].facts[CONTROL_SHARE] > 0
    lan = short(tmp_path, "1gbit", "--schemes", "none,int8")["1gbit"]
    trained = short(tmp_path, "training", "--rounds", "1")["training"]

    none, int8 = lan.turns("none")[0], lan.turns("int8")[0]
    # A ring of 4 sends 2 * 3/4 of it, less what is subtracted too much for the agents' own talk.
    assert none.wire_bytes > 1.4 * lan.op_bytes
    assert int8.wire_bytes < none.wire_bytes / 3
    ours, theirs = trained.turns("pmesh")[0], trained.turns("gloo")[0]
    assert ours.calls == theirs.calls == 2
    assert 0 < ours.loss < 2.5
    assert 0 < theirs.loss < 2.5
