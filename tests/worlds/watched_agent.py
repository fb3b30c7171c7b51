"""A real agent in a thread, whose sessions a test watches, cuts off, and answers in its place."""

import functools
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast
from unittest import mock

import msgspec
import numpy as np
import trio

import pmesh
from pmesh.agent.containment import Contain
from pmesh.agent.jobs.driver import Jobs
from pmesh.agent.jobs.session import serve_trainer
from pmesh.core.values import Verdict
from pmesh.core.wire.calls import Call
from pmesh.core.wire.framing import frame
from pmesh.core.wire.session import (
    ArenaGranted,
    DropArena,
    MessageFailed,
    Refused,
    SessionDecoder,
    SessionMessage,
    WantArena,
    encode,
)
from pmesh.core.wire.trainer import (
    ENTERS,
    Compresses,
    Connect,
    Joined,
    Leave,
    OpDone,
    ReportsNumbers,
    StartOp,
)
from pmesh.ids import TrainerId
from pmesh.net.sessions.arena_pools import ArenaShare
from pmesh.net.sessions.sessions import PeerCredentials, Session
from pmesh.p2p.wire import Attach, MessageWaits, ReceiveMessage, SendMessage
from pmesh.testing import agent_in_a_thread
from simulation.wire import AnyReply
from tests.worlds.scripted_agent import PATIENCE_S

T = TypeVar("T")
LOST = Verdict("RankLost", "rank 1 (mac-1) is lost")


_Request = TypeVar("_Request", bound=SessionMessage)


class WatchedSession(Session):
    def __init__(
        self, agent: "WatchedAgent", stream: trio.SocketStream, credentials: PeerCredentials
    ) -> None:
        super().__init__(stream, credentials)
        self._agent = agent
        self.job = ""
        self.me = TrainerId(-1)
        self.jobs: Jobs | None = None
        """The agent's, if this is a trainer's session."""
        self.inputs: dict[int, mmap.mmap] = {}
        """Arenas that the program keeps, with what they hold."""
        self.calls: list[Call] = []
        self.lent: set[int] = set()
        """Arenas with results that the program has kept."""

    async def receive(self, requests: SessionDecoder[_Request]) -> _Request:
        while True:
            try:
                request = await super().receive(requests)
            except trio.EndOfChannel:
                self._agent.note(lambda: self._agent.crashed.append(self.me))
                raise
            if isinstance(request, StartOp):
                return cast("_Request", await self._agent.start_op(self, request))
            answers = self._agent.answers(self, request)
            if answers is None:
                return request
            for answer in answers:
                await self.send(answer)
            if isinstance(request, Attach):
                raise trio.EndOfChannel

    async def send(self, reply: SessionMessage, descriptors: tuple[int, ...] = ()) -> None:
        match reply:
            case ArenaGranted(number, "input", nbytes):
                self.inputs[number] = mmap.mmap(descriptors[0], nbytes)
            case Joined():
                self.me = reply.world.trainers[reply.world.rank]
                reply = msgspec.structs.replace(reply, compression=self._agent.compression)
            case OpDone(lent=True):
                self.lent.add(reply.arena)
            case _:
                pass
        await super().send(reply, descriptors)

    def say(self, data: bytes | AnyReply) -> None:
        """Send what the agent would not."""
        os.write(
            self._stream.socket.fileno(), data if isinstance(data, bytes) else frame(encode(data))
        )

    def leave_behind(self) -> None:
        """The job goes on without this rank, as when its process has been stopped for long."""
        assert self.jobs is not None
        (rank,) = [r for r in self.jobs.ranks if r.id == self.me and r.roster.job == self.job]
        self.jobs.depart(rank, "is lost: its trainer has been stopped for 60 s")


@dataclass(eq=False)
class RetainedInput:
    """A root's input, which other ranks may still fetch (O2)."""

    session: WatchedSession
    arena: int
    memory: memoryview
    """Where it lies; a copy once the program has given the arena back."""
    was: bytes

    @property
    def unchanged(self) -> bool:
        return self.memory == self.was


