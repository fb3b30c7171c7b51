"""What an agent advertises by mDNS: claims that others can check before they dial.

Two keys authenticate all fields of an advertisement, addresses included: one derived from the mesh
key, which only members hold, and the node key, which only the node holds. The minute in which it
was made reveals a replay.
"""

import base64
import binascii
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from pmesh.core.identity.keys import AdvertisementKey, NodeKey, verify
from pmesh.core.wire.link import PROTOCOL_VERSION, Address
from pmesh.errors import ProtocolError
from pmesh.ids import Incarnation, Member, NodeId, node_from_text, node_text

SERVICE_TYPE: Final = "_pmesh._tcp.local."

TAG_BYTES: Final = 8
MAX_NAME_BYTES: Final = 128  # a TXT entry holds 255 bytes, its key included
MAX_ADDRESSES: Final = 14  # with 17 bytes each they fill an entry; a Mac has about ten
FRESH_MINUTES: Final = 10  # clocks at home differ by less, if they are set at all

_MAC: Final = b"mac"
_MAC_BYTES: Final = 16  # 2^128 cannot be tried out
_SIGNATURE: Final = b"sig"
_INVITATION: Final = b"inv"
_FIRST_ENTRY: Final = b"v="
_OUR_VERSION: Final = b"%d" % PROTOCOL_VERSION
_LABEL: Final = b"pmesh advertisement\0"  # so that the signature is valid for nothing else
_SIGNATURE_BYTES: Final = 64  # Ed25519, RFC 8032 section 5.1.6
_MAX_PROTOCOL: Final = 2**16 - 1
_MAX_PORT: Final = 2**16 - 1
_MAX_INCARNATION: Final = 2**63 - 1
_MAX_INVITATION: Final = 2**16 - 1
_MAX_MINUTE: Final = 2**32 - 1
_DIGITS: Final = re.compile(rb"[0-9]{1,19}")  # int() accepts signs, spaces and underscores


class ForgedAdvertisement(ProtocolError):  # noqa: N818 - a state, as in pmesh.errors
    """An advertisement with our mesh's tag, made without our mesh key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advertisement:
    """One process start of one node, and its TCP port."""

    tag: bytes
    """The namespace tag of the mesh key, 8 bytes: agents of another tag are never dialled."""
    node: NodeId
    incarnation: Incarnation
    port: int
    name: str
    """The user's name for the machine; the first 128 bytes of UTF-8 are sent."""
    hosts: tuple[str, ...] = ()
    """Its IP addresses without scopes; the first 14 are sent."""
    minute: int = 1
    """When it was made, in minutes of Unix time by its own clock."""
    protocol: int = PROTOCOL_VERSION
    invitation: int = 0
    """The number of the code of `pmesh invite` that is open there; 0 for none."""

    @property
    def member(self) -> Member:
        return Member(self.node, self.incarnation)

    @property
    def addresses(self) -> tuple[Address, ...]:
        return tuple(Address(host, self.port) for host in self.hosts)

    def is_fresh(self, *, minute: int) -> bool:
        """True if it was made just before `minute`, our own Unix time in minutes: it is no replay.

        A fresh one may look old, because a clock at home may be wrong by years.
        """
        return abs(minute - self.minute) <= FRESH_MINUTES


def instance_name(node: NodeId) -> str:
    """Return the node's mDNS instance: its id, never the machine's own host name."""
    return f"{node_text(node)}.{SERVICE_TYPE}"


def host_name(node: NodeId) -> str:
    """Return the node's mDNS host name, which holds its addresses."""
    return f"{node_text(node)}.local."


def node_of_instance_untrusted(instance: str) -> NodeId:
    """Reverse `instance_name`; raise ProtocolError for anything else."""
    try:
        return node_from_text(instance.removesuffix(f".{SERVICE_TYPE}"))
    except ValueError as e:
        raise ProtocolError(f"not an instance of ours: {instance[:80]!r}") from e


def encode(
    advertisement: Advertisement, node_key: NodeKey, key: AdvertisementKey
) -> dict[bytes, bytes]:
    """Return the advertisement as the entries of an mDNS TXT record, authenticated and signed.

    Raises ValueError if the node key belongs to another node.
    """
    if node_key.node != advertisement.node:
        raise ValueError("an advertisement must be signed by the node that it names")
    name = advertisement.name.encode()[:MAX_NAME_BYTES].decode(errors="ignore")
    packed = [ipaddress.ip_address(host).packed for host in advertisement.hosts[:MAX_ADDRESSES]]
    entries = {
        b"v": b"%d" % advertisement.protocol,
        b"tag": advertisement.tag.hex().encode(),
        b"node": node_text(advertisement.node).encode(),
        b"inc": b"%d" % advertisement.incarnation,
        b"port": b"%d" % advertisement.port,
        b"name": name.encode(),
        b"at": b"%d" % advertisement.minute,
        b"addr": b"".join(bytes([len(host)]) + host for host in packed),
    }
    if advertisement.invitation:
        entries[_INVITATION] = b"%d" % advertisement.invitation
    entries[_MAC] = base64.b64encode(_mac(entries, key))
    signature = node_key.sign(_labelled(entries))
    return entries | {_SIGNATURE: base64.b64encode(signature)}


