"""Every ring codec, in numpy and in C."""

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from pmesh import native
from pmesh.compression.blocks import Bytes, Float32s
from pmesh.compression.codecs import Codec, codec_of
from pmesh.compression.compiled import in_numpy

NAMES = ("fp16", "bf16", "int8", "int8-stochastic")
COUNTS = st.sampled_from([0, 1, 3, 255, 256, 300])
needs_the_library = pytest.mark.skipif(
    native.library() is None, reason=f"there is no native library: {native.why_missing()}"
)


class CodecInNumpy:
    """A codec that numpy computes."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.name, self.block = codec.name, codec.block
        self.divides_first, self.wire_bytes = codec.divides_first, codec.wire_bytes

    def hop(self, *arrays: Any, **terms: Any) -> int:  # noqa: ANN401 - of a codec
        with in_numpy():
            return self._codec.hop(*arrays, **terms)

    def decode(self, wire: Bytes, out: Float32s) -> None:
        with in_numpy():
            self._codec.decode(wire, out)


IN_NUMPY: dict[str, Codec] = {name: CodecInNumpy(codec_of(name)) for name in NAMES}
IN_C = {name: codec_of(name) for name in NAMES}


def codecs(*names: str) -> pytest.MarkDecorator:
    """Run a test with each of these as the argument `codec`, in numpy and in C."""
    both = [
        *(pytest.param(IN_NUMPY[name], id=f"{name} in numpy") for name in names),
        *(pytest.param(IN_C[name], id=f"{name} in C", marks=needs_the_library) for name in names),
    ]
    return pytest.mark.parametrize("codec", both)


every_codec = codecs(*NAMES)


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
