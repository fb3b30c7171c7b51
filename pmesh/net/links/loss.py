"""What the system has had to send again on a connection."""

import socket
import struct
import sys
from types import MappingProxyType
from typing import Final, NamedTuple

import trio


class _Counters(NamedTuple):
    """Where a system counts the segments of a connection."""

    option: int
    kind: str
    sent_at: int
    sent_again_at: int


MIN_SEGMENTS: Final = 200  # of fewer, one that was lost by chance would look like a bad line
_COUNTERS: Final = MappingProxyType(
    {
        # TCP_INFO, struct tcp_info: tcpi_data_segs_out (since Linux 4.6) and tcpi_total_retrans.
        "linux": _Counters(11, "=I", 156, 100),
        # TCP_CONNECTION_INFO, struct tcp_connection_info: tcpi_txpackets, tcpi_txretransmitpackets.
        "darwin": _Counters(0x106, "=Q", 56, 104),
    }
)
_COUNTERS_BYTES: Final = 256  # more than either struct has up to there


def loss_of(stream: trio.abc.Stream) -> float | None:
    """Return the share of the connection's segments that were sent again, from 0.0 to 1.0.

    None while fewer than 200 were sent, and where the system does not count them.
    """
    counters = _COUNTERS.get(sys.platform)
    if counters is None:
        return None
    option, kind, sent_at, sent_again_at = counters
    try:
        sock: socket.socket = getattr(stream, "socket")  # noqa: B009 - an abstract stream has none
        data = sock.getsockopt(socket.IPPROTO_TCP, option, _COUNTERS_BYTES)
        (sent,) = struct.unpack_from(kind, data, sent_at)
        (sent_again,) = struct.unpack_from(kind, data, sent_again_at)
    except (AttributeError, OSError, struct.error):  # no socket; closed; an older system
        return None
    return min(1.0, sent_again / sent) if sent >= MIN_SEGMENTS else None
