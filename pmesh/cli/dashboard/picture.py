"""What the page is sent: a status and events, as texts and numbers that it shows as they are.

All texts of other machines pass through `printable`: none changes the direction of what follows.
"""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from pmesh.agent.events import Event
from pmesh.agent.schema import JobStatus, MemberHealth, RankStatus, Status, name_peer
from pmesh.charts.rules.history import Chart, ChartReading
from pmesh.charts.rules.readings import readings_of_job
from pmesh.cli.event_reader import Mood, mood_of
from pmesh.cli.sentences import (
    Split,
    explain_pace,
    find_slowest,
    headline,
    job_line,
    remarks_on,
    report_text,
    split_of,
)
from pmesh.cli.troubles import describe_troubles
from pmesh.texts import printable


class ShownMachine(Struct, frozen=True, kw_only=True):
    """A member of the view."""

    name: str
    health: MemberHealth
    leads: bool
    here: bool
    way: str
    """How data take their way to it: `wired en0`; empty for this machine and while unknown."""
    rtt_ms: float | None
    share_percent: int | None
    """Of the rows of a batch; None if no job deals them by measured speed."""
    processor_percent: int | None
    memory_percent: int | None
    next_mbit_s: int | None
    """To the next machine in the ring; None while unknown, and for one that is alone."""


class ShownRank(Struct, frozen=True, kw_only=True):
    """A trainer, and how it spends its time; each of the three is None while unknown."""

    rank: int
    machine: str
    step: int
    computing_percent: int | None
    waiting_percent: int | None
    network_percent: int | None
    reports: dict[str, str]
    remarks: str


class ShownJob(Struct, frozen=True, kw_only=True):
    """A job: its sentence, who or what is slowest and why, its ranks, and who waits to enter it."""

    name: str
    headline: str
    pace: str
    is_well: bool
    ranks: list[ShownRank]
    newcomers: list[str]


class MeshPicture(Struct, frozen=True, kw_only=True):
    """The mesh at one instant."""

    name: str
    version: str
    headline: str
    is_well: bool
    machines: list[ShownMachine]
    """In ring order."""
    jobs: list[ShownJob]
    troubles: list[str]


class ShownEvent(Struct, frozen=True, kw_only=True):
    """An event."""

    time: str
    """ISO 8601, by the clock of the agent's machine."""
    kind: str
    text: str
    mood: Mood


class Update(Struct, frozen=True, kw_only=True):
    """One message to the page."""

    whole: bool
    """True if charts and lines are all that is kept, False if they are only what is new."""
    slot: int
    """Now, as the charts count time."""
    gone: str | None
    """Why the agent does not answer; the picture is then the last one."""
    picture: MeshPicture | None
    """None before the agent has answered for the first time."""
    charts: Sequence[Chart]
    lines: Sequence[ShownEvent]


def picture_of(status: Status) -> MeshPicture:
    """Say what the page shows of a status."""
    members = status.view.members
    speeds = {edge.sender: edge.mbit_s for edge in status.view.edges}
    shares = {r.node: r.share_percent for job in status.jobs for r in job.ranks}
    machines = [
        ShownMachine(
            name=printable(member.name),
            health=member.health,
            leads=member.id == status.view.leader,
            here=member.id == status.node.id,
            way=printable(
                next((f"{p.kind or ''} {p.interface or p.remote}" for p in member.paths), "")
            ).strip(),
            rtt_ms=member.rtt_ms,
            share_percent=shares.get(member.id),
            processor_percent=member.cpu_percent,
            memory_percent=member.memory_percent,
            next_mbit_s=speeds.get(member.id),
        )
        for member in members
    ]
    return MeshPicture(
        name=printable(status.node.name),
        version=printable(status.version),
        headline=headline(status).plain,
        is_well=all(member.health in {"self", "healthy"} for member in members),
        machines=machines,
        jobs=[_job(job, status) for job in status.jobs],
        troubles=[*_troubles(status)],
    )


def _troubles(status: Status) -> Iterator[str]:
    for text in describe_troubles(status):
        yield text.plain.removeprefix("! ")
    for peer in status.peers:
        if peer.state != "linked":
            name = name_peer(peer, status.node.name) or "a machine"
            why = peer.reason or peer.state.replace("_", " ")
            yield printable(f"{name} is not linked: {why}")


def _job(job: JobStatus, status: Status) -> ShownJob:
    slowest, splits = find_slowest(job.ranks), split_of(job.ranks)
    return ShownJob(
        name=printable(job.name),
        headline=job_line(job).plain,
        pace=explain_pace(job, status),
        is_well=job.state in {"running", "waiting"},
        ranks=[
            _rank(rank, splits.get(rank.rank), is_slowest=rank is slowest) for rank in job.ranks
        ],
        newcomers=[printable(newcomer.name) for newcomer in job.newcomers],
    )


def _rank(rank: RankStatus, split: Split | None, *, is_slowest: bool) -> ShownRank:
    computing, waiting, network = split or (None, None, None)
    return ShownRank(
        rank=rank.rank,
        machine=printable(rank.name),
        step=rank.step,
        computing_percent=computing,
        waiting_percent=waiting,
        network_percent=network,
        reports={printable(n): report_text(v) for n, v in rank.reports.items()},
        remarks="; ".join(remarks_on(rank, slow=is_slowest)),
    )


def readings_of(status: Status) -> Iterator[ChartReading]:
    """Yield the numbers that are charted: speed, and the means of what the ranks report."""
    for job in status.jobs:
        reports = (
            {printable(n): v for n, v in rank.reports.items() if not isinstance(v, str)}
            for rank in job.ranks
        )
        ops_per_s = None if job.step else job.ops_per_s
        yield from readings_of_job(printable(job.name), job.steps_per_s, ops_per_s, reports)


def line_of(event: Event) -> ShownEvent:
    """Say what the page shows of an event."""
    return ShownEvent(
        time=event.time.isoformat(),
        kind=event.kind,
        text=printable(event.text),
        mood=mood_of(event.kind),
    )
