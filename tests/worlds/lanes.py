"""Rings of ranks in one process, over real sockets, for the tests of lanes and collectives.

Shares of memory and descriptors, for sessions without an agent.

Ranks in one process with a lane between any two of them that need one, over real sockets.
"""

import gc
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import trio
from numpy.typing import NDArray

from pmesh.core.ops.plan import RankPlan
from pmesh.core.ops.reductions import Values
from pmesh.core.wire.lanes import OfferLane
from pmesh.core.wire.records import OVERHEAD_BYTES, RecordHeader
from pmesh.ids import Epoch, Incarnation, JobName, NodeId, TrainerId
from pmesh.net.lanes.executor import run_in_python, run_plan
from pmesh.net.lanes.lane import Lane
from pmesh.net.lanes.opening import local_lanes
from pmesh.net.lanes.ring import RingPosition, all_reduce
from pmesh.net.sessions.arena_pools import ArenaBudget, ArenaShare

EMPTY = memoryview(b"")
LINKS = Path("/proc/self/fd")
BORN = Epoch(1, NodeId(bytes(32)), Incarnation(1))


def offer_between(
    sender: int, receiver: int, *, number: int = 1, dial: bool = False, several: bool = False
) -> OfferLane:
    return OfferLane(
        lane=bytes([sender, receiver]) * 8,
        job=JobName("digits"),
        born=BORN,
        number=number,
        sender=TrainerId(sender),
        receiver=TrainerId(receiver),
        key=bytes([1, sender]) * 16,
        return_key=bytes([2, receiver]) * 16,
        dial=dial,
        several=several,
    )


def header(
    nbytes: int = 0, *, roster: int = 1, op: int = 0, segment: int = 0, fingerprint: int = 9
) -> RecordHeader:
    return RecordHeader(nbytes, roster, op, segment, fingerprint, completed=op - 1)


@contextmanager
def lane_pair(*, buffer_bytes: int | None = None) -> Iterator[tuple[Lane, Lane]]:
    """A sending and a receiving end; `buffer_bytes` makes the network between them slow."""
    lanes = local_lanes(offer_between(0, 1), peers=("mac-1", "mac-0"))
    if buffer_bytes is not None:
        for lane in lanes:
            shrink(lane, buffer_bytes)
    try:
        yield lanes
    finally:
        for lane in lanes:
            lane.close()


@contextmanager
def raw_receiving_lane() -> Iterator[tuple[socket.socket, Lane]]:
    """A receiving end, and the plain socket of whoever pretends to be the sender."""
    ours, theirs = socket.socketpair()
    lane = Lane(ours, offer_between(0, 1), sending=False, peer="mac-0")
    try:
        yield theirs, lane
    finally:
        theirs.close()
        lane.close()


@contextmanager
def ring_of(
    size: int, *, roster: int = 1, buffer_bytes: int | None = None
) -> Iterator[list[RingPosition]]:
    ring = [RingPosition(rank=rank, size=size, roster=roster) for rank in range(size)]
    lanes: list[Lane] = []
    for rank in range(size if size > 1 else 0):
        with_next = (rank + 1) % size
        offer = offer_between(rank, with_next, number=roster)
        sending, receiving = local_lanes(offer, peers=(f"mac-{with_next}", f"mac-{rank}"))
        if buffer_bytes is not None:
            for lane in (sending, receiving):
                shrink(lane, buffer_bytes)
        ring[rank].to_next = sending
        ring[with_next].from_previous = receiving
        lanes += [sending, receiving]
    try:
        yield ring
    finally:
        for lane in lanes:
            lane.close()


def socket_of(lane: Lane) -> socket.socket:
    """The connection of a lane: a bad network, without a switch in the lane for it."""
    return lane._socket  # noqa: SLF001


def shrink(lane: Lane, buffer_bytes: int) -> None:
    sock = socket_of(lane)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)


