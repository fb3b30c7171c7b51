"""Activations as int8."""

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pmesh.errors import ProtocolError
from pmesh.mlx.pipeline.rules.narrow import from_int8_untrusted, to_int8

SHAPES = arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9)
VALUES = st.floats(-1e6, 1e6, width=32)


@given(arrays.arrays(np.float32, SHAPES, elements=VALUES))
def test_values_come_back_in_their_shape_within_a_half_step(x: np.ndarray[Any, Any]) -> None:
    found = from_int8_untrusted(to_int8(x))
    assert (found.shape, found.dtype) == (x.shape, x.dtype)
    most = np.abs(x).max(initial=0.0)
    np.testing.assert_allclose(found, x, atol=most / 254 * 1.001 + 1e-30, rtol=0)


def test_a_message_is_about_a_quarter_of_its_values() -> None:
    assert to_int8(np.ones((64, 512), np.float32)).size < 0.26 * 4 * 64 * 512


@given(st.binary(max_size=64))
def test_other_bytes_are_refused_or_some_values(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        from_int8_untrusted(np.frombuffer(data, np.uint8))


@pytest.mark.parametrize(
    "head", [[], [-1], [33], [2, 4], [2, -1, -4], [1, 5], [2, 2**40, 2**40], [2, 2**62, 0]]
)
def test_bytes_without_a_shape_that_fits_are_refused(head: list[int]) -> None:
    data = np.array(head, "<i8").view(np.uint8)
    with pytest.raises(ProtocolError, match="a message of a pipeline"):
        from_int8_untrusted(data)
