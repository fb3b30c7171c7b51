"""An agent for n trainers in one process: real sockets and arenas, threads, numpy for the ring."""

import contextlib
import functools
import itertools
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

import pmesh
from pmesh.core.framing import FrameReader, frame
from pmesh.core.messages import Call
from pmesh.core.session import (
    MAX_SESSION_MESSAGE_BYTES,
    ArenaGone,
    ArenaGranted,
    ArenaKind,
    Connect,
    DropArena,
    Joined,
    Leave,
    OpDone,
    OpFailed,
    Refused,
    Reply,
    Request,
    StartOp,
    StillWaiting,
    WantArena,
    decode_request_untrusted,
    encode,
)
from pmesh.core.views import Verdict, View
from pmesh.ids import Epoch, Incarnation, Member, NodeId, OpNumber, Rank
from pmesh.net.arenas import Arena, arena_bytes, create_arena

T = TypeVar("T")
PATIENCE_S = 20.0
NODE = NodeId(bytes(32))
VIEW = View.of_one(Member(NODE, Incarnation(1)), "here", Epoch(1, NODE, Incarnation(1)))
UFUNCS: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "mean": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
}


class Trainer:
    """The agent's end of one trainer's socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.reader = FrameReader(max_bytes=MAX_SESSION_MESSAGE_BYTES)
        self.rank, self.size = 0, 0
        self.inputs: dict[int, Arena] = {}
        self.outputs: list[Arena] = []

    def receive(self) -> Request | None:
        while (message := self.reader.next_message_untrusted()) is None:
            try:
                data = self.connection.recv(65536)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self.reader.receive_data(data)
        return decode_request_untrusted(message)

    def send(self, reply: Reply, *descriptors: int) -> None:
        data = frame(encode(reply))
        if descriptors:
            self.connection.sendall(data[:-1])
            socket.send_fds(self.connection, [data[-1:]], list(descriptors))
        else:
            self.connection.sendall(data)


class Listening:
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

    def serve(self, trainer: Trainer) -> None:
        raise NotImplementedError

    def arena(self, kind: ArenaKind, nbytes: int) -> Arena:
        made = create_arena(kind, next(self._numbers), arena_bytes(nbytes))
        self._arenas.append(made)
        return made

    def grant(self, trainer: Trainer, kind: ArenaKind, nbytes: int) -> Arena:
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
                self.serve(Trainer(connection))
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


@dataclass
class _Job:
    trainers: int = 0
    ops: dict[int, dict[int, tuple[StartOp, np.ndarray[Any, Any]]]] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)


class FakeAgent(Listening):
    """All ranks of each job live here; the first error of a mismatch goes to all."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self._changed = threading.Condition()
        self._jobs: dict[str, _Job] = {}
        self.calls: list[Call] = []
        """Of rank 0, in order."""
        self.left: list[int] = []
        """Ranks that said Leave."""
        self.crashed: list[int] = []
        self.wanted: list[int] = []
        """The sizes of input arenas asked for."""
        self.evict = False
        """Whether each output arena is taken back before the next op."""
        self.retained: list[tuple[memoryview, bytes]] = []
        """What roots have broadcast, and what it was: it must stay so (O2)."""

    def serve(self, trainer: Trainer) -> None:
        request = trainer.receive()
        assert isinstance(request, Connect)
        with self._changed:
            job = self._jobs.setdefault(request.job, _Job())
            rank, job.trainers = job.trainers, job.trainers + 1
            self._changed.notify_all()
            joined = self._changed.wait_for(
                lambda: job.trainers >= request.wait_for, min(request.timeout_s, PATIENCE_S)
            )
        if not joined:
            trainer.send(Refused(Verdict("NotEnoughRanks", "1 of 2 came; mac-2 has none")))
            return
        trainer.rank, trainer.size = rank, request.wait_for
        names = tuple(f"mac-{i}" for i in range(trainer.size))
        trainer.send(Joined(Rank(rank), trainer.size, names, VIEW))
        self._serve_rank(trainer, job)

    def _serve_rank(self, trainer: Trainer, job: _Job) -> None:
        while True:
            match request := trainer.receive():
                case WantArena(nbytes):
                    self.wanted.append(nbytes)
                    arena = self.grant(trainer, "input", nbytes)
                    trainer.inputs[arena.number] = arena
                case DropArena(number):
                    del trainer.inputs[number]
                case StartOp():
                    if self.evict and trainer.outputs:
                        trainer.send(ArenaGone(trainer.outputs.pop().number))
                    self._run_op(trainer, job, request)
                case Leave() | None:
                    with self._changed:
                        (self.crashed if request is None else self.left).append(trainer.rank)
                        job.gone.add(trainer.rank)
                        self._changed.notify_all()
                    return
                case _:
                    raise AssertionError(request)

    def _run_op(self, trainer: Trainer, job: _Job, request: StartOp) -> None:
        op, call = request.op, request.call
        values = self._input(trainer, request)
        with self._changed:
            if trainer.rank == 0:
                self.calls.append(call)
            started = job.ops.setdefault(op, {})
            started[trainer.rank] = (request, values)
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(started) == trainer.size or job.gone, PATIENCE_S)
        if len(started) < trainer.size:
            trainer.send(OpFailed(op, Verdict("RankLost", "rank 1 (mac-1) is lost")))
        elif any(other.call != call for other, _ in started.values()):
            text = " but ".join(sorted(f"rank {r}: {s.call}" for r, (s, _) in started.items()))
            trainer.send(OpFailed(op, Verdict("OpMismatch", f"op {op}: {text}")))
        else:
            everyone = tuple(Rank(i) for i in range(trainer.size))
            output = -1
            if request.count and not is_root(trainer, request):
                output = self._write(trainer, call, [started[r][1] for r in everyone])
            trainer.send(StillWaiting(op, 10.0, ("rank 1 (mac-1)",)))
            trainer.send(OpDone(op, output, everyone))

    def _input(self, trainer: Trainer, request: StartOp) -> np.ndarray[Any, Any]:
        dtype = np.dtype(request.wire_dtype)
        if not request.count or (
            request.call.kind == "broadcast" and not is_root(trainer, request)
        ):
            assert request.arena == -1
            return np.zeros(request.count, dtype)
        memory = trainer.inputs[request.arena].memory[: request.count * dtype.itemsize]
        if is_root(trainer, request):
            self.retained.append((memory, bytes(memory)))
        return np.frombuffer(memory, dtype).copy()

    def _write(self, trainer: Trainer, call: Call, inputs: list[np.ndarray[Any, Any]]) -> int:
        if not trainer.outputs or trainer.outputs[-1].nbytes < inputs[0].nbytes:
            trainer.outputs.append(self.grant(trainer, "output", inputs[0].nbytes))
        output = trainer.outputs[-1]
        with np.errstate(all="ignore"):
            reduced = inputs[call.root] if call.kind == "broadcast" else _reduce(call, inputs)
        np.frombuffer(output.memory, inputs[0].dtype, inputs[0].size)[:] = reduced
        return output.number


