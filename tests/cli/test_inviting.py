"""`pmesh invite` and `pmesh join` at a terminal, with an agent that answers as it is told."""

import getpass
import os
import select
import signal
import socket as sockets
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from trio.testing import memory_stream_pair

from pmesh.agent.home import hold_home, load_mesh_key, store_mesh_key
from pmesh.agent.mesh import keyring
from pmesh.agent.mesh.keyring import latest_key
from pmesh.cli import up
from pmesh.cli.app import run
from pmesh.core.identity.keys import MeshKey, mesh_key_text
from pmesh.core.values import Verdict
from pmesh.core.wire.control import Stopping
from pmesh.core.wire.framing import frame
from pmesh.core.wire.link import PROTOCOL_VERSION, Address
from pmesh.core.wire.session import Refused, SessionMessage, encode
from pmesh.errors import KeyFileError, PeerUnreachable
from pmesh.home_paths import home_directory, socket_path
from pmesh.ids import NodeId
from pmesh.invites.cli import invite, join
from pmesh.invites.rules.codes import Code
from pmesh.invites.wire import InvitationOver, Invited, Outcome, Party
from tests.cli.homes import store_rotation, use_home
from tests.worlds.fake_status_agent import agent_at
from tests.worlds.faults import Faults
from tests.worlds.system import be_a_terminal

KEY = MeshKey(bytes(range(100, 132)))
INVITED = Invited("7-guitar-lemon", 600.0)
ADA = Party(NodeId(b"a" * 32), "mac-1", PROTOCOL_VERSION)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_home(tmp_path / "home", monkeypatch)
    (tmp_path / "home").mkdir(mode=0o700)
    return tmp_path / "home"


def answer(*replies: SessionMessage) -> Callable[[sockets.socket], None]:
    def reply(connection: sockets.socket) -> None:
        connection.recv(4096)
        connection.sendall(b"".join(frame(encode(each)) for each in replies))
        while connection.recv(4096):
            pass

    return reply


def show(*replies: SessionMessage) -> int:
    with agent_at(socket_path(home_directory()), answer(*replies)):
        return run(["invite"])


def test_the_code_stands_in_the_command_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(INVITED, InvitationOver("joined", "mac-2", "10.0.0.2")) == 0
    assert capsys.readouterr().out.splitlines() == [
        "On the other machine, type within 10 minutes:",
        "",
        "    pmesh join 7-guitar-lemon",
        "",
        "The code is good for one try. Ctrl-C withdraws it.",
        "mac-2 has joined: it is here as soon as 'pmesh up' runs there",
    ]


ENDS: dict[Outcome, tuple[int, str]] = {
    "key sent": (0, "mac-2 at 10.0.0.2 was sent the mesh key, and did not say"),
    "wrong code": (1, "somebody tried a wrong code: mac-2 at 10.0.0.2. If that was you, type here"),
    "broken off": (1, "mac-2 at 10.0.0.2 tried the code and broke off, so it is void; type here"),
    "expired": (1, "nobody has used the code, and it is void now; a new one: pmesh invite"),
}


@pytest.mark.parametrize("outcome", ENDS)
def test_each_end_of_a_code_has_its_words_and_its_exit_code(
    outcome: Outcome, capsys: pytest.CaptureFixture[str]
) -> None:
    code, words = ENDS[outcome]
    assert show(INVITED, InvitationOver(outcome, "mac-2", "10.0.0.2")) == code
    assert words in "".join(capsys.readouterr())


