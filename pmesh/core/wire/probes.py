"""Messages of one path between two agents: is it alive, how fast is it, what does it carry."""

from typing import Annotated, TypeAlias

from msgspec import Meta

from pmesh.core.wire.channels import Channel, Message

MAX_PROBE_BYTES = 2 * 1024 * 1024  # 17 ms at 1 Gbit/s
PROBE_PART_BYTES = 8 * 1024  # half of a TLS record

_Microseconds = Annotated[int, Meta(ge=0, le=2**62)]


class _PathMessage(Message, frozen=True):
    channel = 0


class Ping(_PathMessage, frozen=True, tag=28):
    """Asks for a Pong on the same path."""

    sent_us: _Microseconds
    """The sender's monotonic clock; only the sender interprets it."""
    mbit_s: Annotated[int, Meta(ge=0, le=2**32)] = 0
    """What the sender has measured of this path, from the receiver to itself; 0 if unknown."""


class Pong(_PathMessage, frozen=True, tag=29):
    """Answers a Ping at once."""

    sent_us: _Microseconds


class AskProbe(_PathMessage, frozen=True, tag=30):
    """The receiver is to send so many bytes in Probes on the same path: they show its bandwidth."""

    nbytes: Annotated[int, Meta(ge=1, le=MAX_PROBE_BYTES)]


class Probe(_PathMessage, frozen=True, tag=31):
    """A part of a probe."""

    padding: Annotated[bytes, Meta(min_length=1, max_length=PROBE_PART_BYTES)]


PathMessage: TypeAlias = Ping | Pong | AskProbe | Probe
PATHS: Channel[PathMessage] = Channel(_PathMessage.channel, PathMessage)
