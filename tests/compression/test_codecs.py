"""What holds for every ring codec, in numpy and in C."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.compression.blocks import Float32s
from pmesh.compression.codecs import PART, Codec, codec_of
from tests.compression.every_codec import COUNTS, IN_C, NAMES, decoded, encoded, every_codec
from tests.compression.ring_of_codecs import all_reduce
from tests.compression.values import float32s, gaussian
from tests.worlds.examples import examples


@every_codec
@examples(30)
@given(data=st.data(), scale=st.sampled_from([1.0, 0.25, 1 / 3]), divisor=st.integers(1, 8))
def test_what_is_decoded_and_the_residual_make_up_the_value(
    codec: Codec, data: st.DataObject, scale: float, divisor: int
) -> None:
    count = data.draw(COUNTS)
    sizes = st.just(count)
    own = data.draw(float32s(sizes))
    residual = data.draw(st.none() | float32s(sizes))
    arrived = data.draw(st.none() | float32s(sizes))
    incoming = None if arrived is None else encoded(codec, arrived)
    wire, kept = np.empty(codec.wire_bytes(count), np.uint8), np.empty(count, np.float32)
    own.flags.writeable = False

    clipped = codec.hop(
        incoming,
        own,
        wire,
        own_scale=scale,
        divisor=divisor,
        residual=residual,
        residual_out=kept,
        draw=data.draw(st.integers(0, 2**64 - 1)),
    )

    image = decoded(codec, wire, count)
    with np.errstate(all="ignore"):
        value = np.float32(scale) * (own if residual is None else own + residual)
        if incoming is not None:
            value = decoded(codec, incoming, count) + value
        value /= np.float32(divisor)
        exact = np.float64(image) + np.float64(kept) * scale / divisor
        missing = np.abs(exact - value)
        largest = np.maximum(np.abs(value), np.abs(image))
    accounted = np.isfinite(value) & np.isfinite(image) & (largest < 1e37)
    assert np.all(missing[accounted] <= largest[accounted] * 2.0**-22 + 1e-44)
    assert np.isfinite(kept).all()
    assert np.all(kept[~np.isfinite(value) | ~np.isfinite(image)] == 0)
    assert (clipped > 0) <= (codec.name == "fp16")


@every_codec
@examples(30)
@given(values=float32s(COUNTS, finite=False), last=st.booleans())
def test_nothing_that_is_not_finite_is_swallowed(
    codec: Codec,
    values: Float32s,
    last: bool,  # noqa: FBT001 - Hypothesis names it
) -> None:
    wire = encoded(codec, values)
    if last:  # at the end of a longer way
        incoming, wire = wire, np.empty_like(wire)
        codec.hop(incoming, np.zeros_like(values), wire, divisor=2)
    image = decoded(codec, wire, len(values))
    assert not np.isfinite(image[~np.isfinite(values)]).any()


@every_codec
def test_parts_and_pieces_make_no_difference(codec: Codec) -> None:
    count = 2 * PART + 300
    own, residual = gaussian(count, seed=1), gaussian(count, seed=2)
    whole = np.empty(codec.wire_bytes(count), np.uint8)
    codec.hop(encoded(codec, own), own, whole, residual=residual, draw=3)
    image = decoded(codec, whole, count)
    if codec.name == "int8-stochastic":
        return  # each piece draws from the beginning
    half = PART + codec.block
    for piece in (slice(0, half), slice(half, count)):
        wire = np.empty(codec.wire_bytes(piece.stop - piece.start), np.uint8)
        codec.hop(encoded(codec, own[piece]), own[piece], wire, residual=residual[piece])
        np.testing.assert_array_equal(decoded(codec, wire, len(own[piece])), image[piece])


@every_codec
def test_the_residual_may_replace_the_one_before(codec: Codec) -> None:
    own, residual = gaussian(1000, seed=1), gaussian(1000, seed=2)
    kept, wire = np.empty(1000, np.float32), np.empty(codec.wire_bytes(1000), np.uint8)
    codec.hop(None, own, wire, residual=residual, residual_out=kept)
    codec.hop(None, own, wire, residual=residual, residual_out=residual)
    np.testing.assert_array_equal(residual, kept)


@every_codec
def test_bytes_may_begin_anywhere(codec: Codec) -> None:
    own = gaussian(1001, seed=1)
    wire = encoded(codec, own)
    for shift in range(4):
        moved = np.full(len(wire) + 4, 0xEE, np.uint8)[shift:][: len(wire)]
        codec.hop(None, own, moved)
        np.testing.assert_array_equal(moved, wire)
        np.testing.assert_array_equal(decoded(codec, moved, 1001), decoded(codec, wire, 1001))


@every_codec
@given(count=st.integers(0, 10**9))
def test_pieces_lie_one_behind_the_other_at_multiples_of_four(codec: Codec, count: int) -> None:
    assert codec.wire_bytes(count) % 4 == 0
    per_value = 1 + 4 / 256 if codec.name.startswith("int8") else 2
    assert per_value * count <= codec.wire_bytes(count) < per_value * count + 8


@every_codec
@examples(20)
@given(data=st.data())
def test_whatever_bytes_arrive_become_values(codec: Codec, data: st.DataObject) -> None:
    count = data.draw(COUNTS)
    size = codec.wire_bytes(count)
    wire = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8)
    assert len(decoded(codec, wire, count)) == count
    codec.hop(wire, np.ones(count, np.float32), np.empty_like(wire))


@every_codec
def test_arrays_of_other_lengths_are_refused(codec: Codec) -> None:
    own, wire = np.zeros(10, np.float32), np.zeros(codec.wire_bytes(10), np.uint8)
    short, none = wire[:-1], np.zeros(0, np.float32)
    with pytest.raises(ValueError, match=f"10 values are {len(wire)} bytes on the wire, not "):
        codec.hop(short, own, wire)
    with pytest.raises(ValueError, match="10 values are"):
        codec.hop(None, own, short)
    with pytest.raises(ValueError, match="10 values are"):
        codec.decode(short, own)
    with pytest.raises(ValueError, match="0 residuals for 10 values"):
        codec.hop(None, own, wire, residual=none)
    with pytest.raises(ValueError, match="0 residuals for 10 values"):
        codec.hop(None, own, wire, residual_out=none)


@every_codec
def test_a_hop_keeps_no_partial_sum_of_full_size(codec: Codec) -> None:
    count = 16 * PART
    own = gaussian(count, seed=1)
    kept, wire = np.empty_like(own), np.empty(codec.wire_bytes(count), np.uint8)
    incoming = encoded(codec, own)
    tracemalloc.start()
    codec.hop(incoming, own, wire, residual=own, residual_out=kept)
    codec.decode(wire, kept)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < own.nbytes / 4


@pytest.mark.parametrize("name", NAMES)
def test_a_sum_fed_back_loses_only_the_last_residuals(name: str) -> None:
    codec, size, count, ops = IN_C[name], 4, 1000, 100
    residuals = [np.zeros(count, np.float32) for _ in range(size)]
    came_out, exact = np.zeros(count), np.zeros(count)
    for op in range(ops):
        ranks = [gaussian(count, seed=size * op + rank) for rank in range(size)]
        exact += np.sum(np.array(ranks, np.float64), axis=0) / size
        came_out += all_reduce(codec, ranks, mean=True, residuals=residuals, op=op)
    left = np.sum(np.array(residuals, np.float64), axis=0) / size
    np.testing.assert_allclose(came_out + left, exact, atol=ops * size * 2e-7)
    assert np.abs(left).max() < 0.1


@pytest.mark.parametrize("name", NAMES)
def test_a_name_has_one_codec_which_says_it(name: str) -> None:
    assert codec_of(name) is codec_of(name)
    assert codec_of(name).name == name
    assert codec_of(name).divides_first == (name == "fp16")


def test_an_unknown_name_is_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match="no ring codec 'int4'; there are: fp16, bf16, int8, int8"):
        codec_of("int4")
