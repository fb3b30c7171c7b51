"""Rings of ranks in one process, over real sockets, for the tests of lanes and collectives."""

import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import trio

from pmesh.core.messages import OfferLane
from pmesh.core.records import RecordHeader
from pmesh.core.reductions import Values
from pmesh.ids import Epoch, Incarnation, JobName, NodeId, TrainerId
from pmesh.net.collectives import RingPosition, all_reduce
from pmesh.net.lane_opening import local_lanes
from pmesh.net.lanes import Lane

EMPTY = memoryview(b"")
BORN = Epoch(1, NodeId(bytes(32)), Incarnation(1))


def offer_between(sender: int, receiver: int, *, number: int = 1, dial: bool = False) -> OfferLane:
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


def shrink(lane: Lane, buffer_bytes: int) -> None:
    sock = lane._socket  # noqa: SLF001 - a slow network, without a switch in the lane for it
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)


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
