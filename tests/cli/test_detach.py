"""`pmesh up --detach`: the parent reports what became of the agent."""

import os
import sys
from pathlib import Path

import pytest

from pmesh.cli import up
from pmesh.cli.up import start_detached
from pmesh.client.control import ask_status
from pmesh.errors import AgentStopped
from tests.worlds import fake_status_agent
from tests.worlds.faults import Faults


def start(directory: Path, deed: str) -> int:
    return start_detached(
        [sys.executable, fake_status_agent.__file__, str(directory / "agent.sock"), deed],
        environment=dict(os.environ, PMESH_NAME="studio", PYTHONPATH=os.pathsep.join(sys.path)),
        home=directory,
    )


def test_it_returns_when_the_agent_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(tmp_path, "serve") == 0
    pid = int(capsys.readouterr().out.split("pid ")[1].split(",")[0])
    ask_status(tmp_path)  # the agent's second and last answer
    os.waitpid(pid, 0)
    log = tmp_path / "agent.log"
    assert log.read_text() == "studio True\n"  # it leads a session: no terminal can end it
    assert log.stat().st_mode & 0o777 == 0o600


def test_what_a_failing_agent_wrote_is_shown_with_its_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "agent.log").write_text("of yesterday\n")
    assert start(tmp_path, "fail") == 1
    assert capsys.readouterr().err == "studio True\nPortTaken: 24160\n"
    assert (tmp_path / "agent.log").read_text().startswith("of yesterday\n")


def test_the_answer_of_another_agent_that_was_faster_is_not_taken_for_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_status_agent.agent_at(tmp_path / "agent.sock", fake_status_agent.answer_well):
        assert start(tmp_path, "come second") == 1
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "studio True\nAgentAlreadyRunning: another was faster\n")


def test_an_agent_that_just_ends_is_a_failure(tmp_path: Path) -> None:
    assert start(tmp_path, "end") == 1


def test_an_agent_that_does_not_answer_is_killed_and_its_log_named(
    tmp_path: Path, faults: Faults
) -> None:
    faults.limit(up, "START_TIMEOUT_S", 0.1)
    with pytest.raises(AgentStopped, match=r"within 0\.1 s; see .*agent\.log"):
        start(tmp_path, "hang")
