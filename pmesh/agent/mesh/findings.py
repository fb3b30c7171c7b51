"""What mDNS finds, sorted into agents of this mesh and foreign ones."""

from collections.abc import Callable, Iterator
from functools import partial

import structlog
import trio

from pmesh.agent.mesh.keyring import Keyring
from pmesh.agent.mesh.peers import Peers
from pmesh.core.identity.advertisement import Advertisement
from pmesh.core.identity.keys import NodeKey
from pmesh.core.wire.link import PROTOCOL_VERSION
from pmesh.ids import NodeId
from pmesh.net.links.discovery import AgentFound, Deaf, Discovered, Gone, Nameplate, discover
from pmesh.net.links.interfaces import AddressWatch
from pmesh.net.links.packet_filter import DiscoveryCounters

FOUND_AHEAD = 16  # findings that mDNS may queue for us; it keeps the rest itself
SHOWN_S = 600.0  # an agent announces itself anew every 240 s; one that was killed says no goodbye
_log = structlog.get_logger()


class Findings:
    """Passes agents of this mesh to `Peers`; keeps the others for `pmesh status`."""

    def __init__(self, tag: bytes, *, minute: Callable[[], int]) -> None:
        """`minute` returns the current time in Unix minutes."""
        self.tag = tag
        """Of our mesh; it changes with the mesh key."""
        self._minute = minute
        self.counters = DiscoveryCounters()
        self.foreign: dict[NodeId, AgentFound] = {}
        """Agents of another mesh, or of another version of the protocol."""
        self._found_at: dict[NodeId, float] = {}
        self.deaf: str | None = None
        """Why mDNS can't be used now; None if it can."""
        self.nameplate = Nameplate()
        """The number of the invitation that this agent announces."""

    async def discover(
        self,
        own: Callable[[bytes], Advertisement],
        node_key: NodeKey,
        keyring: Keyring,
        watch: AddressWatch,
        peers: Peers,
    ) -> None:
        """Announce this agent and find others, until cancelled; anew with each new mesh key.

        Args:
            own: Returns what to announce, with this tag.
            node_key: Our own.
            keyring: Our mesh key.
            watch: Our addresses.
            peers: Takes the agents of this mesh.
        """
        found, findings = trio.open_memory_channel[Discovered](FOUND_AHEAD)
        async with found, trio.open_nursery() as nursery:
            nursery.start_soon(self.sort, findings, peers)
            while True:
                key, changed = keyring.advertisement_key, keyring.changed
                self.tag = key.tag
                async with trio.open_nursery() as with_this_key:
                    with_this_key.start_soon(
                        partial(
                            discover,
                            own(key.tag),
                            node_key=node_key,
                            key=key,
                            watch=watch,
                            found=found.clone(),
                            counters=self.counters,
                            nameplate=self.nameplate,
                        )
                    )
                    await changed.wait()
                    with_this_key.cancel_scope.cancel()

    async def sort(self, findings: trio.MemoryReceiveChannel[Discovered], peers: Peers) -> None:
        async with findings:
            async for finding in findings:
                self._sort_one(finding, peers)

    def foreign_here(self) -> Iterator[AgentFound]:
        """Yield the foreign agents, but none that has announced nothing for long."""
        since = trio.current_time() - SHOWN_S
        return (found for node, found in self.foreign.items() if self._found_at[node] > since)

    def is_of_other_mesh(self, found: AgentFound) -> bool:
        return found.advertisement.tag != self.tag

    def elsewhere(self) -> Iterator[tuple[Advertisement, bool]]:
        """Yield the agents of another mesh: members that have missed a change of the key, too.

        The flag tells whether an advertisement is fresh; if not, it may be replayed.
        """
        for found in self.foreign.values():
            theirs = found.advertisement
            if self.is_of_other_mesh(found) and theirs.addresses:
                yield theirs, theirs.is_fresh(minute=self._minute())

    def _sort_one(self, finding: Discovered, peers: Peers) -> None:
        match finding:
            case AgentFound(advertisement=theirs):
                self.deaf = None
                self._forget(theirs.node)
                if theirs.tag == self.tag and theirs.protocol == PROTOCOL_VERSION:
                    fresh = theirs.is_fresh(minute=self._minute())
                    peers.found(theirs.node, theirs.addresses, fresh=fresh)
                else:
                    self.foreign[theirs.node] = finding
                    self._found_at[theirs.node] = trio.current_time()
            case Gone(node=node):
                self._forget(node)
                peers.targets.withdraw(node)
            case Deaf(reason=reason):
                if self.deaf != reason:
                    _log.warning("discovery is deaf", reason=reason)
                self.deaf = reason

    def _forget(self, node: NodeId) -> None:
        self.foreign.pop(node, None)
        self._found_at.pop(node, None)
