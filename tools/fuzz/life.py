"""One life of a member without a seat: its node key, its links, and what it holds."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import trio

from pmesh.core.identity.keys import MeshKey, NodeKey
from pmesh.core.identity.names import sign_name
from pmesh.core.links.delivery import pack
from pmesh.core.wire.link import PROTOCOL_VERSION, Address, Hello
from pmesh.core.wire.views import Heartbeat
from pmesh.errors import PmeshError
from pmesh.ids import Epoch, Incarnation, Member
from pmesh.net.links.path import Path
from simulation.wire import encode_unbounded
from tools.fuzz.liar import Liar

UNSENT_BYTES = 1 << 20  # on one link, until some was taken: a link takes 4 MiB
GONE = (trio.BrokenResourceError, trio.ClosedResourceError, trio.EndOfChannel, OSError, PmeshError)


def hello_of(key: NodeKey, name: str) -> Hello:
    """As an honest member of this name says it."""
    me = Member(key.node, Incarnation(1))
    return Hello(PROTOCOL_VERSION, me, sign_name(key, me, name))


@dataclass(eq=False, kw_only=True)
class LiarsLife:
    """One node key's, from its links to its leave."""

    dice: Random
    key: NodeKey
    liar: Liar
    """Speaks to other members."""
    guest: Liar
    """Speaks to machines that invite."""
    mesh_keys: Sequence[MeshKey]
    """All that it has had, the latest last."""
    hello: Hello
    largest: Hello
    """What it might have said instead."""
    links: list[Path] = field(default_factory=list[Path])
    doors: tuple[Address, ...]
    """Of the agents."""
    tell: Callable[[Any], None] = lambda _: None
    """Called with each lie before it is sent."""
    held: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    """What closes the connections that it holds."""

    async def send(self, messages: Iterable[Any]) -> None:
        """To all of its links, as fast as they take it."""
        for message in messages:
            data = pack(0, 0, encode_unbounded(message))
            for link in self.links:
                link.send_packet(data)
            while any(link._queued_bytes > UNSENT_BYTES for link in self.links):  # noqa: ASYNC110, SLF001 - a path tells nobody
                await trio.sleep(0.001)
        await trio.lowlevel.checkpoint()

    def some(self, nbytes: int = 16) -> bytes:
        return self.dice.randbytes(nbytes)

    def let_go(self) -> None:
        """Close all connections, without a goodbye."""
        for close in self.held:
            close()
        for link in self.links:
            link._wire.stream.socket.close()  # type: ignore[attr-defined] # noqa: SLF001 - TCP's

    async def knock(self) -> trio.SocketStream:
        """A new connection to one of the doors."""
        door = self.dice.choice(self.doors)
        return await trio.open_tcp_stream(door.host, door.port)

    @property
    def others(self) -> list[Member]:
        """Those at the other ends of its links."""
        return [link.peer.member for link in self.links]

    @property
    def epoch(self) -> Epoch:
        me = self.hello.member
        return Epoch(1, me.node, me.incarnation)

    @property
    def beat(self) -> Heartbeat:
        """It has a view of its own, of which it is the only member."""
        at = self.epoch
        return Heartbeat(at, at, flushed=False, acting=True, needs_epoch=False, heard={})
