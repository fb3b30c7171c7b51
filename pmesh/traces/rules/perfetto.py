"""A timeline in the JSON that ui.perfetto.dev and chrome://tracing read.

The format: "Trace Event Format" of Chromium's Catapult project. A process there is one of ours; the
calls of a job, or of a group, are a thread of it. Slices of one thread lie within each other, so
messages that overlap are on threads of their own. An arrow leads from each send to its receive.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, Final, TypeAlias

from pmesh.core.jobs.op_times import MESSAGES
from pmesh.ids import TrainerId
from pmesh.terminal.sizes import rounded
from pmesh.traces.rules.timeline import PlacedOp, Process, Waited, find_meetings
from pmesh.traces.wire import TracedEvent, TracedMachine

Entry: TypeAlias = dict[str, Any]

MESH: Final = 1
"""The row of the changes; the trainers' processes come after it."""


def entries_of(
    ops: Sequence[PlacedOp],
    waits: Mapping[int, Waited],
    machines: Sequence[TracedMachine],
    changes: Iterable[TracedEvent],
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
    ended: dict[tuple[int, int], float] = {}
    for place, each in enumerate(ops):
        row, end_us, wait = rows.row(place), each.ended_us, waits.get(place)
        at = {"pid": row[0], "tid": row[1]}
        before_us = ended.get(row, each.began_us)
        began_us = max(before_us, each.began_us)  # by how much clocks drift, they seem to overlap
        ended[row] = end_us
        if began_us > before_us and not each.is_message:
            yield _at(before_us, began_us, zero_us, {"name": "outside calls", **at})
        about = {"name": rows.name(each), **at, "args": _about(each)}
        yield _at(began_us, end_us, zero_us, about)
        if wait is not None and wait.until_us > began_us:
            who = f"rank {wait.last.rank} on {machines[wait.last.process.machine].name}"
            yield _at(began_us, wait.until_us, zero_us, {"name": f"waits for {who}", **at})
            began_us = wait.until_us
        if each.op.nbytes and end_us > began_us:
            about = {"receiving_us": each.op.receiving_us}
            yield _at(began_us, end_us, zero_us, {"name": "moves values", **at, "args": about})
    yield from _arrows(ops, rows, zero_us)


class _Rows:
    """Which process and thread of the file stands for what."""

    def __init__(self, ops: Sequence[PlacedOp], job: str) -> None:
        self._names = _names_of_rows(ops)
        self._threads: dict[Process, dict[str, int]] = defaultdict(dict)
        self._processes = [each.process for each in ops]
        self._trainers = {(each.job, each.run, each.trainer): each.rank for each in ops}
        self.ranks: dict[Process, int] = {}
        for name, each in sorted(zip(self._names, ops, strict=True), key=_order_of_row):
            threads = self._threads[each.process]
            threads.setdefault(name, len(threads) + 1)
            if each.job == job:
                self.ranks[each.process] = each.rank
            self.ranks.setdefault(each.process, -1)
        order = sorted(self._threads, key=lambda process: (self.ranks[process], process))
        self.numbers = {process: number for number, process in enumerate(order, MESH + 1)}

    def row(self, place: int) -> tuple[int, int]:
        """Return the process and the thread of an op."""
        process = self._processes[place]
        return self.numbers[process], self._threads[process][self._names[place]]

    def threads(self, process: Process) -> dict[int, str]:
        return {thread: name for name, thread in self._threads[process].items()}

    def name(self, each: PlacedOp) -> str:
        """Return what is written on an op's slice."""
        if not each.is_message:
            return each.op.kind
        rank = self._trainers.get((each.job, each.run, TrainerId(each.op.peer)), -1)
        peer = "another rank" if rank < 0 else f"rank {rank}"
        what = each.op.kind if each.op.tag >= 0 else "rpc"
        return f"{what} {'to' if each.op.kind == 'send' else 'from'} {peer}"


def _order_of_row(row: tuple[str, PlacedOp]) -> tuple[bool, float]:
    """Put the calls above the messages, whose first row is the one that was taken first."""
    _, each = row
    return each.is_message, each.began_us if each.is_message else 0.0


def _names_of_rows(ops: Sequence[PlacedOp]) -> list[str]:
    """Return the row of each op in its process; of messages the first one that is free."""
    names = [f"calls of {each.job}" for each in ops]
    free: dict[Process, list[tuple[float, int]]] = defaultdict(list)
    messages = [(place, each) for place, each in enumerate(ops) if each.is_message]
    for place, each in sorted(messages, key=lambda message: message[1].began_us):
        rows = free[each.process]  # a heap of when each ends, and its number
        is_free = bool(rows) and rows[0][0] <= each.began_us
        number = heappop(rows)[1] if is_free else len(rows) + 1
        heappush(rows, (each.ended_us, number))
        names[place] = "messages" if number == 1 else f"messages, row {number}"
    return names


def _arrows(ops: Sequence[PlacedOp], rows: _Rows, zero_us: float) -> Iterator[Entry]:
    """Yield an arrow for each message whose send and receive are both known."""
    for number, places in enumerate(find_meetings(ops)):
        kinds = {ops[place].op.kind: place for place in places}
        if kinds.keys() != MESSAGES:
            continue
        about = {"name": "message", "cat": "message", "id": number}
        for kind, phase in (("send", "s"), ("recv", "f")):
            each, (process, thread) = ops[kinds[kind]], rows.row(kinds[kind])
            at_us = each.began_us
            if kind == "recv":  # within its slice
                at_us = max(at_us, each.ended_us - 1e-3)
            at = {"pid": process, "tid": thread, "ts": round(1e3 * (at_us - zero_us)) / 1e3}
            yield {"ph": phase, "bp": "e", **about, **at}


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
    if each.is_message:
        about = {"message": each.op.op, "tag": each.op.tag, "size": about["size"]}
    about |= {"bytes": each.op.nbytes, "clock_error_us": round(each.error_us, 1)}
    return about if each.op.completed else {**about, "failed": True}
