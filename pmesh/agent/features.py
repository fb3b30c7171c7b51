"""What the agent and its features ask of each other. The agent knows no feature by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import trio

from pmesh.agent.config import AgentSettings
from pmesh.agent.containment import Contain
from pmesh.agent.events import News
from pmesh.agent.jobs.driver import Jobs
from pmesh.agent.limits import Admission
from pmesh.agent.mesh.names import MachineNames
from pmesh.agent.mesh.peers import Peers
from pmesh.agent.mesh.register import Register
from pmesh.agent.mesh.renewals import Renewals
from pmesh.core.identity.keys import MeshKey, NodeKey
from pmesh.core.wire.channels import Channel, Message
from pmesh.core.wire.session import SessionMessage
from pmesh.ids import Member
from pmesh.net.links.acceptor import Authenticated
from pmesh.net.sessions.sessions import Session

MessageT = TypeVar("MessageT", bound=Message)
RequestT = TypeVar("RequestT", bound=SessionMessage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """The parts of the agent that features use."""

    me: Member
    settings: AgentSettings
    version: str
    """Of pmesh."""
    key: NodeKey
    names: MachineNames
    register: Register
    renewals: Renewals
    peers: Peers
    jobs: Jobs
    nursery: trio.Nursery
    contain: Contain
    noticed: Callable[[News], None]
    admission: Callable[[], Admission]
    mesh_key: Callable[[], MeshKey]
    """Returns the one that the mesh has now."""
    advertise_invitation: Callable[[int], None]
    """Announces the number of an open invitation by mDNS; 0 for none."""


class Feature(Generic[MessageT, RequestT]):
    """A feature's part of an agent. What a feature does not need does nothing."""

    channel: Channel[MessageT] | None = None
    """Its messages between agents."""
    openings: tuple[type[RequestT], ...] = ()
    """The first requests of the sessions that it serves."""
    takes_guests: bool = False
    """True for the one feature that serves machines which want the mesh key."""

    def receive(self, member: Member, message: MessageT, /) -> None:
        """Handle a member's message. Raises ProtocolError if no honest member sends it."""
        raise NotImplementedError

    async def serve(self, session: Session, request: RequestT, /) -> None:
        """Serve a local program's session. Raises UsageError, which then refuses the request."""
        raise NotImplementedError

    async def welcome(
        self, stream: trio.SocketStream, first: bytes, authenticated: Authenticated, /
    ) -> None:
        """Serve a machine that wants the mesh key, as a handler of `Acceptor` does."""

    async def run(self) -> None:
        """Run until the agent stops."""

    def follow(self) -> None:
        """Follow a view that has been installed."""

    def poll(self) -> None:
        """Do what is due; called at the pace of the agreement."""

    def rank_is(self, pid: int, number: int) -> None:
        """Note the rank of a local program, before that program learns it."""

    def op_completed(self, pid: int, *, syncs: bool) -> None:
        """Note the first op of a local program, or its first `sync`."""

    def close(self) -> None:
        """Free what is left, as the agent ends."""

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of messages between ranks, sent and received at the sockets."""
        return 0, 0


AnyFeature: TypeAlias = Feature[Any, Any]
