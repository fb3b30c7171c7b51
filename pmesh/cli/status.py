"""`pmesh status` and `pmesh down`: shows the agent's state as a ring and tables.

╭─▶ ● mac-1 ★ ──▶ ● mac-2   ──╮
│                             │
╰────────────── ● mac-3   ◀───╯
"""

import contextlib
import itertools
import math
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

import psutil
from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.text import Text

from pmesh.agent.status.schema import (
    EdgeStatus,
    Health,
    HeldOffStatus,
    JobStatus,
    MemberStatus,
    PeerStatus,
    Status,
    ViewStatus,
    decode_status,
)
from pmesh.cli.rows import Rows, output
from pmesh.cli.terminal import say, say_json
from pmesh.client.control import ask_status, stop_agent
from pmesh.ids import SHORT_ID, shared_name
from pmesh.paths import home_directory
from pmesh.texts import printable

# Both shape and colour show the health, for terminals and eyes without colours.
HEALTH_MARKS: Final[Mapping[Health, tuple[str, str]]] = MappingProxyType(
    {
        "self": ("●", "green"),
        "healthy": ("●", "green"),
        "degraded": ("◐", "yellow"),
        "suspect": ("○", "red"),
        "gone": ("✕", "red"),
    }
)
STALL_S = 0.5  # as long as a peer on a wire may be silent without being called late
BAD_LOSS_PERCENT = 1.0  # crowded Wi-Fi; a line that is well loses a hundredth of it
_EDGE_CELLS = 5
_SIDES_CELLS = 8
_SHORTEST_LABEL_CELLS = 7  # "● mac …": a narrower terminal wraps the drawing


class RingNode(NamedTuple):
    """One member of the drawn ring."""

    name: str
    health: Health = "healthy"
    leader: bool = False
    here: bool = False
    """True for the machine that shows the status."""


def draw_ring(nodes: Sequence[RingNode], *, width: int = 80, beat: int | None = None) -> Text:
    """Draw the members in ring order, clockwise.

    Args:
        nodes: At least one.
        width: Cells of the terminal; names are shortened to fit.
        beat: Lights up one edge; a caller that counts it up moves the light around the ring.
    """
    if len(nodes) == 1:
        return Text.assemble(_label(nodes[0], width), (" alone", "dim"))
    columns = (len(nodes) + 1) // 2
    room = (width - _SIDES_CELLS - _EDGE_CELLS * (columns - 1)) // columns
    cells = min(max(_label(node, width).cell_len for node in nodes), room)
    labels = [_label(node, max(cells, _SHORTEST_LABEL_CELLS)) for node in nodes]
    label_cells = max(label.cell_len for label in labels)
    for label in labels:
        label.pad_right(label_cells - label.cell_len)
    lit = None if beat is None else beat % len(nodes)
    styles = ["bold cyan" if edge == lit else "dim" for edge in range(len(nodes))]
    turn, back = styles[columns - 1], styles[-1]  # the edges down the right and up the left side
    top = _top_row(labels[:columns], styles)
    inside = " " * (top.cell_len - 2)
    middle = Text.assemble(("│", back), inside, ("│", turn))
    bottom = _bottom_row(labels[columns:], styles[columns:], turn, missing=len(nodes) % 2)
    return Text("\n").join([top, middle, bottom])


def _top_row(labels: Sequence[Text], styles: Sequence[str]) -> Text:
    row = Text.assemble(("╭─▶ ", styles[-1]))
    for index, label in enumerate(labels):
        last = index == len(labels) - 1
        row.append_text(label).append(" ──╮" if last else " ──▶ ", styles[index])
    return row


def _bottom_row(labels: Sequence[Text], styles: Sequence[str], turn: str, *, missing: int) -> Text:
    """Draw from right to left; an odd ring has one label fewer here, and a longer edge."""
    row = Text.assemble(("╰── ", styles[-1]))
    for index in reversed(range(len(labels))):
        row.append_text(labels[index])
        if index > 0:
            row.append(" ◀── ", styles[index - 1])
    longer = "─" * (missing * (labels[0].cell_len + _EDGE_CELLS))
    return row.append(f" ◀{longer}─╯", turn)


