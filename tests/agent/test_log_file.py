"""An agent's log is moved aside when it is full."""

import subprocess
import sys
from pathlib import Path

import pytest

from pmesh.agent import home
from pmesh.agent.home import LogFile
from pmesh.errors import ConfigError
from tests.worlds.faults import Faults

WRITER = r"""
import sys
from pathlib import Path
from pmesh.agent.home import LogFile
from pmesh.terminal.lines import dropping_lines, say
log = dropping_lines(sys.stderr, LogFile(Path(sys.argv[1]), max_bytes=100).rotate_if_full)
for number in range(int(sys.argv[2])):
    log.write(f"line {number:5}\n")
    log.flush()
say("the end")
"""


def write(log: Path, lines: int, *, into: Path | None = None) -> None:
    with (into or log).open("ab") as output:
        program = [sys.executable, "-c", WRITER, str(log), str(lines)]
        subprocess.run(program, stdout=output, stderr=output, check=True)


def test_a_full_log_is_moved_aside_and_none_of_the_latest_lines_is_lost(tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    write(log, 33)
    old, new = tmp_path / "agent.log.1", log
    assert sorted(tmp_path.iterdir()) == [new, old]
    assert old.stat().st_size <= 100 + len("line     0\n")
    assert new.stat().st_size < 100 + len("the end\n")
    lines = (old.read_text() + new.read_text()).splitlines()
    assert lines == [f"line {number:5}" for number in range(33 - len(lines) + 1, 33)] + ["the end"]


def test_a_short_log_stays(tmp_path: Path) -> None:
    write(tmp_path / "agent.log", 5)
    assert [file.name for file in tmp_path.iterdir()] == ["agent.log"]


@pytest.mark.parametrize("before", [["agent.log"], []])
def test_what_is_not_the_log_is_never_moved(tmp_path: Path, before: list[str]) -> None:
    """Standard error of an agent that runs in a terminal, or whose output the user keeps."""
    log, other = tmp_path / "agent.log", tmp_path / "mine.txt"
    for name in before:
        tmp_path.joinpath(name).write_text("of an agent before")
    write(log, 33, into=other)
    assert len(other.read_text().splitlines()) == 34
    assert [file.name for file in sorted(tmp_path.iterdir())] == [*before, "mine.txt"]


def test_a_log_for_which_there_can_be_no_new_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: Faults
) -> None:
    log = tmp_path / "agent.log"
    log.write_text("full")
    faults.instead(home, "open_own_file", _refuse)
    with log.open("a") as output:
        monkeypatch.setattr(home, "_OUTPUTS", (-1, output.fileno()))
        LogFile(log, max_bytes=1).rotate_if_full()
        LogFile(log, max_bytes=1).rotate_if_full()
        output.write(", and more")
    assert (tmp_path / "agent.log.1").read_text() == "full, and more"


def _refuse(*_: object) -> int:
    raise ConfigError("refused")


def test_a_log_that_cant_be_moved_goes_on(tmp_path: Path) -> None:
    (tmp_path / "agent.log.1").mkdir()
    (tmp_path / "agent.log.1" / "a file").touch()
    write(tmp_path / "agent.log", 33)
    assert len((tmp_path / "agent.log").read_text().splitlines()) == 34


def test_the_new_log_is_its_users_alone(tmp_path: Path) -> None:
    write(tmp_path / "agent.log", 33)
    assert (tmp_path / "agent.log").stat().st_mode & 0o777 == 0o600
