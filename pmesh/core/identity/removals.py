"""Who has no place in the mesh any more: what members say of it, signed, and how two lists merge.

Each agent keeps one entry for a node, the latest. Entries are numbered, the higher number wins, and
all agents choose the same of two that have one number. So a merge is commutative, associative and
idempotent: it does not matter who tells whom in which order, or how often. It is a map of
last-writer-wins registers (Shapiro and others, A comprehensive study of CRDTs, 2011, 3.2.1) and not
a set that only grows, as a removal can be undone.
"""

from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

from pmesh.core.identity.keys import NodeKey, verify
from pmesh.core.values import Removal
from pmesh.errors import ProtocolError
from pmesh.ids import MAX_COUNTER, NodeId

Removals: TypeAlias = Mapping[NodeId, Removal]

MAX_REMOVALS: Final = 256  # a mesh at home has 8 machines; beyond it the lowest numbers are dropped

_LABEL = b"pmesh removal\0"  # so that the signature is valid for nothing else
_NUMBER_BYTES = 8


def sign_removal(key: NodeKey, node: NodeId, ours: Removals, *, out: bool) -> Removal:
    """Return an entry that replaces ours about a node.

    Raises ValueError for the key's own node, and if a member has used up all numbers.
    """
    if key.node == node:
        raise ValueError("a machine can't remove itself, or undo its own removal")
    before = ours[node].number if node in ours else 0
    least = min((entry.number for entry in ours.values()), default=0)
    number = 1 + (before if len(ours) < MAX_REMOVALS else max(before, least))
    number = min(number, MAX_COUNTER)  # with which a member may have filled the list
    if node in ours and (number, out) <= (ours[node].number, ours[node].out):
        raise ValueError("a member has used up the numbers for this machine")
    signature = key.sign(_labelled(node, number, out=out))
    return Removal(node, number, out, key.node, signature)


def check_removal_untrusted(removal: Removal) -> None:
    """Raise ProtocolError unless another node has signed the entry, as the entry says."""
    said = _labelled(removal.node, removal.number, out=removal.out)
    if removal.by == removal.node or not verify(removal.by, said, removal.signature):
        raise ProtocolError("a removal that no other machine has signed")


def newer(ours: Removals, theirs: Iterable[Removal]) -> list[Removal]:
    """Return those of their entries that replace ours, or that we have nothing of."""
    return [
        entry
        for entry in theirs
        if entry.node not in ours or _rank(entry) > _rank(ours[entry.node])
    ]


def merge(
    ours: Removals, theirs: Iterable[Removal], *, me: NodeId | None = None
) -> dict[NodeId, Removal]:
    """Return the latest entry about each node, at most `MAX_REMOVALS`, the highest numbers.

    Those that `me` has signed come before all others, so that nobody who fills the list keeps the
    owner of this machine from removing another.
    """
    merged = dict(ours)
    for entry in newer(ours, theirs):
        before = merged.get(entry.node)
        if before is None or _rank(entry) > _rank(before):
            merged[entry.node] = entry
    # An older entry of a node ranks lower than its later one. So what was dropped stays out,
    # whoever brings it again.
    kept = sorted(merged.values(), key=lambda e: (e.by == me, _rank(e)), reverse=True)
    return {entry.node: entry for entry in kept[:MAX_REMOVALS]}


def _rank(entry: Removal) -> tuple[int, bool, bytes, bytes, bytes]:
    """Order all entries: of two with one number, the removal wins; the rest only breaks ties."""
    return entry.number, entry.out, entry.by, entry.node, entry.signature


def _labelled(node: NodeId, number: int, *, out: bool) -> bytes:
    return b"".join((_LABEL, node, number.to_bytes(_NUMBER_BYTES, "big"), bytes((out,))))
