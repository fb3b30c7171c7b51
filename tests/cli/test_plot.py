"""`pmesh plot`, against an agent that answers, and of a file of `pmesh bench --json`."""

import json
import socket as sockets
from pathlib import Path

import pytest

from pmesh.charts.wire import JobCharts
from pmesh.cli import plot
from pmesh.cli.app import run
from pmesh.cli.bench import BenchRow
from pmesh.cli.plot import draw_bench
from pmesh.core.values import Verdict
from pmesh.core.wire.framing import frame
from pmesh.core.wire.session import Refused, encode
from simulation.wire import AnyReply
from tests.worlds.fake_status_agent import Answer, agent_at
from tests.worlds.faults import Faults

LOSSES = JobCharts(
    720, 5.0, {"steps a second": ((700, 720), (2.0, 3.0)), "loss": ((600, 601, 700), (3.0, 2.0, 1))}
)
SPEED = JobCharts(720, 5.0, {"ops a second": ((720,), (3.0,))})
PNG = b"\x89PNG"


def answering(reply: AnyReply) -> Answer:
    def answer(connection: sockets.socket) -> None:
        connection.recv(4096)
        connection.sendall(frame(encode(reply)))

    return answer


@pytest.fixture(autouse=True)
def _home(socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(socket.parent)


def test_each_number_of_a_job_has_a_chart_with_its_loss_first(
    socket: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with agent_at(socket, answering(LOSSES)):
        assert run(["plot", "digits/é", "--output", "a.svg"]) == 0

    assert capsys.readouterr() == ("a.svg: steps a second, loss\n", "")
    drawn = Path("a.svg").read_text()
    texts = [drawn.index(f"<!-- {text} -->") for text in ("loss", "steps a second")]
    assert texts == sorted(texts)
    assert "<!-- job digits/é -->" in drawn


def test_a_job_without_reports_has_its_speed_and_is_told_how_to_report(
    socket: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with agent_at(socket, answering(SPEED)):
        assert run(["plot", "digits"]) == 0

    assert Path("pmesh-plot-digits.png").read_bytes().startswith(PNG)
    assert capsys.readouterr().err == (
        "job 'digits' has reported no number: call mesh.report(loss=…) in each step\n"
    )


def row(nbytes: int, *, collective: str = "all_reduce", strategy: str | None = "ring") -> BenchRow:
    return BenchRow(
        collective=collective,
        strategy=strategy,
        bytes=nbytes,
        calls=3,
        min_s=0.1,
        median_s=0.2,
        p99_s=0.3,
        algorithm_bytes_per_s=5.0,
        bus_bytes_per_s=None if nbytes == 0 else 5.0,
        correct=True,
    )


def test_a_bench_has_a_line_for_each_collective_and_strategy(tmp_path: Path) -> None:
    rows = [row(4), row(1 << 22), row(4, collective="broadcast", strategy=None)]
    barrier = row(0, collective="barrier", strategy=None)

    draw_bench(["mac-1", "mac-2"], [*rows, barrier]).savefig(tmp_path / "plot.svg")

    drawn = (tmp_path / "plot.svg").read_text()
    assert drawn.count("<!-- all_reduce ring -->") == drawn.count("<!-- broadcast -->") == 1
    assert "barrier" not in drawn


def test_what_the_agent_refuses_and_what_the_disk_does_is_said(
    socket: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with agent_at(socket, answering(Refused(Verdict("UsageError", "no job 'x' ran")))):
        assert run(["plot", "x"]) == 1
    assert capsys.readouterr().err == "UsageError: no job 'x' ran\n"
    with agent_at(socket, answering(SPEED)):
        assert run(["plot", "x", "--output", "none/a.png"]) == 1
    assert "can't write none/a.png: No such file or directory; choose" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["digits", "--output", "a.doc"], "--output a.doc: the file name must end in one of "),
        (["digits", "--output", "a.pgf"], "--output a.pgf: the file name must end in one of "),
        (["a\nb"], r"no job has the name 'a\nb'; 'pmesh status' shows those that run"),
        (["no.json"], "can't read no.json: No such file or directory; write it by 'pmesh bench "),
        (["other.json"], "other.json is not what 'pmesh bench --json' prints: Object missing "),
    ],
)
def test_what_can_not_be_drawn_is_said_in_one_line(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("other.json").write_text(json.dumps({"schema": 1}))
    assert run(["plot", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"ConfigError: {error}")
    assert said.count("\n") == 1


def test_without_matplotlib_the_command_that_gets_it_is_named(
    faults: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    faults.skip(plot, "find_spec")

    assert run(["plot", "digits"]) == 2
    assert capsys.readouterr().err == (
        "ConfigError: pmesh plot needs matplotlib: pip install matplotlib\n"
    )
