"""The agent's picture as a person reads it."""

from collections.abc import Iterator

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pmesh.agent.status import JobStatus, MemberStatus, PeerStatus, Status
from pmesh.cli.ring import HEALTH_MARKS, RingNode, draw_ring
from pmesh.cli.terminal import printable

SHORT_ID = 8  # as `pmesh.ids.short_node`
_UNIT_STEP = 1000


def render_status(status: Status, *, width: int = 80, beat: int | None = None) -> RenderableType:
    """The whole picture; `beat` lets a light run around the ring (see `draw_ring`)."""
    parts: list[RenderableType] = [_headline(status), _ring(status, width, beat), _members(status)]
    strangers = [peer for peer in status.peers if peer.state != "linked"]
    if strangers:
        parts.append(_peers(strangers))
    if status.jobs:
        parts.append(_jobs(status.jobs))
    return Group(*parts, _footer(status))


def bytes_text(count: int) -> str:
    """A number of bytes in the largest unit that leaves at least 1.

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
    return Padding(Group(title, draw_ring(nodes, width=width, beat=beat)), (1, 0, 0, 0))


def _members(status: Status) -> Table:
    table = Table(
        "rank", "name", "id", "health", "round trip", "interface", "addresses", box=SIMPLE
    )
    for member in status.view.members:
        table.add_row(*_member_row(member))
    return table


def _member_row(member: MemberStatus) -> tuple[str | Text, ...]:
    mark, color = HEALTH_MARKS[member.health]
    return (
        str(member.rank),
        Text(printable(member.name)),
        member.id[:SHORT_ID],
        Text(f"{mark} {member.health}", color),
        "" if member.rtt_ms is None else f"{member.rtt_ms:.2f} ms",
        Text(printable(member.interface or "")),
        _lines(member.addresses),
    )


def _peers(peers: list[PeerStatus]) -> Table:
    table = Table("peer", "id", "state", "addresses", "why", box=SIMPLE, title="Not linked")
    for peer in peers:
        table.add_row(
            Text(printable(peer.name or "")),
            Text(printable((peer.id or "")[:SHORT_ID])),
            peer.state.replace("_", " "),
            _lines(peer.addresses),
            Text(printable(peer.reason or "")),
        )
    return table


def _jobs(jobs: tuple[JobStatus, ...]) -> Table:
    table = Table("job", "state", "ranks", "ops", "stable", "why", box=SIMPLE, title="Jobs")
    for job in jobs:
        waiting = "" if job.wait_for is None else f" for {job.wait_for}"
        table.add_row(
            Text(printable(job.name)),
            f"{job.state.replace('_', ' ')}{waiting}",
            Text("\n".join(_rank_lines(job))),
            "\n".join(str(rank.completed + 1) for rank in job.ranks),
            str(job.stable + 1),
            Text("\n".join(map(printable, _reasons(job)))),
        )
    return table


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
