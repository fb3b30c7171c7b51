"""What `pmesh top` shows: a status, how losses went and the last events in, lines out. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Final

from rich.cells import cached_cell_len
from rich.text import Text

from pmesh.agent.events import Event
from pmesh.agent.schema import JobStatus, Status
from pmesh.cli.events import kind_text
from pmesh.cli.ring import HEALTH_MARKS, draw_ring, has_room, nodes_of
from pmesh.cli.sentences import (
    FULL_PERCENT,
    Split,
    explain_pace,
    find_slowest,
    gbit_text,
    headline,
    job_line,
    progress_text,
    report_text,
    split_of,
)
from pmesh.cli.status_all import round_trip_text
from pmesh.cli.top.history import Losses, loss_of, sparkline
from pmesh.cli.troubles import describe_troubles
from pmesh.texts import printable

MOST_CELLS: Final = 120  # a wider screen would only tear the columns apart
FEWEST_EVENTS: Final = 3
MOST_TROUBLES: Final = 3
BAR_CELLS: Final = 16
FEWEST_NAME_CELLS: Final = 6
GAP: Final = "  "


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """All that is shown."""

    status: Status
    losses: Losses
    events: Sequence[Event]
    """The latest last."""
    trouble: str = ""
    """Why the status is an old one; empty if it is of now."""


def bar(split: Split, cells: int) -> str:
    """Draw a split with so many cells.

    >>> bar(Split(50, 25, 25), 8)
    '████▒▒░░'
    """
    computed = round(split.computes * cells / 100)
    waited = round((split.computes + split.waits) * cells / 100) - computed
    return "█" * computed + "▒" * waited + "░" * (cells - computed - waited)


def lines_of(seen: Shown, *, width: int, height: int | None, beat: int | None = None) -> list[Text]:
    """Lay out the screen.

    Args:
        seen: What is shown.
        width: Cells of each line; what is longer is cut, and "…" shows it.
        height: The most lines; None for as many as there are.
        beat: Moves a light around the ring; see `draw_ring`.

    Returns:
        The lines. If they do not fit, first old events are left out, then the ring, whose speeds
        move to the machines, then the empty lines. Then the last line says how many more there are.
    """
    cached_cell_len.cache_clear()  # the next screen has other numbers: rich would keep 4,096
    width = min(width, MOST_CELLS)
    lines = list(_without_events(seen, width, beat=beat, ring=True))
    events, gap = min(FEWEST_EVENTS, len(seen.events)), [Text("")]
    if height is not None:
        if len(lines) + len(gap) + events > height:
            lines = list(_without_events(seen, width, beat=beat, ring=False))
        if len(lines) + len(gap) + events > height:
            lines, gap = [line for line in lines if line], []
        events = height - len(lines) - len(gap)
        lines[0].append(" · q ends", "dim")
    if seen.events and events > 0:
        lines += [*gap, *map(_event_line, seen.events[-events:])]
    if height is not None and len(lines) > height:
        more = Text(f"… {len(lines) - height + 1} more lines: pmesh status", "yellow")
        lines = [*lines[: height - 1], more]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _without_events(seen: Shown, width: int, *, beat: int | None, ring: bool) -> Iterator[Text]:
    status = seen.status
    yield Text(printable(seen.trouble), "red") if seen.trouble else headline(status)
    speeds = [gbit_text(edge.mbit_s) for edge in status.view.edges]
    nodes = nodes_of(status)
    ring = ring and has_room(len(nodes), speeds, width)
    if ring:
        yield Text("")
        unit = "Gbit/s" if any(speeds) else ""
        yield from draw_ring(nodes, width=width, beat=beat, speeds=speeds, unit=unit).split("\n")
    for job in status.jobs:
        yield Text("")
        yield from _job_lines(job, seen, width)
    yield Text("")
    yield from _machine_lines(status, width, speeds=not ring)
    yield from list(describe_troubles(status))[:MOST_TROUBLES]


def _job_lines(job: JobStatus, seen: Shown, width: int) -> Iterator[Text]:
    if job.state != "running":
        yield job_line(job)
        if job.ranks:
            yield from _columns(_rank_rows(job), width)
        return
    loss = loss_of(job)
    title = Text.assemble((f"Job {printable(job.name)}", "bold"), f": {progress_text(job)}")
    if loss is not None:
        title.append("; loss ").append(
            report_text(loss), "red" if isinstance(loss, str) else "bold"
        )
    yield title
    if history := seen.losses.of(job):
        yield Text(sparkline(history, width), "cyan")
    for line in wrap(explain_pace(job, seen.status), width):
        yield Text(line, "yellow")
    yield from _columns(_rank_rows(job), width)


def _rank_rows(job: JobStatus) -> Iterator[Sequence[Text]]:
    splits, slowest = split_of(job.ranks), find_slowest(job.ranks)
    headers = ("rank", "machine", "loss", "rows", "█comp ▒wait ░net", "%")
    yield [Text(header, "dim") for header in headers]
    for rank in job.ranks:
        split, style = splits.get(rank.rank), "yellow" if rank is slowest else ""
        loss, rows = rank.reports.get("loss"), rank.share_percent
        yield (
            Text(str(rank.rank)),
            Text(printable(rank.name), style),
            Text(report_text(loss), "red" if isinstance(loss, str) else ""),
            Text("" if rows is None else f"{rows} %"),
            Text("" if split is None else bar(split, BAR_CELLS), style),
            Text("stopped" if rank.stopped else "" if split is None else "/".join(map(str, split))),
        )
    for one in job.newcomers:
        yield (Text(""), Text(printable(one.name)), Text(""), Text(""), Text("enters soon"), Text())


def _machine_lines(status: Status, width: int, *, speeds: bool) -> Iterator[Text]:
    """One line a machine, in ring order; `speeds` adds that to the next one in the ring."""
    to_next = {edge.sender: gbit_text(edge.mbit_s) for edge in status.view.edges}
    headers = ("", "machine", "cpu", "memory", "round trip", "→ Gbit/s" if speeds else "")
    rows = [[Text(header, "dim") for header in headers]]
    for member in status.view.members:
        mark, color = HEALTH_MARKS[member.health]
        star = " ★" if member.id == status.view.leader else ""
        memory = member.memory_percent
        full = memory is not None and memory >= FULL_PERCENT
        rows.append(
            [
                Text(mark, color),
                Text(printable(member.name) + star),
                Text(_percent(member.cpu_percent)),
                Text(_percent(memory), "red" if full else ""),
                Text("here" if member.health == "self" else round_trip_text(member.rtt_ms)),
                Text(to_next.get(member.id, "") if speeds else ""),
            ]
        )
    yield from _columns(rows, width)


def _percent(percent: int | None) -> str:
    return "" if percent is None else f"{percent:3} %"  # as wide as 100 %: columns stay in place


def _event_line(event: Event) -> Text:
    time = f"{event.time.astimezone():%H:%M:%S}"
    return Text.assemble((time, "dim"), GAP, kind_text(event), GAP, printable(event.text))


def _columns(rows: Iterable[Sequence[Text]], width: int, *, names: int = 1) -> Iterator[Text]:
    """Put the cells of rows below each other; a column whose cells are all empty is left out.

    Args:
        rows: The headers, then the rows.
        width: Of the screen, in cells.
        names: The column that becomes narrower if the screen is too narrow.
    """
    header, *rest = rows
    wanted = [i for i in range(len(header)) if i == names or any(row[i].plain for row in rest)]
    cells = {i: max(row[i].cell_len for row in (header, *rest)) for i in wanted}
    excess = sum(cells.values()) + len(GAP) * (len(wanted) - 1) - width
    cells[names] = max(cells[names] - max(excess, 0), min(cells[names], FEWEST_NAME_CELLS))
    for row in (header, *rest):
        line = Text()
        for i in wanted:
            cell = row[i].copy()
            cell.truncate(cells[i], overflow="ellipsis", pad=True)
            line.append_text(cell).append(GAP)
        line.rstrip()
        yield line
