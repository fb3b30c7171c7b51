"""What is stated of the codecs `int8` and `int8-stochastic`."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.compression.blocks import Float32s
from pmesh.compression.codecs import Codec
from tests.compression.every_codec import IN_NUMPY, codecs, decoded, encoded, float32
from tests.compression.ring_of_codecs import relative_error
from tests.compression.values import gaussian

LARGEST = float(np.finfo(np.float32).max)
int8, stochastic = codecs("int8"), codecs("int8-stochastic")
both = codecs("int8", "int8-stochastic")


def there_and_back(codec: Codec, values: Float32s) -> Float32s:
    return decoded(codec, encoded(codec, values), len(values))


@int8
def test_scales_come_first_then_codes_then_zeros(codec: Codec) -> None:
    values = np.zeros(258, np.float32)
    values[:3] = 127, -127, 64
    values[256:] = -0.5, 0.25
    wire = encoded(codec, values)
    np.testing.assert_array_equal(wire[:8].view("<f4"), float32(1, 0.5 / 127))
    codes = wire[8:].view(np.int8)
    assert codes[:3].tolist() == [127, -127, 64]
    assert not codes[3:256].any()
    assert codes[256:].tolist() == [-127, 64, 0, 0]  # 63.5 to even; two zeros to be a multiple of 4


@int8
def test_ties_go_to_the_even_code(codec: Codec) -> None:
    values = np.arange(-126.5, 127, 1, dtype=np.float32)
    values[0] = 127  # so that the scale is 1
    between = np.floor(values[1:])
    even = np.where(between % 2 == 0, between, between + 1)
    np.testing.assert_array_equal(there_and_back(codec, values)[1:], even)


@int8
@given(st.integers(0, 2**32 - 1))
def test_a_value_is_at_most_half_a_step_away(codec: Codec, seed: int) -> None:
    values = gaussian(1000, seed=seed) * np.float32(10) ** (seed % 30 - 15)
    error = np.abs(np.float64(there_and_back(codec, values)) - values)
    for start in range(0, 1000, 256):
        block = slice(start, start + 256)
        step = np.abs(values[block]).max() / 127
        assert error[block].max() <= step * (0.5 + 2**-16)


@both
def test_zeros_come_out_as_zeros_without_a_sign(codec: Codec) -> None:
    image = there_and_back(codec, np.resize(float32(0, -0.0), 300))
    assert not image.view(np.uint32).any()


@both
def test_denormals_become_multiples_of_the_smallest_scale_and_the_rest_is_residual(
    codec: Codec,
) -> None:
    values = float32(1e-45, -1e-40, 1e-38, -1.2e-38)
    wire, kept = np.empty(codec.wire_bytes(4), np.uint8), np.empty(4, np.float32)
    codec.hop(None, values, wire, residual_out=kept)
    image = decoded(codec, wire, 4)
    np.testing.assert_array_equal(image % np.float32(2.0**-126), 0)
    np.testing.assert_array_equal(image + kept, values)


@both
def test_the_largest_values_do_not_overflow(codec: Codec) -> None:
    values = np.full(300_000, LARGEST, np.float32)  # so many that every lot is drawn
    values[::2] *= -1
    np.testing.assert_allclose(there_and_back(codec, values), values, rtol=1 / 126)


@both
@pytest.mark.parametrize("what", [np.inf, -np.inf, np.nan])
def test_a_block_with_what_is_not_finite_is_nan_and_no_other(codec: Codec, what: float) -> None:
    values = gaussian(700, seed=1)
    values[300] = what
    wire, kept = np.empty(codec.wire_bytes(700), np.uint8), np.empty(700, np.float32)
    codec.hop(None, values, wire, residual_out=kept)
    image = decoded(codec, wire, 700)
    assert np.isnan(image[256:512]).all()
    assert np.isfinite(np.delete(image, slice(256, 512))).all()
    assert not kept[256:512].any()


@both
def test_a_sum_that_overflows_is_nan(codec: Codec) -> None:
    values = np.full(4, LARGEST, np.float32)
    wire = np.empty(codec.wire_bytes(4), np.uint8)
    codec.hop(encoded(codec, values), values, wire)
    assert np.isnan(decoded(codec, wire, 4)).all()


def heavy_tailed(count: int, *, seed: int, scales: Float32s) -> Float32s:
    """Student's t with 4 degrees of freedom, each run of 1000 values at a scale of its own."""
    values = np.random.default_rng(seed).standard_t(4, count)
    return (values * np.repeat(scales, 1000)).astype(np.float32)


@int8
@pytest.mark.parametrize(("size", "bar"), [(2, 0.009), (4, 0.0115), (8, 0.015)])
def test_a_gaussian_sum_is_within_the_bar(codec: Codec, size: int, bar: float) -> None:
    assert relative_error(codec, [gaussian(100_000, seed=rank) for rank in range(size)]) <= bar


@int8
@pytest.mark.parametrize(("size", "bar"), [(2, 0.016), (4, 0.022), (8, 0.03)])
def test_a_sum_of_heavy_tails_is_within_the_bar(codec: Codec, size: int, bar: float) -> None:
    scales = (10 ** np.random.default_rng(0).uniform(-3, 0, 200)).astype(np.float32)
    ranks = [heavy_tailed(200_000, seed=rank, scales=scales) for rank in range(size)]
    assert relative_error(codec, ranks) <= bar


@stochastic
def test_random_rounding_is_right_on_average_where_rounding_is_not(codec: Codec) -> None:
    values = np.linspace(-1, 1, 256, dtype=np.float32)
    values[:2] = 127, 0.3  # steps of 1
    tries = 4000
    total = np.zeros(256)
    for draw in range(tries):
        wire = np.empty(codec.wire_bytes(256), np.uint8)
        codec.hop(None, values, wire, draw=draw)
        image = decoded(codec, wire, 256)
        assert np.abs(image - values).max() < 1
        total += image
    # Five standard deviations of a mean of that many random numbers.
    np.testing.assert_allclose(total / tries, values, atol=5 * 0.5 / tries**0.5)
    assert not there_and_back(IN_NUMPY["int8"], values)[1]


@stochastic
def test_random_numbers_are_drawn_from_the_key_alone(codec: Codec) -> None:
    values, size = gaussian(1000, seed=1), codec.wire_bytes(1000)
    wires = np.zeros((3, size), np.uint8)
    for wire, draw in zip(wires, (5, 5, 6), strict=True):
        codec.hop(None, values, wire, draw=draw)
    np.testing.assert_array_equal(wires[0], wires[1])
    assert np.mean(wires[0] != wires[2]) > 0.2
