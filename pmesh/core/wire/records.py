"""Lane records: a header in clear, a body sealed with AES-256-GCM; buffers in, buffers out.

    bytes   0        4        12      20       24            32          40      40+body      +16
            │ body   │ roster │ op    │ segment│ fingerprint │ completed │ sealed body │ tag │
            └────────────────── header, authenticated ───────────────────┘

Each direction of a lane has its own random key, so the record's number can serve as the nonce
(NIST SP 800-38D, 8.2.1). A lost, repeated or reordered record fails authentication.
"""

import hashlib
import struct
from functools import lru_cache
from typing import NamedTuple

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from pmesh.core.wire.calls import Call
from pmesh.errors import ProtocolError

_HEADER = struct.Struct(">IQQIQq")
HEADER_BYTES = _HEADER.size
TAG_BYTES = 16
OVERHEAD_BYTES = HEADER_BYTES + TAG_BYTES

MAX_BODY_BYTES = 1024 * 1024  # sealing one takes 0.1 ms, which the event loop can spare
KEY_BYTES = 2**38  # 2^34 blocks under one key: a forger's advantage stays below 2^-60

PREAMBLE_MAGIC = b"PMLN\x02"  # no TLS record begins with it: the acceptor distinguishes lanes by it
LANE_ID_BYTES = 16
_INDEX = struct.Struct(">I")
PREAMBLE_BYTES = len(PREAMBLE_MAGIC) + LANE_ID_BYTES + _INDEX.size


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
        raise ProtocolError(
            f"a record claims {header.body_bytes} bytes, {max_body_bytes} are allowed"
        )
    return header


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


@lru_cache(maxsize=256)  # every training step makes the same few calls
def fingerprint(call: Call) -> int:
    """Return a 64-bit hash of the call that is equal on every machine (O8)."""
    digest = hashlib.sha3_256(msgspec.msgpack.encode(call)).digest()
    return int.from_bytes(digest[:8], "big")


def subflow_key(key: bytes, index: int) -> bytes:
    """Return the key of one direction of a lane's connection, of several (`subflows`)."""
    info = b"pmesh lane: subflow %d" % index
    return HKDFExpand(SHA256(), length=32, info=info).derive(key)


class _Keys:
    """The cipher and the nonce for each record of one direction, in order.

    After `key_bytes` a key derived from it replaces it (as in TLS 1.3, RFC 8446 7.2). Both ends
    count the same records, so both replace it at the same record and no op is disturbed.
    """

    def __init__(self, key: bytes, *, key_bytes: int) -> None:
        self._limit = key_bytes
        self._records = 0
        self._replace(key)

    def _replace(self, key: bytes) -> None:
        self._key = key
        self._cipher = AESGCM(key)
        self._left = self._limit

    def for_record(self, body_bytes: int) -> tuple[AESGCM, bytes]:
        self._left -= body_bytes + OVERHEAD_BYTES
        if self._left < 0:
            info = b"pmesh lane: next key"
            self._replace(HKDFExpand(SHA256(), length=32, info=info).derive(self._key))
            self._left -= body_bytes + OVERHEAD_BYTES
        self._records += 1
        return self._cipher, self._records.to_bytes(12, "big")


class Sealer:
    """Writes the records of one direction of one connection, with a key used nowhere else."""

    def __init__(self, key: bytes, *, key_bytes: int = KEY_BYTES) -> None:
        self._keys = _Keys(key, key_bytes=key_bytes)

    def seal(self, header: RecordHeader, body: bytes | memoryview, into: memoryview) -> int:
        """Seal `body` directly into the caller's buffer and return the record's length in bytes.

        Args:
            header: its `body_bytes` is the length of `body`.
            body: at most MAX_BODY_BYTES; only read.
            into: at least body_bytes + OVERHEAD_BYTES.
        """
        cipher, nonce = self._keys.for_record(header.body_bytes)
        _HEADER.pack_into(into, 0, *header)
        end = OVERHEAD_BYTES + header.body_bytes
        cipher.encrypt_into(nonce, body, into[:HEADER_BYTES], into[HEADER_BYTES:end])
        return end


class Opener:
    """Reads the records of one direction, in the order in which they were sealed."""

    def __init__(self, key: bytes, *, key_bytes: int = KEY_BYTES) -> None:
        self._keys = _Keys(key, key_bytes=key_bytes)

    def open_untrusted(self, record: memoryview, into: bytearray | memoryview) -> None:
        """Open a whole record directly into `into`, which has exactly the size of its body.

        Raises ProtocolError if it was not sealed with this key as the next record. `into` then
        holds garbage, and the connection is unusable.
        """
        if len(record) != len(into) + OVERHEAD_BYTES:
            raise ProtocolError(f"a record of {len(record)} bytes for a body of {len(into)}")
        cipher, nonce = self._keys.for_record(len(into))
        try:
            cipher.decrypt_into(
                nonce,
                record[HEADER_BYTES:],
                record[:HEADER_BYTES],
                into or bytearray(),  # an empty buffer, as for a barrier, may be read-only
            )
        except InvalidTag as e:
            raise ProtocolError("a record fails authentication") from e