def decode_untrusted(
    entries: Mapping[bytes, bytes | None], *, instance: str, key: AdvertisementKey
) -> Advertisement:
    """Reverse `encode` for an advertisement of any mesh and version.

    The signature covers unknown entries, which are otherwise ignored: so an agent of another
    protocol version can still be shown by its name. An advertisement with our tag and version must
    be made with our mesh key; for other meshes only the signature is checked.

    Args:
        entries: The TXT record's keys and values; mDNS allows a key without a value.
        instance: The instance name of the record; it must be the signer's.
        key: Our mesh's key.

    Raises:
        ForgedAdvertisement: It has our tag but was made without our mesh key.
        ProtocolError: It is no advertisement, or its node has not signed it.
    """
    filled = {name: value for name, value in entries.items() if value is not None}
    node = node_of_instance_untrusted(instance)
    try:
        protocol = _number(filled[b"v"], most=_MAX_PROTOCOL)
        advertisement = _read(filled, protocol)
        signature = base64.b64decode(filled.pop(_SIGNATURE), validate=True)
        if protocol == PROTOCOL_VERSION and advertisement.tag == key.tag:
            _check_mac(filled, key)
    except (KeyError, ValueError, binascii.Error) as e:
        raise ProtocolError(f"not an advertisement of ours: {e}") from e
    if advertisement.node != node:
        raise ProtocolError("an advertisement under another node's instance name")
    if len(signature) != _SIGNATURE_BYTES or not verify(node, _labelled(filled), signature):
        raise ProtocolError("an advertisement that its node has not signed")
    return advertisement


def read_packet_untrusted(packet: bytes, *, key: AdvertisementKey) -> Advertisement | None:
    """Return the first advertisement in an mDNS packet, of any mesh and version; None if none is.

    As with `decode_untrusted` its node has signed it, and with our tag it is made with our key.
    """
    entries = _find_entries(packet)
    try:
        node = node_from_text(entries[b"node"].decode("ascii"))
        return decode_untrusted(entries, instance=instance_name(node), key=key)
    except (KeyError, ValueError, ProtocolError):
        return None


def judge_untrusted(packet: bytes, *, key: AdvertisementKey) -> bytes | Literal["forged", "other"]:
    """Judge an mDNS packet in microseconds, without parsing it.

    Returns:
        The authentication code of an advertisement made with our mesh key; "forged" for one with
        our tag but without the key; "other" for anything else.
    """
    entries = _find_entries(packet)
    if entries.get(b"tag") != key.tag.hex().encode() or entries.get(b"v") != _OUR_VERSION:
        return "other"
    entries.pop(_SIGNATURE, None)
    try:
        _check_mac(entries, key)
    except (KeyError, ValueError, binascii.Error, ForgedAdvertisement):
        return "forged"
    return entries[_MAC]


def _find_entries(packet: bytes) -> dict[bytes, bytes]:
    """Return the entries of the packet's first TXT record that begins as ours do."""
    entries: dict[bytes, bytes] = {}
    at = packet.find(_FIRST_ENTRY) - 1
    while 0 <= at < len(packet) and _SIGNATURE not in entries:
        end = at + 1 + packet[at]
        name, _, value = packet[at + 1 : end].partition(b"=")
        if name in entries:
            break
        entries[name] = value
        at = end
    return entries


def _check_mac(entries: Mapping[bytes, bytes], key: AdvertisementKey) -> None:
    mac = base64.b64decode(entries[_MAC], validate=True)
    rest = {name: value for name, value in entries.items() if name != _MAC}
    if not hmac.compare_digest(mac, _mac(rest, key)):
        raise ForgedAdvertisement("an advertisement with our tag, made without our mesh key")


def _mac(entries: Mapping[bytes, bytes], key: AdvertisementKey) -> bytes:
    return hmac.digest(key.secret, _labelled(entries), hashlib.sha256)[:_MAC_BYTES]


def _read(entries: Mapping[bytes, bytes], protocol: int) -> Advertisement:
    """Read all fields, or for another version those that every version has."""
    tag = bytes.fromhex(entries[b"tag"].decode("ascii"))
    if len(tag) != TAG_BYTES:
        raise ValueError(f"a tag of {len(tag)} bytes")
    name = entries[b"name"].decode()
    if len(entries[b"name"]) > MAX_NAME_BYTES:
        raise ValueError("a name that is too long")
    return Advertisement(
        protocol=protocol,
        tag=tag,
        node=node_from_text(entries[b"node"].decode("ascii")),
        incarnation=Incarnation(_number(entries[b"inc"], most=_MAX_INCARNATION)),
        port=_number(entries[b"port"], most=_MAX_PORT),
        name=name,
        hosts=_hosts(entries[b"addr"]) if protocol == PROTOCOL_VERSION else (),
        minute=_number(entries[b"at"], most=_MAX_MINUTE) if protocol == PROTOCOL_VERSION else 1,
        invitation=(
            _number(entries[_INVITATION], most=_MAX_INVITATION) if _INVITATION in entries else 0
        ),
    )


def _hosts(packed: bytes) -> tuple[str, ...]:
    hosts: list[str] = []
    while packed:
        end = 1 + packed[0]
        hosts.append(str(ipaddress.ip_address(packed[1:end])))  # may raise ValueError
        packed = packed[end:]
    return tuple(hosts)


def _number(text: bytes, *, most: int) -> int:
    if not _DIGITS.fullmatch(text) or not 1 <= int(text) <= most:
        raise ValueError(f"not a number from 1 to {most}: {text[:32]!r}")
    return int(text)


def _labelled(entries: Mapping[bytes, bytes]) -> bytes:
    """Return all entries, sorted and length-prefixed: no two sets give the same bytes."""
    parts = [_LABEL]
    for key in sorted(entries):
        for part in (key, entries[key]):
            parts += [len(part).to_bytes(4, "big"), part]
    return b"".join(parts)
