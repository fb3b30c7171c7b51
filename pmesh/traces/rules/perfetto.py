"""A timeline in the JSON that ui.perfetto.dev and chrome://tracing read.

The format: "Trace Event Format" of Chromium's Catapult project. A process there is one of ours; the
calls of a job, or of a group, are a thread of it. Slices of one thread lie within each other.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from pmesh.terminal.sizes import rounded
from pmesh.traces.rules.timeline import PlacedOp, Process, Wait
from pmesh.traces.wire import Change, Machine

Entry: TypeAlias = dict[str, Any]

MESH: Final = 1
"""The row of the changes; the trainers' processes come after it."""


def entries_of(
    ops: Sequence[PlacedOp],
    waits: Mapping[int, Wait],
    machines: Sequence[Machine],
    changes: Iterable[Change],
    *,
    job: str,
    since_us: int,
) -> Iterator[Entry]:
    """Yield all entries of the file's `traceEvents`.

    Args:
        ops: all ops, by their ends.
        waits: as `find_waits` returns them.
        machines: those that were asked.
        changes: of the job and the mesh.
        job: the one that was asked for; other ops are of groups of its ranks.
        since_us: the time that is 0 in the file, unless an op began before.
    """
    zero_us = min([since_us, *(each.began_us for each in ops)])
    yield from _names(MESH, "the mesh", {1: "views and losses"}, order=-1)
    for change in changes:
        about = {"name": change.kind, "pid": MESH, "tid": 1, "args": {"text": change.text}}
        yield _at(max(zero_us, change.at_us - change.took_us), change.at_us, zero_us, about)
    rows = _Rows(ops, job)
    for process, number in rows.numbers.items():
        rank, machine = rows.ranks[process], machines[process.machine].name
        name = f"a rank on {machine}" if rank < 0 else f"rank {rank} on {machine}"
        yield from _names(number, name, rows.threads(process), order=rank)
    ended: dict[tuple[Process, str], float] = {}
    for place, each in enumerate(ops):
        row, end_us, wait = (each.process, each.job), each.ended_us, waits.get(place)
        at = {"pid": rows.numbers[each.process], "tid": rows.thread(each)}
        before_us = ended.get(row, each.began_us)
        began_us = max(before_us, each.began_us)  # by how much clocks drift, they seem to overlap
        ended[row] = end_us
        if began_us > before_us:
            yield _at(before_us, began_us, zero_us, {"name": "outside calls", **at})
        yield _at(began_us, end_us, zero_us, {"name": each.op.kind, **at, "args": _about(each)})
        if wait is not None and wait.until_us > began_us:
            who = f"rank {wait.last.rank} on {machines[wait.last.process.machine].name}"
            yield _at(began_us, wait.until_us, zero_us, {"name": f"waits for {who}", **at})
            began_us = wait.until_us
        if each.op.nbytes and end_us > began_us:
            about = {"receiving_us": each.op.receiving_us}
            yield _at(began_us, end_us, zero_us, {"name": "moves values", **at, "args": about})


class _Rows:
    """Which process and thread of the file stands for what."""

    def __init__(self, ops: Sequence[PlacedOp], job: str) -> None:
        self._threads: dict[Process, dict[str, int]] = {}
        self.ranks: dict[Process, int] = {}
        for each in ops:
            threads = self._threads.setdefault(each.process, {})
            threads.setdefault(each.job, len(threads) + 1)
            if each.job == job:
                self.ranks[each.process] = each.rank
            self.ranks.setdefault(each.process, -1)
        order = sorted(self._threads, key=lambda process: (self.ranks[process], process))
        self.numbers = {process: number for number, process in enumerate(order, MESH + 1)}

    def thread(self, op: PlacedOp) -> int:
        return self._threads[op.process][op.job]

    def threads(self, process: Process) -> dict[int, str]:
        return {thread: f"calls of {job}" for job, thread in self._threads[process].items()}


def _names(process: int, name: str, threads: Mapping[int, str], *, order: int) -> Iterator[Entry]:
    yield _named("process_name", process, {"name": name})
    yield _named("process_sort_index", process, {"sort_index": order})
    for thread, row in threads.items():
        yield {**_named("thread_name", process, {"name": row}), "tid": thread}


def _named(what: str, process: int, arguments: Mapping[str, object]) -> Entry:
    return {"ph": "M", "name": what, "pid": process, "args": arguments}


def _at(began_us: float, ended_us: float, zero_us: float, about: Entry) -> Entry:
    """Return a slice, or what only happened; in whole nanoseconds, so that ends meet begins."""
    begin_ns, end_ns = round(1e3 * (began_us - zero_us)), round(1e3 * (ended_us - zero_us))
    if begin_ns == end_ns:
        return {"ph": "i", "s": "t", "ts": begin_ns / 1e3, **about}
    return {"ph": "X", "ts": begin_ns / 1e3, "dur": (end_ns - begin_ns) / 1e3, **about}


def _about(each: PlacedOp) -> Entry:
    about: Entry = {"op": each.op.op, "size": rounded(each.op.nbytes)}
    about |= {"bytes": each.op.nbytes, "clock_error_us": round(each.error_us, 1)}
    return about if each.op.completed else {**about, "failed": True}
