"""The first bytes on a connection of a lane, in clear: they say which lane it belongs to."""

import struct
from typing import NamedTuple

from pmesh.errors import ProtocolError

PREAMBLE_MAGIC = b"PMLN\x03"  # no TLS record begins with it: the acceptor distinguishes lanes by it
LANE_ID_BYTES = 16
_INDEX = struct.Struct(">I")
PREAMBLE_BYTES = len(PREAMBLE_MAGIC) + LANE_ID_BYTES + _INDEX.size


class Preamble(NamedTuple):
    """The first bytes on a lane's connection, in clear."""

    lane: bytes
    """The lane's id."""
    connection: int = 0
    """Its index among those of the lane, where it has several (`subflows`)."""


def encode_preamble(preamble: Preamble) -> bytes:
    """Return the preamble as bytes; their length is always the same."""
    return PREAMBLE_MAGIC + preamble.lane + _INDEX.pack(preamble.connection)


def decode_preamble_untrusted(data: bytes) -> Preamble:
    """Reverse `encode_preamble`; raise ProtocolError for anything else."""
    if len(data) != PREAMBLE_BYTES or not data.startswith(PREAMBLE_MAGIC):
        raise ProtocolError("not the beginning of a lane")
    begin = len(PREAMBLE_MAGIC)
    (index,) = _INDEX.unpack_from(data, begin + LANE_ID_BYTES)
    return Preamble(data[begin : begin + LANE_ID_BYTES], index)
