"""Messages of a link itself: how two agents introduce themselves, and others, and part."""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from pmesh.core.values import Name, Removal, SignedName
from pmesh.core.wire.channels import MAX_ENTRIES, Channel, Message
from pmesh.ids import Member

PROTOCOL_VERSION = 21
MAX_HELLO_BYTES = 16 * 1024  # 64 addresses and interfaces take 8 KiB; each peer passes it on
MAX_ADDRESSES = 64  # of one machine; a Mac with every port in use has about ten
_Count = Annotated[int, Meta(ge=0, le=2**62)]


class Address(msgspec.Struct, frozen=True, array_like=True):
    """An address at which an agent can be dialled."""

    host: Annotated[str, Meta(max_length=255)]
    """An IP address (IPv6 with its scope, if it has one) or a host name."""
    port: Annotated[int, Meta(ge=1, le=65535)]

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PeerInterface(msgspec.Struct, frozen=True, array_like=True):
    """A network interface of the sender's, for paths between two machines."""

    name: Name
    kind: Name
    """As in `pmesh.core.links.addresses`; a later version may know others."""
    speed_mbit_s: Annotated[int, Meta(ge=0, le=2**32)]
    """As the system says; 0 if it does not."""
    hosts: Annotated[
        tuple[Annotated[str, Meta(max_length=255)], ...], Meta(max_length=MAX_ADDRESSES)
    ]
    """IP addresses without a scope."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The first message on a path, from both sides; of no channel, so that any version reads it."""

    protocol: Annotated[int, Meta(ge=0, le=2**16 - 1)]
    member: Member
    said: SignedName
    """The user's name for the machine."""
    addresses: Annotated[tuple[Address, ...], Meta(max_length=MAX_ADDRESSES)] = ()
    """The addresses at which others can dial the sender."""
    interfaces: Annotated[tuple[PeerInterface, ...], Meta(max_length=MAX_ADDRESSES)] = ()
    link: _Count = 0
    """The number that the sender gives to its link with the receiver. Two paths are of one link if
    both numbers are the same."""
    removal: Removal | None = None
    """By which the receiver has no place in the mesh: the sender refuses the path."""

    @property
    def name(self) -> str:
        """What the machine calls itself; others may say the same."""
        return self.said.name


class _LinkMessage(Message, frozen=True):
    channel = 1


class KnownPeers(_LinkMessage, frozen=True, tag=22):
    """The peers that the sender has links with, and their addresses: one address finds them all."""

    most_bytes = MAX_HELLO_BYTES + 16  # one peer in a message
    peers: Annotated[tuple[Hello, ...], Meta(max_length=MAX_ENTRIES)]


class Leaving(_LinkMessage, frozen=True, tag=12):
    """The sender ends cleanly: this is no failure."""


LinkMessage: TypeAlias = KnownPeers | Leaving
LINK: Channel[LinkMessage] = Channel(_LinkMessage.channel, LinkMessage)
