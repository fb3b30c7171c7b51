"""What a status means, in the words that `pmesh status`, `pmesh top` and the page have in common.

`pmesh dashboard` stays in memory for hours: nothing is imported here that only a terminal needs.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from rich.text import Text

from pmesh.agent.schema import EdgeStatus, JobStatus, MemberStatus, RankStatus, Status
from pmesh.texts import printable

DIGITS: Final = 12  # of the 32 of a hash; a person compares them with the eye
SLOWER_PERCENT: Final = 10  # less is within what steps differ by from one to the next
FULL_PERCENT: Final = 95  # of the memory: then the machine begins to swap


def headline(status: Status) -> Text:
    """Say how many machines there are, and whether all is well."""
    members = status.view.members
    if len(members) == 1:
        return Text.assemble(
            (printable(status.node.name), "bold"), " is alone: no other machine of its mesh is here"
        )
    lost = [member for member in members if member.health not in {"self", "healthy"}]
    leader = next(m.name for m in members if m.id == status.view.leader)
    words = {"degraded": "is slow to answer", "suspect": "is silent", "gone": "is gone"}
    troubles = [f"{printable(member.name)} {words[member.health]}" for member in lost]
    return Text.assemble(
        (printable(status.node.name), "bold"),
        f" sees {len(members)} machines: ",
        (", ".join(troubles), "red") if troubles else ("all are well", "green"),
        f"; ★ {printable(leader)} leads",
    )


def job_line(job: JobStatus) -> Text:
    """Say in one sentence how a job gets on."""
    name, count = printable(job.name), len(job.ranks)
    if job.wait_for is not None:
        here = len(job.newcomers)
        return Text(
            f"Job {name} waits to begin: {here} of {job.wait_for} trainers are here", "bold"
        )
    ranks = f"{count} rank{'s' * (count > 1)}"
    if job.state != "running":
        return Text.assemble(
            (f"Job {name} stands still with {ranks}", "bold"),
            (f": {printable(job.reason or job.state)}", "red"),
        )
    slowest = find_slowest(job.ranks)
    return Text.assemble(
        (f"Job {name} trains with {ranks}", "bold"),
        f": {progress_text(job)}",
        f"; slowest: {printable(slowest.name)}" if slowest else "",
        _comparison_text(job),
    )


def _comparison_text(job: JobStatus) -> Text:
    """Say whether all ranks have the same state; empty if they have not compared it."""
    found = job.comparison
    if found is None:
        return Text()
    differing = [rank for rank in job.ranks if rank.trainer in found.others]
    if found.mended or not differing:  # the one that differed may have left
        return Text(f"; state {found.digest[:DIGITS]} on all")
    names = [f"rank {rank.rank} ({printable(rank.name)})" for rank in differing]
    more = found.differing - len(found.others)
    names += [f"{more} more"] * (more > 0)
    return Text.assemble("; ", (f"another state than the others: {', '.join(names)}", "red"))


def progress_text(job: JobStatus) -> str:
    done = max(rank.completed for rank in job.ranks) + 1
    steps, per_s = ("step", job.steps_per_s) if job.step else ("op", job.ops_per_s)
    speed = "" if per_s is None else f", {speed_text(per_s)} {steps}s a second"
    return f"{steps} {job.step or done}{speed}"


def speed_text(per_s: float) -> str:
    """Format a speed with the digits that count."""
    return f"{per_s:.0f}" if per_s >= 100 or not per_s else f"{per_s:.2g}"  # noqa: PLR2004 - digits


def find_slowest(ranks: Sequence[RankStatus]) -> RankStatus | None:
    """Return the rank that the others wait for: it computes while they are in a call.

    None if no rank is slower than all others, or nothing is known.
    """
    known = sorted(
        ((rank.own_percent, rank) for rank in ranks if rank.own_percent is not None),
        key=lambda pair: pair[0],
    )
    if len(known) <= 1 or len(known) < len(ranks):
        return None
    (second, _), (most, slowest) = known[-2:]
    return slowest if most - second >= SLOWER_PERCENT else None


class Split(NamedTuple):
    """What a rank does with the time of a step, in percent."""

    computes: int
    waits: int
    network: int


def split_of(ranks: Sequence[RankStatus]) -> dict[int, Split]:
    """Return by rank how a step is split; empty unless all ranks say how long they compute.

    The rank that computes longest comes last to each call and waits for nobody, so the rest of its
    step is what the network takes. All steps take equally long, and the network as long for all, so
    what then is left of another rank's step is its wait.
    """
    own = {rank.rank: rank.own_percent for rank in ranks if rank.own_percent is not None}
    if len(own) < len(ranks):
        return {}
    longest = max(own.values(), default=0)
    return {rank: Split(percent, longest - percent, 100 - longest) for rank, percent in own.items()}


def explain_pace(job: JobStatus, status: Status) -> str:
    """Say who is slowest in a job and why, or that the network is; empty if nothing stands out."""
    members = {member.id: member for member in status.view.members}
    stopped = [printable(rank.name) for rank in job.ranks if rank.stopped]
    if stopped:
        return f"the process of {', '.join(stopped)} is stopped: the others wait"
    splits, slowest = split_of(job.ranks), find_slowest(job.ranks)
    if slowest is not None:
        own, waits = slowest.own_percent, max(split.waits for split in splits.values())
        reasons = "; ".join(_reasons(slowest, members.get(slowest.node)))
        name = printable(slowest.name)
        return f"slowest: {name} computes {own} %, others wait {waits} %" + (
            f"; {reasons}" if reasons else ""
        )
    network = max((split.network for split in splits.values()), default=0)
    if network < 50 or len(splits) == 1:  # noqa: PLR2004 - half of the time
        return ""
    edge = _slowest_edge(status.view.edges, {rank.node for rank in job.ranks})
    if edge is None:
        return f"the network takes {network} % of a step"
    one, other = (printable(members[node].name) for node in (edge.sender, edge.receiver))
    return (
        f"the network takes {network} % of a step; slowest: {one} → {other}, "
        f"{gbit_text(edge.mbit_s)} Gbit/s"
    )


def _reasons(rank: RankStatus, member: MemberStatus | None) -> Iterator[str]:
    memory = None if member is None else member.memory_percent
    if memory is not None and memory >= FULL_PERCENT:
        yield f"its memory is full ({memory} %)"
    if rank.share_percent is not None:
        yield f"it takes {rank.share_percent} % of the rows"


def _slowest_edge(edges: Iterable[EdgeStatus], nodes: set[str]) -> EdgeStatus | None:
    inside = (edge for edge in edges if {edge.sender, edge.receiver} <= nodes)
    return min((e for e in inside if e.mbit_s), key=lambda edge: edge.mbit_s or 0, default=None)


def gbit_text(mbit_s: int | None) -> str:
    """Format a bandwidth in Gbit/s with the digits that count.

    >>> gbit_text(18_400), gbit_text(940), gbit_text(54), gbit_text(3), gbit_text(None)
    ('18.4', '0.94', '0.05', '0.003', '')
    """
    if mbit_s is None:
        return ""
    gbit_s = mbit_s / 1000
    digits = 1 if mbit_s >= 1000 else 2 if mbit_s >= 10 else 3  # noqa: PLR2004 - digits
    return f"{gbit_s:.{digits}f}"


def report_text(value: float | str | None) -> str:
    """Format a reported number with the digits that count; empty if there is none.

    >>> report_text(0.0312345), report_text(12345.6), report_text("nan"), report_text(None)
    ('0.03123', '1.235e+04', 'nan', '')
    """
    return "" if value is None else value if isinstance(value, str) else f"{value:.4g}"


def remarks_on(rank: RankStatus, *, slow: bool) -> Iterator[str]:
    if rank.stopped:
        yield "its process is stopped: the others wait"
    elif slow:
        yield "the others wait for it in each step"
    if rank.share_percent is not None:
        yield f"takes {rank.share_percent} % of each batch"
    if rank.compression is not None:
        yield f"compression {printable(rank.compression)}"
