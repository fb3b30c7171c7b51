"""What a person reads of agents that hold another mesh key. Light: `pmesh up` imports it."""

from typing import Final

from pmesh.agent.schema import PeerStatus
from pmesh.ids import shared_name

OTHER_MESH: Final = (
    "it holds another mesh key; if it should be in this mesh, type there: pmesh key set, and paste "
    "what 'pmesh key show' prints here; then pmesh down, and pmesh up"
)


def name_peer(peer: PeerStatus, own_name: str) -> str:
    """Return what to call a machine that is not linked."""
    if peer.name == own_name and peer.id is not None:
        return shared_name(own_name, peer.id)
    return peer.name or ", ".join(peer.addresses)


def describe_other_mesh(peer: PeerStatus, *, own_name: str) -> str:
    """Say of a machine with another key, to who has just started this one, what to type here."""
    whom = name_peer(peer, own_name)
    return (
        f"{whom} is here, but holds another mesh key, so this machine is in a mesh of its own; to "
        f"join {whom}, type here: pmesh key set, and paste what 'pmesh key show' prints there; "
        "then pmesh down, and pmesh up"
    )
