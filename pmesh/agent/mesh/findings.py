"""What mDNS finds, sorted into agents of this mesh and foreign ones."""

from collections.abc import Callable

import structlog
import trio

from pmesh.agent.mesh.peers import Peers
from pmesh.core.wire.link import PROTOCOL_VERSION
from pmesh.ids import NodeId
from pmesh.net.links.discovery import AgentFound, Deaf, Discovered, Gone, Nameplate
from pmesh.net.links.packet_filter import DiscoveryCounters

_log = structlog.get_logger()


class Findings:
    """Passes agents of this mesh to `Peers`; keeps the others for `pmesh status`."""

    def __init__(self, tag: bytes, *, minute: Callable[[], int]) -> None:
        """`minute` returns the current time in Unix minutes."""
        self._tag = tag
        self._minute = minute
        self.counters = DiscoveryCounters()
        self.foreign: dict[NodeId, AgentFound] = {}
        """Agents of another mesh, or of another version of the protocol."""
        self.deaf: str | None = None
        """Why mDNS can't be used now; None if it can."""
        self.nameplate = Nameplate()
        """The number of the invitation that this agent announces."""

    async def sort(self, findings: trio.MemoryReceiveChannel[Discovered], peers: Peers) -> None:
        async with findings:
            async for finding in findings:
                self._sort_one(finding, peers)

    def is_of_other_mesh(self, found: AgentFound) -> bool:
        return found.advertisement.tag != self._tag

    def _sort_one(self, finding: Discovered, peers: Peers) -> None:
        match finding:
            case AgentFound(advertisement=theirs):
                self.deaf = None
                self.foreign.pop(theirs.node, None)
                if theirs.tag == self._tag and theirs.protocol == PROTOCOL_VERSION:
                    fresh = theirs.is_fresh(minute=self._minute())
                    peers.found(theirs.node, theirs.addresses, fresh=fresh)
                else:
                    self.foreign[theirs.node] = finding
            case Gone(node=node):
                self.foreign.pop(node, None)
                peers.targets.withdraw(node)
            case Deaf(reason=reason):
                if self.deaf != reason:
                    _log.warning("discovery is deaf", reason=reason)
                self.deaf = reason
