"""The home directory and its lock: rows of the failure table."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pmesh.agent.home import LOCK_NAME, hold_home, open_home
from pmesh.errors import AgentAlreadyRunning, ConfigError


def test_a_home_is_made_for_its_user_alone(tmp_path: Path) -> None:
    home = open_home(tmp_path / "new" / "home")
    assert home.stat().st_mode & 0o777 == 0o700
    assert open_home(home) == home


def test_a_home_that_others_can_enter_is_refused_with_the_command(tmp_path: Path) -> None:
    home = tmp_path / "my home"
    home.mkdir()
    home.chmod(0o750)
    with pytest.raises(ConfigError, match=r"run: chmod 700 '.*my home'$"):
        open_home(home)
    home.chmod(0o700)
    assert open_home(home) == home


def test_a_home_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="another user"):
        open_home(tmp_path)


def test_a_home_that_is_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(ConfigError, match="--home"):
        open_home(path)


def test_a_second_agent_is_refused_by_the_pid_of_the_first(tmp_path: Path) -> None:
    second = (
        "import sys, pathlib; from pmesh.agent.home import hold_home\n"
        "with hold_home(pathlib.Path(sys.argv[1])): pass"
    )
    command = [sys.executable, "-c", second, str(tmp_path)]
    with hold_home(tmp_path):
        refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert f"AgentAlreadyRunning: an agent runs in {tmp_path} already: pid {os.getpid()};" in (
        refused.stderr
    )
    assert subprocess.run(command, check=False).returncode == 0


def test_a_second_agent_is_refused_while_the_first_has_not_written_its_pid(tmp_path: Path) -> None:
    with hold_home(tmp_path):
        (tmp_path / LOCK_NAME).write_text("")
        with pytest.raises(AgentAlreadyRunning, match="just starting"), hold_home(tmp_path):
            pass


def test_the_lock_of_a_killed_agent_is_free(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_text("12345\n")
    with hold_home(tmp_path):
        assert (tmp_path / LOCK_NAME).read_text() == f"{os.getpid()}\n"
    assert not (tmp_path / LOCK_NAME).read_text()


def test_a_lock_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).mkdir()
    with pytest.raises(ConfigError, match=LOCK_NAME), hold_home(tmp_path):
        pass
