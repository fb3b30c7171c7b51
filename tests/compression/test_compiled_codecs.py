"""The kernels in C against the codecs in numpy."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.compression.blocks import Float32s
from pmesh.compression.codecs import Codec
from tests.compression.every_codec import (
    COUNTS,
    IN_C,
    IN_NUMPY,
    NAMES,
    decoded,
    encoded,
    needs_the_library,
)
from tests.compression.values import float32s, gaussian
from tests.worlds.examples import examples

pytestmark = needs_the_library


def assert_same_bits(
    name: str,
    own: Float32s,
    *,
    arrived: Float32s | None,
    **terms: Any,  # noqa: ANN401 - of a hop
) -> None:
    """One hop of both."""
    incoming = None if arrived is None else encoded(IN_NUMPY[name], arrived)

    def outcome(codec: Codec) -> Any:  # noqa: ANN401 - compared below
        wire = np.full(codec.wire_bytes(len(own)), 0xEE, np.uint8)
        kept = np.full(len(own), 77, np.float32)
        clipped = codec.hop(incoming, own, wire, residual_out=kept, **terms)
        bare = np.full_like(wire, 0xEE)
        assert codec.hop(incoming, own, bare, **terms) == clipped
        np.testing.assert_array_equal(bare, wire)
        return clipped, wire, kept, decoded(codec, wire, len(own))

    clipped, wire, kept, image = outcome(IN_NUMPY[name])
    clipped_there, wire_there, kept_there, image_there = outcome(IN_C[name])
    assert clipped == clipped_there
    np.testing.assert_array_equal(kept.view(np.uint32), kept_there.view(np.uint32))
    # Which NaN it is depends on the processor's order of operands: only that it is one counts.
    np.testing.assert_array_equal(image, image_there)
    if not np.isnan(image).any():
        np.testing.assert_array_equal(wire, wire_there)
    if name.startswith("int8"):
        codes_from = 4 * -(-len(own) // 256)
        np.testing.assert_array_equal(wire[codes_from:], wire_there[codes_from:])


@pytest.mark.parametrize("name", NAMES)
@examples(60)
@given(data=st.data(), scale=st.sampled_from([1.0, 1 / 3]), divisor=st.integers(1, 3))
def test_c_gives_the_same_bits_as_numpy(
    name: str, data: st.DataObject, scale: float, divisor: int
) -> None:
    sizes = st.just(data.draw(COUNTS))
    assert_same_bits(
        name,
        data.draw(float32s(sizes, finite=False)),
        arrived=data.draw(st.none() | float32s(sizes, finite=False)),
        residual=data.draw(st.none() | float32s(sizes)),
        own_scale=scale,
        divisor=divisor,
        draw=data.draw(st.integers(0, 2**64 - 1)),
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_magnitude_is_rounded_alike(name: str) -> None:
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = (halves[1:] + halves[:-1]) * np.float32(0.5)  # exact
    beside = np.nextafter(ties, np.float32(0))
    anywhere = np.arange(0, 0x7F800000, 40_009, dtype=np.uint32).view(np.float32)
    bf16_ties = (np.arange(0x7F80, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    magnitudes: list[Float32s] = [halves, ties, beside, anywhere, bf16_ties]
    for values in magnitudes:
        signed = values.copy()
        signed[::2] *= -1
        assert_same_bits(name, signed, arrived=None)


@pytest.mark.parametrize("name", ["int8", "int8-stochastic"])
def test_quotients_beside_ties_are_rounded_alike(name: str) -> None:
    """Where one that is off by a single bit, as the product with 1 / scale is, would be seen."""
    largest = 1 + np.abs(gaussian(500, seed=0))[:, None]
    ties = (np.arange(-127.5, 128, dtype=np.float32) * (largest / np.float32(127))).astype(
        np.float32
    )
    ties[:, :1], ties[:, -1:] = largest, -largest
    for neighbour in (ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, ties * 2)):
        assert_same_bits(name, neighbour.reshape(-1), arrived=None, draw=1)


def test_codes_stay_within_127_whatever_is_drawn() -> None:
    """Their quotients are a little beyond; one draw of 65,536 would raise, or lower, the code."""
    largest = np.full(1 << 20, np.finfo(np.float32).max)
    largest[::2] *= -1
    assert_same_bits("int8-stochastic", largest, arrived=None, draw=1)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_any_bytes_from_another_machine_are_added_alike(name: str, data: st.DataObject) -> None:
    count = data.draw(COUNTS)
    size = IN_C[name].wire_bytes(count)
    arrived = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8)
    own = gaussian(count, seed=1)

    def outcome(codec: Codec) -> Float32s:
        wire = np.empty(size, np.uint8)
        codec.hop(arrived, own, wire)
        return np.concatenate([decoded(codec, arrived, count), decoded(codec, wire, count)])

    np.testing.assert_array_equal(outcome(IN_NUMPY[name]), outcome(IN_C[name]))


@pytest.mark.parametrize("name", NAMES)
def test_arrays_may_begin_at_any_address(name: str) -> None:
    codec, count = IN_C[name], 300
    wire_bytes = codec.wire_bytes(count)
    expected = encoded(codec, gaussian(count, seed=0))
    room = np.zeros(4 * count + wire_bytes + 2, np.uint8)
    own = room[1 : 1 + 4 * count].view(np.float32)
    own[:] = gaussian(count, seed=0)
    wire = room[1 + 4 * count :][:wire_bytes]

    codec.hop(None, own, wire)

    np.testing.assert_array_equal(wire, expected)
    assert room[-1] == 0
