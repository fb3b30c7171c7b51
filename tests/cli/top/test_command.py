"""`pmesh top` against an agent that answers, in a terminal and without one."""

import errno
import os
import termios
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from pmesh.agent.schema import JobState
from pmesh.cli.app import run
from pmesh.cli.top.command import LOOK_S, LOOKS_AT_REST, TRAINING_LOOKS, Feed
from pmesh.errors import AgentNotRunning
from tests.worlds import fake_status_agent
from tests.worlds.fake_status_agent import MINIMAL, agent_at, answer_well
from tests.worlds.faults import Faults, Real

READ = (answer_well, answer_well)  # the status, and the events


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Both streams are those of a terminal; what is written to this descriptor is typed there."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    for name in ("COLUMNS", "LINES"):  # rich believes them more than the terminal
        monkeypatch.delenv(name, raising=False)
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "r") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        yield ours
    os.close(ours)


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch, faults: Faults) -> list[Callable[[], None]]:
    """The terminal has no keys; instead of waiting, the next of these is called."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    for name in ("COLUMNS", "LINES"):  # rich believes them more than the terminal
        monkeypatch.delenv(name, raising=False)
    calls: list[Callable[[], None]] = []

    def sleep(seconds: float) -> None:
        assert seconds == LOOK_S
        calls.pop(0)()

    faults.pretend(time, "sleep", sleep)
    return calls


def press_ctrl_c() -> None:
    raise KeyboardInterrupt


def nothing() -> None:
    pass


def test_without_a_terminal_one_screen_is_printed(
    socket: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with agent_at(socket, *READ):
        assert run(["top"]) == 0
    shown = capsys.readouterr().out
    assert "mac-1 ★" in shown
    assert "agent started" in shown
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= 120


def test_without_an_agent_it_says_so(socket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top"]) == 1
    assert not socket.exists()
    assert capsys.readouterr().err.startswith("AgentNotRunning: ")


@pytest.mark.parametrize("keys", [b"q", b"xQ", b"\x04"])
def test_q_ends_it_and_the_terminal_is_as_before(
    socket: Path,
    terminal: int,
    keys: bytes,
    faults: Faults,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = termios.tcgetattr(terminal)

    def type_then(set_cbreak: Real, descriptor: int) -> None:
        set_cbreak(descriptor)
        os.write(terminal, keys)

    faults.around(tty, "setcbreak", type_then)
    with agent_at(socket, *READ):
        assert run(["top"]) == 0
    shown = capsys.readouterr().out
    assert "sees 3 machines" in shown
    assert shown.index("\x1b[?1049h") < shown.index("\x1b[?1049l"), "on the alternate screen"
    assert termios.tcgetattr(terminal) == before


def test_it_ends_with_its_terminal(socket: Path, terminal: int, faults: Faults) -> None:
    def type_then(_descriptor: int) -> None:
        os.write(terminal, b"x\n")

    faults.instead(tty, "setcbreak", type_then)
    faults.fail(os, "read", OSError(errno.EIO, "Input/output error"))
    with agent_at(socket, *READ):
        assert run(["top"]) == 0


def test_ctrl_c_ends_it_with_code_0(
    socket: Path, sleeps: list[Callable[[], None]], capsys: pytest.CaptureFixture[str]
) -> None:
    sleeps.append(press_ctrl_c)
    with agent_at(socket, *READ):
        assert run(["top"]) == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    "pace", [("running", TRAINING_LOOKS), ("no_quorum", LOOKS_AT_REST)], ids=["training", "rest"]
)
def test_it_reads_the_status_again_and_goes_on_when_the_agent_has_ended(
    socket: Path,
    sleeps: list[Callable[[], None]],
    pace: tuple[JobState, int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    state, looks = pace
    job = replace(fake_status_agent.SNAPSHOT.jobs[0], state=state)
    status = replace(MINIMAL, jobs=(job,))
    monkeypatch.setattr(fake_status_agent, "SNAPSHOT", status)
    sleeps += [nothing] * (2 * looks) + [press_ctrl_c]
    with agent_at(socket, *READ, *READ):
        assert run(["top"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("sees 3 machines") == 2
    assert shown.count("the agent has ended; it was last seen like this") == 1
    assert sleeps == []


def test_a_terminal_of_another_size_gets_another_screen_at_once(
    socket: Path,
    sleeps: list[Callable[[], None]],
    faults: Faults,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = [os.terminal_size((80, 24))]
    faults.instead(os, "get_terminal_size", lambda _: sizes[-1])
    sleeps += [lambda: sizes.append(os.terminal_size((20, 4))), press_ctrl_c]
    with agent_at(socket, *READ, *READ):
        assert run(["top"]) == 0
    assert "… 11 more lines: pm…" in capsys.readouterr().out


def test_the_events_of_the_next_agent_follow_those_of_the_last(socket: Path) -> None:
    feed = Feed(socket.parent)
    with pytest.raises(AgentNotRunning):
        feed.read()
    with agent_at(socket, *READ):
        first = feed.read()
    assert (len(first.events), first.trouble) == (1, "")
    again = feed.read()
    assert again.events == first.events
    assert again.trouble.startswith("the agent has ended")
    other = fake_status_agent.answer_with(fake_status_agent.make_chronicle(incarnation=2))
    with agent_at(socket, answer_well, other, other):
        then = feed.read()
    assert (len(then.events), then.trouble) == (2, "")