@contextmanager
def forgotten(lane: Lane) -> Iterator[None]:
    """The network between swallows what the lane sends, as a router that has lost its table."""
    descriptor = socket_of(lane).fileno()
    connection, (end, nowhere) = os.dup(descriptor), socket.socketpair()
    try:
        os.dup2(end.fileno(), descriptor)
        yield
    finally:
        os.close(connection)
        end.close()
        nowhere.close()


async def at_every_rank(
    ring: list[RingPosition], call: Callable[[RingPosition], Awaitable[None]]
) -> None:
    async with trio.open_nursery() as nursery:
        for position in ring:
            nursery.start_soon(call, position)


def inputs_of(size: int, count: int, dtype: str, *, seed: int = 1) -> list[Values]:
    dice = np.random.default_rng(seed)
    rows = [dice.integers(-3, 4, count).astype(dtype) for _ in range(size)]
    if np.dtype(dtype).kind == "f":
        rows = [(row * dice.random(count)).astype(dtype) for row in rows]
    if np.dtype(dtype).kind == "c":
        rows = [(row * (1 + 2j)).astype(dtype) for row in rows]
    return rows


def bytes_of(values: Values) -> memoryview:
    return values.data.cast("B") if values.size else memoryview(bytearray())


async def reduce_all(
    ring: Sequence[RingPosition],
    inputs: Sequence[Values],
    *,
    reduction: str = "sum",
    op: int = 0,
    fingerprints: Sequence[int] | None = None,
) -> list[Values]:
    """Every rank's result; the inputs go in read-only (I8), the results begin as garbage."""
    results = [np.full_like(x, 1) for x in inputs]
    before = [x.tobytes() for x in inputs]

    async def call(position: RingPosition) -> None:
        rank = position.rank
        await all_reduce(
            position,
            op=op,
            fingerprint=fingerprints[rank] if fingerprints else 9,
            completed=op - 1,
            source=bytes_of(inputs[rank]).toreadonly(),
            result=bytes_of(results[rank]),
            dtype=inputs[rank].dtype.name,
            reduction=reduction,
        )

    await at_every_rank(list(ring), call)
    assert [x.tobytes() for x in inputs] == before
    return results


def is_closed(lane: Lane) -> bool:
    """True if its connection is: no descriptor leaks."""
    return socket_of(lane).fileno() == -1


def descriptors() -> int:
    """How many sockets this process has open, without those of what is garbage.

    Threads of earlier tests may still open and close files, as one that imports a library does.
    """
    gc.collect()
    return sockets()


def sockets() -> int:
    """How many sockets this process has open, also those of what is garbage."""
    return sum(entry.is_socket() for entry in Path("/dev/fd").iterdir())


def native_threads() -> int:
    """How many threads this process has that Python has not begun.

    Its own come and go: one of trio ends ten seconds after the work that an earlier test gave it.
    """
    return psutil.Process().num_threads() - threading.active_count()


def shared_memory() -> set[int]:
    """Which descriptors are of shared memory, likewise; macOS does not tell which is which."""
    gc.collect()
    found = set[int]()
    for descriptor in range(256):
        try:
            os.fstat(descriptor)
            target = str((LINKS / str(descriptor)).readlink()) if LINKS.exists() else "memfd"
        except OSError:
            continue
        if "memfd" in target or "shm" in target:
            found.add(descriptor)
    return found


def share_of_one(limit_bytes: int) -> ArenaShare:
    """That of a program which is alone, and may hold so many bytes."""
    return ArenaShare(ArenaBudget(files=1024, nbytes=2 * limit_bytes), 1)


Bytes = NDArray[np.uint8]


