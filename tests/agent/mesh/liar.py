"""A program that holds the mesh key and has a link to a whole agent."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from pmesh.core.identity.certificates import issue_credentials
from pmesh.core.identity.keys import NodeKey
from pmesh.core.identity.names import sign_name
from pmesh.core.values import SignedName, View
from pmesh.core.wire.link import PROTOCOL_VERSION, Hello
from pmesh.core.wire.views import Propose, TellView
from pmesh.errors import PeerUnreachable, ProtocolError
from pmesh.ids import Epoch, Incarnation, Member
from pmesh.net.links.path import Path, shake_hands
from pmesh.net.links.tls import TlsContexts
from simulation.wire import AnyPathMessage, decode_untrusted
from tests.worlds.builders import make_heartbeat
from tests.worlds.village import MESH, Machine

KEY = NodeKey.from_seed(b"l" * 32)
LIAR = Member(KEY.node, Incarnation(666))
CRONY_KEY, THIRD_KEY = (NodeKey.from_seed(letter * 32) for letter in (b"z", b"y"))
CRONY, THIRD = (Member(key.node, Incarnation(1)) for key in (CRONY_KEY, THIRD_KEY))
ALL_KEYS = (KEY, CRONY_KEY, THIRD_KEY)


@dataclass
class ConnectedLiar:
    """A program with the mesh key, and what it has been told."""

    link: Path
    heard: list[AnyPathMessage] = field(default_factory=list)
    ended: bool = False

    def ask_to_promise(self, epoch: Epoch, base: View, honest: Member) -> None:
        """As the leader of a heavier view, that takes the honest member in."""
        self.link.send(TellView(base))
        self.link.send(make_heartbeat(base, honest))
        self.link.send(Propose(epoch, base, (LIAR, honest), (LIAR,), ()))

    async def read(self) -> None:
        try:
            while True:
                self.heard.append(decode_untrusted((await self.link.receive()).message))
        except (trio.EndOfChannel, trio.ClosedResourceError, PeerUnreachable, ProtocolError):
            self.ended = True


@asynccontextmanager
async def lying_to(machine: Machine, hello: Hello | None = None) -> AsyncGenerator[ConnectedLiar]:
    stream = await trio.open_tcp_stream("127.0.0.1", machine.port)
    link = await shake_hands(
        stream,
        contexts=TlsContexts.of(issue_credentials(MESH, KEY)),
        server_side=False,
        hello=lambda _: hello or Hello(PROTOCOL_VERSION, LIAR, SAID[LIAR], link=1),
    )
    async with trio.open_nursery() as nursery:
        liar = ConnectedLiar(link)
        nursery.start_soon(link.run_writer)
        nursery.start_soon(liar.read)
        try:
            yield liar
        finally:
            with trio.CancelScope(shield=True):
                await link.aclose()
            nursery.cancel_scope.cancel()


def of(machine: Machine) -> Member:
    return machine.me


Told = dict[Member, SignedName]
SAID: Told = {
    member: sign_name(key, member, f"liar {i}")
    for i, (key, member) in enumerate(zip(ALL_KEYS, (LIAR, CRONY, THIRD), strict=True))
}
