"""Bytes that a third agent forwards between two others (`pmesh.agent.mesh.relays`)."""

from typing import Annotated

from msgspec import Meta

from pmesh.core.wire.channels import Channel, Message
from pmesh.ids import NodeId

MAX_RELAYED_BYTES = 16 * 1024  # one TLS record
_Count = Annotated[int, Meta(ge=0, le=2**62)]


class Relay(Message, frozen=True, tag=1):
    """Bytes of a connection between two agents that a third one forwards (V5).

    They are of a TLS connection between the two: nobody else can read or change them.
    """

    channel = 6
    far: Annotated[NodeId, Meta(min_length=32, max_length=32)]
    """The other end: where the bytes shall go, or where they come from."""
    number: _Count
    """Of the connection, given by the end that opens it, the one with the smaller node id."""
    to_forward: bool = False
    """True: from an end to the agent that forwards. False: from that one to an end."""
    data: Annotated[bytes, Meta(max_length=MAX_RELAYED_BYTES)] = b""
    read: Annotated[int, Meta(ge=0, le=2**32)] = 0
    """How many more bytes of the other end the sender has read."""
    ends: bool = False
    """The sender sends no more."""


RELAYS: Channel[Relay] = Channel(Relay.channel, Relay)
