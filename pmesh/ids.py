"""Distinct types for identifiers: nodes, incarnations, jobs, ranks, ops, epochs."""

import base64
import re
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, NamedTuple, NewType

from msgspec import Meta

NodeId = NewType("NodeId", bytes)
"""A machine's identity: its 32-byte Ed25519 public key."""

Incarnation = NewType("Incarnation", int)
"""A random 63-bit number of one process start; never 0, unique for all practical purposes."""

JobName = NewType("JobName", str)
Rank = NewType("Rank", int)
"""A trainer's index in its job's ring; it may change as trainers come and go."""

OpNumber = NewType("OpNumber", int)
"""The number of a collective call within its job, from 0 in call order."""

PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]*\Z"
"""A pattern for text from others. It appears in logs, events and terminals, so it must not start a
line, control a terminal, or change the text direction."""

PathName = NewType("PathName", str)
"""Text that may become part of a path, whoever has sent it: see `path_name`."""

PATH_NAME = r"^[a-z0-9_-]{1,64}\Z"
"""A pattern for a `PathName`. It has no dot and no slash, so it leads nowhere else. It has no
capitals, so that a disk that ignores case tells two of them apart."""

TrainerId = NewType("TrainerId", int)
"""A trainer's number within its job: fixed when it enters and never reused, while ranks change."""

Slot = NewType("Slot", int)
"""The number of a trainer's connection within one incarnation of its agent."""

MAX_COUNTER = 2**62
"""The highest counter of an epoch. No lie can raise a counter by more than 2^20 per message, so it
never gets near this (`pmesh.core.views.limits`)."""


class Member(NamedTuple):
    """One process start of one node."""

    node: Annotated[NodeId, Meta(min_length=32, max_length=32)]
    incarnation: Annotated[Incarnation, Meta(ge=1, le=2**63 - 1)]


class Epoch(NamedTuple):
    """The name of a view, totally ordered; two proposals never share one (V1)."""

    counter: Annotated[int, Meta(ge=1, le=MAX_COUNTER)]
    """Grows with each proposal."""
    leader: Annotated[NodeId, Meta(min_length=32, max_length=32)]
    incarnation: Annotated[Incarnation, Meta(ge=1, le=2**63 - 1)]


def path_name(text: str) -> PathName:
    """Return the text as a part of a path; raise ValueError if it could lead anywhere else.

    >>> path_name("3f2a6kq7-5fe0")
    '3f2a6kq7-5fe0'
    """
    if not re.match(PATH_NAME, text):
        raise ValueError(f"not a name that may be part of a path: {text[:MAX_NAME]!r}")
    return PathName(text)


@lru_cache(maxsize=256)  # a status names each machine several times: a sixth of its time
def node_text(node: NodeId) -> str:
    """Return the node id as 52 lower-case base32 characters: a DNS label holds 63, hex needs 64.

    >>> node_text(NodeId(bytes(32)))[:8]
    'aaaaaaaa'
    """
    return base64.b32encode(node).decode().rstrip("=").lower()


def node_from_text(text: str) -> NodeId:
    """Reverse `node_text`; raise ValueError for anything else.

    >>> node_from_text(node_text(NodeId(bytes(range(32))))) == bytes(range(32))
    True
    """
    node = base64.b32decode(text.upper() + "====")
    if len(node) != 32 or node_text(NodeId(node)) != text:  # noqa: PLR2004 - the size of a key
        raise ValueError(f"not a node id: {text!r}")
    return NodeId(node)


SHORT_ID = 8
"""How many characters of a node id are shown: enough to distinguish 8 machines."""


def short_node(node: NodeId) -> str:
    """Return the first characters of the node id."""
    return node_text(node)[:SHORT_ID]


MAX_NAME = 64
"""The most characters of a machine's name."""


def shared_name(name: str, node: str) -> str:
    """Return what a machine is called where another has the same name.

    Args:
        name: The one that both have.
        node: The machine's id, as `node_text` writes it.

    >>> shared_name("mac", "3f2a6kq7")
    'mac (3f2a)'
    """
    suffix = f" ({node[:4]})"  # of 8 machines, two have the same 4 characters once in 37,000 meshes
    return name[: MAX_NAME - len(suffix)] + suffix


_LIKE_AN_ID = re.compile(r"[a-z2-7]{52}")


def tell_apart(
    said: Mapping[NodeId, str], owners: Mapping[str, NodeId] = MappingProxyType({})
) -> dict[NodeId, str]:
    """Return what to call each machine: no two the same, and none like one that is not here.

    Machines that say the same get the start of their ids, and if even that is not clear, their ids.

    Args:
        said: What each machine calls itself.
        owners: Names that belong to one machine, which may be away.

    >>> one, two = NodeId(bytes(32)), NodeId(bytes([255]) * 32)
    >>> list(tell_apart({one: "mac", two: "mac"}).values())
    ['mac (aaaa)', 'mac (7777)']
    >>> list(tell_apart({one: "mac", two: "linux"}, {"mac": two}).values())
    ['mac (aaaa)', 'linux']
    """
    clearer = {node: 1 if _LIKE_AN_ID.fullmatch(name) else 0 for node, name in said.items()}
    while True:
        shown = {node: _call(node, name, clearer[node]) for node, name in said.items()}
        times = Counter(shown.values())
        unclear = [
            node
            for node, name in shown.items()
            if clearer[node] < 2  # noqa: PLR2004 - nobody is called like a whole id
            and (times[name] > 1 or owners.get(name, node) != node)
        ]
        if not unclear:
            return shown
        for node in unclear:
            clearer[node] += 1


def _call(node: NodeId, name: str, clearer: int) -> str:
    if not clearer:
        return name
    text = node_text(node)
    return shared_name(name, text) if clearer == 1 else text
