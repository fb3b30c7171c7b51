"""What others have written: no command lets it control a terminal, or look like other lines."""

import ast
import json
import re
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pmesh.agent.events import encode_events
from pmesh.agent.schema import encode_status
from pmesh.charts.wire import AskCharts, JobCharts
from pmesh.cli.app import run
from pmesh.core.values import Verdict
from pmesh.core.wire.control import (
    AgentEvents,
    AskEvents,
    AskPing,
    AskStatus,
    Pinged,
    StatusReply,
    WayTried,
)
from pmesh.core.wire.framing import FrameReader, frame
from pmesh.core.wire.session import Refused, encode
from pmesh.home_paths import home_directory, socket_path
from pmesh.invites.wire import InvitationOver, Invite, Invited
from pmesh.launches.rules.lines import STARTER
from pmesh.launches.wire.messages import (
    AskLaunches,
    Fetched,
    FetchedFiles,
    FetchFiles,
    FilesSent,
    FollowLaunch,
    Launch,
    LaunchBegan,
    LaunchLines,
    LaunchOver,
    LaunchRow,
    LaunchRows,
    LaunchSends,
    NewFile,
)
from pmesh.members.wire import (
    AskMembers,
    MachineTold,
    MemberRow,
    MemberRows,
    RemoveMachine,
)
from pmesh.terminal.rows import output
from pmesh.traces.wire import AskTrace, Traced, TracedEvent, TracedMachine
from simulation.wire import AnyReply, decode_request_untrusted
from tests.traces.histories import BEGAN_US, op, told
from tests.worlds.fake_status_agent import SNAPSHOT, agent_at, make_chronicle
from tests.worlds.system import be_a_terminal

EVIL = "[/bold] m\x1b]0;you\x07\x9b2J\npmesh: \u202e:boom:"
SHOWN = "[/bold] m�]0;you��2J pmesh: �:boom:"
OF_RICH = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PMESH = Path(run.__code__.co_filename).parents[1]
COMMANDS_OF = ("cli", "cli/doctor", "cli/top", "*/cli", "terminal")


def status() -> bytes:
    """A status in which nearly all texts are evil."""
    evil = json.dumps(EVIL)[1:-1].encode()
    text = encode_status(SNAPSHOT)
    for of_others in (b"mac-2", b"en7", b"it has 2 of the 3", b"late.py"):
        text = text.replace(of_others, evil)
    return text


def replies_to(request: object) -> list[AnyReply]:  # noqa: C901, PLR0911 - one for each request
    events = make_chronicle()
    events.note("peer lost", f"{EVIL} is gone")
    row = LaunchRow(EVIL, EVIL, EVIL, EVIL, False, (EVIL,), EVIL, 1.0, None)  # noqa: FBT003
    lines = f"0 0 o {SHOWN}\x1b]0;\x07\n0 0 n failed\n{STARTER} 0 n stopped\n7 0 o seven\n"
    match request:
        case AskStatus():
            return [StatusReply(status())]
        case AskEvents(after):
            return [AgentEvents(encode_events(events.since(after)))]
        case AskMembers():
            member = MemberRow(
                id="a" * 52, name=EVIL, state="removed", version=EVIL, first_seen=0.0, last_seen=0.0
            )
            return [MemberRows((msgspec.structs.replace(member, removed_by=EVIL),))]
        case RemoveMachine():
            return [MachineTold(EVIL, (EVIL,), (EVIL,))]
        case AskPing():
            way = WayTried(interface=EVIL, remote=EVIL, kind=EVIL, why_not=EVIL)
            return [way, Pinged(interface=EVIL, remote=EVIL, why=EVIL)]
        case AskLaunches():
            return [LaunchRows((row,)), LaunchRows(())]
        case FetchFiles():
            new = FetchedFiles(EVIL, "a" * 52, "", 2, 3, (NewFile(EVIL, 1),), left_out=EVIL)
            return [Fetched("l", (new, FetchedFiles(EVIL, "b" * 52, EVIL)))]
        case Launch() | FollowLaunch():
            began = LaunchBegan("l", "j", (EVIL, "mac"), (1, 1), (EVIL, EVIL))
            sends = [LaunchSends((FilesSent(EVIL, 1, 2),))] * isinstance(request, Launch)
            return [*sends, began, LaunchLines(lines.encode()), LaunchOver(0)]
        case AskCharts():
            return [JobCharts(7, 5.0, {EVIL: ((7,), (0.5,))})]
        case AskTrace():
            there = TracedMachine(name=EVIL, me=True, clock=(), why_not=EVIL)
            ops = told(0, (op(0, BEGAN_US, BEGAN_US + 1),))
            return [ops, Traced(EVIL, BEGAN_US + 2, (there,), (TracedEvent(0, 0, EVIL, EVIL),))]
        case Invite():
            return [Invited(EVIL, 600.0), InvitationOver("wrong code", EVIL, EVIL)]
        case _:
            return [Refused(Verdict("UsageError", EVIL))]


