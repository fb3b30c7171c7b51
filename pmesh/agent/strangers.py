"""What mDNS finds, sorted: peers of this mesh are dialled, all others only shown."""

from collections.abc import Callable

import structlog
import trio

from pmesh.agent.peers import Peers
from pmesh.core.messages import PROTOCOL_VERSION
from pmesh.ids import NodeId
from pmesh.net.discovery import Deaf, Discovered, Found, Gone
from pmesh.net.packet_filter import DiscoveryCounters

_log = structlog.get_logger()


class Strangers:
    """Agents of another mesh or of another protocol version, for `pmesh status`."""

    def __init__(self, tag: bytes, *, minute: Callable[[], int]) -> None:
        """`minute` is that of now, in Unix time."""
        self._tag = tag
        self._minute = minute
        self.counters = DiscoveryCounters()
        self.seen: dict[NodeId, Found] = {}
        self.deaf: str | None = None
        """Why mDNS can't be used now."""

    async def sort(self, findings: trio.MemoryReceiveChannel[Discovered], peers: Peers) -> None:
        """Sort what is found for as long as the agent lives."""
        async with findings:
            async for finding in findings:
                self._sort_one(finding, peers)

    def is_of_other_mesh(self, found: Found) -> bool:
        """Whether it advertises another mesh key's tag."""
        return found.advertisement.tag != self._tag

    def _sort_one(self, finding: Discovered, peers: Peers) -> None:
        match finding:
            case Found(advertisement=theirs):
                self.deaf = None
                self.seen.pop(theirs.node, None)
                if theirs.tag == self._tag and theirs.protocol == PROTOCOL_VERSION:
                    fresh = theirs.is_fresh(minute=self._minute())
                    peers.found(theirs.node, theirs.addresses, fresh=fresh)
                else:
                    self.seen[theirs.node] = finding
            case Gone(node=node):
                self.seen.pop(node, None)
                peers.targets.withdraw(node)
            case Deaf(reason=reason):
                if self.deaf != reason:
                    _log.warning("discovery is deaf", reason=reason)
                self.deaf = reason