def _label(node: RingNode, cells: int) -> Text:
    mark, color = HEALTH_MARKS[node.health]
    star = " ★" if node.leader else ""
    name = printable(node.name)
    room = cells - cell_len(f"{mark} {star}")
    if cell_len(name) > room:
        name = f"{set_cell_size(name, room - 1).rstrip()}…"
    return Text.assemble((mark, color), " ", (name, "bold" if node.here else ""), star)


_UNIT_STEP = 1000


def render_status(status: Status, *, width: int = 80, beat: int | None = None) -> RenderableType:
    """Lay out the whole status; `beat` moves a light around the ring (see `draw_ring`)."""
    parts: list[RenderableType] = [_headline(status), _ring(status, width, beat), _members(status)]
    parts += _shared_names(status.view.members)
    if any(member.paths for member in status.view.members):
        parts.append(_edges(status.view, status.node.id))
    parts += _slow_paths(status.view.members)
    parts += _bad_links(status.view.members)
    parts += _held_off(status.held_off)
    strangers = [peer for peer in status.peers if peer.state != "linked"]
    if strangers:
        parts.append(_peers(strangers))
    if status.jobs:
        parts.append(_jobs(status.jobs))
    return Group(*parts, _footer(status))


def bytes_text(count: int) -> str:
    """Format bytes in the largest unit that leaves at least 1.

    >>> bytes_text(999), bytes_text(1_250_000)
    ('999 B', '1.2 MB')
    """
    value, units = float(count), ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= _UNIT_STEP and len(units) > 1:
        value /= _UNIT_STEP
        del units[0]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def _headline(status: Status) -> Text:
    node = status.node
    return Text.assemble(
        (printable(node.name), "bold"),
        f" {node.id[:SHORT_ID]} · {', '.join(map(printable, node.addresses)) or 'not listening'}",
        f" · pid {status.pid}, up {status.uptime_s:.0f} s · pmesh {printable(status.version)}",
        f" · compression {printable(node.compression)}" if node.compression else "",
    )


def _ring(status: Status, width: int, beat: int | None) -> RenderableType:
    view = status.view
    leader = view.leader
    nodes = [
        RingNode(m.name, m.health, leader=m.id == leader, here=m.id == status.node.id)
        for m in view.members
    ]
    title = Text(f"View {view.epoch.counter}, {len(nodes)} in the ring, ★ leads", "dim")
    ring = Group(title, draw_ring(nodes, width=width, beat=beat))
    return Padding(ring, (1, 0, 0, 0), expand=False)  # a pipe has no width to fill


def _members(status: Status) -> Rows:
    headers = ("rank", "name", "id", "health", "sent again", "addresses")
    return Rows(headers, [_member_row(member) for member in status.view.members])


def _member_row(member: MemberStatus) -> tuple[str | Text, ...]:
    mark, color = HEALTH_MARKS[member.health]
    return (
        str(member.rank),
        Text(printable(member.name)),
        member.id[:SHORT_ID],
        Text(f"{mark} {member.health}", color),
        "" if member.loss_percent is None else f"{member.loss_percent:.1f} %",
        _lines(member.addresses),
    )


def _edges(view: ViewStatus, me: str) -> Rows:
    """Show all paths from here, and the edges of the ring between others."""
    rows = [row for member in view.members for row in _path_rows(member, view.edges, me)]
    names = {member.id: printable(member.name) for member in view.members}
    for edge in view.edges:
        if me not in {edge.sender, edge.receiver}:
            to = Text(f"{names[edge.sender]} → {names[edge.receiver]}")
            rows.append((to, "", "", _mbit_s(edge.mbit_s), _round_trip(edge.rtt_ms), ""))
    return Rows(("to", "path", "kind", "Mbit/s", "round trip", "use"), rows)


