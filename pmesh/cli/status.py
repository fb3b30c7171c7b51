"""`pmesh status`: the mesh on one screen, in the order in which one asks.

Is all well? Do the jobs train, how fast, and whom do they wait for? Which way do the data take?
"""

import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.segment import Segment
from rich.text import Text

from pmesh.agent.schema import (
    JobStatus,
    MemberStatus,
    PathStatus,
    Status,
    decode_status,
    name_peer,
)
from pmesh.cli.ring import HEALTH_MARKS, draw_ring, nodes_of
from pmesh.cli.sentences import find_slowest, headline, job_line, remarks_on, report_text
from pmesh.cli.status_all import bandwidth_text, render_all, round_trip_text
from pmesh.cli.troubles import describe_troubles
from pmesh.client.control import ask_status
from pmesh.home_paths import home_directory
from pmesh.terminal.lines import say_json
from pmesh.terminal.rows import Cell, Rows, output
from pmesh.terminal.sizes import bytes_text
from pmesh.texts import printable

WIDE: Final = 80  # cells; a narrower terminal has no room for the loss


def render_status(status: Status, *, width: int = 80, beat: int | None = None) -> RenderableType:
    """Lay out what a person asks first; `beat` moves a light around the ring (see `draw_ring`)."""
    parts: list[RenderableType] = [headline(status), _ring(status, width, beat)]
    for job in status.jobs:
        parts += ["", job_line(job)]
        if job.ranks or job.newcomers:
            parts.append(_ranks(job, loss=width >= WIDE and _reports_loss(job)))
    parts += ["", _machines(status)]
    parts += describe_troubles(status)
    parts += _not_linked(status)
    return Group(*parts, _footer(status))


def _ring(status: Status, width: int, beat: int | None) -> RenderableType:
    ring = draw_ring(nodes_of(status), width=width, beat=beat)
    return Padding(ring, (1, 0, 0, 0), expand=False)  # a pipe has no width to fill


def _reports_loss(job: JobStatus) -> bool:
    return any("loss" in rank.reports for rank in job.ranks)


def _ranks(job: JobStatus, *, loss: bool) -> Rows:
    """One line a rank; `loss` adds the column of what each has reported."""
    slowest = find_slowest(job.ranks)
    rows: list[tuple[Cell, ...]] = [
        (
            str(rank.rank),
            Text(printable(rank.name)),
            str(rank.step if job.step else rank.completed + 1),
            *[report_text(rank.reports.get("loss"))] * loss,
            "" if rank.own_percent is None else f"{rank.own_percent} %",
            Text("; ".join(remarks_on(rank, slow=rank is slowest))),
        )
        for rank in job.ranks
    ]
    waits = "waits" if job.wait_for is not None else "enters at the next sync"
    rows += [("", Text(printable(one.name)), *[""] * (2 + loss), waits) for one in job.newcomers]
    step = "step" if job.step else "op"
    return Rows(("rank", "machine", step, *["loss"] * loss, "computes", ""), rows, compact=True)


def _machines(status: Status) -> Rows:
    """One line a machine: its first address, and the way that data take to it."""
    rows = [row for member in status.view.members for row in _machine_rows(member, status)]
    headers = ("machine", "address", "way to it", "Mbit/s", "round trip")
    return Rows(headers, rows, compact=True)


def _machine_rows(member: MemberStatus, status: Status) -> Iterator[tuple[Cell, ...]]:
    mark, color = HEALTH_MARKS[member.health]
    name = Text.assemble((mark, color), f" {printable(member.name)}")
    address = Text(printable(member.addresses[0] if member.addresses else ""))
    ways = [path for path in member.paths if path.use != "standby"]
    if not ways:
        here = member.id == status.node.id
        yield name, address, "this machine" if here else "", "", round_trip_text(member.rtt_ms)
    for path in ways:
        first = path is ways[0]
        yield (
            name if first else "",
            address if first else "",
            Text(_way_text(path), "red" if path.use == "silent" else ""),
            Text(bandwidth_text(path), "yellow" if path.slow else ""),
            round_trip_text(path.rtt_ms or (member.rtt_ms if first else None)),
        )


def _way_text(path: PathStatus) -> str:
    words = [path.kind or "", path.interface or path.remote, "silent" * (path.use == "silent")]
    return printable(" ".join(filter(None, words)))


def _not_linked(status: Status) -> Iterator[Text]:
    for peer in status.peers:
        if peer.state != "linked":
            name = name_peer(peer, status.node.name) or "a machine"
            why = peer.reason or peer.state.replace("_", " ")
            yield Text(f"Not linked: {printable(name)}: {printable(why)}", "yellow")


def _footer(status: Status) -> Text:
    traffic = status.traffic
    sent, received = traffic.data_sent_bytes, traffic.data_received_bytes
    return Text(
        f"{bytes_text(sent)} of data sent, {bytes_text(received)} received"
        " · all of it: pmesh status --all",
        "dim",
    )


WATCH_INTERVAL_S = 1.0


class Cropped:
    """As many lines as the terminal has; the last one says how many there are more."""

    def __init__(self, whole: RenderableType) -> None:
        self._whole = whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._whole, options.update(height=None), pad=False)
        room = console.height
        if len(lines) > room:
            more = Text(f"… {len(lines) - room + 1} more lines: pmesh status", "yellow")
            lines = [*lines[: room - 1], list(more.render(console))]
        for number, line in enumerate(lines):
            yield from line
            if number < len(lines) - 1:
                yield Segment.line()


def show_status(home: Path | None, *, watch: bool, whole: bool, as_json: bool) -> int:
    """Print the agent's status: once, or every second until Ctrl-C or the agent's end."""
    directory = home_directory(home)
    # Ctrl-C is how one ends watching, as in `pmesh top`.
    with contextlib.suppress(*[KeyboardInterrupt] * watch):
        if as_json:
            _print_json(directory, watch=watch)
        else:
            _print_screens(directory, watch=watch, whole=whole)
    return 0


def _print_screens(directory: Path, *, watch: bool, whole: bool) -> None:
    console = output()
    screens = _screens(directory, console, whole=whole, moves=watch)
    if not watch:
        console.print(next(screens))
    elif not console.is_terminal:  # Live would show nothing before its end
        for screen in screens:
            console.print(screen)
    else:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            for screen in screens:
                live.update(Cropped(screen), refresh=True)


def _screens(home: Path, console: Console, *, whole: bool, moves: bool) -> Iterator[RenderableType]:
    render = render_all if whole else render_status
    for beat in itertools.count():
        status = decode_status(ask_status(home))
        yield render(status, width=console.width, beat=beat if moves else None)
        time.sleep(WATCH_INTERVAL_S)


def _print_json(home: Path, *, watch: bool) -> None:
    while True:
        say_json(ask_status(home))
        if not watch:
            return
        time.sleep(WATCH_INTERVAL_S)
