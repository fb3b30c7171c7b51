"""What an agent says of itself by mDNS, signed by its node key: claims that others can check.

A forged advertisement is refused here. A replayed one only names an address at which TLS will then
find the wrong key, so neither needs more than being ignored.
"""

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pmesh.core.identity import NodeKey, verify
from pmesh.core.messages import PROTOCOL_VERSION
from pmesh.errors import ProtocolError
from pmesh.ids import Incarnation, Member, NodeId, node_from_text, node_text

SERVICE_TYPE: Final = "_pmesh._tcp.local."

TAG_BYTES: Final = 8
MAX_NAME_BYTES: Final = 128  # a TXT entry holds 255 bytes, its key included

_SIGNATURE: Final = b"sig"
_LABEL: Final = b"pmesh advertisement\0"  # so that the signature means nothing elsewhere
_SIGNATURE_BYTES: Final = 64  # Ed25519, RFC 8032 section 5.1.6
_MAX_PROTOCOL: Final = 2**16 - 1
_MAX_PORT: Final = 2**16 - 1
_MAX_INCARNATION: Final = 2**63 - 1
_DIGITS: Final = re.compile(rb"[0-9]{1,19}")  # int() alone takes signs, spaces and underscores


@dataclass(frozen=True, slots=True, kw_only=True)
class Advertisement:
    """One process start of one node, and the TCP port at which it can be met."""

    tag: bytes
    """The namespace tag of the mesh key, 8 bytes: agents of another tag are never dialled."""
    node: NodeId
    incarnation: Incarnation
    port: int
    name: str
    """What the user calls the machine, cut to 128 bytes of UTF-8 when it travels."""
    protocol: int = PROTOCOL_VERSION

    @property
    def member(self) -> Member:
        """Who advertises."""
        return Member(self.node, self.incarnation)


def instance_name(node: NodeId) -> str:
    """The node's mDNS instance: its id, never the machine's own host name."""
    return f"{node_text(node)}.{SERVICE_TYPE}"


def host_name(node: NodeId) -> str:
    """The node's mDNS host, under which its addresses stand."""
    return f"{node_text(node)}.local."


def node_of_instance_untrusted(instance: str) -> NodeId:
    """The reverse of `instance_name`; raises ProtocolError for anything else."""
    try:
        return node_from_text(instance.removesuffix(f".{SERVICE_TYPE}"))
    except ValueError as e:
        raise ProtocolError(f"not an instance of ours: {instance[:80]!r}") from e


def encode(advertisement: Advertisement, node_key: NodeKey) -> dict[bytes, bytes]:
    """The advertisement as the entries of an mDNS TXT record, signed.

    Raises:
        ValueError: The key is another node's.
    """
    if node_key.node != advertisement.node:
        raise ValueError("an advertisement is signed by the node that it names")
    name = advertisement.name.encode()[:MAX_NAME_BYTES].decode(errors="ignore")
    entries = {
        b"v": b"%d" % advertisement.protocol,
        b"tag": advertisement.tag.hex().encode(),
        b"node": node_text(advertisement.node).encode(),
        b"inc": b"%d" % advertisement.incarnation,
        b"port": b"%d" % advertisement.port,
        b"name": name.encode(),
    }
    signature = node_key.sign(_signed_bytes(entries))
    return entries | {_SIGNATURE: base64.b64encode(signature)}


def decode_untrusted(entries: Mapping[bytes, bytes | None], *, instance: str) -> Advertisement:
    """The reverse of `encode`; raises ProtocolError for anything else, forged ones too.

    Entries that it doesn't know are covered by the signature and otherwise ignored: so an agent of
    another protocol version can still be shown by its name.

    Args:
        entries: The TXT record's keys and values, in which mDNS allows a key without a value.
        instance: The instance name under which the record stood; it must be the signer's.
    """
    filled = {key: value for key, value in entries.items() if value is not None}
    node = node_of_instance_untrusted(instance)
    try:
        advertisement = _read(filled)
        signature = base64.b64decode(filled.pop(_SIGNATURE), validate=True)
    except (KeyError, ValueError, binascii.Error) as e:
        raise ProtocolError(f"not an advertisement of ours: {e}") from e
    if advertisement.node != node:
        raise ProtocolError("an advertisement under another node's instance name")
    if len(signature) != _SIGNATURE_BYTES or not verify(node, _signed_bytes(filled), signature):
        raise ProtocolError("an advertisement that its node has not signed")
    return advertisement


def _read(entries: Mapping[bytes, bytes]) -> Advertisement:
    tag = bytes.fromhex(entries[b"tag"].decode("ascii"))
    if len(tag) != TAG_BYTES:
        raise ValueError(f"a tag of {len(tag)} bytes")
    name = entries[b"name"].decode()
    if len(entries[b"name"]) > MAX_NAME_BYTES:
        raise ValueError("a name that is too long")
    return Advertisement(
        protocol=_number(entries[b"v"], most=_MAX_PROTOCOL),
        tag=tag,
        node=node_from_text(entries[b"node"].decode("ascii")),
        incarnation=Incarnation(_number(entries[b"inc"], most=_MAX_INCARNATION)),
        port=_number(entries[b"port"], most=_MAX_PORT),
        name=name,
    )


def _number(text: bytes, *, most: int) -> int:
    if not _DIGITS.fullmatch(text) or not 1 <= int(text) <= most:
        raise ValueError(f"not a number from 1 to {most}: {text[:32]!r}")
    return int(text)


def _signed_bytes(entries: Mapping[bytes, bytes]) -> bytes:
    """All entries in one order, each behind its length, so that no two sets look alike."""
    parts = [_LABEL]
    for key in sorted(entries):
        for part in (key, entries[key]):
            parts += [len(part).to_bytes(4, "big"), part]
    return b"".join(parts)
