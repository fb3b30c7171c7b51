"""The compiled kernels against the codecs in numpy."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pmesh.compression import fast
from pmesh.compression.blocks import Float32s
from pmesh.compression.codecs import Codec
from pmesh.compression.fast import rings
from tests.compression.every_codec import (
    COUNTS,
    IN_NUMBA,
    IN_NUMPY,
    NAMES,
    decoded,
    encoded,
    float32,
    make,
)
from tests.compression.values import float32s, gaussian


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
    clipped_there, wire_there, kept_there, image_there = outcome(IN_NUMBA[name])
    assert clipped == clipped_there
    np.testing.assert_array_equal(kept.view(np.uint32), kept_there.view(np.uint32))
    # Which NaN it is depends on the processor's order of operands: only that it is one counts.
    np.testing.assert_array_equal(image, image_there)
    if not np.isnan(image).any():
        np.testing.assert_array_equal(wire, wire_there)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(data=st.data(), scale=st.sampled_from([1.0, 1 / 3]), divisor=st.integers(1, 3))
def test_numba_gives_the_same_bits_as_numpy(
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


@contextmanager
def _in_plain_python() -> Iterator[None]:
    """What numba compiles, run by Python: else nothing could tell which of its lines are tested."""
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        for name, function in list(vars(rings).items()):
            if hasattr(function, "py_func"):
                patch.setattr(rings, name, function.py_func)
        yield


@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_mean_in_python_what_they_mean_compiled(name: str) -> None:
    own, arrived, residual = (gaussian(300, seed=seed) for seed in range(3))
    with_all = float32(0, -0.0, 1e-45, -1e-6, 1.0, 65519, 65520, -7e4, 3e38, -np.inf, np.nan)
    terms = {"residual": residual, "own_scale": 0.25, "divisor": 3}
    with _in_plain_python():
        assert_same_bits(name, own, arrived=arrived, draw=2**63 + 5, **terms)
        assert_same_bits(name, own * np.float32(1e-5), arrived=None)
        assert_same_bits(name, np.concatenate([with_all, own]), arrived=None)


@pytest.mark.parametrize("name", NAMES)
def test_without_numba_a_codec_goes_on_in_numpy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pmesh.compression.fast.rings", None)  # as if that had failed
    monkeypatch.delattr(fast, "rings")
    codec, values = make(name), gaussian(300, seed=0)
    assert not codec.prepare()
    np.testing.assert_array_equal(encoded(codec, values), encoded(IN_NUMBA[name], values))
