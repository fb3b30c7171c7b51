"""`pmesh bench`: what it measures, what it shows, and what it says when it can't."""

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import numpy as np
import pytest

from pmesh import native
from pmesh.cli import bench
from pmesh.cli.app import run
from pmesh.cli.bench import (
    LEAST_CALLS,
    MOST_CALLS,
    WARM_CALLS,
    BenchPlan,
    BenchRow,
    check_alike,
    measure_row,
)
from pmesh.cli.bench_calls import COLLECTIVES, Benchmark
from pmesh.client.connect import connect
from pmesh.client.control import ask_status
from pmesh.client.mesh import Mesh
from pmesh.errors import UsageError
from pmesh.terminal.sizes import parse_size
from pmesh.testing import SimulatedMesh, agent_in_a_thread
from tests.worlds.fake_status_agent import agent_at, answer_well
from tests.worlds.faults import Faults

PNG = b"\x89PNG"


@dataclass
class Meeting:
    """What the ranks of one mesh have in common."""

    size: int
    names: tuple[str, ...] = ()
    calls: list[str] = field(default_factory=list)
    """Of rank 0."""
    spoil: Callable[[str, int, Any], Any] = lambda _call, _rank, result: result
    """What comes out instead: a broken collective."""

    def __post_init__(self) -> None:
        self.names = tuple(f"mac-{rank + 1}" for rank in range(self.size))


class SpoiledMesh:
    """One rank on a real agent, whose results a test can spoil."""

    def __init__(self, meeting: Meeting, mesh: Mesh) -> None:
        self.meeting = meeting
        self.mesh = mesh

    @property
    def names(self) -> tuple[str, ...]:
        return self.meeting.names

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.mesh.__exit__(kind, error, traceback)

    def all_reduce(self, x: Any, op: str = "sum", **how: Any) -> Any:  # noqa: ANN401
        call = "all_reduce" if op == "sum" else op
        return self._call(call, self.mesh.all_reduce(x, op, **how), how.get("strategy", "auto"))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        found = getattr(self.mesh, name)
        if name == "empty" or not callable(found):
            return found
        return lambda *arguments: self._call(name, found(*arguments))

    def _call(self, call: str, result: object, *how: str) -> Any:  # noqa: ANN401
        if self.mesh.rank == 0:
            self.meeting.calls.append(" ".join((call, *how)))
        return self.meeting.spoil(call, self.mesh.rank, result)


def on_each_rank(meeting: Meeting, program: Callable[[Mesh], Any]) -> list[Any]:
    """What the program returns at each rank, each in a thread of its own."""
    return SimulatedMesh(meeting.size).run(
        lambda mesh: program(cast("Mesh", SpoiledMesh(meeting, mesh)))
    )


@pytest.fixture
def meeting(tmp_path: Path, faults: Faults) -> Iterator[Meeting]:
    """Where `pmesh bench` connects to: the first that comes is rank 0."""
    meeting, home = Meeting(2), tmp_path / "home"
    home.mkdir(mode=0o700)
    with agent_in_a_thread(home):
        faults.pretend(
            bench,
            "connect",
            lambda job, ranks, *_: SpoiledMesh(meeting, connect(job, ranks, home=home)),
        )
        faults.pretend(bench, "ask_status", lambda _: ask_status(home))
        yield meeting


def run_both(*options: str, other: tuple[str, ...] | None = None) -> list[int]:
    """The exit codes of two machines, the first that connects being rank 0."""
    codes: list[int] = [-1, -1]

    def one(number: int, arguments: tuple[str, ...]) -> None:
        codes[number] = run(["bench", "--wait-for", "2", *arguments])

    second = threading.Thread(target=one, args=(1, options if other is None else other))
    second.start()
    one(0, options)
    second.join()
    return codes


def clock(faults: Faults, step_s: float) -> None:
    """Every reading of the time is so much later than the last."""
    readings = itertools.count()
    lock = threading.Lock()

    def read() -> float:
        with lock:
            return next(readings) * step_s

    faults.instead(time, "perf_counter", read)