@pytest.mark.parametrize("replies", [(), (INVITED,)])
def test_a_refusal_is_an_error(
    replies: tuple[SessionMessage, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert show(*replies, Refused(Verdict("UsageError", "3 codes"))) == 1
    assert capsys.readouterr().err == "UsageError: 3 codes\n"


def test_without_an_agent_it_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["invite"]) == 1
    assert "AgentNotRunning: " in (error := capsys.readouterr().err)
    assert "start one with 'pmesh up'" in error


def test_ctrl_c_says_that_the_code_is_withdrawn(
    capsys: pytest.CaptureFixture[str], faults: Faults
) -> None:
    shown = threading.Event()
    faults.instead(invite, "say", lambda *_: shown.set())

    def interrupt(connection: sockets.socket) -> None:
        connection.recv(4096)
        connection.sendall(frame(encode(INVITED)))
        assert shown.wait(10)
        gone = False
        while not gone:  # a signal just before the main thread waits is seen with the next one
            os.kill(os.getpid(), signal.SIGINT)
            gone = bool(select.select([connection], [], [], 1)[0]) and not connection.recv(4096)

    assert threading.current_thread() is threading.main_thread()
    with agent_at(socket_path(home_directory()), interrupt):
        assert run(["invite"]) == 130
    assert capsys.readouterr().err == "the code is withdrawn\n"


@pytest.fixture
def inviter(faults: Faults) -> list[tuple[str, Address | None]]:
    """A machine that gives KEY for any code; what it was asked, and at which address."""
    asked: list[tuple[str, Address | None]] = []

    async def give(code: Code, newcomer: join.Newcomer, address: Address | None) -> Party:
        await trio.lowlevel.checkpoint()
        asked.append((code.text, address))
        if newcomer.mesh_key not in {None, KEY}:
            raise KeyFileError("this machine holds the key of another mesh")
        if newcomer.mesh_key is None:
            store_mesh_key(newcomer.settings.home, KEY)
        return ADA

    faults.pretend(join, "_join", give)
    return asked


@pytest.mark.parametrize("words", ["7-guitar-lemon", "7 guitar lemon", "7 GUITAR-Lemon"])
def test_the_key_is_stored_and_it_says_what_to_type_next(
    words: str,
    home: Path,
    inviter: list[tuple[str, Address | None]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["join", *words.split()]) == 0
    assert inviter == [("7-guitar-lemon", None)]
    assert load_mesh_key(home) == KEY
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        f"This machine has the mesh key of mac-1, in {home}/mesh_key.",
        "Type next: pmesh up",
    ]
    assert shown.err == "looking for the machine that invites by the number 7 …\n"
    assert mesh_key_text(KEY) not in "".join(shown)


def test_an_address_and_a_home_are_part_of_what_to_type_next(
    tmp_path: Path,
    inviter: list[tuple[str, Address | None]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = tmp_path / "my home"
    assert run(["join", "7-guitar-lemon", "--peer", "mac-1.local", "--home", str(other)]) == 0
    assert inviter == [("7-guitar-lemon", Address("mac-1.local", 24160))]
    assert capsys.readouterr().out.splitlines()[1] == (
        f"Type next: pmesh up --home '{other}' --peer mac-1.local:24160"
    )


@pytest.mark.usefixtures("inviter")
@pytest.mark.parametrize("peer", [None, "10.0.0.1:7000"])
def test_up_starts_the_agent_in_the_background(
    peer: str | None, faults: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[object] = []

    def bring_up(home: Path | None, flags: dict[str, object], *, detach: bool) -> int:
        started.append((home, flags, detach))
        return 3

    faults.instead(up, "bring_up", bring_up)
    options = [] if peer is None else ["--peer", peer]
    assert run(["join", "7-guitar-lemon", "--up", *options]) == 3
    assert started == [(None, {"peers": peer and (peer,)}, True)]
    assert "Type next" not in capsys.readouterr().out


@pytest.mark.usefixtures("inviter")
def test_a_member_is_told_that_it_is_one(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store_mesh_key(home, KEY)
    assert run(["join", "7-guitar-lemon"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "this machine is already a member of the mesh of mac-1",
        "Type next: pmesh up",
    ]


@pytest.mark.usefixtures("inviter")
def test_a_machine_of_another_mesh_leaves_it_only_if_told_and_keeps_its_key(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    former = MeshKey(bytes(range(32)))
    store_mesh_key(home, former)
    assert run(["join", "7-guitar-lemon"]) == 1
    assert load_mesh_key(home) == former

    assert run(["join", "7-guitar-lemon", "--replace"]) == 0
    assert load_mesh_key(home) == KEY
    kept = home / "mesh_key.replaced"
    assert kept.read_text() == f"{mesh_key_text(former)}\n"
    assert kept.stat().st_mode & 0o077 == 0
    assert f"The key of the mesh that it has left is in {kept}." in capsys.readouterr().out


def test_a_key_by_a_code_counts_also_if_this_machine_has_replaced_it_before(
    home: Path, faults: Faults
) -> None:
    """The others have stayed with the key before: this machine has left them, and comes back."""
    own = MeshKey(bytes(range(32)))
    store_rotation(home, KEY, own)

    async def connect(_: Address) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        return memory_stream_pair()[0]

    async def give(
        _: object, __: Code, newcomer: join.Newcomer, store: Callable[[MeshKey], None]
    ) -> Party:
        await trio.lowlevel.checkpoint()
        if newcomer.mesh_key is not None:
            raise KeyFileError("this machine holds the key of another mesh")
        store(KEY)
        return ADA

    faults.instead(join, "dial", connect)
    faults.instead(join, "get_key", give)
    assert run(["join", "7-guitar-lemon", "--replace", "--peer", "mac-1.local"]) == 0
    assert latest_key(home, KEY) == load_mesh_key(home) == KEY
    assert (home / "mesh_key.replaced").read_text() == f"{mesh_key_text(own)}\n"


@pytest.mark.usefixtures("inviter")
def test_the_latest_key_counts_also_if_the_disk_was_full_as_it_came(
    home: Path, faults: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    store_mesh_key(home, MeshKey(bytes(range(32))))
    with faults.fail(keyring, "store_mesh_key", KeyFileError("no room")):
        store_rotation(home, MeshKey(bytes(range(32))), KEY)
    assert run(["join", "7-guitar-lemon"]) == 0
    assert "already a member of the mesh of mac-1" in capsys.readouterr().out


def test_an_agent_that_runs_keeps_its_key(
    home: Path, inviter: list[tuple[str, Address | None]], capsys: pytest.CaptureFixture[str]
) -> None:
    store_mesh_key(home, MeshKey(bytes(range(32))))
    with hold_home(home):
        assert run(["join", "7-guitar-lemon", "--replace"]) == 1
    assert "stop it with 'pmesh down'" in capsys.readouterr().err
    assert inviter == []


@pytest.mark.usefixtures("inviter")
def test_a_member_has_nothing_to_replace(home: Path) -> None:
    store_mesh_key(home, KEY)
    assert run(["join", "7-guitar-lemon", "--replace"]) == 0
    assert not (home / "mesh_key.replaced").exists()


def test_the_code_may_be_typed_when_it_asks(
    inviter: list[tuple[str, Address | None]], monkeypatch: pytest.MonkeyPatch, faults: Faults
) -> None:
    be_a_terminal(monkeypatch, "stdin")
    faults.instead(getpass, "getpass", lambda _: "7 guitar lemon")
    assert run(["join"]) == 0
    assert inviter == [("7-guitar-lemon", None)]


def end_of_input(_: str) -> str:
    raise EOFError


WRONG: dict[str, str] = {
    "join 7-gitar-lemon": "no code has the word 'gitar'; did you mean guitar?; 'pmesh invite' on a",
    "join lemon": "a code is a number and two words, such as 7-guitar-lemon; 'pmesh invite'",
    "join 7-guitar-lemon --peer [::1": "--peer [::1: an IPv6 address is written [ADDRESS]:PORT",
    "join 7-guitar-lemon --peer :0": "--peer :0: it must be HOST:PORT",
}


@pytest.mark.parametrize("command", WRONG)
def test_what_can_not_be_meant_is_refused_before_anybody_is_asked(
    command: str,
    inviter: list[tuple[str, Address | None]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(command.split()) == 2
    assert capsys.readouterr().err.startswith(f"ConfigError: {WRONG[command]}")
    assert inviter == []


@pytest.mark.parametrize("terminal", [False, True])
def test_no_code_at_all_is_refused(
    *,
    terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    faults: Faults,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if terminal:
        be_a_terminal(monkeypatch, "stdin")
    faults.pretend(getpass, "getpass", end_of_input)
    assert run(["join"]) == 2
    assert "pmesh" in capsys.readouterr().err


def test_where_mdns_is_off_the_address_must_be_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PMESH_MDNS", "0")
    assert run(["join", "7-guitar-lemon"]) == 2
    assert "mDNS is switched off here; type: pmesh join CODE --peer" in capsys.readouterr().err


@pytest.mark.parametrize("peer", [None, "127.0.0.1:1"])
def test_a_silent_machine_is_given_up(
    peer: str | None,
    monkeypatch: pytest.MonkeyPatch,
    faults: Faults,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def connect(*_: object) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        ours, theirs = trio.testing.memory_stream_pair()
        monkeypatch.setattr(join, "silent", theirs, raising=False)  # else it would be closed
        return ours

    faults.instead(join, "find_inviter" if peer is None else "dial", connect)
    faults.limit(join, "EXCHANGE_S", 0.05)
    options = [] if peer is None else ["--peer", peer]
    assert run(["join", "7-guitar-lemon", *options]) == 1
    error = capsys.readouterr().err
    assert "the other machine did not answer in 0.05 s; a code is good for one try" in error


def test_a_machine_that_refuses_connections_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["join", "7-guitar-lemon", "--peer", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.startswith(f"{PeerUnreachable.__name__}: 127.0.0.1:1 refuses")


def test_another_answer_of_the_agent_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(INVITED, Stopping(pid=1)) == 1
    assert "Error" in capsys.readouterr().err
