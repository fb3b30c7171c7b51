"""The ops of all ranks on one clock, and what each rank did meanwhile."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from pmesh.core.jobs.op_times import MESSAGES, OpTime
from pmesh.core.links.clocks import by_our_clock
from pmesh.core.ops.kinds import KINDS
from pmesh.traces.wire import RankOps, TracedMachine, TracedOps


class Process(NamedTuple):
    """A trainer's process: it is one rank of its job, and maybe of groups."""

    machine: int
    """The place of its machine."""
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedOp:
    """One op of one rank, in microseconds by the clock of the machine that was asked."""

    process: Process
    job: str
    """The job, or a group of its ranks."""
    run: int
    trainer: int
    rank: int
    op: OpTime
    began_us: float
    ended_us: float
    error_us: float
    """How far both times may be from the truth, to either side."""

    @property
    def is_message(self) -> bool:
        """Whether it is a send or a receive."""
        return self.op.kind in MESSAGES

    @property
    def meeting(self) -> Hashable:
        """What the ops of several ranks share in which none ends before all have begun, or None.

        A send ends when the message has been received.
        """
        run, op = (self.job, self.run), self.op
        if self.is_message and op.peer >= 0:
            ends = (self.trainer, op.peer) if op.kind == "send" else (op.peer, self.trainer)
            return *run, op.op, ends
        kind = KINDS.get(op.kind)
        return (*run, op.op) if kind is not None and kind.barrier else None


def place_ops(
    traced: Iterable[TracedOps], machines: Sequence[TracedMachine], *, since_us: int, until_us: int
) -> list[PlacedOp]:
    """Place the ops on one clock, by their ends; only those that ended within these bounds.

    A machine whose clock is not known has no place there; whatever times a machine may have told,
    what is returned lies within the bounds, except for the beginning of long ops.
    """
    placed = [
        _placed(each.machine, each.ops, op, machines[each.machine])
        for each in traced
        if machines[each.machine].me or machines[each.machine].clock
        for op in each.ops.times
    ]
    inside = (p for p in placed if since_us <= p.ended_us <= until_us + p.error_us)
    return sorted(inside, key=attrgetter("ended_us"))


def only_latest_run(ops: Sequence[PlacedOp], job: str) -> tuple[list[PlacedOp], int]:
    """Return the ops of the latest run of a job and of its groups, and how many runs are left out.

    A job that ends and begins again under its name has the counter of a later epoch, and so have
    the groups that it makes then. Without an op of the job itself, all ops are returned.

    Args:
        ops: all ops, by their ends.
        job: the one that was asked for; other ops are of groups of its ranks.
    """
    runs = {each.run for each in ops if each.job == job}
    latest = max(runs, default=0)
    return [each for each in ops if each.run >= latest], max(0, len(runs) - 1)


def _placed(place: int, ops: RankOps, op: OpTime, machine: TracedMachine) -> PlacedOp:
    ended_us, error_us = float(op.began_us + op.took_us), 0.0
    if not machine.me:
        ended_us, error_us = by_our_clock(machine.clock, op.began_us + op.took_us)
    return PlacedOp(
        process=Process(place, ops.pid),
        job=ops.last.job,
        run=ops.last.run,
        trainer=ops.last.trainer,
        rank=ops.rank,
        op=op,
        began_us=ended_us - op.took_us,  # clocks differ by nothing within one op
        ended_us=ended_us,
        error_us=error_us,
    )


class Waited(NamedTuple):
    """How long a rank waited in an op or a message until the last rank had called it."""

    until_us: float
    last: PlacedOp
    """The op of the rank that came last."""


def find_meetings(ops: Iterable[PlacedOp]) -> list[list[int]]:
    """Return the places of the ops of each call that ranks make together, and of each message."""
    found: dict[Hashable, list[int]] = defaultdict(list)
    for place, each in enumerate(ops):
        if (meeting := each.meeting) is not None:
            found[meeting].append(place)
    return list(found.values())


def find_waits(ops: Iterable[PlacedOp]) -> dict[int, Waited]:
    """Return the waits by the places of their ops in `ops`.

    A wait that is shorter than the error of the two clocks is none.
    """
    ordered = list(ops)
    waits: dict[int, Waited] = {}
    for places in find_meetings(ordered):
        last = max((ordered[place] for place in places), key=attrgetter("began_us"))
        for place in places:
            each = ordered[place]
            until_us = min(last.began_us, each.ended_us)
            if each is not last and until_us - each.began_us > each.error_us + last.error_us:
                waits[place] = Waited(until_us, last)
    return waits


@dataclass(slots=True)
class TimeShares:
    """What one process did from its first op to its last one, in microseconds."""

    calls: int = 0
    outside_us: float = 0.0
    """No op ran."""
    waited_us: float = 0.0
    """It waited for ranks that had not called the op yet."""
    moved_us: float = 0.0
    """The rest of its ops: values were sent, received, added and sealed."""


def share_out(ops: Sequence[PlacedOp], waits: Mapping[int, Waited]) -> dict[Process, TimeShares]:
    """Return how each process has spent its time; where its groups' ops overlap, it counts once.

    Args:
        ops: all ops, by their ends.
        waits: as `find_waits` returns them.
    """
    shares: dict[Process, TimeShares] = {}
    busy: dict[Process, list[tuple[float, float]]] = defaultdict(list)
    waiting: dict[Process, list[tuple[float, float]]] = defaultdict(list)
    for place, each in enumerate(ops):
        shares.setdefault(each.process, TimeShares()).calls += 1
        busy[each.process].append((each.began_us, each.ended_us))
        if place in waits:
            waiting[each.process].append((each.began_us, waits[place].until_us))
    for process, share in shares.items():
        spans = busy[process]
        in_ops_us = _covered(spans)
        whole_us = max(end for _, end in spans) - min(begin for begin, _ in spans)
        share.outside_us = max(0.0, whole_us - in_ops_us)
        share.waited_us = _covered(waiting[process])
        share.moved_us = max(0.0, in_ops_us - share.waited_us)
    return shares


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return how much of the time at least one of the spans covers."""
    covered_us, until_us = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered_us += max(0.0, end - max(begin, until_us))
        until_us = max(until_us, end)
    return covered_us