def _path_rows(
    member: MemberStatus, edges: Sequence[EdgeStatus], me: str
) -> Iterator[tuple[str | Text, ...]]:
    pairs = {(edge.sender, edge.receiver) for edge in edges}
    sends, receives = (me, member.id) in pairs, (member.id, me) in pairs
    arrow = "⇄ " if sends and receives else "→ " if sends else "← " if receives else ""
    for path in member.paths:
        first = path is member.paths[0]
        yield (
            Text(arrow + printable(member.name) if first else ""),
            Text(printable(path_text(path.interface, path.remote))),
            Text(printable(path.kind or "")),
            Text(_mbit_s(path.mbit_s, path.speed_mbit_s, path.slow), "yellow" if path.slow else ""),
            _round_trip(member.rtt_ms, member.jitter_ms) if first else _round_trip(path.rtt_ms),
            Text(path.use, "red" if path.use == "silent" else ""),
        )


def path_text(interface: str | None, remote: str) -> str:
    """Name a path by its interfaces here and there.

    >>> path_text("en5", "en0"), path_text("bridge0", "bridge0"), path_text(None, "10.0.0.2")
    ('en5 → en0', 'bridge0', '? → 10.0.0.2')
    """
    return remote if remote == interface else f"{interface or '?'} → {remote}"


def _mbit_s(measured: int | None, nominal: int | None = None, slow: str | None = None) -> str:
    """Show what was measured; what the interfaces claim, in parentheses, where nothing was.

    >>> _mbit_s(94, 1000, "of a cable"), _mbit_s(None, 1000), _mbit_s(940)
    ('! 94', '(1000)', '940')
    """
    known = f"({nominal})" if measured is None and nominal is not None else measured or ""
    return f"{known}" if slow is None else f"! {known}"


def _round_trip(rtt_ms: float | None, jitter_ms: float | None = None) -> str:
    if rtt_ms is None:
        return ""
    jitter = "" if jitter_ms is None else f" ± {jitter_ms:.1f}"
    return f"{rtt_ms:.2f}{jitter} ms"


def _slow_paths(members: Sequence[MemberStatus]) -> Iterator[Text]:
    for member in members:
        for path in member.paths:
            if path.slow is not None:
                yield Text(f"! {printable(member.name)}: {printable(path.slow)}", "yellow")


def _bad_links(members: Sequence[MemberStatus]) -> Iterator[Text]:
    """Say which links lose packets or stand still now and then, and what follows."""
    for member in members:
        found: list[str] = []
        if member.loss_percent is not None and member.loss_percent >= BAD_LOSS_PERCENT:
            found.append(f"had to send {member.loss_percent:.1f} % of its packets again")
        if member.silence_s is not None and member.silence_s >= STALL_S:
            found.append(f"was silent for {member.silence_s:.1f} s lately")
        if found:
            yield Text(
                f"the link to {printable(member.name)} {' and '.join(found)}; "
                "training waits for it each time",
                "yellow",
            )


def _held_off(those: Sequence[HeldOffStatus]) -> Iterator[Text]:
    for one in those:
        yield Text(
            f"{printable(one.name)} was lost {one.losses} times lately; "
            f"it is let back in in {math.ceil(one.back_in_s)} s",
            "yellow",
        )


def _shared_names(members: Sequence[MemberStatus]) -> Iterator[Text]:
    """Say which machines have one name: their view appends to each the start of its id."""
    names = Counter(
        name
        for member in members
        if shared_name(name := member.name.rpartition(" (")[0], member.id) == member.name
    )
    for name, count in names.items():
        if count > 1:
            text = f"{count} machines are called '{name}'; start one with 'pmesh up --name OTHER'"
        else:
            text = (
                f"another machine had the name '{name}' before; if it is the same one, reinstalled,"
                f" type: pmesh forget {shlex.quote(name)}"
            )
        yield Text(printable(text))


