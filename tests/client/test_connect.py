import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import pmesh
from pmesh.client.session.connection import AgentConnection
from pmesh.core.values import Terms, Verdict
from pmesh.core.wire.session import SESSION_VERSION, Refused
from pmesh.core.wire.trainer import TRAINER_REPLIES, Connect
from pmesh.ids import JobName
from tests.worlds.faults import Faults
from tests.worlds.scripted_agent import ScriptedAgent, TrainerSocket, joins, replies
from tests.worlds.system import be_called
from tests.worlds.watched_agent import WatchedAgent


def test_without_an_agent_the_error_names_the_socket_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(pmesh.AgentNotRunning, match=r"agent\.sock .*'pmesh up'"):
        pmesh.connect("job", home=tmp_path / "none")


def test_a_socket_whose_agent_was_killed_counts_as_no_agent(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / "agent.sock"))
    with pytest.raises(pmesh.AgentNotRunning):
        pmesh.connect("job", home=tmp_path)


@pytest.fixture
def crowd(tmp_path: Path) -> Iterator[socket.socket]:
    """A listener before whom as many wait as the system lets wait."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(tmp_path / "agent.sock"))
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)  # noqa: FBT003 - the name of the call says it
                waiting.connect(str(tmp_path / "agent.sock"))
        yield listener


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a full queue looks like nobody")
class TestAnAgentWithACrowdAtItsDoor:
    def test_is_waited_for(self, tmp_path: Path, crowd: socket.socket, faults: Faults) -> None:
        def meanwhile(_: float) -> None:
            crowd.accept()[0].close()

        faults.instead(time, "sleep", meanwhile)
        AgentConnection(tmp_path, TRAINER_REPLIES).close()

    @pytest.mark.usefixtures("crowd")
    def test_is_not_waited_for_longer_than_for_any_answer(self, tmp_path: Path) -> None:
        with pytest.raises(pmesh.AgentStopped, match=r"has not answered for 0\.02 s"):
            AgentConnection(tmp_path, TRAINER_REPLIES, silence_s=0.02)


def test_the_home_comes_from_the_environment(
    agent: WatchedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMESH_HOME", str(agent.home))
    with pmesh.connect("job") as mesh:
        assert mesh.size == 1


def test_too_few_ranks_in_time_is_what_the_agent_says(agent: WatchedAgent) -> None:
    with pytest.raises(pmesh.NotEnoughRanks, match="1 of 2 trainers of job 'job' are here"):
        pmesh.connect("job", wait_for=2, timeout_s=0.05, home=agent.home)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("JobRunning", pmesh.JobRunning),
        ("HistorySuperseded", pmesh.HistorySuperseded),
        ("NewInAVersionToCome", pmesh.RunError),
        ("ClassVar", pmesh.RunError),
        ("ProtocolError", pmesh.RunError),
        ("__doc__", pmesh.RunError),
    ],
)
def test_a_refusal_is_the_error_that_it_names(
    tmp_path: Path, error: str, expected: type[Exception]
) -> None:
    with ScriptedAgent(tmp_path, replies(Refused(Verdict(error, "because")))):
        with pytest.raises(pmesh.PmeshError, match="because") as caught:
            pmesh.connect("job", home=tmp_path)
        assert type(caught.value) is expected


def test_the_agent_is_told_what_runs_and_on_what_terms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    def look(trainer: TrainerSocket, request: object) -> None:
        seen.append(request)
        joins(trainer, request)  # type: ignore[arg-type] # a Connect

    be_called(monkeypatch, "/home/me/train.py", "--fast")
    with ScriptedAgent(tmp_path, look):
        pmesh.connect(
            "digits",
            wait_for=3,
            timeout_s=7,
            home=tmp_path,
            min_ranks=2,
            on_loss="raise",
            quorum="majority",
            straggler_after_s=5,
        ).close()
    assert seen == [
        Connect(
            version=SESSION_VERSION,
            job=JobName("digits"),
            wait_for=3,
            timeout_s=7.0,
            program="train.py",
            terms=Terms(min_ranks=2, on_loss="raise", quorum="majority"),
            straggler_after_s=5.0,
        )
    ]


def test_without_other_wishes_a_job_goes_on_with_whoever_is_left(tmp_path: Path) -> None:
    seen: list[object] = []

    def look(trainer: TrainerSocket, request: object) -> None:
        seen.append(request)
        joins(trainer, request)  # type: ignore[arg-type] # a Connect

    with ScriptedAgent(tmp_path, look):
        pmesh.connect("digits", home=tmp_path).close()
    (request,) = seen
    assert isinstance(request, Connect)
    assert (request.terms, request.straggler_after_s) == (Terms(1, "continue", "any"), 60.0)


@pytest.mark.parametrize(
    "argv", [[], [""], ["x" * 300], [os.fsdecode(b"caf\xe9.py")], ["a\n\x1b[2J.py"]]
)
def test_any_program_name_will_do(
    agent: WatchedAgent, monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    be_called(monkeypatch, *argv)
    pmesh.connect("job", home=agent.home).close()


@pytest.mark.parametrize(
    ("job", "wait_for", "timeout_s"),
    [
        ("", 1, 1),
        ("x" * 65, 1, 1),
        ("a\nb", 1, 1),
        ("job", 0, 1),
        ("job", 1025, 1),
        ("job", 1, 0),
        ("job", 1, -1),
    ],
)
def test_terms_without_meaning_are_refused_before_anyone_is_asked(
    tmp_path: Path, job: str, wait_for: int, timeout_s: float
) -> None:
    with pytest.raises(pmesh.UsageError) as caught:
        pmesh.connect(job, wait_for, timeout_s, tmp_path)
    assert type(caught.value) is pmesh.UsageError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wait_for": "2"}, "wait_for is a whole number, not '2'"),
        ({"min_ranks": 0}, "min_ranks is at least 1 and at most 1024, not 0"),
        ({"min_ranks": 1025}, "min_ranks is at least 1 and at most 1024, not 1025"),
        ({"on_loss": "ignore"}, "on_loss is 'continue' or 'raise', not 'ignore'"),
        ({"quorum": "all"}, "quorum is 'any' or 'majority', not 'all'"),
        ({"on_superseded": "continue"}, "on_superseded is 'raise' or 'sync', not 'continue'"),
        ({"straggler_after_s": 0}, "straggler_after_s is more than 0, not 0"),
    ],
)
def test_options_without_meaning_are_refused_with_what_is_allowed(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(pmesh.UsageError, match=f"^{message}$") as caught:
        pmesh.connect("job", home=tmp_path, **options)
    assert type(caught.value) is pmesh.UsageError


def modules_after(code: str) -> set[str]:
    code = f"import sys; {code}; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


def test_a_trainer_gets_no_event_loop_and_no_library_that_it_does_not_use() -> None:
    loaded = modules_after("import pmesh; pmesh.connect")
    assert "pmesh.client.mesh" in loaded
    unwanted = {"trio", "asyncio", "mlx", "torch", "zeroconf", "networkx", "structlog", "psutil"}
    assert not loaded & unwanted


def test_importing_pmesh_alone_costs_next_to_nothing() -> None:
    assert not modules_after("import pmesh") & {"numpy", "msgspec", "pmesh.client"}


def test_every_public_name_is_there_and_no_other() -> None:
    assert all(hasattr(pmesh, name) for name in pmesh.__all__)
    assert not hasattr(pmesh, "disconnect")


def test_tab_completion_lists_what_the_package_offers() -> None:
    assert set(dir(pmesh)) == {*pmesh.__all__, "errors"}


def test_the_version_is_that_of_the_installed_package() -> None:
    assert pmesh.__version__ == version("pmesh-agent")


def test_the_job_comes_from_pmesh_run_where_none_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(pmesh.UsageError, match="a job needs a name"):
        pmesh.connect()
    monkeypatch.setenv("PMESH_JOB", "")
    number: Any = 3
    with pytest.raises(pmesh.UsageError, match="job is a name, such as 'mnist', not 3"):
        pmesh.connect(number)
    with pytest.raises(pmesh.UsageError, match="a job's name has 1 to 64 characters"):
        pmesh.connect()
    with pytest.raises(pmesh.UsageError, match="fewer if they are not ASCII"):
        pmesh.connect("ü" * 33)
    monkeypatch.setenv("PMESH_JOB", "digits")
    monkeypatch.setenv("PMESH_WAIT_FOR", "three")
    with pytest.raises(
        pmesh.UsageError, match="PMESH_WAIT_FOR is a number of trainers, not 'three'"
    ):
        pmesh.connect()
    monkeypatch.setenv("PMESH_WAIT_FOR", "0")
    with pytest.raises(pmesh.UsageError, match="wait_for is at least 1"):
        pmesh.connect()
    tmp_path.chmod(0o700)
    monkeypatch.setenv("PMESH_WAIT_FOR", "3")
    monkeypatch.setenv("PMESH_PLACE", "second")
    with pytest.raises(pmesh.UsageError, match="PMESH_PLACE is a rank, not 'second'"):
        pmesh.connect(home=tmp_path)
    monkeypatch.setenv("PMESH_PLACE", "1")
    with pytest.raises(pmesh.AgentNotRunning):
        pmesh.connect(home=tmp_path)
