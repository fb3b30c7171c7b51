"""The agent's end of a trainer's socket, and an agent that answers by a script."""

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from pmesh.core.values import SignedName, View
from pmesh.core.wire.framing import FrameReader, frame
from pmesh.core.wire.session import MAX_SESSION_MESSAGE_BYTES, ArenaGranted, ArenaKind, encode
from pmesh.core.wire.trainer import Connect, Joined, OpDone, World
from pmesh.ids import Epoch, Incarnation, Member, NodeId, OpNumber, TrainerId
from pmesh.net.sessions.arenas import Arena, arena_bytes, create_arena
from simulation.wire import AnyReply, AnyRequest, decode_request_untrusted

PATIENCE_S = 20.0
NODE = NodeId(bytes(32))
SAID = SignedName("here", bytes(64))
VIEW = View.of_one(Member(NODE, Incarnation(1)), SAID, Epoch(1, NODE, Incarnation(1)))
ALONE = World(0, (TrainerId(0),), ("here",))


class TrainerSocket:
    """The agent's end of one trainer's socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.reader = FrameReader(max_bytes=MAX_SESSION_MESSAGE_BYTES)
        self.id = TrainerId(-1)
        self.told = World(-1, (), ())
        self.next_op = 0
        self.superseded = False
        self.inputs: dict[int, Arena] = {}
        self.outputs: list[Arena] = []
        self.lent: dict[int, Arena] = {}

    def receive(self) -> AnyRequest | None:
        while (message := self.reader.next_message_untrusted()) is None:
            try:
                data = self.connection.recv(65536)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self.reader.receive_data(data)
        return decode_request_untrusted(message)

    def send(self, reply: AnyReply, *descriptors: int) -> None:
        data = frame(encode(reply))
        if descriptors:
            self.connection.sendall(data[:-1])
            socket.send_fds(self.connection, [data[-1:]], list(descriptors))
        else:
            self.connection.sendall(data)


class ThreadedAgent:
    """A thread for each connection to `home`; errors in them fail the test at the end."""

    def __init__(self, home: Path) -> None:
        home.mkdir(exist_ok=True)
        self.home = home
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(home / "agent.sock"))
        self._listener.listen(64)
        self._threads = [threading.Thread(target=self._accept)]
        self.connections: list[socket.socket] = []
        self._errors: list[BaseException] = []
        self._arenas: list[Arena] = []
        self._numbers = itertools.count(100)

    def serve(self, trainer: TrainerSocket) -> None:
        raise NotImplementedError

    def arena(self, kind: ArenaKind, nbytes: int) -> Arena:
        made = create_arena(kind, next(self._numbers), arena_bytes(nbytes))
        self._arenas.append(made)
        return made

    def grant(self, trainer: TrainerSocket, kind: ArenaKind, nbytes: int) -> Arena:
        made = self.arena(kind, nbytes)
        trainer.send(ArenaGranted(made.number, kind, made.nbytes), made.descriptor)
        return made

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            if not connection.recv(1, socket.MSG_PEEK):  # __exit__ says: no more
                connection.close()
                return
            self.connections.append(connection)
            thread = threading.Thread(target=self._run, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _run(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(BrokenPipeError):  # the trainer has gone
                self.serve(TrainerSocket(connection))
        except BaseException as e:  # noqa: BLE001 - handed to the test's own thread
            self._errors.append(e)

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for connection in self.connections if error is not None else []:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(str(self.home / "agent.sock"))
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self._listener.close()
        for arena in self._arenas:
            arena.close()
        if self._errors and error is None:
            raise self._errors[0]


Step = Callable[[TrainerSocket, AnyRequest | None], None]


class ScriptedAgent(ThreadedAgent):
    """Answers each request with the next step of a script, then closes the connection."""

    def __init__(self, home: Path, *steps: Step) -> None:
        super().__init__(home)
        self.steps = [*steps]

    def serve(self, trainer: TrainerSocket) -> None:
        for step in self.steps:
            step(trainer, trainer.receive())

    def wait_until_closed(self) -> None:
        """Until its thread has come to the end of the script."""
        while self.connections[-1].fileno() >= 0:
            threading.Event().wait(0.001)

    def grants(self, kind: ArenaKind, nbytes: int, *, claim: int | None = None) -> Step:
        """A step that grants an arena, perhaps claiming another size."""

        def step(trainer: TrainerSocket, request: AnyRequest | None) -> None:
            del request
            made = self.arena(kind, nbytes)
            said = made.nbytes if claim is None else claim
            trainer.send(ArenaGranted(made.number, kind, said), made.descriptor)

        return step


def joins(trainer: TrainerSocket, request: AnyRequest | None) -> None:
    """A step: the job begins, with this rank alone."""
    assert isinstance(request, Connect)
    trainer.send(Joined(ALONE, VIEW))


def replies(*answers: AnyReply) -> Step:
    """A step that sends these."""

    def step(trainer: TrainerSocket, request: AnyRequest | None) -> None:
        del request
        for answer in answers:
            trainer.send(answer)

    return step


def says(data: bytes) -> Step:
    """A step that sends raw bytes."""

    def step(trainer: TrainerSocket, request: AnyRequest | None) -> None:
        del request
        trainer.connection.sendall(data)

    return step


def op_done(number: int, arena: int = -1) -> OpDone:
    return OpDone(OpNumber(number), arena)