@dataclass
class Web:
    """All lanes, by sender and receiver: the ends of each."""

    roster: int = 1
    buffer_bytes: int | None = None
    sending: dict[tuple[int, int], Lane] = field(default_factory=dict)
    receiving: dict[tuple[int, int], Lane] = field(default_factory=dict)

    def open(self, plans: Sequence[RankPlan]) -> None:
        """Whatever these plans need and there isn't yet."""
        for rank, plan in enumerate(plans):
            for peer in plan.sends:
                if (rank, peer) not in self.sending:
                    self._open(rank, peer)

    def _open(self, rank: int, peer: int) -> None:
        offer = offer_between(rank, peer, number=1)
        lanes = local_lanes(offer, peers=(f"mac-{peer}", f"mac-{rank}"))
        for lane in lanes:
            if self.buffer_bytes is not None:
                shrink(lane, self.buffer_bytes)
        self.sending[rank, peer], self.receiving[rank, peer] = lanes

    def lanes_of(self, rank: int) -> Iterable[Lane]:
        """All ends of one rank."""
        yield from (lane for (a, _), lane in self.sending.items() if a == rank)
        yield from (lane for (_, b), lane in self.receiving.items() if b == rank)

    def bytes_sent(self, rank: int) -> int:
        """By that rank on all of its lanes."""
        return sum(lane.bytes_sent for (a, _), lane in self.sending.items() if a == rank)

    def close(self) -> None:
        for lane in [*self.sending.values(), *self.receiving.values()]:
            lane.close()


@contextmanager
def web(*, buffer_bytes: int | None = None) -> Iterator[Web]:
    """No lane yet; `buffer_bytes` makes the network slow."""
    lanes = Web(buffer_bytes=buffer_bytes)
    try:
        yield lanes
    finally:
        lanes.close()


@dataclass(kw_only=True)
class OpOfAllRanks:
    """An op at all ranks: their plans, sources, and how many bytes each result has."""

    plans: Sequence[RankPlan]
    sources: Sequence[Bytes]
    results: Sequence[int]
    dtype: str = ""
    reduction: str = ""
    op: int = 0
    fingerprints: Sequence[int] | None = None
    in_python: Collection[int] = ()
    """The ranks that don't use the native library."""

    async def at(self, rank: int, lanes: Web) -> Bytes:
        """One rank's part; its result begins as garbage, its source is read-only (I8)."""
        source, result = self.sources[rank], np.full(self.results[rank], 0xEE, np.uint8)
        before = source.tobytes()
        await self.run(rank, lanes, result)
        assert source.tobytes() == before
        return result

    async def run(self, rank: int, lanes: Web, result: Bytes) -> None:
        """The same, without a byte of its own."""
        lanes.open(self.plans)
        mark = self.fingerprints[rank] if self.fingerprints else 9
        plan, header = (
            self.plans[rank],
            RecordHeader(0, lanes.roster, self.op, 0, mark, self.op - 1),
        )
        to = {b: lane for (a, b), lane in lanes.sending.items() if a == rank}
        from_ = {a: lane for (a, b), lane in lanes.receiving.items() if b == rank}
        regions = self.sources[rank].data.toreadonly(), result.data
        if rank in self.in_python:
            scratch = bytearray(plan.scratch_bytes)
            all_regions = (*regions, memoryview(scratch))
            await run_in_python(
                plan, to, from_, header, all_regions, dtype=self.dtype, reduction=self.reduction
            )
            return
        await run_plan(
            plan,
            to,
            from_,
            header,
            source=regions[0],
            result=regions[1],
            dtype=self.dtype,
            reduction=self.reduction,
        )

    async def everywhere(self, lanes: Web) -> list[Bytes]:
        """All ranks' results."""
        results: list[Bytes] = [np.empty(0, np.uint8)] * len(self.plans)

        async def call(rank: int) -> None:
            results[rank] = await self.at(rank, lanes)

        async with trio.open_nursery() as nursery:
            for rank in range(len(self.plans)):
                nursery.start_soon(call, rank)
        return results


def bytes_on_the_wire(plan: RankPlan) -> int:
    """What the plan's records take, with their headers."""
    return plan.bytes_sent + OVERHEAD_BYTES * sum(map(len, plan.sends.values()))