def answer(connection: socket.socket) -> None:
    reader = FrameReader(max_bytes=1 << 20)
    while (message := reader.next_message_untrusted()) is None:
        reader.receive_data(connection.recv(4096))
    replies = replies_to(decode_request_untrusted(message))
    connection.sendall(b"".join(frame(encode(reply)) for reply in replies))
    while connection.recv(4096):
        pass


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("PMESH_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    project = tmp_path.parent / f"{tmp_path.name}-project"
    project.mkdir()
    (project / "train.py").touch()
    monkeypatch.chdir(project)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    return tmp_path


COMMANDS: dict[str, tuple[int, str]] = {
    "status": (1, SHOWN),
    "status --json": (1, "\\u001b"),
    "events": (1, f"{SHOWN} is gone"),
    "events --json": (1, "[/bold] m"),
    "ping mac-2": (1, f"{SHOWN} is used: {SHOWN}"),
    "ping mac-2 --json": (1, "\\u001b"),
    "members": (1, f"removed by {SHOWN}"),
    "trace digits": (1, f"{SHOWN}: {SHOWN}"),
    "plot digits": (1, f"pmesh-plot-digits.png: {SHOWN}"),
    "members --json": (1, "\\u001b"),
    "remove mac-2": (1, f"told when they are back: {SHOWN}"),
    "ps": (1, SHOWN),
    "stop 1234": (1, f"UsageError: {SHOWN}"),
    "logs 1234": (1, "m�]0;you"),
    "run --on all -- true": (1, "m�]0;you"),
    "run --on all --sync -- true": (
        3,
        f"new files on {SHOWN}: {SHOWN} (1 B) and 1 more",
    ),
    "fetch 1234": (1, f"{SHOWN}: {SHOWN}"),
    "invite": (1, f"somebody tried a wrong code: {SHOWN} at {SHOWN}."),
    "allow run --as-root --member nobody": (1, f"UsageError: {SHOWN}"),
}


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("on_a_terminal", [False, True])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_text_of_others_controls_the_terminal_or_begins_a_line(
    command: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    on_a_terminal: bool,
) -> None:
    if on_a_terminal:
        monkeypatch.setenv("TERM", "xterm")
        be_a_terminal(monkeypatch, "stdout", "stderr")
    connections, words = COMMANDS[command]
    answers: list[Callable[[socket.socket], None]] = [answer] * connections
    with agent_at(socket_path(home_directory()), *answers):
        run(command.split())
    shown = "".join(OF_RICH.sub("", text) for text in capsys.readouterr())
    assert [c for c in shown if not c.isprintable() and c not in "\n\r"] == []
    assert (words if not on_a_terminal else "[/bold] m") in " ".join(shown.split())
    ours = [line for line in shown.splitlines() if line.startswith("pmesh: ")]
    assert ours == (["pmesh: stopped"] if command.startswith(("run", "logs")) else [])


def test_only_these_files_print() -> None:
    """Another way to print would have to think of all this again."""
    makers: set[tuple[str, str]] = set()
    files = [path for folder in COMMANDS_OF for path in PMESH.glob(f"{folder}/*.py")]
    assert {"app.py", "sync.py", "lines.py"} <= {path.name for path in files}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                own = any(keyword.arg == "console" for keyword in node.keywords)
                if name in {
                    "print",
                    "Console",
                    "from_markup",
                    "Text.from_markup",
                    "rich.print",
                } or (name in {"Live", "Progress"} and not own):
                    makers.add((path.name, name))
                if name in {"sys.stdout.write", "sys.stderr.write", "Output"}:
                    makers.add((path.name, name))
    assert makers == {
        ("lines.py", "sys.stdout.write"),
        ("lines.py", "sys.stderr.write"),
        ("rows.py", "Output"),
        ("bugreport.py", "Output"),  # into a file, of which each line is printable
    }


def test_the_console_of_all_commands_takes_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    output().print("[bold]a[/] :boom:\x1b[2J")
    assert capsys.readouterr().out == "[bold]a[/] :boom:�[2J\n"
