import numpy as np
import pytest

from pmesh.compression.arrays import Float32s
from pmesh.compression.codecs import codec_of
from tests.compression.rings import all_reduce

CODECS = ("fp16", "bf16", "int8", "int8-stochastic")


def gaussian(count: int, seed: int = 0) -> Float32s:
    values: Float32s = np.random.default_rng(seed).standard_normal(count).astype(np.float32)
    return values


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("count", [0, 1, 2, 255, 256, 257, 40_000])
def test_what_is_decoded_and_the_residual_make_up_the_value(name: str, count: int) -> None:
    codec = codec_of(name)
    own, kept = gaussian(count), np.empty(count, np.float32)
    wire = np.empty(codec.wire_bytes(count), np.uint8)
    assert codec.hop(None, own, wire, residual_out=kept) == 0
    decoded = np.empty(count, np.float32)
    codec.decode(wire, decoded)
    largest = np.maximum(np.abs(decoded), np.abs(kept))
    assert np.all(np.abs(np.float64(decoded) + kept - own) <= largest * 2.0**-24)
    assert np.abs(kept).max(initial=0) < 0.05


@pytest.mark.parametrize("name", CODECS)
def test_a_name_has_one_codec_which_says_it(name: str) -> None:
    assert codec_of(name) is codec_of(name)
    assert codec_of(name).name == name


def test_an_unknown_name_is_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match="no ring codec 'int4'; there are: fp16, bf16, int8, int8"):
        codec_of("int4")


@pytest.mark.parametrize(("size", "bar"), [(2, 0.009), (4, 0.0115), (8, 0.015)])
def test_int8_keeps_a_gaussian_sum_within_the_bar(size: int, bar: float) -> None:
    ranks = [gaussian(100_000, seed) for seed in range(size)]
    exact = np.sum(np.array(ranks, np.float64), axis=0)
    error = all_reduce(codec_of("int8"), ranks) - exact
    assert np.linalg.norm(error) <= bar * np.linalg.norm(exact)
