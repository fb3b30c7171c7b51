"""The node key and the mesh key: derivations, signatures, and the text to paste."""

import base64
import hashlib
from dataclasses import dataclass, field
from typing import NamedTuple, NewType, Self

import nacl.exceptions
import nacl.signing
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from pmesh.ids import NodeId

MeshKey = NewType("MeshKey", bytes)
"""32 random bytes that all nodes of one mesh hold."""

KEY_BYTES = 32
TAG_BYTES = 8  # enough to distinguish the meshes of one house; it proves nothing

_PREFIX = "pmesh"
_GROUP_CHARACTERS = 4  # easy to read out
_LEAST_DIFFERENT_BYTES = 12  # of 32 random ones, fewer differ once in 10^25 keys
_CHECKSUM_BYTES = 3  # 32 + 3 bytes fill 56 base32 characters exactly; 1 typo in 16 million passes
_TEXT_CHARACTERS = (KEY_BYTES + _CHECKSUM_BYTES) * 8 // 5
_ALPHABET = frozenset("abcdefghijklmnopqrstuvwxyz234567")  # RFC 4648 base32


@dataclass(frozen=True, slots=True)
class NodeKey:
    """A node's Ed25519 key pair (RFC 8032); its seed never shows in a repr or a log."""

    seed: bytes = field(repr=False)
    node: NodeId
    _signing: nacl.signing.SigningKey = field(repr=False, compare=False)

    @classmethod
    def from_seed(cls, seed: bytes) -> Self:
        """Return the key pair of a 32-byte seed; raise ValueError for another size."""
        if len(seed) != KEY_BYTES:
            raise ValueError(f"a node key has {KEY_BYTES} bytes, not {len(seed)}")
        signing = nacl.signing.SigningKey(seed)
        return cls(seed, NodeId(bytes(signing.verify_key)), signing)

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte signature of the message, without the message."""
        return self._signing.sign(message).signature


def verify(node: NodeId, message: bytes, signature: bytes) -> bool:
    """True if the node signed the message; False also for an invalid key or signature."""
    try:
        nacl.signing.VerifyKey(node).verify(message, signature)
    except (nacl.exceptions.BadSignatureError, ValueError):
        return False
    return True


def derive(mesh_key: MeshKey, label: bytes) -> bytes:
    """Derive 32 bytes by HKDF-SHA256 (RFC 5869); different labels give unrelated bytes.

    Raises ValueError if the mesh key has the wrong size: a cut key would derive bytes, too.
    """
    if len(mesh_key) != KEY_BYTES:
        raise ValueError(f"a mesh key has {KEY_BYTES} bytes, not {len(mesh_key)}")
    return HKDF(hashes.SHA256(), KEY_BYTES, salt=b"pmesh/1", info=label).derive(mesh_key)


def namespace_tag(mesh_key: MeshKey) -> bytes:
    """Return the 8 bytes that mark agents of one mesh in mDNS; they reveal nothing of the key."""
    return hashlib.sha3_256(derive(mesh_key, b"namespace tag")).digest()[:TAG_BYTES]


class AdvertisementKey(NamedTuple):
    """The public tag and the secret by which a mesh's agents recognize each other in mDNS."""

    tag: bytes
    secret: bytes

    @classmethod
    def of(cls, mesh_key: MeshKey) -> Self:
        return cls(namespace_tag(mesh_key), derive(mesh_key, b"advertisement"))


def mesh_key_text(key: MeshKey) -> str:
    """Return the mesh key as text to paste: prefix, base32 in groups of four, with a checksum.

    >>> mesh_key_text(MeshKey(bytes(32)))
    'pmesh-aaaa-aaaa-aaaa-aaaa-aaaa-aaaa-aaaa-aaaa-aaaa-aaaa-aaaa-aaaa-aaap-svwc'
    """
    characters = base64.b32encode(key + _checksum(key)).decode().lower()
    groups = range(0, len(characters), _GROUP_CHARACTERS)
    return "-".join([_PREFIX, *(characters[i : i + _GROUP_CHARACTERS] for i in groups)])


def mesh_key_from_text(text: str) -> MeshKey:
    """Reverse `mesh_key_text`; spaces, line breaks, dashes and case do not matter.

    Raises ValueError that names the fault but never repeats the text: it may be most of a key.
    """
    characters = "".join(text.split()).replace("-", "").lower()
    if not characters.startswith(_PREFIX):
        raise ValueError(f"a mesh key begins with '{_PREFIX}-'; this text does not")
    characters = characters.removeprefix(_PREFIX)
    strangers = sorted(set(characters) - _ALPHABET)
    if strangers:
        raise ValueError(
            f"a mesh key has only the letters a-z and digits 2-7, not {strangers[0]!r}"
        )
    if len(characters) != _TEXT_CHARACTERS:
        raise ValueError(
            f"a mesh key has {_TEXT_CHARACTERS} characters after '{_PREFIX}-', "
            f"this text has {len(characters)}: copy the whole line"
        )
    data = base64.b32decode(characters.upper())
    key = MeshKey(data[:KEY_BYTES])
    if data[KEY_BYTES:] != _checksum(key):
        raise ValueError("a character of this mesh key is wrong (its checksum differs)")
    if len(set(key)) < _LEAST_DIFFERENT_BYTES:
        raise ValueError(
            "anybody can guess this mesh key, as it repeats a few bytes; 'pmesh key new' makes a "
            "random one"
        )
    return key


def _checksum(key: MeshKey) -> bytes:
    return hashlib.sha3_256(b"pmesh mesh key/1" + key).digest()[:_CHECKSUM_BYTES]
