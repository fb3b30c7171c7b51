"""`pmesh up`: what the agent is started with, and how it ends. The agent itself is faked."""

import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import trio

from pmesh.agent.config import AgentSettings, Listen
from pmesh.agent.home import hold_home, load_mesh_key, store_mesh_key
from pmesh.cli import up
from pmesh.cli.app import run
from pmesh.core.identity.keys import MeshKey, NodeKey, mesh_key_text
from pmesh.core.wire.link import Address
from pmesh.errors import ConfigError, PeerUnreachable, PortTaken
from pmesh.home_paths import socket_path
from pmesh.terminal.lines import ending_signals
from tests.cli.homes import use_agent, use_home
from tests.worlds.fake_status_agent import agent_at, answer_well
from tests.worlds.faults import Faults, InjectedFault
from tests.worlds.system import type_in

KEY = MeshKey(bytes(range(32)))
LOOPBACK = socket.if_nameindex()[0][1]


class Start(NamedTuple):
    """What an agent was started with."""

    settings: AgentSettings
    mesh_key: MeshKey
    node_key: NodeKey


class FakeAgent:
    """Notes how it is started, then does as told."""

    def __init__(self) -> None:
        self.starts: list[Start] = []
        self.then: Callable[[], None] = lambda: None

    async def run(
        self,
        settings: AgentSettings,
        mesh_key: MeshKey,
        node_key: NodeKey,
        announce: Callable[[str], None],
    ) -> None:
        self.starts.append(Start(settings, mesh_key, node_key))
        announce("mac-2 joined")
        announce("the ring: mac-1 →\nmac-2")  # a line break would let one begin a line of ours
        self.then()
        await trio.lowlevel.checkpoint()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_home(tmp_path, monkeypatch)
    return tmp_path


@pytest.fixture
def agent(home: Path, monkeypatch: pytest.MonkeyPatch) -> FakeAgent:
    fake = FakeAgent()
    use_agent(fake.run, monkeypatch)
    store_mesh_key(home, KEY)
    return fake


def test_every_option_reaches_the_agent(agent: FakeAgent, home: Path) -> None:
    options = "--name studio --listen 127.0.0.1:0 --peer a:1 --peer [::1]:2 --no-mdns --min-peers 2"
    more = "--compression topk --log-level debug --log-json"
    names = ["--interface", LOOPBACK, "--not-interface", LOOPBACK]
    assert run(["up", *options.split(), *more.split(), *names]) == 0
    assert agent.starts[0].settings == AgentSettings(
        home=home,
        name="studio",
        listen=Listen("127.0.0.1", 0),
        peers=(Address("a", 1), Address("::1", 2)),
        interfaces=(LOOPBACK,),
        not_interfaces=(LOOPBACK,),
        mdns=False,
        min_peers=2,
        compression="topk",
        log_level="debug",
        log_json=True,
    )


def test_no_collection_looks_through_the_modules_while_the_agent_runs(
    agent: FakeAgent, freezing: InjectedFault
) -> None:
    freezing.end()
    looked_at = list[int]()
    agent.then = lambda: looked_at.append(len(gc.get_objects()))
    gc.unfreeze()  # what the tests have frozen: the agent does so again
    before = len(gc.get_objects())
    assert run(["up"]) == 0
    assert looked_at[0] < before / 10


