"""`pmesh trace`, against an agent that answers."""

import gzip
import json
import socket as sockets
from pathlib import Path
from typing import Any

import pytest

from pmesh.cli.app import run
from pmesh.core.values import Verdict
from pmesh.core.wire.framing import frame
from pmesh.core.wire.session import Refused, encode
from pmesh.home_paths import home_directory, socket_path
from pmesh.ids import JobName
from pmesh.traces.wire import Traced, TracedEvent, TracedMachine
from simulation.wire import AnyReply
from tests.traces.histories import BEGAN_US, machine, op, told
from tests.worlds.fake_status_agent import Answer, agent_at

TRACED = Traced(
    "0.1.0",
    BEGAN_US + 10_000,
    (
        machine(0, me=True),
        machine(1, error_us=120),
        TracedMachine(name="mac-2", me=False, clock=(), why_not="it has not answered within 5 s"),
    ),
    (TracedEvent(BEGAN_US + 5, 0, "rank lost", "job 'digits': rank 2 is lost"),),
)
JOB = JobName("digits/é")
TIMES = op(0, BEGAN_US, BEGAN_US + 9_000), op(1, BEGAN_US + 9_500, BEGAN_US + 10_000)
QUICK = told(0, TIMES, job=JOB)
SLOW = told(1, (op(0, BEGAN_US + 6_000, BEGAN_US + 9_000),), job=JOB)


@pytest.fixture
def socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("PMESH_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return socket_path(home_directory())


def answering(*replies: AnyReply) -> Answer:
    def answer(connection: sockets.socket) -> None:
        connection.recv(4096)
        connection.sendall(b"".join(frame(encode(reply)) for reply in replies))

    return answer


def test_the_file_has_all_calls_and_the_table_where_the_time_went(
    socket: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with agent_at(socket, answering(QUICK, SLOW, TRACED)):
        assert run(["trace", JOB, "--seconds", "1"]) == 0

    shown = capsys.readouterr()
    lines = [line.split() for line in shown.out.splitlines()]
    assert lines[1] == ["0", "mac-0", "2", "5", "%", "60", "%", "35", "%"]
    assert lines[2] == ["1", "mac-1", "1", "0", "%", "0", "%", "100", "%"]
    assert shown.out.endswith(
        "pmesh-trace-digits_é.json.gz: 3 calls, on one clock within 0.120 ms; "
        "open it at https://ui.perfetto.dev\n"
    )
    assert shown.err == "mac-2: it has not answered within 5 s\n"
    data = gzip.decompress((tmp_path / "pmesh-trace-digits_é.json.gz").read_bytes())
    found: dict[str, Any] = json.loads(data)
    assert found["otherData"] == {
        "job": "digits/é",
        "seconds": 1,
        "pmesh": "0.1.0",
        "clock": "mac-0",
        "clock_error_us": 120,
        "left_out": ["mac-2: it has not answered within 5 s"],
    }
    assert [each["name"] for each in found["traceEvents"] if each["ph"] == "i"] == ["rank lost"]
    assert sum(each["name"] == "all_reduce" for each in found["traceEvents"]) == 3


def test_a_run_that_has_ended_before_is_left_out_and_named(
    socket: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = told(0, TIMES[:1], job=JOB, run=2)
    for earlier, words in (((QUICK,), "an earlier run is"), ((QUICK, again), "2 earlier runs are")):
        latest = told(1, TIMES, job=JOB, run=3)
        with agent_at(socket, answering(*earlier, latest, TRACED)):
            assert run(["trace", JOB]) == 0
        out, err = capsys.readouterr()
        assert len(out.splitlines()) == 3
        assert f"{words} left out; 'pmesh trace' right after a run shows that one\n" in err


def test_a_file_that_is_named_json_is_not_compressed(socket: Path, tmp_path: Path) -> None:
    with agent_at(socket, answering(QUICK, SLOW, TRACED)):
        assert run(["trace", "digits", "--output", "a.json"]) == 0
    assert json.loads((tmp_path / "a.json").read_bytes())["displayTimeUnit"] == "ms"


def test_a_file_that_cannot_be_written_is_an_error(
    socket: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with agent_at(socket, answering(QUICK, SLOW, TRACED)):
        assert run(["trace", "digits", "--output", "none/a.json"]) == 1
    assert capsys.readouterr().err == (
        "UsageError: can't write none/a.json: No such file or directory; "
        "choose another file with --output\n"
    )


def test_what_the_agent_refuses_is_said(socket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with agent_at(socket, answering(Refused(Verdict("UsageError", "no call of job 'x'")))):
        assert run(["trace", "x"]) == 1
    assert capsys.readouterr().err == "UsageError: no call of job 'x'\n"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["digits", "--seconds", "0"], "--seconds is above 0 and at most 3600, not 0"),
        (["digits", "--seconds", "nan"], "--seconds is above 0 and at most 3600, not nan"),
        (["a\nb"], r"no job has the name 'a\nb'; 'pmesh status' shows those that run"),
        (["x" * 65], f"no job has the name {'x' * 65!r}; 'pmesh status' shows those that run"),
    ],
)
def test_options_without_sense_are_errors(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["trace", *arguments]) == 2
    assert capsys.readouterr().err == f"ConfigError: {error}\n"
