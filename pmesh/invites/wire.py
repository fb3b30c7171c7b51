"""Messages of invitations: between two machines, and between `pmesh invite` and its agent.

The machine that joins dials the agent's port and sends GUEST_MAGIC. Then each message is one frame
of at most MAX_GUEST_BYTES. Nothing else protects them, so all but the sealed key is public:

    joins     Knock        who it is, which invitation it means, its element of SPAKE2
    invites   Offer        who it is, its element, and a proof that it knows the code
    joins     Proof        that it knows the code, too; or WrongCode, if the offer's proof is wrong
    invites   SealedKey    the mesh key
    joins     Stored       the key is on its disk

In place of Offer and of SealedKey the inviter may send Declined, which ends the exchange.
"""

from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from pmesh.core.values import Name
from pmesh.core.wire.session import Refused, SessionDecoder, SessionMessage
from pmesh.errors import ProtocolError
from pmesh.ids import NodeId

MAX_GUEST_BYTES: Final = 1024  # the largest is a Knock with a name of 256 bytes
ELEMENT_BYTES: Final = 33  # of Ed25519's group, after a byte for the side
PROOF_BYTES: Final = 32
SEALED_BYTES: Final = 32 + 16  # a mesh key, and ChaCha20-Poly1305's tag

Element: TypeAlias = Annotated[bytes, Meta(min_length=ELEMENT_BYTES, max_length=ELEMENT_BYTES)]
_ProofBytes: TypeAlias = Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
_Node: TypeAlias = Annotated[NodeId, Meta(min_length=32, max_length=32)]
_Version: TypeAlias = Annotated[int, Meta(ge=0, le=2**16 - 1)]


class Party(msgspec.Struct, frozen=True, array_like=True):
    """One of the two machines, as it says."""

    node: _Node
    name: Name
    protocol: _Version
    """The version of the protocol between agents."""


class GuestMessage(msgspec.Struct, frozen=True, array_like=True):
    """A message between the two machines."""


class Knock(GuestMessage, frozen=True, tag=1):
    """Asks for the mesh key of the machine that invites by this number."""

    party: Party
    number: Annotated[int, Meta(ge=0, le=2**16 - 1)]
    element: Element | None
    """None if the sender has a mesh key: it only asks whether that is the same."""
    tag: Annotated[bytes, Meta(max_length=8)] = b""
    """The public tag of the mesh key that the sender has."""


class InviterHalf(GuestMessage, frozen=True, tag=2):
    """The inviter's half of the exchange."""

    party: Party
    element: Element
    proof: _ProofBytes


Reason: TypeAlias = Literal[
    "version", "removed", "not invited", "member", "other mesh", "wrong code"
]


class Declined(GuestMessage, frozen=True, tag=3):
    """There is no key for the sender of the Knock; nothing proves who says so."""

    party: Party
    reason: Reason


class Proof(GuestMessage, frozen=True, tag=4):
    """Proves that the machine that joins knows the code."""

    proof: _ProofBytes


class WrongCode(GuestMessage, frozen=True, tag=5):
    """The proof in the offer is wrong: the two machines do not have the same code."""


class SealedKey(GuestMessage, frozen=True, tag=6):
    """The mesh key, sealed by a key that only the two machines have."""

    sealed: Annotated[bytes, Meta(min_length=SEALED_BYTES, max_length=SEALED_BYTES)]


class KeyStored(GuestMessage, frozen=True, tag=7):
    """The mesh key is on the disk of the machine that joins."""


AnyGuestMessage: TypeAlias = (
    Knock | InviterHalf | Declined | Proof | WrongCode | SealedKey | KeyStored
)
_decoder: msgspec.msgpack.Decoder[AnyGuestMessage] = msgspec.msgpack.Decoder(AnyGuestMessage)


def encode_guest(message: GuestMessage) -> bytes:
    """Return the message as bytes, without a length prefix."""
    return msgspec.msgpack.encode(message)


def decode_guest_untrusted(data: bytes) -> AnyGuestMessage:
    """Reverse `encode_guest`; raise ProtocolError for anything else."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise ProtocolError(f"not a message about an invitation: {e}") from e


class Invite(SessionMessage, frozen=True, tag="invite"):
    """Asks for a code; answered by Refused, or Invited and then InvitationOver.

    The end of the session withdraws the code.
    """


class Invited(SessionMessage, frozen=True, tag="invited"):
    """The code is open."""

    code: str
    lasts_s: float


Outcome: TypeAlias = Literal["joined", "key sent", "wrong code", "broken off", "expired"]


class InvitationOver(SessionMessage, frozen=True, tag="invitation_over"):
    """The code can't be used any more."""

    outcome: Outcome
    name: str = ""
    """What the machine calls itself that has tried it."""
    host: str = ""
    """Its address."""


InvitationReply: TypeAlias = Refused | Invited | InvitationOver
INVITATION_REPLIES: SessionDecoder[InvitationReply] = SessionDecoder("reply", InvitationReply)