def is_root(trainer: Trainer, request: StartOp) -> bool:
    return request.call.kind == "broadcast" and request.call.root == trainer.rank


def _reduce(call: Call, inputs: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    total = functools.reduce(UFUNCS[call.reduction], inputs)
    return total / len(inputs) if call.reduction == "mean" else total


Step = Callable[[Trainer, Request | None], None]


class ScriptedAgent(Listening):
    """Answers each request with the next step of a script, then closes the connection."""

    def __init__(self, home: Path, *steps: Step) -> None:
        super().__init__(home)
        self.steps = [*steps]

    def serve(self, trainer: Trainer) -> None:
        for step in self.steps:
            step(trainer, trainer.receive())

    def grants(self, kind: ArenaKind, nbytes: int, *, claim: int | None = None) -> Step:
        """A step that grants an arena, perhaps claiming another size."""

        def step(trainer: Trainer, request: Request | None) -> None:
            del request
            made = self.arena(kind, nbytes)
            said = made.nbytes if claim is None else claim
            trainer.send(ArenaGranted(made.number, kind, said), made.descriptor)

        return step


def joins(trainer: Trainer, request: Request | None) -> None:
    """A step: the job begins, with this rank alone."""
    assert isinstance(request, Connect)
    trainer.send(Joined(Rank(0), 1, ("here",), VIEW))


def replies(*answers: Reply) -> Step:
    """A step that sends these."""

    def step(trainer: Trainer, request: Request | None) -> None:
        del request
        for answer in answers:
            trainer.send(answer)

    return step


def says(data: bytes) -> Step:
    """A step that sends raw bytes."""

    def step(trainer: Trainer, request: Request | None) -> None:
        del request
        trainer.connection.sendall(data)

    return step


def run_ranks(home: Path, size: int, program: Callable[[pmesh.Mesh], T]) -> list[T]:
    """Run the program on `size` ranks, each a thread of its own; results by rank."""

    def rank(_: int) -> tuple[int, T]:
        with pmesh.connect("job", wait_for=size, home=home) as mesh:
            return mesh.rank, program(mesh)

    with ThreadPoolExecutor(size) as pool:
        results: Sequence[tuple[int, T]] = list(pool.map(rank, range(size)))
    return [result for _, result in sorted(results, key=lambda pair: pair[0])]


def op_done(number: int, arena: int = -1) -> OpDone:
    return OpDone(OpNumber(number), arena, (Rank(0),))
