"""`pmesh status --all`: everything that an agent says of its mesh, for who looks for a cause."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from pmesh.agent.schema import (
    EdgeStatus,
    JobStatus,
    MemberStatus,
    PathStatus,
    PeerStatus,
    Status,
    ViewStatus,
)
from pmesh.cli.ring import HEALTH_MARKS, draw_ring, nodes_of
from pmesh.cli.troubles import describe_troubles
from pmesh.ids import SHORT_ID
from pmesh.terminal.rows import Rows
from pmesh.terminal.sizes import bytes_text
from pmesh.texts import printable


def render_all(status: Status, *, width: int = 80, beat: int | None = None) -> RenderableType:
    """Lay out the whole status; `beat` moves a light around the ring (see `draw_ring`)."""
    parts: list[RenderableType] = [_headline(status), _ring(status, width, beat)]
    if status.jobs:
        parts.append(_jobs(status.jobs))
    parts.append(_members(status))
    if any(member.paths for member in status.view.members):
        parts.append(_edges(status.view, status.node.id))
    parts += describe_troubles(status)
    strangers = [peer for peer in status.peers if peer.state != "linked"]
    if strangers:
        parts.append(_not_linked(strangers))
    return Group(*parts, _footer(status))


def _headline(status: Status) -> Text:
    node = status.node
    return Text.assemble(
        (printable(node.name), "bold"),
        f" {node.id[:SHORT_ID]} · {', '.join(map(printable, node.addresses)) or 'not listening'}",
        f" · pid {status.pid}, up {status.uptime_s:.0f} s · pmesh {printable(status.version)}",
        f" · compression {printable(node.compression)}" if node.compression else "",
    )


def _ring(status: Status, width: int, beat: int | None) -> RenderableType:
    nodes = nodes_of(status)
    title = Text(f"View {status.view.epoch.counter}, {len(nodes)} in the ring, ★ leads", "dim")
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
            rows.append((to, "", "", f"{edge.mbit_s or ''}", round_trip_text(edge.rtt_ms), ""))
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
            Text(bandwidth_text(path), "yellow" if path.slow else ""),
            round_trip_text(member.rtt_ms, member.jitter_ms)
            if first
            else round_trip_text(path.rtt_ms),
            Text(path.use, "red" if path.use == "silent" else ""),
        )


def path_text(interface: str | None, remote: str) -> str:
    """Name a path by its interfaces here and there.

    >>> path_text("en5", "en0"), path_text("bridge0", "bridge0"), path_text(None, "10.0.0.2")
    ('en5 → en0', 'bridge0', '? → 10.0.0.2')
    """
    return remote if remote == interface else f"{interface or '?'} → {remote}"


def bandwidth_text(path: PathStatus) -> str:
    """Return what was measured; what the interfaces claim, in parentheses, where nothing was."""
    measured, nominal = path.mbit_s, path.speed_mbit_s
    known = f"({nominal})" if measured is None and nominal is not None else f"{measured or ''}"
    return known if path.slow is None else f"! {known}"


def round_trip_text(rtt_ms: float | None, jitter_ms: float | None = None) -> str:
    if rtt_ms is None:
        return ""
    jitter = "" if jitter_ms is None else f" ± {jitter_ms:.1f}"
    return f"{rtt_ms:.2f}{jitter} ms"


def _not_linked(peers: Sequence[PeerStatus]) -> Rows:
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
