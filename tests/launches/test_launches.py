"""`pmesh ps` on a terminal, against an agent that answers."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from pmesh.cli.app import run
from pmesh.core.wire.framing import frame
from pmesh.core.wire.session import encode
from pmesh.home_paths import home_directory, socket_path
from pmesh.launches.wire.messages import LaunchRow, LaunchRows
from tests.worlds.fake_status_agent import agent_at

MANY = tuple(f"mac-studio-{number}" for number in range(1, 9))


def row(number: int, *, ended: bool = True, job: str = "") -> LaunchRow:
    """A launch with a long command; the higher its number, the older it is."""
    launch = f"{number:012x}"
    return LaunchRow(
        launch=launch,
        job=job or launch,
        command="python train.py --data /Volumes/data/shards --epochs 100 --rate 3e-4",
        starter="mac-studio-1",
        here=True,
        machines=MANY,
        state="over" if ended else "running",
        age_s=60.0 * number,
        code=1 if ended else None,
    )


@pytest.fixture
def ps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """Run `pmesh ps` with these options on a terminal of 80 columns; returns its lines."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("PMESH_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")

    def call(rows: list[LaunchRow], *options: str) -> list[str]:
        def answer(connection: socket.socket) -> None:
            connection.recv(4096)
            for some in (tuple(rows), ()):
                connection.sendall(frame(encode(LaunchRows(some))))

        with agent_at(socket_path(home_directory()), answer):
            assert run(["ps", *options]) == 0
        return [line.rstrip() for line in capsys.readouterr().out.splitlines()]

    return call


def test_twenty_launches_are_a_line_each_the_newest_last(ps: Callable[..., list[str]]) -> None:
    lines = ps([row(number) for number in range(1, 21)])
    assert [line.split()[0] for line in lines[1:-1]] == [f"{n:012x}" for n in range(10, 0, -1)]
    assert lines[-1] == "10 older ones: pmesh ps --all"
    assert max(map(len, lines)) <= 80
    assert all("failed: 1" in line and "python" in line for line in lines[1:-1])


def test_what_still_runs_is_shown_however_old(ps: Callable[..., list[str]]) -> None:
    old = [row(99, ended=False, job="digits")]
    lines = ps([row(number) for number in range(1, 13)] + old)
    assert lines[1].split()[:3] == [f"{99:012x}", "digits", "running"]
    assert lines[-1] == "2 older ones: pmesh ps --all"


def test_all_shows_whole_commands_and_who_started_them(ps: Callable[..., list[str]]) -> None:
    whole = " ".join(" ".join(ps([row(number) for number in range(1, 13)], "--all")).split())
    assert whole.count("python train.py --data /Volumes/data/shards") == 12
    assert whole.index(f"{12:012x}") < whole.index(f"{1:012x}")
    assert "mac-studio-1 (this one)" in whole
    assert "mac-studio-8" in whole
