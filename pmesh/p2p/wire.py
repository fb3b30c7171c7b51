"""Messages about what one rank sends to another (`pmesh.p2p.agent`)."""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from pmesh.core.values import Id, Job, RosterNumber
from pmesh.core.wire.calls import Envelope
from pmesh.core.wire.channels import Channel, Message
from pmesh.ids import Epoch

EAGER_BYTES = 16 * 1024  # a token's activations of the largest open models
_Count = Annotated[int, Meta(ge=0, le=2**62)]
_OpOrNone = Annotated[int, Meta(ge=-1, le=2**62)]


class MessageAddress(msgspec.Struct, frozen=True, array_like=True):
    """The unique address of a message of a job, across all views (O4)."""

    job: Job
    born: Epoch
    sender: Id
    receiver: Id
    sequence: _Count
    """Its number among all messages from this sender to this receiver, from 0, of any tag."""


class P2PLinkMessage(Message, frozen=True):
    """A message between two agents about a point-to-point message."""

    channel = 4
    address: MessageAddress


class AnnounceMessage(P2PLinkMessage, frozen=True, tag=23):
    """The sender keeps a message for the receiver; repeated until it is settled."""

    envelope: Envelope
    first: _Count
    """Every message of this pair below this number is settled: delivered or withdrawn."""
    before: _OpOrNone
    """The previous unsettled message of the same tag, to be delivered first; -1 if none."""
    values: Annotated[bytes, Meta(max_length=EAGER_BYTES)] = b""
    """All of the message's, or none."""


class RequestMessage(P2PLinkMessage, frozen=True, tag=24):
    """A trainer of the receiver waits for the message: its values may be sent."""

    number: RosterNumber
    """The roster's number, as in OfferLane."""
    lane: Annotated[int, Meta(ge=0, le=2**61)]
    """The number of the lane among the successive lanes of this pair under this roster, from 0."""
    transfer: _Count
    """Its index among the messages on this lane, from 0."""


class MessageDelivered(P2PLinkMessage, frozen=True, tag=25):
    """The receiver's trainer has the message: the send is complete."""


class MessageWithdrawn(P2PLinkMessage, frozen=True, tag=26):
    """The sender no longer keeps the message."""


P2PMessage: TypeAlias = AnnounceMessage | RequestMessage | MessageDelivered | MessageWithdrawn
P2P: Channel[P2PMessage] = Channel(P2PLinkMessage.channel, P2PMessage)
