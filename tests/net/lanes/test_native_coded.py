"""The native library and Python do the works of codecs alike: results, residuals, bytes, errors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from pmesh.compression.blocks import Float32s
from pmesh.compression.codecs import Cast, Codec, Int8, codec_of
from pmesh.compression.compiled import in_numpy
from pmesh.core.ops.coded import PIECE_VALUES, plan_coded_ring
from pmesh.core.wire.records import OVERHEAD_BYTES, RecordHeader, Sealer
from pmesh.errors import LaneBroken
from pmesh.net.lanes import native
from pmesh.net.lanes.lane import CallsDiffer
from pmesh.net.lanes.ring import RingPosition, Tensors, all_reduce_coded
from tests.worlds.coded_rings import noise
from tests.worlds.lanes import (
    bytes_on_the_wire,
    lane_pair,
    offer_between,
    raw_receiving_lane,
    ring_of,
)

MAKE: dict[str, Callable[[], Codec]] = {
    "fp16": lambda: Cast("fp16"),
    "bf16": lambda: Cast("bf16"),
    "int8": lambda: Int8(stochastic=False),
    "int8-stochastic": lambda: Int8(stochastic=True),
}
"""Codecs that the library does not know, as only `codec_of` returns those that it does."""
NAMES = st.sampled_from(list(MAKE))


@dataclass(frozen=True, kw_only=True)
class Asked:
    """An op that all ranks of a ring run."""

    size: int
    count: int
    name: str
    reduction: str = "mean"
    op: int = 3
    factor: float = 1.0
    adds: bool = True
    keeps: bool = True
    in_python: frozenset[int] = frozenset()

    def tensors(self) -> list[Tensors]:
        garbage = [np.full(self.count, np.nan, np.float32) for _ in range(2 * self.size)]
        xs, residuals = noise(self.size, self.count), noise(self.size, self.count, seed=2)
        return [
            Tensors(
                np.multiply(xs[rank], self.factor, dtype=np.float32),
                garbage[2 * rank],
                residuals[rank] if self.adds else None,
                garbage[2 * rank + 1] if self.keeps else None,
            )
            for rank in range(self.size)
        ]

    async def at(self, position: RingPosition, tensors: Tensors) -> int:
        in_python = position.rank in self.in_python
        return await all_reduce_coded(
            position,
            op=self.op,
            fingerprint=9,
            completed=self.op - 1,
            tensors=tensors,
            codec=MAKE[self.name]() if in_python else codec_of(self.name),
            reduction=self.reduction,
        )

    async def everywhere(self, positions: Sequence[RingPosition]) -> list[tuple[int, bytes, bytes]]:
        """Return what each rank clips, gets and keeps."""
        tensors, clipped = self.tensors(), dict[int, int]()

        async def run(position: RingPosition) -> None:
            clipped[position.rank] = await self.at(position, tensors[position.rank])

        async with trio.open_nursery() as nursery:
            for position in positions:
                nursery.start_soon(run, position)
        return [
            (
                clipped[rank],
                t.result.tobytes(),
                b"" if t.residual_out is None else bytes(t.residual_out),
            )
            for rank, t in enumerate(tensors)
        ]


IN_A_THREAD = 70_000
"""So many values of int8 are too much for the event loop; half as many of two bytes."""
IN_SEVERAL_PIECES = 700_001


@st.composite
def asked(draw: st.DrawFn, most: int = IN_A_THREAD) -> Asked:
    """By some ranks with the library, and by some without it."""
    size = draw(st.integers(2, 4))
    return Asked(
        size=size,
        count=draw(
            st.integers(0, 40) | st.integers(0, 5000) | st.sampled_from([IN_A_THREAD, most])
        ),
        name=draw(NAMES),
        reduction=draw(st.sampled_from(["sum", "mean"])),
        op=draw(st.integers(0, 2**40)),
        factor=draw(st.sampled_from([1.0, 1e5])),
        adds=draw(st.booleans()),
        keeps=draw(st.booleans()),
        in_python=frozenset(draw(st.sets(st.integers(0, size - 1)))),
    )


def test_the_library_does_what_codecs_are_named_and_no_others() -> None:
    plan = plan_coded_ring(rank=0, size=2, count=10, codec=codec_of("int8"))
    for name, make in MAKE.items():
        assert native.library_for(plan, [], codec=codec_of(name)) is not None
        assert native.library_for(plan, [], codec=make()) is None
    with in_numpy():
        assert native.library_for(plan, [], codec=codec_of("int8")) is None


@given(asked(most=IN_SEVERAL_PIECES))
async def test_ranks_with_and_without_it_get_and_keep_the_same_by_the_same_bytes(
    asked: Asked,
) -> None:
    got: list[list[tuple[int, bytes, bytes]]] = []
    for choice in (asked, replace(asked, in_python=frozenset(range(asked.size)))):
        with ring_of(asked.size) as positions, trio.fail_after(30):
            got.append(await choice.everywhere(positions))
            for position in positions:
                plan = plan_coded_ring(
                    rank=position.rank,
                    size=asked.size,
                    count=asked.count,
                    codec=codec_of(asked.name),
                )
                assert position.to_next is not None
                assert position.to_next.bytes_sent == bytes_on_the_wire(plan)
    assert got[0] == got[1]


@given(asked(), st.lists(st.integers(0, 200), min_size=1, max_size=3), st.data())
async def test_after_a_cancel_at_any_point_both_go_on_over_the_same_lanes(
    asked: Asked, moments: Sequence[int], data: st.DataObject
) -> None:
    """V4, V7: what an attempt left in lanes and sockets is dropped, whoever reads it."""
    everybody = range(asked.size)
    with ring_of(asked.size) as positions:
        wanted = await asked.everywhere(positions)
    with ring_of(asked.size, buffer_bytes=16_384) as positions, trio.fail_after(60):
        for number, moment in enumerate(moments, 2):
            tensors = asked.tensors()
            async with trio.open_nursery() as nursery:
                for rank in data.draw(st.sets(st.sampled_from(everybody))):
                    nursery.start_soon(asked.at, positions[rank], tensors[rank])
                for _ in range(moment):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            for position in positions:
                position.roster = number
            chosen = frozenset(data.draw(st.sets(st.sampled_from(everybody))))
            assert await replace(asked, in_python=chosen).everywhere(positions) == wanted


async def test_no_thread_writes_once_an_op_has_been_cancelled() -> None:
    """V3, I8, O9: the memory of a cancelled attempt belongs to others."""
    asked = Asked(size=2, count=40 * PIECE_VALUES, name="int8")
    tensors, written = asked.tensors(), list[Float32s]()
    for t in tensors:
        assert t.residual_out is not None
        written += [t.result, t.residual_out]
    with ring_of(2) as positions, trio.fail_after(30):
        lane = positions[0].to_next
        assert lane is not None
        for number in range(2, 12):
            enough = lane.bytes_sent + number * 200_000
            async with trio.open_nursery() as nursery:
                for position in positions:
                    nursery.start_soon(asked.at, position, tensors[position.rank])
                while lane.bytes_sent < enough:
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            for position in positions:
                position.roster = number
            for values in written:
                values[:] = 7
            assert all((values == 7).all() for values in written)


@pytest.mark.parametrize("count", [100, 3 * PIECE_VALUES])
async def test_residuals_of_another_length_are_refused(count: int) -> None:
    own = np.zeros(count, np.float32)
    with ring_of(2) as positions:
        for residuals in ((own[1:], None), (None, own[1:].copy())):
            with pytest.raises(ValueError, match="need float32"):
                await Asked(size=2, count=count, name="int8").at(
                    positions[0], Tensors(own, own.copy(), *residuals)
                )


# --- whatever a peer sends


@dataclass
class CodedOutcome:
    """What became of an op whose peer sent something."""

    error: str
    clipped: int
    result: bytes
    kept: bytes
    received: int


async def outcome_of(asked: Asked, bodies: Sequence[bytes], fingerprint: int) -> CodedOutcome:
    """Rank 0 of two; the other sends these bodies, properly sealed."""
    tensors, clipped, error = asked.tensors()[0], -1, ""
    sealer = Sealer(offer_between(0, 1).key)
    with lane_pair() as (to_next, _), raw_receiving_lane() as (peer, lane), trio.fail_after(10):
        for segment, body in enumerate(bodies):
            header = RecordHeader(len(body), 1, asked.op, segment, fingerprint, asked.op - 1)
            record = memoryview(bytearray(OVERHEAD_BYTES + len(body)))
            sealer.seal(header, body, record)
            peer.sendall(record)
        peer.close()
        position = RingPosition(rank=0, size=2, roster=1, to_next=to_next, from_previous=lane)
        try:
            clipped = await asked.at(position, tensors)
        except (LaneBroken, CallsDiffer) as e:
            error = f"{type(e).__name__} {e} {getattr(e, 'op', '')}"
        received = lane.bytes_received
    assert tensors.residual_out is not None
    if error:
        return CodedOutcome(error, -1, b"", b"", received)  # what was written is garbage
    return CodedOutcome(
        error, clipped, tensors.result.tobytes(), tensors.residual_out.tobytes(), received
    )


@given(NAMES, st.integers(1, 600), st.data())
async def test_whatever_bytes_a_peer_encodes_come_to_the_same(
    name: str, count: int, data: st.DataObject
) -> None:
    """Any bytes are some values: no length or index is among them."""
    asked = Asked(size=2, count=count, name=name, in_python=frozenset())
    plan = plan_coded_ring(rank=0, size=2, count=count, codec=codec_of(name))
    bodies = list[bytes]()
    for receive in plan.receives[1]:
        seed, ones = data.draw(st.integers(0, 999)), data.draw(st.booleans())
        dice = np.random.default_rng(seed)
        bodies.append(b"\xff" * receive.nbytes if ones else dice.bytes(receive.nbytes))
    change = data.draw(st.sampled_from(["none", "none", "cut", "shorter", "other call"]))
    if change == "cut":
        bodies.pop()
    if change == "shorter":
        bodies[-1] = bodies[-1][4:] if bodies[-1] else bytes(4)
    fingerprint = 8 if change == "other call" else 9
    ours = await outcome_of(asked, bodies, fingerprint)
    theirs = await outcome_of(replace(asked, in_python=frozenset([0])), bodies, fingerprint)
    assert ours == theirs
    assert bool(ours.error) == (change != "none")
