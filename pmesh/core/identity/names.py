"""What a machine is called is what its node has signed: nobody else can name it.

The leader makes the seats of a view, and each member passes views on. So each name travels with a
signature of the node, and whoever gets a view checks it: an honest member never passes on a name
that the node has not said, whatever others have sent to it.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import TypeAlias

from pmesh.core.identity.keys import NodeKey, verify
from pmesh.core.values import SignedName, View
from pmesh.core.wire.views import AgreementMessage, Commit, Flushed, Propose, Superseded, TellView
from pmesh.errors import ProtocolError
from pmesh.ids import Member

Claim: TypeAlias = tuple[Member, SignedName]

_LABEL = b"pmesh name\0"  # so that the signature is valid for nothing else
_INCARNATION_BYTES = 8


def sign_name(key: NodeKey, member: Member, name: str) -> SignedName:
    """Return the name with the node's signature, for one process start of its agent.

    Raises ValueError if the node key belongs to another node.
    """
    if key.node != member.node:
        raise ValueError("a name must be signed by the node that it names")
    return SignedName(name, key.sign(_labelled(member, name)))


@lru_cache(maxsize=1024)  # 16 views of 64 members; what is wrong is not kept
def check_name_untrusted(member: Member, said: SignedName) -> None:
    """Raise ProtocolError unless the member's node has signed the name."""
    if not verify(member.node, _labelled(member, said.name), said.signature):
        raise ProtocolError(f"a name that its machine has not signed: {said.name!r}")


def claims_of(sender: Member, message: AgreementMessage) -> frozenset[Claim]:
    """Return who is called what, as the message says."""
    match message:
        case Propose():
            return frozenset(_claims_in(message.base))
        case Flushed():
            return frozenset([(sender, message.said), *_claims_in(message.view)])
        case TellView() | Superseded() | Commit():
            return frozenset(_claims_in(message.view))
        case _:
            return frozenset()


def _claims_in(view: View) -> Iterator[Claim]:
    for seat in view.seats:
        yield seat.member, seat.said
    for roster in view.rosters:
        for trainer in roster.trainers + roster.lost_holders:
            yield trainer.member, trainer.said


def _labelled(member: Member, name: str) -> bytes:
    incarnation = member.incarnation.to_bytes(_INCARNATION_BYTES, "big")
    return b"".join((_LABEL, member.node, incarnation, name.encode()))
