"""The fake agent with messages: it matches sends and receives under one lock."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pmesh
from pmesh.client.calls.point_to_point import PointToPoint
from pmesh.core.values import Verdict
from pmesh.core.wire.link import Envelope
from pmesh.core.wire.local import (
    ArenaGone,
    Attach,
    Attached,
    DropArena,
    MessageFailed,
    MessageReceived,
    MessageSent,
    MessageWaits,
    ReceiveMessage,
    Refused,
    SendMessage,
    WantArena,
)
from pmesh.ids import TrainerId
from pmesh.net.local.arenas import Arena
from tests.worlds.fake_agent import FakeAgent, run_ranks
from tests.worlds.scripted_agent import Trainer

T = TypeVar("T")
LOST = Verdict("RankLost", "rank 1 (mac-1) is lost")


@dataclass(eq=False)
class Connection:
    """One attached connection."""

    trainer: Trainer
    me: TrainerId
    sending: threading.Lock = field(default_factory=threading.Lock)
    inputs: dict[int, Arena] = field(default_factory=dict)
    outputs: dict[int, Arena] = field(default_factory=dict)


class P2PAgent(FakeAgent):
    """All messages of all jobs go through one place: the tests have one job."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type] # as they came
        self._post = threading.Lock()
        self._sends: list[tuple[Connection, SendMessage, bytes]] = []
        self._receives: list[tuple[Connection, ReceiveMessage]] = []
        self.attached: list[Connection] = []
        self.inputs_wanted: list[int] = []
        self.dropped: list[int] = []
        self.refuses: Verdict | None = None
        self.fails: Callable[[SendMessage | ReceiveMessage], Verdict | None] = lambda _: None
        """What a call fails with, at once."""
        self.evicts = False
        """Whether output arenas are taken back, and others granted."""
        self.ignores: Callable[[SendMessage | ReceiveMessage], bool] = lambda _: False
        self.memory: Verdict | None = None
        """Why there is no arena."""

    def serve(self, trainer: Trainer) -> None:
        first = trainer.receive()
        if not isinstance(first, Attach):
            pending = [first]
            receive = trainer.receive
            trainer.receive = lambda: pending.pop() if pending else receive()  # type: ignore[method-assign]
            super().serve(trainer)
            return
        if self.refuses is not None:
            trainer.send(Refused(self.refuses))
            return
        connection = Connection(trainer, first.trainer)
        self.attached.append(connection)
        trainer.send(Attached())
        while (request := trainer.receive()) is not None:
            with connection.sending:
                self._take_arena_request(connection, request)
            if isinstance(request, SendMessage | ReceiveMessage):
                self._take(connection, request)

    def _take_arena_request(self, connection: Connection, request: object) -> None:
        match request:
            case WantArena() if self.memory is not None:
                connection.trainer.send(Refused(self.memory))
            case WantArena(nbytes):
                self.inputs_wanted.append(nbytes)
                arena = self.grant(connection.trainer, "input", nbytes)
                connection.inputs[arena.number] = arena
            case DropArena(number):
                self.dropped.append(number)
                connection.inputs.pop(number, None)
            case _:
                pass

    def _take(self, connection: Connection, request: SendMessage | ReceiveMessage) -> None:
        if self.ignores(request):
            return
        verdict = self.fails(request)
        if verdict is not None:
            with connection.sending:
                connection.trainer.send(MessageWaits(request.call, 10.0, ("rank 1 (mac-1)",)))
                connection.trainer.send(MessageFailed(request.call, verdict))
            return
        with self._post:
            if isinstance(request, SendMessage):
                data = b""
                if request.envelope.nbytes:
                    data = bytes(connection.inputs[request.arena].memory[: request.envelope.nbytes])
                self._sends.append((connection, request, data))
            else:
                self._receives.append((connection, request))
            while self._match():
                pass

    def _match(self) -> bool:
        for receive in self._receives:
            at, wanted = receive
            for send in self._sends:
                sender, sent, data = send
                if (
                    sent.to == at.me
                    and sender.me in wanted.sources
                    and sent.envelope.tag == wanted.tag
                ):
                    self._sends.remove(send)
                    self._receives.remove(receive)
                    self._deliver(at, wanted.call, sender.me, sent.envelope, data)
                    with sender.sending:
                        sender.trainer.send(MessageSent(sent.call))
                    return True
        return False

    def _deliver(
        self, at: Connection, call: int, source: TrainerId, envelope: Envelope, data: bytes
    ) -> None:
        with at.sending:
            number = -1
            if data:
                arena = self.grant(at.trainer, "output", len(data))
                arena.memory[: len(data)] = data
                number = arena.number
                if self.evicts:
                    for old in at.outputs:
                        at.trainer.send(ArenaGone(old))
                    at.outputs = {number: arena}
            at.trainer.send(MessageReceived(call, source, envelope, number))


def run(agent: P2PAgent, size: int, program: Callable[[PointToPoint], T]) -> list[T]:
    """On so many ranks, each a thread; the barrier keeps them until all are done."""

    def rank(mesh: pmesh.Mesh) -> T:
        p2p: Any = mesh if isinstance(mesh, PointToPoint) else PointToPoint(mesh._place)  # noqa: SLF001
        try:
            result = program(p2p)
            mesh.barrier()
            return result
        finally:
            if p2p is not mesh and p2p._p2p is not None:  # noqa: SLF001
                p2p._p2p[1].close("the test ends")  # noqa: SLF001

    return run_ranks(agent.home, size, rank)


def pair(
    agent: P2PAgent, one: Callable[[PointToPoint], Any], other: Callable[[PointToPoint], Any]
) -> list[Any]:
    """What rank 0 and rank 1 do."""
    return run(agent, 2, lambda p2p: (one, other)[p2p.rank](p2p))
