"""`pmesh events`, against agents that answer."""

import contextlib
import io
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pmesh.agent.events import EVENTS_SCHEMA_VERSION
from pmesh.cli.app import run
from pmesh.cli.event_reader import Reader
from pmesh.cli.events import POLL_INTERVAL_S
from pmesh.errors import AgentNotRunning
from tests.worlds.fake_status_agent import agent_at, answer_with, make_chronicle
from tests.worlds.faults import Faults
from tests.worlds.system import Terminal


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    """Ends the agent that runs, when it is closed; at the latest with the test."""
    with contextlib.ExitStack() as agents:
        yield agents


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The machine stands in a zone of its own."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "PMESH-05:30")
        time.tzset()
        yield
    time.tzset()


@pytest.fixture
def meanwhile(faults: Faults) -> Callable[..., None]:
    """What happens while `--follow` waits: one deed for each wait, then Ctrl-C."""

    def plan(*deeds: Callable[[], object]) -> None:
        left = list(deeds)

        def sleep(seconds: float) -> None:
            assert seconds == POLL_INTERVAL_S
            if not left:
                raise KeyboardInterrupt
            left.pop(0)()

        faults.pretend(time, "sleep", sleep)

    return plan


@pytest.mark.usefixtures("clock")
def test_a_pipe_gets_a_line_for_each_event_in_local_time(
    socket: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    event_log = make_chronicle()
    event_log.note("peer lost", f"mac-\x1b2 is gone: {'silent ' * 30}at last")
    with agent_at(socket, answer_with(event_log)):
        assert run(["events"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "2026-11-22 17:30:00.000  agent started      mac-1 is up",
        f"2026-11-22 17:30:01.000  peer lost          mac-�2 is gone: {'silent ' * 30}at last",
    ]


def make_terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Make standard output a terminal with colors."""

    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    for variable in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return terminal


@pytest.mark.usefixtures("clock")
def test_a_terminal_gets_a_table_in_which_bad_news_are_red(
    socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    event_log = make_chronicle()
    event_log.note("peer joined", "mac-2 joined")
    event_log.note("peer lost", "mac-2 is gone")
    terminal = make_terminal(monkeypatch)
    with agent_at(socket, answer_with(event_log)):
        assert run(["events"]) == 0
    shown = terminal.getvalue()
    assert "what happened" in shown
    assert "17:30:02.000" in shown
    assert "\x1b[32mpeer joined" in shown
    assert "\x1b[31mpeer lost" in shown


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("columns", [40, 60, 70, 80])
def test_a_narrow_terminal_cuts_no_event(
    columns: int, socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = make_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", str(columns))
    event_log = make_chronicle()
    text = "job 'line' stood still for 0.039 s, until op 6 had ended"
    event_log.note("ring stood still", text)
    with agent_at(socket, answer_with(event_log)):
        assert run(["events"]) == 0
    words = terminal.getvalue().split()
    assert all(word in words for word in text.split())
    assert "17:30:01.000" in terminal.getvalue()


def test_json_is_one_line_with_all_events(socket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    event_log = make_chronicle()
    for number in range(999):
        event_log.note("view", f"{number} " + "long" * 120, names=("mac",) * 32)
    assert len(event_log.since(-1).events) < 1000, "the agent tells them page by page"
    after = event_log.since(-1).events[-1].number
    assert len(event_log.since(after).events) + after + 1 == 1000, "two pages"
    with agent_at(socket, answer_with(event_log), answer_with(event_log)):
        assert run(["events", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    page = json.loads(line)
    assert page["schema"] == EVENTS_SCHEMA_VERSION
    assert [event["number"] for event in page["events"]] == list(range(1000))


def test_following_prints_what_is_new_until_ctrl_c(
    socket: Path, meanwhile: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    event_log = make_chronicle()
    meanwhile(
        lambda: event_log.note("peer joined", "mac-2 joined"),
        lambda: None,
        lambda: event_log.note("peer lost", "mac-2 is gone"),
    )
    with agent_at(socket, *[answer_with(event_log)] * 4):
        assert run(["events", "--follow"]) == 130
    shown = capsys.readouterr()
    assert [line[25:].split("  ")[0] for line in shown.out.splitlines()] == [
        "agent started",
        "peer joined",
        "peer lost",
    ]
    assert not shown.err


def test_following_goes_on_with_the_next_agent_whose_numbers_begin_anew(
    socket: Path,
    stack: contextlib.ExitStack,
    meanwhile: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second = make_chronicle(1), make_chronicle(2)
    first.note("peer joined", "mac-2 joined")

    def restart() -> None:
        stack.enter_context(agent_at(socket, answer_with(second), answer_with(second)))

    meanwhile(stack.close, lambda: None, restart)
    stack.enter_context(agent_at(socket, answer_with(first)))
    assert run(["events", "--follow", "--json"]) == 130
    shown = capsys.readouterr()
    pages = [json.loads(line) for line in shown.out.splitlines()]
    told = [(page["incarnation"][-1], [e["number"] for e in page["events"]]) for page in pages]
    assert told == [("1", [0, 1]), ("2", [0])]
    assert shown.err.count("\n") == 1, "said once, however long it takes"
    assert shown.err.startswith(f"no agent listens at {socket}")
    assert shown.err.endswith("; waiting for the next agent\n")


def test_events_of_a_restarted_agent_are_not_mixed_with_its_numbers_before(
    socket: Path,
) -> None:
    first, second = make_chronicle(1), make_chronicle(2)
    for _ in range(3):
        second.note("view", "more than the first had")
    reader = Reader(socket.parent)
    with agent_at(socket, answer_with(first), answer_with(second), answer_with(second)):
        assert len(reader.read().events) == 1
        page = reader.read()
    assert [event.number for event in page.events] == [0, 1, 2, 3]


def test_a_second_read_without_news_is_empty(socket: Path) -> None:
    reader, event_log = Reader(socket.parent), make_chronicle()
    with agent_at(socket, *[answer_with(event_log)] * 2):
        assert len(reader.read().events) == 1
        assert not reader.read().events
    with pytest.raises(AgentNotRunning):
        reader.read()


@pytest.mark.parametrize("form", [[], ["--json"], ["--follow"]])
def test_without_an_agent_the_socket_and_the_command_are_named(
    socket: Path, form: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["events", *form]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"AgentNotRunning: no agent listens at {socket}")
    assert error.count("\n") == 1
