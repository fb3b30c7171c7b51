"""All control messages between two agents as bytes.

They are MessagePack arrays, tagged by a short number; msgspec validates them as it decodes.

Each kind of message has a bound in bytes, `bound_of`. What others have said goes into our messages,
so each part that one member may fill is small enough for all of them to fit. `encode` refuses a
message beyond its bound: that is our error, and must not look like the receiver's peer's.
"""

from typing import TypeAlias

import msgspec

from pmesh.core.wire.channels import MAX_MESSAGE_BYTES, Message
from pmesh.core.wire.lanes import AskResult, OfferLane, RestLane, Splice
from pmesh.core.wire.launches import AnyLaunchMessage
from pmesh.core.wire.link import Hello, KnownPeers
from pmesh.core.wire.p2p import P2PMessage
from pmesh.core.wire.probes import AskProbe, Ping, Pong, Probe
from pmesh.core.wire.relays import Relay
from pmesh.core.wire.store import StorePart
from pmesh.core.wire.views import AgreementMessage
from pmesh.errors import ProtocolError

RanksMessage: TypeAlias = P2PMessage | StorePart
LinkMessage: TypeAlias = (
    Hello
    | AgreementMessage
    | OfferLane
    | RestLane
    | AskResult
    | RanksMessage
    | KnownPeers
    | Relay
    | Splice
    | AnyLaunchMessage
)

PathMessage: TypeAlias = LinkMessage | Ping | Pong | AskProbe | Probe
_decoder: msgspec.msgpack.Decoder[PathMessage] = msgspec.msgpack.Decoder(PathMessage)
_encoder = msgspec.msgpack.Encoder()


def bound_of(kind: type[PathMessage]) -> int:
    """Return how many bytes a message of this kind may have."""
    return kind.most_bytes if issubclass(kind, Message) else MAX_MESSAGE_BYTES


def encode(message: PathMessage) -> bytes:
    """Return the message as bytes, without a length prefix.

    Raises ValueError for one beyond its bound: nobody would take it, and the error is ours.
    """
    data = _encoder.encode(message)
    if len(data) > bound_of(type(message)):
        raise ValueError(_too_large(message, data))
    return data


def decode_untrusted(data: bytes) -> PathMessage:
    """Reverse `encode`; raise ProtocolError for anything else."""
    try:
        message = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise ProtocolError(f"not a control message: {e}") from e
    if len(data) > bound_of(type(message)):
        raise ProtocolError(_too_large(message, data))
    return message


def _too_large(message: PathMessage, data: bytes) -> str:
    kind = type(message)
    return f"a {kind.__name__} of {len(data)} bytes, {bound_of(kind)} are allowed"