def _peers(peers: list[PeerStatus]) -> Rows:
    rows = [
        (
            Text(printable(peer.name or "")),
            Text(printable((peer.id or "")[:SHORT_ID])),
            peer.state.replace("_", " "),
            _lines(peer.addresses),
            Text(printable(peer.reason or "")),
        )
        for peer in peers
    ]
    return Rows(("peer", "id", "state", "addresses", "why"), rows, title="Not linked")


def _jobs(jobs: tuple[JobStatus, ...]) -> Rows:
    rows = [
        (
            Text(printable(job.name)),
            job.state.replace("_", " ") + ("" if job.wait_for is None else f" for {job.wait_for}"),
            Text("\n".join(_rank_lines(job))),
            "\n".join(str(rank.completed + 1) for rank in job.ranks),
            str(job.stable + 1),
            Text("\n".join(map(printable, _reasons(job)))),
        )
        for job in jobs
    ]
    return Rows(("job", "state", "ranks", "ops", "stable", "why"), rows, title="Jobs")


def _rank_lines(job: JobStatus) -> Iterator[str]:
    for rank in job.ranks:
        yield f"{rank.rank} {printable(rank.name)}{' stopped' if rank.stopped else ''}"
    for newcomer in job.newcomers:
        waits = "waits" if job.wait_for is not None else "enters at the next sync"
        yield f"{printable(newcomer.name)} {waits}"


def _reasons(job: JobStatus) -> Iterator[str]:
    if job.reason is not None:
        yield job.reason
    yield from job.losses
    for text in dict.fromkeys(rank.compression for rank in job.ranks):
        if text is not None:
            yield f"compression {text}"


def _footer(status: Status) -> Text:
    traffic, door, away = status.traffic, status.door, status.turned_away
    data = f"data {_both(traffic.data_sent_bytes, traffic.data_received_bytes)}"
    control = f"control {_both(traffic.control_sent_bytes, traffic.control_received_bytes)}"
    lag = f"loop lag {status.loop_lag_ms:.1f} ms"
    came = (
        f"{door.accepted} connections came, {away.connections} turned away, {door.pending} pending"
    )
    others = {
        "forged announcements": away.forged_announcements,
        "links of members that broke the protocol": away.broken_links,
        "local programs": away.programs,
    }
    if refused := [f"{count} {what}" for what, count in others.items() if count]:
        came += f"\nalso turned away: {', '.join(refused)}"
    return Text(f"{data}; {control}\n{lag}; {came}", "dim")


def _both(sent: int, received: int) -> str:
    return f"{bytes_text(sent)} sent, {bytes_text(received)} received"


def _lines(addresses: tuple[str, ...]) -> Text:
    return Text("\n".join(map(printable, addresses)))


WATCH_INTERVAL_S = 1.0
EXIT_TIMEOUT_S = 5.0


def show_status(home: Path | None, *, watch: bool, as_json: bool) -> int:
    """Print the agent's status: once, or every second until Ctrl-C or the agent's end."""
    directory = home_directory(home)
    if as_json:
        _print_json(directory, watch=watch)
        return 0
    console = output()
    if not watch:
        console.print(render_status(decode_status(ask_status(directory)), width=console.width))
    elif not console.is_terminal:  # Live would show nothing before its end
        for screen in _screens(directory, console):
            console.print(screen)
    else:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            for screen in _screens(directory, console):
                live.update(screen, refresh=True)
    return 0


def _screens(home: Path, console: Console) -> Iterator[RenderableType]:
    for beat in itertools.count():
        status = decode_status(ask_status(home))
        yield render_status(status, width=console.width, beat=beat)
        time.sleep(WATCH_INTERVAL_S)


def bring_down(home: Path | None) -> int:
    """Stop the agent and wait until its process has ended, which frees its home."""
    pid = stop_agent(home_directory(home))
    with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
        psutil.Process(pid).wait(EXIT_TIMEOUT_S)
    say(f"The agent has left the mesh (pid {pid}).")
    return 0


def _print_json(home: Path, *, watch: bool) -> None:
    while True:
        say_json(ask_status(home))
        if not watch:
            return
        time.sleep(WATCH_INTERVAL_S)
