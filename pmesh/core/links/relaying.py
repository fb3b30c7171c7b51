"""What a member forwards between two others that can't reach each other, and how much of it.

Each end of a relayed connection sends at most a window of bytes that the other end has not read.
The member between them checks that: what it holds for others is bounded, and its own messages to an
end wait for no more than that. Where it is more, the connection ends, and nobody is to blame: an
end that lies may give a number twice, and what the honest one had on its way is counted as new.
"""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pmesh.core.wire.relays import Relay
from pmesh.ids import NodeId

WINDOW_BYTES: Final = 32 * 1024
"""Control messages need some 10 KiB/s; at 10 Mbit/s a heartbeat waits 26 ms behind a window."""
MAX_RELAYED: Final = 16
"""Connections of one end over one member: 512 KiB, of the 4 MiB that a link may have unread."""


class Onward(NamedTuple):
    """A message for one of the two ends."""

    to: NodeId
    message: Relay


@dataclass(slots=True)
class _RelayedConnection:
    number: int
    unread: dict[NodeId, int]
    """The bytes of each end that the other one has not read."""
    ended: set[NodeId] = field(default_factory=set[NodeId])
    is_lost: bool = False
    """An end was lost or exceeded its window. What is sent before both know opens nothing."""


class Forwarding:
    """The connections that one member forwards; of two ends it knows one at a time."""

    def __init__(self) -> None:
        self._connections: dict[frozenset[NodeId], _RelayedConnection] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def forward(self, sender: NodeId, message: Relay, *, reachable: bool) -> Onward | None:
        """Return what follows from a message that is to be forwarded.

        Args:
            sender: The end that has sent it.
            message: Names the other end.
            reachable: There are direct paths to both ends: what is relayed is not relayed again.
        """
        pair = frozenset((sender, message.far))
        known = self._connections.get(pair)
        if known is None or known.number != message.number:
            opens = reachable and sender < message.far and message.data and self._has_room(pair)
            if not opens:
                end = Relay(message.far, message.number, ends=True)
                return None if message.ends else Onward(sender, end)
            known = _RelayedConnection(message.number, dict.fromkeys(pair, 0))
            self._connections[pair] = known
        if message.ends:
            known.ended.add(sender)
            if known.ended >= pair:
                del self._connections[pair]
        if known.is_lost:
            end = Relay(message.far, message.number, ends=True)
            return None if message.ends else Onward(sender, end)
        known.unread[sender] += len(message.data)
        known.unread[message.far] -= message.read
        if known.unread[sender] > WINDOW_BYTES or known.unread[message.far] < 0:
            known.is_lost = True
            return Onward(message.far, Relay(sender, message.number, ends=True))
        onward = Relay(
            sender, message.number, data=message.data, read=message.read, ends=message.ends
        )
        return Onward(message.far, onward)

    def forget(self, node: NodeId) -> list[Onward]:
        """Return what to tell the other ends when there is no direct path to a node any more."""
        onward: list[Onward] = []
        for pair, known in list(self._connections.items()):
            if node not in pair or (known.is_lost and node in known.ended):
                continue
            known.is_lost = True
            known.ended.add(node)
            if known.ended >= pair:
                del self._connections[pair]
            onward += [Onward(f, Relay(node, known.number, ends=True)) for f in pair - known.ended]
        return onward

    def _has_room(self, pair: frozenset[NodeId]) -> bool:
        others = [other for other in self._connections if other != pair]
        return all(sum(end in other for other in others) < MAX_RELAYED for end in pair)
