import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.compression import one_bit
from pmesh.compression.blocks import Bytes, Float32s
from tests.compression.values import dyadic, float32s, gaussian

# Around a byte, a word, a block, and a part that is worked on at once.
lengths = st.sampled_from([0, 1, 7, 8, 9, 31, 32, 33, 1023, 1024, 1025, 2500, 32_768, 33_000])


def compressed(
    own: Float32s, *, residual: Float32s | None = None, residual_out: Float32s | None = None
) -> Bytes:
    wire = np.full(one_bit.wire_bytes(len(own)), 0xEE, np.uint8)
    own.flags.writeable = False
    one_bit.compress(own, wire, residual=residual, residual_out=residual_out)
    return wire


def read(wire: Bytes, count: int) -> Float32s:
    out = np.zeros(count, np.float32)
    one_bit.accumulate(wire, out)
    return out


@given(lengths, st.integers(0, 2**32))
def test_values_become_their_sign_and_the_mean_magnitude_of_their_block(
    count: int, seed: int
) -> None:
    values = gaussian(count, seed=seed)
    image = read(compressed(values), count)
    np.testing.assert_array_equal(np.signbit(image), np.signbit(values))
    for start in range(0, count, one_bit.BLOCK):
        block, sent = values[start : start + 1024], np.abs(image[start : start + 1024])
        assert (sent == sent[0]).all()
        assert sent[0] == pytest.approx(np.abs(block.astype(np.float64)).mean(), rel=1e-6)


def test_a_reader_finds_magnitudes_and_then_signs_on_the_wire() -> None:
    values = np.ones(1024 + 9, np.float32)
    values[[0, 3, 1023, 1024, 1032]] *= -1
    values[1024:] *= 2
    wire = compressed(values)
    assert len(wire) == one_bit.wire_bytes(1033) == 2 * 4 + 132
    np.testing.assert_array_equal(wire[:8].view("<f4"), [1, 2])
    signs = wire[8:].tolist()
    assert signs == [0b1001, *[0] * 126, 0b1000_0000, 1, 1, 0, 0]


@given(lengths, st.integers(0, 2**32))
def test_what_is_read_and_what_is_kept_make_up_the_values(count: int, seed: int) -> None:
    own, before = gaussian(count, seed=seed), gaussian(count, seed=seed + 1)
    after, in_place = np.full(count, np.nan, np.float32), before.copy()
    wire = compressed(own, residual=before, residual_out=after)
    again = compressed(own, residual=in_place, residual_out=in_place)
    np.testing.assert_array_equal(wire, again)
    np.testing.assert_array_equal(after, in_place)
    np.testing.assert_array_equal(after, own + before - read(wire, count))


@given(float32s(st.integers(0, 50), finite=False))
def test_a_block_that_is_not_finite_comes_out_so_and_does_not_stay(values: Float32s) -> None:
    residual = np.full(len(values), np.nan, np.float32)
    image = read(compressed(values, residual_out=residual), len(values))
    assert np.isfinite(residual).all()
    with np.errstate(over="ignore"):
        finite = np.isfinite(np.add.reduce(np.abs(values)))
    assert np.isfinite(image).all() if finite else not np.isfinite(image).any()


def test_only_its_own_block_suffers() -> None:
    values = dyadic(3 * 1024, seed=1)
    clean = read(compressed(values.copy()), len(values))
    values[1500] = np.nan
    image = read(compressed(values), len(values))
    assert np.isnan(image[1024:2048]).all()
    np.testing.assert_array_equal(image[:1024], clean[:1024])
    np.testing.assert_array_equal(image[2048:], clean[2048:])


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_come_out_as_zeros(zero: float) -> None:
    values = np.full(1100, zero, np.float32)
    residual = values.copy()
    wire = compressed(values, residual=values, residual_out=residual)
    assert not read(wire, 1100).any()
    assert not residual.any()


def test_payloads_add_up() -> None:
    into = np.ones(3, np.float32)
    wire = compressed(np.array([1, -2, 3], np.float32))
    one_bit.accumulate(wire, into)
    one_bit.accumulate(wire, into)
    np.testing.assert_array_equal(into, [5, -3, 5])


def test_a_payload_is_thirty_one_times_smaller() -> None:
    assert 4 * 25_000_000 / one_bit.wire_bytes(25_000_000) == pytest.approx(31.03, abs=0.01)
