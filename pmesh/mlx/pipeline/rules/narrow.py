"""Float32 values as int8 with a scale for each 256 of them, and their shape: pure."""

import math

import numpy as np

from pmesh.compression.blocks import Bytes
from pmesh.compression.codecs import codec_of
from pmesh.core.ops.reductions import Values
from pmesh.errors import ProtocolError

_CODEC = codec_of("int8")
_MOST_DIMENSIONS = 32  # numpy has no more, MLX neither


def to_int8(x: Values) -> Bytes:
    """Return float32 of any shape as bytes: each value is off by at most 1/254 of its block's most.

    The bytes are the number of dimensions and the dimensions, as little-endian int64, then what
    `pmesh.compression.codecs.Int8` makes of the values.
    """
    head = np.array([x.ndim, *x.shape], "<i8").view(np.uint8)
    flat = np.ascontiguousarray(x, np.float32).reshape(-1)
    found = np.empty(head.size + _CODEC.wire_bytes(flat.size), np.uint8)
    found[: head.size] = head
    _CODEC.hop(None, flat, found[head.size :])
    return found


def from_int8_untrusted(data: Values) -> Values:
    """Return the float32 values that these bytes of `to_int8` stand for, in their shape.

    Raises:
        ProtocolError: the bytes are not of `to_int8`.
    """
    ndim = int(data[:8].view("<i8")[0]) if data.ndim == 1 and data.size >= 8 else -1  # noqa: PLR2004 - a number
    if not 0 <= ndim <= _MOST_DIMENSIONS or data.size < 8 * (1 + ndim):
        raise ProtocolError("a message of a pipeline has no shape: send_as differs between ranks?")
    shape = tuple(data[8 : 8 * (1 + ndim)].view("<i8").tolist())
    wire, count = data[8 * (1 + ndim) :], math.prod(shape)
    if min(shape, default=0) < 0 or wire.size != _CODEC.wire_bytes(count):
        raise ProtocolError(f"a message of a pipeline has {wire.size} bytes for the shape {shape}")
    found = np.empty(count, np.float32)
    _CODEC.decode(wire, found)
    try:
        return found.reshape(shape)
    except ValueError as e:  # without values, the other dimensions may be anything
        raise ProtocolError(f"a message of a pipeline has the shape {shape}, which none has") from e