@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda c: c.name)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_right_mesh_is_found_right_with_any_number_of_values(
    collective: Benchmark, ranks: int
) -> None:
    def program(mesh: Mesh) -> list[BenchRow]:
        return [
            measure_row(mesh, collective, strategy, nbytes, seconds=1e-9)
            for strategy, nbytes in itertools.product(collective.strategies, (4, 28, 40_000))
        ]

    rows = on_each_rank(Meeting(ranks), program)
    assert rows == [rows[0]] * ranks, "all ranks have measured the same"
    assert all(row.correct and row.calls == LEAST_CALLS for row in rows[0])


@pytest.mark.parametrize(
    "collective", [c for c in COLLECTIVES if c.has_sizes], ids=lambda c: c.name
)
def test_one_wrong_value_at_one_rank_is_found(collective: Benchmark) -> None:
    meeting = Meeting(2)

    def spoil(call: str, rank: int, result: Any) -> Any:  # noqa: ANN401 - what the call returns
        victim = 1 if call in {"all_gather", "broadcast"} else 0  # of some calls rank 0 is the root
        if call == "max" or rank != victim:
            return result
        wrong = np.array(result[-1] if isinstance(result, list) else result)
        wrong[-1] += 1
        return [*result[:-1], wrong] if isinstance(result, list) else wrong

    meeting.spoil = spoil
    strategy = collective.strategies[0]
    rows = on_each_rank(
        meeting, lambda mesh: measure_row(mesh, collective, strategy, 64, seconds=1e-9)
    )
    assert [found.correct for found in rows] == [False, False]


def test_one_wrong_result_among_right_ones_is_found() -> None:
    meeting = Meeting(2)
    results = itertools.count()

    def spoil(call: str, rank: int, result: Any) -> Any:  # noqa: ANN401 - an array
        wrong = call == "all_reduce" and rank == 0 and next(results) == WARM_CALLS
        return result + 1 if wrong else result

    meeting.spoil = spoil
    found, _ = on_each_rank(
        meeting, lambda mesh: measure_row(mesh, COLLECTIVES[0], "ring", 64, seconds=1e-9)
    )
    assert next(results) == WARM_CALLS + found.calls > WARM_CALLS + 1
    assert not found.correct


@pytest.mark.parametrize("name", ["reduce", "gather"])
def test_whoever_gets_a_result_that_is_the_roots_is_found_wrong(name: str) -> None:
    (collective,) = (c for c in COLLECTIVES if c.name == name)
    meeting = Meeting(2)
    meeting.spoil = lambda _, rank, result: np.zeros(8) if rank and result is None else result

    found, _ = on_each_rank(
        meeting, lambda mesh: measure_row(mesh, collective, "", 64, seconds=1e-9)
    )
    assert not found.correct


