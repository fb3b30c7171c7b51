"""Rotations of the mesh key: which key a mesh has from now on, and who gets it.

Each has a number, one higher than that of the rotation before; the first key has none. The higher
number wins, and of two with one number all agents choose the same. So however a rotation was
interrupted, and however many there were at once, agents that meet end with one key.
"""

import hashlib
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from pmesh.core.identity.keys import KEY_BYTES, MeshKey, NodeKey, verify
from pmesh.errors import ProtocolError
from pmesh.ids import MAX_COUNTER, NodeId

MAX_ENTITLED: Final = 257  # this machine, and the 256 that it keeps
MAX_ROTATION_BYTES: Final = 12 * 1024

_LABEL = b"pmesh rotation\0"  # so that the signature is valid for nothing else
_NUMBER_BYTES = 8

_Node = Annotated[NodeId, Meta(min_length=32, max_length=32)]


class Rotation(msgspec.Struct, frozen=True, array_like=True):
    """A mesh key that replaces another. It is as secret as the key."""

    number: Annotated[int, Meta(ge=1, le=MAX_COUNTER)]
    key: Annotated[MeshKey, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    entitled: Annotated[tuple[_Node, ...], Meta(max_length=MAX_ENTITLED)]
    """The members at the time, which get the key also if they come with an earlier one."""
    by: _Node
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]
    """By the node key of `by`, over all other fields."""

    def __repr__(self) -> str:
        """Return what may stand in a log: the key may not."""
        return f"Rotation(number={self.number})"


def sign_rotation(
    signer: NodeKey, key: MeshKey, entitled: Iterable[NodeId], *, before: Rotation | None
) -> Rotation:
    """Return the rotation to this key that follows another one, or the first key.

    Raises ValueError if a member has used up all numbers.
    """
    number = 1 if before is None else before.number + 1
    if number > MAX_COUNTER:
        raise ValueError("a member has used up the numbers of rotations")
    nodes = tuple(sorted(set(entitled)))
    signature = signer.sign(_labelled(number, key, nodes))
    return Rotation(number, key, nodes, signer.node, signature)


def check_rotation_untrusted(rotation: Rotation) -> None:
    """Raise ProtocolError unless the node has signed the rotation that it is said to be of."""
    said = _labelled(rotation.number, rotation.key, rotation.entitled)
    if not verify(rotation.by, said, rotation.signature):
        raise ProtocolError("a rotation of the mesh key that its machine has not signed")


def supersedes(rotation: Rotation, ours: Rotation | None) -> bool:
    """Return whether a rotation replaces ours; of two with one number, a hash decides."""
    return ours is None or _rank(rotation) > _rank(ours)


def _rank(rotation: Rotation) -> tuple[int, bytes]:
    return rotation.number, hashlib.sha3_256(msgspec.msgpack.encode(rotation)).digest()


def _labelled(number: int, key: MeshKey, entitled: tuple[NodeId, ...]) -> bytes:
    return b"".join((_LABEL, number.to_bytes(_NUMBER_BYTES, "big"), key, *entitled))
