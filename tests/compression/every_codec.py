"""Every ring codec, in numpy and in numba."""

import numpy as np
import pytest
from hypothesis import strategies as st

from pmesh.compression.blocks import Bytes, Float32s
from pmesh.compression.codecs import Cast, Codec, Int8

NAMES = ("fp16", "bf16", "int8", "int8-stochastic")
COUNTS = st.sampled_from([0, 1, 3, 255, 256, 300])


def make(name: str) -> Codec:
    """One of its own, that is not compiled."""
    if name.startswith("int8"):
        return Int8(stochastic=name != "int8")
    return Cast("fp16") if name == "fp16" else Cast("bf16")


def prepared(name: str) -> Codec:
    codec = make(name)
    assert codec.prepare()
    return codec


IN_NUMPY = {name: make(name) for name in NAMES}
IN_NUMBA = {name: prepared(name) for name in NAMES}
ALL = [*IN_NUMPY.values(), *IN_NUMBA.values()]
IDS = [f"{name} in {where}" for where in ("numpy", "numba") for name in NAMES]
every_codec = pytest.mark.parametrize("codec", ALL, ids=IDS)


def encoded(codec: Codec, values: Float32s) -> Bytes:
    wire = np.full(codec.wire_bytes(len(values)), 0xEE, np.uint8)
    codec.hop(None, values, wire)
    return wire


def decoded(codec: Codec, wire: Bytes, count: int) -> Float32s:
    values = np.full(count, 77, np.float32)
    codec.decode(wire, values)
    return values


def float32(*values: float) -> Float32s:
    """These, as an array."""
    return np.array(values, np.float32)
