"""Messages of one path between two agents: is it alive, how long does it take, what does it carry.

They are numbered with the others (`pmesh.core.wire.link`).
"""

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_PROBE_BYTES = 2 * 1024 * 1024  # 17 ms at 1 Gbit/s
PROBE_PART_BYTES = 8 * 1024  # half of a TLS record

_Microseconds = Annotated[int, Meta(ge=0, le=2**62)]


class _Message(msgspec.Struct, frozen=True, array_like=True):
    pass


class Ping(_Message, frozen=True, tag=28):
    """Asks for a Pong on the same path."""

    sent_us: _Microseconds
    """The sender's monotonic clock; only the sender interprets it."""
    mbit_s: Annotated[int, Meta(ge=0, le=2**32)] = 0
    """What the sender has measured of this path, from the receiver to itself; 0 if unknown."""


class Pong(_Message, frozen=True, tag=29):
    """Answers a Ping at once."""

    sent_us: _Microseconds


class AskProbe(_Message, frozen=True, tag=30):
    """The receiver is to send so many bytes in Probes on the same path: they show its bandwidth."""

    nbytes: Annotated[int, Meta(ge=1, le=MAX_PROBE_BYTES)]


class Probe(_Message, frozen=True, tag=31):
    """A part of a probe."""

    padding: Annotated[bytes, Meta(min_length=1, max_length=PROBE_PART_BYTES)]
