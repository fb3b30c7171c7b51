"""How members are reached over the links with them: messages, connections for lanes, and names."""

from collections.abc import Callable, Mapping

import structlog
import trio

from pmesh.agent.mesh.links import Link
from pmesh.agent.mesh.membership import Membership
from pmesh.agent.mesh.probing import ProbedPath
from pmesh.core.wire.channels import Message
from pmesh.core.wire.link import Hello
from pmesh.errors import NetworkError, PeerUnreachable
from pmesh.ids import Member, NodeId, short_node
from pmesh.net.lanes.multipath import LanePath
from pmesh.net.links.dialer import dial_any

_log = structlog.get_logger()


class MemberReach:
    """Sends to members, dials them and names them; a `pmesh.agent.lanes.splices.Reach`."""

    def __init__(
        self,
        links: Mapping[NodeId, Link],
        *,
        hello: Callable[[], Hello],
        membership: Callable[[], Membership],
    ) -> None:
        """`links` change while it is used; `hello` and `membership` are this agent's."""
        self._links = links
        self._hello = hello
        self._membership = membership

    def send(self, member: Member, message: Message) -> None:
        """Send on the link to the member; dropped if there is none."""
        link = self._links.get(member.node)
        if link is not None and link.member == member:
            link.send(message)

    def we_dialled(self, member: Member) -> bool:
        link = self._links.get(member.node)
        best = next(iter(() if link is None else link.carriers()), None)
        if best is None:  # as the smaller node opens relayed paths
            return link is not None and self._hello().member.node < member.node
        return best.dialled is not None

    def relay_of(self, member: Member) -> Member | None:
        link = self._links.get(member.node)
        return None if link is None or link.carriers() else link.relay

    def paths_to(self, member: Member) -> tuple[LanePath, ...]:
        link = self._links.get(member.node)
        return () if link is None else link.spread()

    async def dial_member(self, member: Member) -> trio.SocketStream:
        """Open a new connection to the member over the best path that takes one."""
        link = self._links.get(member.node)
        if link is None or not (addresses := link.addresses()):
            raise PeerUnreachable(f"this agent has no path to {self.name_of(member)}")
        return (await dial_any(addresses))[0]

    def probed_paths_to(self, member: Member) -> tuple[ProbedPath, ...]:
        """Return what is measured of the paths to the member, the best for tensors first."""
        link = self._links.get(member.node)
        return () if link is None else link.probed()

    def name_of(self, member: Member) -> str:
        membership = self._membership()
        seat, link = membership.view.seat_of(member), self._links.get(member.node)
        if seat is not None:
            return membership.names.of_seat(seat)
        if link is not None:
            return membership.names.of(member.node, link.peer.name)
        own = self._hello()
        return own.name if member.node == own.member.node else short_node(member.node)

    def complain(self, member: Member, error: NetworkError) -> None:
        """Log a failed connection to the member; the lane rendezvous tries again."""
        _log.info("no lane", peer=self.name_of(member), reason=str(error))