class WatchedAgent:
    def __init__(self, home: Path) -> None:
        self.home = home
        self._changed = threading.Condition()
        self.sessions: list[WatchedSession] = []
        """Of trainers, in the order in which they came."""
        self.calls: list[Call] = []
        """Those of rank 0, in order."""
        self.left: list[TrainerId] = []
        """Trainers that have said that they leave; all others have crashed."""
        self.crashed: list[TrainerId] = []
        self.entering: list[TrainerId] = []
        """Trainers whose `sync`, in which they enter, has passed `before_op`: the agent has it."""
        self.wanted: list[int] = []
        """The sizes of the input arenas that trainers asked for."""
        self.shown: list[str] = []
        """What trainers say of their compression."""
        self.reported: list[dict[str, float]] = []
        """The numbers that trainers have reported."""
        self.retained: list[RetainedInput] = []
        """What roots have broadcast."""
        self.compression = ""
        """Of gradients, where trainers don't name one."""
        self.lends = True
        self.before_op: Callable[[WatchedSession, StartOp], None] | None = None
        """Called in a thread, before a rank's op reaches the agent."""
        self.losses: Mapping[int, int] = {}
        """By the number of an op of "job": the trainer that is lost as it starts it."""
        self.left_behind: Mapping[int, int] = {}
        """The same for a trainer whose connection stays, while the job goes on without it."""
        self.mismatched: int | None = None
        """The number of an op that fails at all ranks, as rank 0 has called something else."""
        self.attached: list[WatchedSession] = []
        self.inputs_wanted: list[int] = []
        """Sizes of the arenas wanted for messages."""
        self.refuses: Verdict | None = None
        """Why nobody gets a session for messages."""
        self.fails: Callable[[SendMessage | ReceiveMessage], Verdict | None] = lambda _: None
        """What a call fails with, at once."""
        self.ignores: Callable[[SendMessage | ReceiveMessage], bool] = lambda _: False
        self.memory: Verdict | None = None
        """Why there is no arena."""

    def note(self, record: Callable[[], object]) -> None:
        with self._changed:
            record()
            self._changed.notify_all()

    def wait_until(self, happened: Callable[[], bool]) -> None:
        """Wait until something is so that changes with requests."""
        with self._changed:
            assert self._changed.wait_for(happened, PATIENCE_S)

    def answers(
        self, session: WatchedSession, request: SessionMessage
    ) -> Sequence[AnyReply] | None:
        """What a request gets in place of the agent's own answer; None: that."""
        match request:
            case Connect(job=job):
                session.job = job
                self.note(lambda: self.sessions.append(session))
            case Leave():
                self.note(lambda: self.left.append(session.me))
            case Compresses(text):
                self.shown.append(text)
            case ReportsNumbers(reports):
                self.reported.append(reports)
            case WantArena(nbytes) if session.job:
                self.wanted.append(nbytes)
            case DropArena(number):
                for sent in self.retained:
                    if (sent.session, sent.arena) == (session, number):
                        sent.memory = memoryview(bytes(sent.memory))
                session.inputs.pop(number, None)
                session.lent.discard(number)
            case _:
                return self._answers_to_messages(session, request)
        return None

    def _answers_to_messages(
        self, session: WatchedSession, request: SessionMessage
    ) -> Sequence[AnyReply] | None:
        match request:
            case Attach() if self.refuses is not None:
                return [Refused(self.refuses)]
            case Attach(trainer=me):
                session.me = me
                self.attached.append(session)
            case WantArena() if self.memory is not None:
                return [Refused(self.memory)]
            case WantArena(nbytes):
                self.inputs_wanted.append(nbytes)
            case SendMessage() | ReceiveMessage() if self.ignores(request):
                return []
            case SendMessage() | ReceiveMessage() if verdict := self.fails(request):
                waits = MessageWaits(request.call, 10.0, ("rank 1 (mac-1)",))
                return [waits, MessageFailed(request.call, verdict)]
            case _:
                pass
        return None

    async def start_op(self, session: WatchedSession, request: StartOp) -> StartOp:
        """Return the op as it reaches the agent. Raises EndOfChannel if its rank is lost now."""
        session.calls.append(request.call)
        if session.me == 0:
            self.note(lambda: self.calls.append(request.call))
        if request.call.kind == "broadcast" and request.arena >= 0:
            size = request.count * np.dtype(request.wire_dtype).itemsize
            sent = memoryview(session.inputs[request.arena])[request.offset : request.offset + size]
            self.retained.append(RetainedInput(session, request.arena, sent, bytes(sent)))
        if self.before_op is not None:
            await trio.to_thread.run_sync(self.before_op, session, request, abandon_on_cancel=True)
        if request.op == ENTERS:
            self.note(lambda: self.entering.append(session.me))
        if session.job == "job" and self.losses.get(request.op) == session.me:
            raise trio.EndOfChannel
        if session.job == "job" and self.left_behind.get(request.op) == session.me:
            session.leave_behind()
        if session.job == "job" and request.op == self.mismatched and session.me == 0:
            call = msgspec.structs.replace(request.call, tree="something else")
            request = msgspec.structs.replace(request, call=call)
        if not self.lends:
            request = msgspec.structs.replace(request, borrows=False)
        return request


@contextmanager
def watched_agent(home: Path) -> Iterator[WatchedAgent]:
    agent = WatchedAgent(home)
    home.mkdir(mode=0o700, exist_ok=True)

    async def serve(
        session: Session,
        request: Connect,
        jobs: Jobs,
        share: ArenaShare,
        contain: Contain,
        **options: Any,  # noqa: ANN401 - as they are
    ) -> None:
        assert isinstance(session, WatchedSession)
        session.jobs = jobs
        await serve_trainer(session, request, jobs, share, contain, **options)

    with (
        mock.patch("pmesh.net.sessions.sessions.Session", functools.partial(WatchedSession, agent)),
        mock.patch("pmesh.agent.run.serve_trainer", serve),
        agent_in_a_thread(home),
    ):
        yield agent


def run_ranks(home: Path, size: int, program: Callable[[pmesh.Mesh], T]) -> list[T]:
    """Run the program on `size` ranks, each a thread of its own; results by rank."""

    def rank(_: int) -> tuple[int, T]:
        with pmesh.connect("job", wait_for=size, home=home) as mesh:
            return mesh.rank, program(mesh)

    with ThreadPoolExecutor(size) as pool:
        results: Sequence[tuple[int, T]] = list(pool.map(rank, range(size)))
    return [result for _, result in sorted(results, key=lambda pair: pair[0])]


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
