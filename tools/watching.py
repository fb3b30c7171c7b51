"""What it takes to watch a mesh: memory after a day, and processor time while nothing happens.

A day goes by in some minutes: its statuses and events are made up, and what keeps them is that of
`pmesh dashboard` with a page open, and of `pmesh top`. Then both watch a real mesh that rests.
"""

import json
import os
import pty
import subprocess
import sys
import termios
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Final

import psutil

from pmesh.agent.events import Event
from pmesh.agent.schema import decode_status, encode_status
from pmesh.cli.dashboard.board import Board
from pmesh.cli.top.command import MOST_EVENTS
from pmesh.cli.top.history import Losses
from pmesh.cli.top.screen import Shown, lines_of
from tools.dashboard_pictures import Story, page_of
from tools.lab.call import words_for
from tools.lab.mesh import LabMesh, inherited
from tools.lab.units import MIB

MOST_MIB: Final = 15.0
MOST_PERCENT: Final = 0.2  # of a core
HOUR_S: Final = 3600.0
BEGINS_S: Final = 60  # by then all that it needs is imported and made once
SETTLES_S: Final = 5.0  # a watcher's start costs half a second of a core
EVENT_EVERY_S: Final = 60.0
NOON: Final = datetime(2026, 11, 28, 12, tzinfo=UTC)


class Day(Story):
    """A mesh that trains all day long; something happens each minute."""

    def next_events(self) -> tuple[Event, ...]:
        """The event of this second, if there is one."""
        if self.now % EVENT_EVERY_S:
            return ()
        at = timedelta(seconds=self.now)
        number, text = int(self.now / EVENT_EVERY_S), f"mac-{self.now:.0f} joined"
        return (
            Event(number=number, time=NOON + at, uptime_s=self.now, kind="peer joined", text=text),
        )


def _page_of_a_day(day: Day) -> Callable[[], None]:
    board = Board(
        lambda: decode_status(encode_status(day.status())),
        lambda: page_of(day.next_events()),
        lambda: day.now,
    )
    sent = threading.Semaphore(0)  # a page takes each update before the next second
    write = (lambda _: sent.release(),)
    threading.Thread(target=board.stream, args=write, daemon=True).start()
    sent.acquire()  # when it opens

    def look() -> None:
        board.refresh()
        sent.acquire()

    return look


def _top_of_a_day(day: Day) -> Callable[[], None]:
    losses, events = Losses(), deque[Event](maxlen=MOST_EVENTS)

    def look() -> None:
        status = decode_status(encode_status(day.status()))
        events.extend(day.next_events())
        losses.note(status.jobs)
        seen = Shown(status=status, losses=losses, events=tuple(events))
        lines_of(seen, width=120, height=40, beat=int(day.now))

    return look


_OF_A_DAY: Final = {"dashboard": _page_of_a_day, "top": _top_of_a_day}


def watch_a_day(command: str, machines: int, hours: float) -> None:
    """Look each second of a day; print what this process alone holds at first and at the end."""
    day = Day(machines)
    look = _OF_A_DAY[command](day)
    held: list[float] = []
    for second in range(int(hours * HOUR_S)):
        day.now = float(second)
        look()
        if second == BEGINS_S:
            held.append(_held_mib(psutil.Process()))
    print(json.dumps([*held, _held_mib(psutil.Process())]))


def _held_mib(process: psutil.Process) -> float:
    """What would be free if it ended: pages that it shares with other programs do not count."""
    return float(process.memory_full_info().uss) / MIB


def bare_mib() -> float:
    """What a Python holds that does nothing but say so."""
    words = "import psutil; print(psutil.Process().memory_full_info().uss)"
    return int(subprocess.check_output([sys.executable, "-c", words])) / MIB


@contextmanager
def _dashboard(mesh: LabMesh) -> Iterator[psutil.Process]:
    program = mesh.start_command(mesh.nodes[0], "dashboard", "--listen", "127.0.0.1:0")
    with program:
        program.hear()
        yield psutil.Process(program.pid)


@contextmanager
def _open_page(mesh: LabMesh) -> Iterator[psutil.Process]:
    program = mesh.start_command(mesh.nodes[0], "dashboard", "--listen", "127.0.0.1:0")
    _, _, link = program.hear().rpartition(" ")  # it says nothing else
    with program, urllib.request.urlopen(f"{link}updates") as page:  # noqa: S310 - of this machine
        threading.Thread(target=_drain, args=(page.fileno(),), daemon=True).start()
        yield psutil.Process(program.pid)


@contextmanager
def _top(mesh: LabMesh) -> Iterator[psutil.Process]:
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (40, 120))
    words = [sys.executable, "-m", "pmesh.cli", "top", "--home", str(mesh.nodes[0].home)]
    program = subprocess.Popen(words, stdin=its, stdout=its, env=inherited())
    threading.Thread(target=_drain, args=(ours,), daemon=True).start()
    try:
        yield psutil.Process(program.pid)
    finally:
        program.terminate()
        program.wait()
        os.close(its)


def _drain(descriptor: int) -> None:
    with suppress(OSError):  # the other end is closed
        while os.read(descriptor, 1 << 16):
            pass


def _percent(processes: Sequence[psutil.Process], seconds: float) -> list[float]:
    """Return how much of a core each takes while nothing happens."""

    def used() -> list[float]:
        return [sum(process.cpu_times()[:2]) for process in processes]

    before, began = used(), time.monotonic()
    time.sleep(seconds)
    passed = time.monotonic() - began
    pairs = zip(before, used(), strict=True)
    return [100 * (then - earlier) / passed for earlier, then in pairs]


WATCHERS: Final = (
    ("pmesh dashboard", "dashboard", _dashboard),
    ("pmesh dashboard with a page open", "dashboard", _open_page),
    ("pmesh top", "top", _top),
)


def run(*, machines: int = 8, hours: float = 24.0, rest_s: float = 60.0) -> int:
    """What the page and `pmesh top` hold after a day, and take of a core while nothing happens."""
    grown: dict[str, float] = {}
    for command in _OF_A_DAY:
        words = words_for(watch_a_day, command, machines, hours)
        first, last = json.loads(subprocess.check_output([sys.executable, *words]))
        grown[command] = last - first
        print(f"pmesh {command} grows by {grown[command]:.1f} MiB in {hours:g} h", flush=True)
    met, bare = True, bare_mib()
    with LabMesh(machines) as mesh:
        mesh.start_agents()
        mesh.await_view()
        agent = psutil.Process(mesh.nodes[0].pid)
        for what, command, watcher in WATCHERS:
            (alone,) = _percent([agent], rest_s)
            with watcher(mesh) as process:
                time.sleep(SETTLES_S)
                own, asked = _percent([process, agent], rest_s)
                held = _held_mib(process) - bare + grown[command]
            good = held <= MOST_MIB and own <= MOST_PERCENT
            met = met and good
            print(
                f"{what}: {held:.1f} MiB more than a bare Python, {own:.2f} % of a core; its agent "
                f"takes {asked:.2f} % in place of {alone:.2f}: {'met' if good else 'missed'}",
                flush=True,
            )
    return 0 if met else 1
