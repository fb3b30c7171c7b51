"""Names for things that must not be mixed up: nodes, incarnations, jobs, ranks, ops, epochs."""

import base64
from typing import NamedTuple, NewType

NodeId = NewType("NodeId", bytes)
"""A machine's identity: its 32-byte Ed25519 public key."""

Incarnation = NewType("Incarnation", int)
"""A random 63-bit number of one process start; never 0, unique for all practical purposes."""

JobName = NewType("JobName", str)
Rank = NewType("Rank", int)
OpNumber = NewType("OpNumber", int)
"""The number of a collective call within its job, from 0 in call order."""

Slot = NewType("Slot", int)
"""The number of a trainer's connection within one incarnation of its agent."""


class Member(NamedTuple):
    """One process start of one node."""

    node: NodeId
    incarnation: Incarnation


class Epoch(NamedTuple):
    """The name of a view, totally ordered; two proposals never share one (V1)."""

    counter: int
    leader: NodeId
    incarnation: Incarnation


def node_text(node: NodeId) -> str:
    """The node id as 52 lower-case base32 characters: a DNS label holds 63, and hex is 64.

    >>> node_text(NodeId(bytes(32)))[:8]
    'aaaaaaaa'
    """
    return base64.b32encode(node).decode().rstrip("=").lower()


def node_from_text(text: str) -> NodeId:
    """The reverse of `node_text`; raises ValueError for anything else.

    >>> node_from_text(node_text(NodeId(bytes(range(32))))) == bytes(range(32))
    True
    """
    node = base64.b32decode(text.upper() + "====")
    if len(node) != 32 or node_text(NodeId(node)) != text:  # noqa: PLR2004 - the size of a key
        raise ValueError(f"not a node id: {text!r}")
    return NodeId(node)


def short_node(node: NodeId) -> str:
    """The first 8 characters of the node id: enough to tell 8 machines apart on a screen."""
    return node_text(node)[:8]
