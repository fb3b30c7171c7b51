"""A real agent in a thread. A test watches its sessions for messages, and answers in its place."""

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import trio

import pmesh
from pmesh.core.values import Verdict
from pmesh.core.wire.framing import frame
from pmesh.core.wire.local import (
    ArenaGranted,
    Attach,
    DropArena,
    MessageFailed,
    MessageWaits,
    ReceiveMessage,
    Refused,
    Reply,
    Request,
    SendMessage,
    WantArena,
    encode,
)
from pmesh.ids import TrainerId
from pmesh.net.local.sessions import PeerCredentials, Session
from pmesh.testing.simulated_mesh import agent_in_a_thread
from tests.worlds.fake_agent import run_ranks

T = TypeVar("T")
LOST = Verdict("RankLost", "rank 1 (mac-1) is lost")


class WatchedSession(Session):
    def __init__(
        self, agent: "WatchedAgent", stream: trio.SocketStream, credentials: PeerCredentials
    ) -> None:
        super().__init__(stream, credentials)
        self._agent = agent
        self.me = TrainerId(-1)
        """Of a session for messages."""
        self.inputs: set[int] = set()
        """Arenas that it keeps."""

    async def receive(self) -> Request:
        while True:
            request = await super().receive()
            answers = self._agent.answers(self, request)
            if answers is None:
                return request
            for answer in answers:
                await self.send(answer)
            if isinstance(request, Attach):
                raise trio.EndOfChannel

    async def send(self, reply: Reply, descriptors: tuple[int, ...] = ()) -> None:
        if isinstance(reply, ArenaGranted) and reply.kind == "input":
            self.inputs.add(reply.arena)
        await super().send(reply, descriptors)

    def say(self, data: bytes | Reply) -> None:
        """Send what the agent would not."""
        os.write(
            self._stream.socket.fileno(), data if isinstance(data, bytes) else frame(encode(data))
        )


class WatchedAgent:
    def __init__(self, home: Path) -> None:
        self.home = home
        self.attached: list[WatchedSession] = []
        self.inputs_wanted: list[int] = []
        self.refuses: Verdict | None = None
        """Why nobody gets a session for messages."""
        self.fails: Callable[[SendMessage | ReceiveMessage], Verdict | None] = lambda _: None
        """What a call fails with, at once."""
        self.ignores: Callable[[SendMessage | ReceiveMessage], bool] = lambda _: False
        self.memory: Verdict | None = None
        """Why there is no arena."""

    def answers(self, session: WatchedSession, request: Request) -> Sequence[Reply] | None:
        """What a request gets in place of the agent's own answer; None: that."""
        match request:
            case Attach() if self.refuses is not None:
                return [Refused(self.refuses)]
            case Attach(trainer=me):
                session.me = me
                self.attached.append(session)
            case WantArena() if session.me >= 0 and self.memory is not None:
                return [Refused(self.memory)]
            case WantArena(nbytes) if session.me >= 0:
                self.inputs_wanted.append(nbytes)
            case DropArena(number):
                session.inputs.discard(number)
            case SendMessage() | ReceiveMessage() if self.ignores(request):
                return []
            case SendMessage() | ReceiveMessage() if verdict := self.fails(request):
                waits = MessageWaits(request.call, 10.0, ("rank 1 (mac-1)",))
                return [waits, MessageFailed(request.call, verdict)]
            case _:
                pass
        return None


@contextmanager
def watched_agent(home: Path) -> Iterator[WatchedAgent]:
    agent = WatchedAgent(home)
    home.mkdir(mode=0o700)
    session = functools.partial(WatchedSession, agent)
    with mock.patch("pmesh.net.local.sessions.Session", session), agent_in_a_thread(home):
        yield agent


def run(agent: WatchedAgent, size: int, program: Callable[[pmesh.Mesh], T]) -> list[T]:
    """On so many ranks, each a thread; the barrier keeps them until all are done."""

    def rank(mesh: pmesh.Mesh) -> T:
        result = program(mesh)
        mesh.barrier()
        return result

    return run_ranks(agent.home, size, rank)


def pair(
    agent: WatchedAgent, one: Callable[[pmesh.Mesh], Any], other: Callable[[pmesh.Mesh], Any]
) -> list[Any]:
    """What rank 0 and rank 1 do."""
    return run(agent, 2, lambda mesh: (one, other)[mesh.rank](mesh))
