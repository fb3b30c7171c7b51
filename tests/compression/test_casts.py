"""What is stated of the codecs `fp16` and `bf16`."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.compression.codecs import Codec
from tests.compression.every_codec import codecs, decoded, encoded, float32
from tests.compression.ring_of_codecs import all_reduce, relative_error
from tests.compression.values import gaussian

fp16, bf16 = codecs("fp16"), codecs("bf16")


def through(codec: Codec, *values: float) -> list[float]:
    wire = encoded(codec, float32(*values))
    assert not wire[2 * len(values) :].any()
    return decoded(codec, wire, len(values)).tolist()


def assert_rounds_to_nearest(codec: Codec, step: float) -> None:
    """Between 1 and 2, numbers that it can write are this far apart; ties go to the even one."""
    values = 1 + step / 2, 1 + 1.5 * step, 1 + 0.51 * step, -1 - step / 2
    assert through(codec, *values) == [1, 1 + 2 * step, 1 + step, -1]


@fp16
def test_fp16_rounds_to_nearest_and_ties_to_even(codec: Codec) -> None:
    assert_rounds_to_nearest(codec, 2.0**-10)


@bf16
def test_bf16_rounds_to_nearest_and_ties_to_even(codec: Codec) -> None:
    assert_rounds_to_nearest(codec, 2.0**-7)


@fp16
@given(st.lists(st.floats(width=32, allow_nan=False), max_size=40))
def test_fp16_is_what_ieee_754_says_but_for_what_it_clips(
    codec: Codec, values: list[float]
) -> None:
    own = np.array(values, np.float32)
    wire = np.empty(codec.wire_bytes(len(own)), np.uint8)
    clipped = codec.hop(None, own, wire)
    with np.errstate(over="ignore"):
        expected = own.astype(np.float16)
    beyond = np.isinf(expected) & np.isfinite(own)
    expected[beyond] = np.copysign(np.float16(65504), own[beyond])
    np.testing.assert_array_equal(wire[: 2 * len(own)].view(np.uint16), expected.view(np.uint16))
    assert clipped == beyond.sum()


@fp16
def test_what_fp16_clips_is_counted_and_left_in_the_residual(codec: Codec) -> None:
    own = float32(65519, 65520, -1e6, 3, np.inf, np.nan)
    wire, kept = np.empty(codec.wire_bytes(6), np.uint8), np.empty(6, np.float32)
    assert codec.hop(None, own, wire, residual_out=kept) == 2
    np.testing.assert_array_equal(
        decoded(codec, wire, 6), float32(65504, 65504, -65504, 3, np.inf, np.nan)
    )
    assert kept.tolist() == [15, 16, 65504 - 1e6, 0, 0, 0]


@fp16
def test_a_mean_divided_first_does_not_reach_the_end_of_fp16(codec: Codec) -> None:
    ranks = [np.full(10, 57_344, np.float32) for _ in range(8)]
    np.testing.assert_array_equal(all_reduce(codec, ranks, mean=True), 57_344)
    assert codec.divides_first


@bf16
def test_bf16_overflows_to_infinity_and_keeps_what_is_not_finite(codec: Codec) -> None:
    largest = float(np.finfo(np.float32).max)
    assert through(codec, largest, -largest, np.inf, -np.inf) == [np.inf, -np.inf] * 2
    assert np.isnan(through(codec, np.nan)).all()
    quietest = np.array([0x7F800001, 0xFF800001], np.uint32).view(np.float32)
    assert np.isnan(decoded(codec, encoded(codec, quietest), 2)).all()


@fp16
def test_fp16_has_multiples_of_its_smallest_denormal(codec: Codec) -> None:
    smallest = 2.0**-24
    values = [smallest, 0.5 * smallest, 0.51 * smallest, 2.5 * smallest, -1e-45, 1023.5 * smallest]
    assert through(codec, *values) == [smallest, 0, smallest, 2 * smallest, 0, 1024 * smallest]


@bf16
def test_bf16_has_multiples_of_its_smallest_denormal(codec: Codec) -> None:
    smallest = 2.0**-133
    assert through(codec, smallest, 0.5 * smallest, 0.75 * smallest, 2.5 * smallest, -1e-45) == [
        smallest,
        0,
        smallest,
        2 * smallest,
        0,
    ]


@fp16
@pytest.mark.parametrize("size", [2, 8])
def test_fp16_is_accurate_to_its_eleven_bits(codec: Codec, size: int) -> None:
    ranks = [gaussian(50_000, seed=rank) for rank in range(size)]
    assert relative_error(codec, ranks) < size**0.5 * 2.0**-12


@bf16
@pytest.mark.parametrize("size", [2, 8])
def test_bf16_is_accurate_to_its_eight_bits(codec: Codec, size: int) -> None:
    ranks = [gaussian(50_000, seed=rank) for rank in range(size)]
    assert relative_error(codec, ranks) < size**0.5 * 2.0**-9
