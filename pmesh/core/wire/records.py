"""Lane records: a header in clear, a body sealed with AEGIS-128L; buffers in, buffers out.

    bytes   0        4        12      20       24            32          40      40+body      +32
            │ body   │ roster │ op    │ segment│ fingerprint │ completed │ sealed body │ tag │
            └────────────────── header, authenticated ───────────────────┘

Each direction of a lane has its own random key, so the record's number can serve as the nonce. A
lost, repeated or reordered record fails authentication.
"""

import hashlib
import struct
from functools import lru_cache
from typing import NamedTuple

import msgspec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from pmesh.core.wire import aead
from pmesh.core.wire.calls import Call
from pmesh.errors import ProtocolError

_HEADER = struct.Struct(">IQQIQq")
HEADER_BYTES = _HEADER.size
OVERHEAD_BYTES = HEADER_BYTES + aead.TAG_BYTES

MAX_BODY_BYTES = 1024 * 1024  # sealing one takes 0.1 ms, which the event loop can spare


class RecordHeader(NamedTuple):
    """The header of a record."""

    body_bytes: int
    roster: int
    """The number of the roster under which it was sent (V4)."""
    op: int
    segment: int
    """Its index among the records of this op on this lane, from 0."""
    fingerprint: int
    """The fingerprint of the sender's call (O8)."""
    completed: int
    """The sender has completed every op up to this one; -1 before the first (O2)."""


def read_header_untrusted(
    data: bytes | memoryview, *, max_body_bytes: int = MAX_BODY_BYTES
) -> RecordHeader:
    """Return the header in the first HEADER_BYTES; raise ProtocolError for an impossible one.

    It is not authenticated until the body has been opened.
    """
    if len(data) < HEADER_BYTES:
        raise ProtocolError(f"a record's header has {HEADER_BYTES} bytes, not {len(data)}")
    header = RecordHeader._make(_HEADER.unpack_from(data))
    if header.body_bytes > max_body_bytes:
        raise ProtocolError(too_large(header.body_bytes, max_body_bytes))
    return header


def too_large(nbytes: int, max_body_bytes: int = MAX_BODY_BYTES) -> str:
    """Return the text of the error for a body that is too large."""
    return f"a record claims {nbytes} bytes, {max_body_bytes} are allowed"


@lru_cache(maxsize=256)  # every training step makes the same few calls
def fingerprint(call: Call) -> int:
    """Return a 64-bit hash of the call that is equal on every machine (O8)."""
    digest = hashlib.sha3_256(msgspec.msgpack.encode(call)).digest()
    return int.from_bytes(digest[:8], "big")


def subflow_key(key: bytes, index: int) -> bytes:
    """Return the key of one direction of a lane's connection, of several (`subflows`)."""
    return _derived(key, b"pmesh lane: subflow %d" % index, nbytes=len(key))


def _derived(key: bytes, info: bytes, *, nbytes: int) -> bytes:
    return HKDFExpand(SHA256(), length=nbytes, info=info).derive(key)


class _Direction:
    """One direction of one connection. Its lane key is used for no other."""

    def __init__(self, lane_key: bytes) -> None:
        self.key = _derived(lane_key, b"pmesh lane: records", nbytes=aead.KEY_BYTES)
        """The key of all its records."""
        self.records: int = 0
        """How many records have been sealed or opened. The nonce of each is its number, from 1."""


class Sealer(_Direction):
    """Writes the records of a direction."""

    def seal(self, header: RecordHeader, body: bytes | memoryview, into: memoryview) -> int:
        """Seal `body` directly into the caller's buffer and return the record's length in bytes.

        Args:
            header: its `body_bytes` is the length of `body`.
            body: at most MAX_BODY_BYTES; only read.
            into: at least body_bytes + OVERHEAD_BYTES.
        """
        self.records += 1
        _HEADER.pack_into(into, 0, *header)
        end = OVERHEAD_BYTES + header.body_bytes
        aead.seal(self.key, self.records, into[:end], HEADER_BYTES, body)
        return end


class Opener(_Direction):
    """Reads the records of a direction, in the order in which they were sealed."""

    def open_untrusted(self, record: memoryview, into: bytearray | memoryview) -> None:
        """Open a whole record directly into `into`, which has exactly the size of its body.

        Raises ProtocolError if it was not sealed with this key as the next record. `into` then
        holds zeros, and the connection is unusable.
        """
        self.records += 1
        aead.open_untrusted(self.key, self.records, record, HEADER_BYTES, into)