@pytest.mark.parametrize(
    ("name", "factors"),
    [
        ("all_reduce", [1.0, 1.5]),
        ("all_reduce_shared", [1.0, 1.5]),
        ("reduce", [1.0, 1.0]),
        ("broadcast", [1.0, 1.0]),
        ("all_gather", [0.5, 0.75]),
        ("gather", [0.5, 0.75]),
        ("scatter", [0.5, 0.75]),
        ("reduce_scatter", [0.5, 0.75]),
        ("all_to_all", [0.5, 0.75]),
        ("sendrecv", [1.0, 1.0]),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(name: str, factors: list[float]) -> None:
    (collective,) = (c for c in COLLECTIVES if c.name == name)

    assert [collective.bus_factor(n) for n in (2, 4)] == factors


def test_a_row_tells_the_slowest_rank_and_both_bandwidths(faults: Faults) -> None:
    took = {0: [9.0, 9.0, 1.0, 2.0, 3.0, 4.0], 1: [9.0, 9.0, 2.0, 1.0, 5.0, 1.0]}
    reads = {rank: [t for s in times for t in (0.0, s)] for rank, times in took.items()}
    here = threading.local()
    faults.instead(time, "perf_counter", lambda: reads[here.rank].pop(0))

    def program(mesh: Mesh) -> BenchRow:
        here.rank = mesh.rank
        return measure_row(mesh, COLLECTIVES[0], "ring", 800, seconds=9.0 * 4)

    found, _ = on_each_rank(Meeting(2), program)

    assert (found.calls, found.min_s, found.median_s, found.p99_s) == (4, 2.0, 3.0, 5.0)
    assert found.algorithm_bytes_per_s == found.bus_bytes_per_s == 800 / 3.0


def test_a_row_of_quick_calls_ends_after_a_thousand(faults: Faults) -> None:
    clock(faults, 1e-7)
    found, _ = on_each_rank(
        Meeting(2), lambda mesh: measure_row(mesh, COLLECTIVES[-1], "", 0, seconds=1.0)
    )
    assert found.calls == MOST_CALLS
    assert found.bus_bytes_per_s is None


def test_rank_0_shows_the_table_and_the_others_say_who_does(
    meeting: Meeting, capsys: pytest.CaptureFixture[str]
) -> None:
    some = ("all_reduce", "broadcast", "barrier")
    options = ("--max-size", "4k", "--strategy", "ring", "--seconds", "1e-9")

    assert run_both(*options, *(word for name in some for word in ("--collective", name))) == [0, 0]

    captured = capsys.readouterr()
    first = [line.split()[:3] for line in captured.out.splitlines() if " KiB" in line]
    assert first == [
        ["all_reduce", "ring", "1"],
        ["all_reduce", "ring", "4"],
        ["broadcast", "1", "KiB"],
        ["broadcast", "4", "KiB"],
    ]
    assert captured.out.count("barrier") == 1
    assert "The agent of rank 0 works with" in captured.out
    assert captured.err == "measured; rank 0, on mac-1, shows the table\n"
    assert {call.split()[-1] for call in meeting.calls if "reduce" in call} == {"ring"}


@pytest.mark.usefixtures("meeting")
def test_whoever_asks_for_json_gets_what_can_be_plotted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--min-size", "4", "--max-size", "64", "--seconds", "1e-9")

    assert run_both(*small, "--json") == [0, 0]
    one, other = map(json.loads, capsys.readouterr().out.splitlines())
    assert one == other
    assert (one["schema"], one["names"]) == (1, ["mac-1", "mac-2"])
    assert one["native"] == (native.library() is not None)
    assert {r["collective"] for r in one["rows"]} == {c.name for c in COLLECTIVES}
    assert [r["bytes"] for r in one["rows"]][:3] == [4, 16, 64]
    report, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    report.write_text(json.dumps(one))
    assert run(["plot", str(report), "--output", str(plot)]) == 0
    assert plot.read_bytes().startswith(PNG)
    assert capsys.readouterr().out == f"{plot}: {len(one['rows'])} rows of {report}\n"


@pytest.mark.usefixtures("meeting")
def test_machines_that_were_asked_for_different_rows_both_learn_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_both("--max-size", "1KiB", other=("--max-size", "4KiB")) == [1, 1]
    lines = capsys.readouterr().err.splitlines()
    assert lines == [lines[0]] * 2
    assert lines[0].startswith("UsageError: the machines were given different sizes, ")


def test_equal_plans_are_alike_however_they_were_written() -> None:
    def options(largest: str) -> BenchPlan:
        return bench.plan_of(
            bench.BenchOptions(
                min_size="1KiB",
                max_size=largest,
                collectives=(),
                strategies=(),
                seconds=1.0,
                wait_for=None,
                as_json=False,
            )
        )

    def program(mesh: Mesh) -> None:
        check_alike(mesh, options("1MiB" if mesh.rank else "1048576"))

    on_each_rank(Meeting(2), program)
    with pytest.raises(UsageError):
        on_each_rank(
            Meeting(2), lambda mesh: check_alike(mesh, options("4k" if mesh.rank else "1k"))
        )


def test_a_wrong_result_is_shown_and_fails_the_command(
    meeting: Meeting, capsys: pytest.CaptureFixture[str]
) -> None:
    meeting.spoil = lambda call, _, x: x + 1 if call == "broadcast" else x

    assert run_both("--max-size", "1KiB", "--seconds", "1e-9") == [1, 1]

    captured = capsys.readouterr()
    assert [line.split()[0] for line in captured.out.splitlines() if "NO" in line] == ["broadcast"]
    assert "RunError: 1 of 17 rows had wrong results: broadcast; report this" in captured.err


def test_a_lost_machine_ends_the_measurement_by_name(
    meeting: Meeting, capsys: pytest.CaptureFixture[str]
) -> None:
    def spoil(call: str, _: int, result: Any) -> Any:  # noqa: ANN401 - an array
        if call == "broadcast":
            meeting.names = ("mac-1",)
        return result

    meeting.spoil = spoil
    assert run_both("--max-size", "1KiB", "--seconds", "1e-9") == [1, 1]
    assert "RankLost: mac-2 is lost, " in capsys.readouterr().err


def test_without_a_number_it_waits_for_all_machines_of_the_mesh_and_names_them(
    socket: Path, faults: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[object] = []

    def alone(mesh: Mesh) -> int:
        def connected(*what: object) -> Mesh:
            asked.extend(what)
            return mesh

        faults.instead(bench, "connect", connected)
        return run(["bench", "--max-size", "1KiB", "--seconds", "1e-9"])

    with agent_at(socket, answer_well):
        assert SimulatedMesh(1).run(alone) == [0]
    assert asked == ["bench", 3, 300.0, socket.parent]
    assert capsys.readouterr().err == "waiting until 'pmesh bench' runs on mac-1, mac-2, studio\n"


@pytest.mark.parametrize("size", ["4294967296GiB", "99999999999GiB"])
def test_an_array_that_no_machine_has_memory_for_is_named_with_what_to_type(
    size: str, socket: Path, faults: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    def alone(mesh: Mesh) -> int:
        faults.instead(bench, "connect", lambda *_: mesh)
        return run(["bench", "--wait-for", "1", "--min-size", size, "--max-size", size])

    with agent_at(socket, answer_well):
        assert SimulatedMesh(1).run(alone) == [1]
    said = capsys.readouterr().err
    assert said.endswith(
        f"has no memory for arrays of {size.replace('G', ' G')}; give a smaller "
        "--max-size, the same on all machines\n"
    )


def test_an_agent_that_is_alone_is_told_what_to_do(
    socket: Path, faults: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    import msgspec  # noqa: PLC0415

    from pmesh.agent.schema import decode_status  # noqa: PLC0415

    def alone(data: bytes) -> object:
        status = decode_status(data)
        view = msgspec.structs.replace(status.view, members=status.view.members[:1])
        return msgspec.structs.replace(status, view=view)

    faults.instead(bench, "decode_status", alone)
    with agent_at(socket, answer_well):
        assert run(["bench"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("UsageError: this agent has met no other machine")
    assert "'pmesh bench --wait-for 2' twice" in error


@pytest.mark.parametrize("options", [[], ["--wait-for", "2"]])
def test_without_an_agent_the_socket_and_the_command_are_named(
    socket: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", *options]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"AgentNotRunning: no agent listens at {socket}")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-size", "1TB"], "--max-size must be a number of bytes, at least 4, such as 4096, "),
        (["--min-size", "3"], "--min-size must be a number of bytes, at least 4, "),
        (["--min-size", "2MiB", "--max-size", "1MiB"], "--min-size 2MiB is above --max-size 1MiB"),
        (["--collective", "sum"], "--collective must be one of all_reduce, all_reduce_shared, "),
        (["--strategy", "star"], "--strategy must be one of auto, ring, tree, "),
        (["--seconds", "0"], "--seconds must be over 0 and at most 3600, not 0"),
    ],
)
def test_what_it_can_not_do_is_said_before_anybody_waits(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ConfigError: {message}")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "size"), [("4", 4), ("64KiB", 65536), ("3 MB", 3 << 20), ("1g", 1 << 30)]
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_size("--max-size", text) == size