def test_without_options_variables_count(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMESH_NAME", "from-variable")
    monkeypatch.setenv("PMESH_MDNS", "0")
    assert run(["up"]) == 0
    settings = agent.starts[0].settings
    assert (settings.name, settings.mdns) == ("from-variable", False)


def test_the_node_keeps_its_identity_from_start_to_start(agent: FakeAgent) -> None:
    assert run(["up"]) == run(["up"]) == 0
    first, second = agent.starts
    assert first.node_key.node == second.node_key.node
    assert first.mesh_key == second.mesh_key == KEY


def test_a_first_up_makes_a_key_and_says_how_to_add_a_machine_without_showing_it(
    agent: FakeAgent, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "mesh_key").unlink()
    assert run(["up"]) == 0
    key = agent.starts[0].mesh_key
    assert key == load_mesh_key(home) != KEY
    shown = capsys.readouterr()
    assert "To add another machine to it, type here: pmesh invite\n" in shown.out
    assert mesh_key_text(key) not in "".join(shown)


def test_the_mesh_key_may_come_from_a_file_or_a_variable(
    agent: FakeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_file, by_variable = MeshKey(bytes(range(100, 132))), MeshKey(bytes(range(50, 82)))
    (tmp_path / "other").mkdir()
    store_mesh_key(tmp_path / "other", by_file)
    monkeypatch.setenv("PMESH_KEY", mesh_key_text(by_variable))
    assert run(["up"]) == 0
    assert run(["up", "--key-file", str(tmp_path / "other" / "mesh_key")]) == 0
    assert [start.mesh_key for start in agent.starts] == [by_variable, by_file]


@pytest.mark.usefixtures("agent")
def test_a_variable_without_a_key_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PMESH_KEY", "correct horse battery staple")
    assert run(["up"]) == 2
    assert capsys.readouterr().err.startswith("ConfigError: PMESH_KEY is not a mesh key")


@pytest.mark.usefixtures("agent")
def test_a_key_of_zero_bytes_is_refused_wherever_it_comes_from(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    zeros = MeshKey(bytes(32))
    type_in(monkeypatch, mesh_key_text(zeros))
    assert run(["key", "set"]) == 2
    store_mesh_key(home, zeros)
    assert run(["up"]) == run(["up", "--key-file", str(home / "mesh_key")]) == 1
    assert run(["key", "show"]) == 1
    monkeypatch.setenv("PMESH_KEY", mesh_key_text(zeros))
    assert run(["up"]) == run(["key", "show"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 6
    assert all("'pmesh key new' makes a random one" in error for error in errors)


def test_what_the_agent_announces_is_printed(
    agent: FakeAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["up"]) == 0
    assert agent.starts
    assert capsys.readouterr().out == "mac-2 joined\nthe ring: mac-1 → mac-2\n"


@pytest.mark.parametrize("detach", [(), ("--detach",)])
def test_beside_an_agent_that_runs_the_permission_is_named(
    agent: FakeAgent, home: Path, capsys: pytest.CaptureFixture[str], detach: tuple[str, ...]
) -> None:
    with hold_home(home):
        assert run(["up", *detach]) == 1
        assert "pmesh allow run" not in capsys.readouterr().err
        assert run(["up", "--allow-run", *detach]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("AgentAlreadyRunning: an agent already runs in")
    assert said.endswith("; or let it run what others ask for: pmesh allow run")
    assert agent.starts == []


def test_a_second_up_in_the_same_home_names_the_running_pid(
    agent: FakeAgent, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with hold_home(home):
        assert run(["up"]) == 1
        assert run(["up", "--detach"]) == 1
    assert not agent.starts
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert all(e.startswith("AgentAlreadyRunning: ") and f"pid {os.getpid()};" in e for e in errors)


@pytest.mark.parametrize(
    ("error", "code"), [(PortTaken("24160"), 1), (ConfigError("x"), 2), (KeyboardInterrupt(), 130)]
)
def test_an_error_inside_the_agent_is_one_line(
    agent: FakeAgent, error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise BaseExceptionGroup("inner nursery", [error])

    agent.then = fail
    assert run(["up"]) == code
    words = "" if code == 130 else f"{type(error).__name__}: {error}\n"
    assert capsys.readouterr().err == words


def test_two_errors_at_once_are_two_lines(
    agent: FakeAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ExceptionGroup("", [PortTaken("a"), ExceptionGroup("", [PeerUnreachable("b")])])

    agent.then = fail
    assert run(["up"]) == 1
    assert capsys.readouterr().err.splitlines() == ["PortTaken: a", "PeerUnreachable: b"]


def test_a_bug_keeps_its_traceback(agent: FakeAgent) -> None:
    def fail() -> None:
        raise ExceptionGroup("", [PortTaken("a"), ZeroDivisionError()])

    agent.then = fail
    with pytest.raises(BaseExceptionGroup):
        run(["up"])


def test_too_few_open_files_are_said_at_start(
    agent: FakeAgent, faults: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    faults.instead(up, "raise_open_files", lambda: "only 64 files")
    assert run(["up"]) == 0
    assert agent.starts
    assert capsys.readouterr().err == "only 64 files\n"


def test_a_detached_agent_gets_the_chosen_settings_and_no_others(
    agent: FakeAgent, home: Path, monkeypatch: pytest.MonkeyPatch, faults: Faults
) -> None:
    calls: list[tuple[object, Mapping[str, str], Path]] = []

    def note(command: object, *, environment: Mapping[str, str], home: Path) -> int:
        calls.append((command, environment, home))
        return 0

    faults.instead(up, "start_detached", note)
    monkeypatch.setenv("PMESH_NAME", "loses")
    monkeypatch.setenv("PMESH_STALE", "1")
    assert run(["up", "--detach", "--name", "wins", "--no-mdns"]) == 0
    (command, environment, directory) = calls[0]
    assert command == [sys.executable, "-m", "pmesh.cli", "up"]
    assert (environment["PMESH_NAME"], environment["PMESH_MDNS"]) == ("wins", "false")
    assert environment["PATH"] == os.environ["PATH"]
    assert "PMESH_STALE" not in environment
    assert directory == home
    assert not agent.starts


@pytest.mark.parametrize("makes_key", [True, False])
def test_who_begins_a_new_mesh_beside_another_is_told_what_to_type(
    home: Path,
    *,
    makes_key: bool,
    faults: Faults,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if not makes_key:
        store_mesh_key(home, KEY)
    faults.instead(up, "start_detached", lambda *_, **__: 0)
    with agent_at(socket_path(home), *[answer_well] * makes_key):  # it hears one of another mesh
        assert run(["up", "--detach", "--name", "new"]) == 0
    said = capsys.readouterr()
    assert ("To add another machine to it, type here: pmesh invite" in said.out) == makes_key
    key = load_mesh_key(home)
    assert key is not None
    assert mesh_key_text(key) not in said.out  # it is on no screen that nobody has asked for
    expected = "is here, but holds another mesh key, so this machine is in a mesh of its own"
    assert (expected in said.err) == makes_key
    assert ("pmesh join --replace --up" in said.err) == makes_key


AGENT_THAT_LEAVES = """
import sys, types, trio
async def run_agent(settings, mesh_key, node_key, announce):
    announce("up")
    try:
        await trio.sleep_forever()
    finally:
        announce("left")
        if "hang" in sys.argv:
            with trio.CancelScope(shield=True):
                await trio.sleep_forever()
sys.modules["pmesh.agent.run"] = types.ModuleType("pmesh.agent.run")
sys.modules["pmesh.agent.run"].run_agent = run_agent
from pmesh.cli.app import run
from pmesh.terminal.lines import ending_signals
sys.exit(run(["up"]))
"""


def start_agent(*words: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", AGENT_THAT_LEAVES, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while process.stdout.readline() not in ("up\n", ""):
        pass
    return process


@pytest.mark.parametrize("listen", ["no-such-host.invalid", "192.0.2.1:0"])
def test_an_address_of_no_interface_is_refused_before_a_key_is_made(
    tmp_path: Path, listen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh = tmp_path / "fresh"
    assert run(["up", "--listen", listen, "--home", str(fresh)]) == 2
    assert "--listen must be an address of this machine" in capsys.readouterr().err
    assert not list(fresh.glob("*_key"))


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize("option", ["--interface", "--not-interface"])
def test_an_interface_that_does_not_exist_is_named_with_those_that_do(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["up", option, "gone9"]) == 2
    message = capsys.readouterr().err
    assert "this machine has no network interface 'gone9'; it has " in message
    assert LOOPBACK in message


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)]
)
def test_a_signal_lets_the_agent_leave(number: signal.Signals, code: int) -> None:
    with start_agent() as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
    assert (out, err, process.returncode) == ("left\n", "", code)


@pytest.mark.usefixtures("home")
def test_a_second_ctrl_c_ends_an_agent_that_hangs_while_it_leaves() -> None:
    with start_agent("hang") as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "left\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert (err, process.returncode) == ("", 130)


def test_a_signal_that_nohup_ignores_stays_ignored(faults: Faults) -> None:
    def disposition(number: int) -> signal.Handlers:
        return signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL

    faults.instead(signal, "getsignal", disposition)
    assert ending_signals() == (signal.SIGINT, signal.SIGTERM)
