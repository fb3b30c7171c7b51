"""What a stranger's first bytes say it is, before anything is spent on it.

A link begins with a TLS ClientHello, a lane with its preamble; nothing else comes from a pmesh. A
TLS object costs 50 KiB and a handshake 3 ms of CPU, so those who can't be pmesh get neither.
"""

import enum
from typing import Final

from pmesh.core.records import PREAMBLE_BYTES, encode_preamble

MAX_CLIENT_HELLO_BYTES: Final = 16 * 1024
"""Ours has 225 bytes, 1.8 KiB with a post-quantum key share. OpenSSL believes a claim of up to
128 KiB, and allocates it at once."""

FIRST_BYTES: Final = PREAMBLE_BYTES
"""How many to read, at most: what follows a preamble belongs to the lane."""

_LANE = encode_preamble(b"")
_TLS_HEADER_BYTES = 9  # of the record (5) and of the handshake message in it (4): RFC 8446, 5.1, 4
_HANDSHAKE_RECORD, _CLIENT_HELLO = 22, 1


class FirstBytes(enum.Enum):
    """What a connection's first bytes make of it."""

    TOO_FEW = enum.auto()
    LINK = enum.auto()
    LANE = enum.auto()
    GARBAGE = enum.auto()


def recognize(first: bytes) -> FirstBytes:
    """What begins with these bytes; decides as early as it can, and never takes it back.

    >>> recognize(b"GET / HTTP/1.1")
    <FirstBytes.GARBAGE: 4>
    """
    if first[: len(_LANE)] == _LANE[: len(first)]:
        return FirstBytes.LANE if len(first) >= PREAMBLE_BYTES else FirstBytes.TOO_FEW
    if _may_be_client_hello(first):
        return FirstBytes.LINK if len(first) >= _TLS_HEADER_BYTES else FirstBytes.TOO_FEW
    return FirstBytes.GARBAGE


def _may_be_client_hello(first: bytes) -> bool:
    header = first[:_TLS_HEADER_BYTES]
    claimed = int.from_bytes(header[6:9], "big") if len(header) == _TLS_HEADER_BYTES else 0
    return (
        header[:2] == bytes((_HANDSHAKE_RECORD, 3))[: len(header)]  # 3: every TLS there has been
        and header[5:6] in (b"", bytes((_CLIENT_HELLO,)))
        and claimed <= MAX_CLIENT_HELLO_BYTES
    )
