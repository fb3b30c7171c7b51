"""A trainer's second connection to its agent, for messages and its job's store.

Several calls run at a time, of any thread.

The thread that waits first reads for all of them, and wakes the others at each reply.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

from pmesh.client.link.arenas import Mapped
from pmesh.client.link.connection import AgentConnection, error_of, mesh_ended
from pmesh.client.link.interrupts import postponed, wait
from pmesh.core.ops.reductions import Values
from pmesh.core.wire.link import Envelope
from pmesh.core.wire.local import (
    MAX_STORE_DATA_BYTES,
    ArenaGone,
    ArenaGranted,
    DropArena,
    MessageFailed,
    MessageReceived,
    MessageSent,
    MessageWaits,
    ReceiveMessage,
    Refused,
    Reply,
    Request,
    SendMessage,
    StoreAnswered,
    StoreCall,
    StoreWaits,
    WantArena,
)
from pmesh.core.wire.store import Answer, Command, decode_answer_untrusted, encode
from pmesh.errors import AgentStopped, MeshClosed, PmeshError, ProtocolError
from pmesh.ids import TrainerId

KEPT_INPUTS = (
    4  # arenas that wait for the next send: faulting in fresh memory costs more than a copy
)
_ARENA = -1
"""The key of the reply to WantArena, which has no call."""

_logger = logging.getLogger("pmesh")


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message that has been received."""

    source: TrainerId
    envelope: Envelope
    data: Values
    """Flat uint8, the caller's to keep."""


class P2PSession:
    """Sends, receives and store calls over one attached connection."""

    def __init__(self, connection: AgentConnection) -> None:
        self._connection = connection
        self._news = threading.Condition()
        self._reading = False
        self._answers: dict[int, Reply] = {}
        self._under_way: set[int] = set()
        self._calls = 0
        self._sending = threading.Lock()
        self._wanting = threading.Lock()
        self._inputs: list[Mapped] = []
        self._lent: dict[int, Mapped] = {}
        self._maps: dict[int, Mapped] = {}
        self._parts: dict[int, bytearray] = {}
        """What has come of answers of the store."""
        self._ended: PmeshError | None = None

    @property
    def has_ended(self) -> bool:
        """Whether another connection is needed for further calls."""
        return self._ended is not None

    def begin_send(self, to: TrainerId, envelope: Envelope, data: Values, timeout_s: float) -> int:
        """Put an array's bytes where the agent reads them; returns the call's number."""
        arena = None
        if envelope.nbytes:
            arena = self._take_input(envelope.nbytes)
            np.frombuffer(arena.memory, np.uint8, envelope.nbytes)[:] = data
        number = -1 if arena is None else arena.number
        with self._sending:
            call = self._next_call()
            if arena is not None:
                self._lent[call] = arena
            self._send(SendMessage(call, to, envelope, number, timeout_s))
        return call

    def begin_receive(self, sources: tuple[TrainerId, ...], tag: int, timeout_s: float) -> int:
        """Ask for a message of one of these; returns the call's number."""
        with self._sending:
            call = self._next_call()
            self._send(ReceiveMessage(call, sources, tag, timeout_s))
        return call

    def ask_store(self, command: Command, timeout_s: float) -> Answer:
        """Carry out a command in the job's store, and wait for its answer.

        Raises PmeshError as `end`.
        """
        data = encode(command)
        begins = range(0, len(data), MAX_STORE_DATA_BYTES)
        parts = [data[begin : begin + MAX_STORE_DATA_BYTES] for begin in begins]
        with self._sending:
            call, last = self._next_call(), len(parts) - 1
            self._send(
                *(StoreCall(call, part, i < last, timeout_s) for i, part in enumerate(parts))
            )
        with self._whole_or_ended():
            match reply := self._await(call, None):
                case StoreAnswered(data=answer):
                    return decode_answer_untrusted(answer)
                case MessageFailed():
                    raise error_of(reply.verdict)
                case _:
                    raise self._nonsense(type(reply).__name__)

    def done(self, call: int) -> bool:
        """Whether a call has ended, well or badly."""
        try:
            with postponed():
                while call in self._under_way and call not in self._answers:
                    if not self._read_some(0.0, call):
                        break
        except PmeshError:
            return True
        return call in self._answers or call not in self._under_way or self.has_ended

    def end(self, call: int, timeout_s: float | None) -> Arrived | None:
        """Wait for a call; what it has received, if it is a receive.

        Raises:
            TimeoutError: it is still under way.
            PmeshError: what became of it; MeshClosed or AgentStopped if the connection has ended.
        """
        with self._whole_or_ended():
            match reply := self._await(call, timeout_s):
                case MessageSent():
                    return None
                case MessageFailed():
                    raise error_of(reply.verdict)
                case MessageReceived():
                    return self._arrived(reply)
                case _:
                    raise self._nonsense(type(reply).__name__)

    def close(self, reason: str) -> None:
        """End it; threads that wait get MeshClosed, with this reason."""
        self._end(mesh_ended(reason))

    @contextlib.contextmanager
    def _whole_or_ended(self) -> Generator[None]:
        """What Ctrl-C interrupts in the middle would leave an answer that nobody takes."""
        with postponed():
            try:
                yield
            except (TimeoutError, PmeshError):
                raise
            except BaseException as e:
                self._end(e)
                raise

    def _end(self, why: BaseException) -> None:
        with self._news:
            if self._ended is None:
                what = f"the connection for messages has ended: {str(why) or type(why).__name__}"
                self._ended = why if isinstance(why, PmeshError) else MeshClosed(what)
            if self._reading:
                self._connection.interrupt()  # the reader closes it
            else:
                self._connection.close()
                self._inputs.clear()
                self._maps.clear()
            self._news.notify_all()

    # --- arenas

    def _take_input(self, nbytes: int) -> Mapped:
        with self._wanting, self._whole_or_ended():
            with self._news:
                fitting = [arena for arena in self._inputs if arena.nbytes >= nbytes]
                if fitting:
                    best = min(fitting, key=lambda arena: arena.nbytes)
                    self._inputs.remove(best)
                    return best
            with self._sending:
                self._send(WantArena(nbytes))
            match reply := self._await(_ARENA, None):
                case ArenaGranted():
                    return self._maps.pop(reply.arena)
                case Refused():
                    raise error_of(reply.verdict)
                case _:
                    raise self._nonsense(type(reply).__name__)

    def _give_back(self, call: int) -> None:
        arena = self._lent.pop(call, None)
        if arena is None:
            return
        with self._news:
            self._inputs.append(arena)
            if len(self._inputs) <= KEPT_INPUTS:
                return
            smallest = min(self._inputs, key=lambda arena: arena.nbytes)
            self._inputs.remove(smallest)
        with self._sending:
            self._send(DropArena(smallest.number))

    def _arrived(self, reply: MessageReceived) -> Arrived:
        envelope = reply.envelope
        if not envelope.nbytes:
            return Arrived(reply.source, envelope, np.empty(0, np.uint8))
        arena = self._maps.get(reply.arena)
        if arena is None or arena.nbytes < envelope.nbytes:
            raise self._nonsense("a message in an arena that was not granted")
        data = np.frombuffer(arena.memory, np.uint8, envelope.nbytes).copy()
        with self._sending:
            self._send(DropArena(reply.arena))
        return Arrived(reply.source, envelope, data)

    # --- messages

    def _next_call(self) -> int:
        self._calls += 1
        self._under_way.add(self._calls)
        return self._calls

    def _send(self, *requests: Request) -> None:
        self._check_open()
        try:
            self._connection.send(*requests)
        except BaseException as e:
            self._end(e)
            if isinstance(e, AgentStopped):  # perhaps because another thread has closed it
                self._check_open()
            raise

    def _await(self, call: int, timeout_s: float | None) -> Reply:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._news:
                if call in self._answers:
                    reply = self._answers.pop(call)
                    break
                self._check_open()
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise TimeoutError
            self._read_some(left_s, call)
        self._under_way.discard(call)
        self._give_back(call)
        return reply

    def _read_some(self, timeout_s: float | None, call: int) -> bool:
        """Read a message, or wait until another thread has; returns whether one may have come."""
        with self._news:
            if call in self._answers:  # since its thread has looked
                return True
            self._check_open()
            if self._reading:
                return wait(lambda: self._news.wait(timeout_s), otherwise=True)
            self._reading = True
        reply: Reply | None = None
        try:
            reply = self._connection.receive_within(timeout_s)
            if reply is not None:
                self._sort(reply)
        except ProtocolError as e:
            raise self._nonsense(str(e)) from e
        except BaseException as e:
            self._end(e)
            if isinstance(e, PmeshError):
                self._check_open()  # whatever ended it first
            raise
        finally:
            with self._news:
                self._reading = False
                if self._ended is not None:
                    self._connection.close()
                self._news.notify_all()
        return reply is not None

    def _sort(self, reply: Reply) -> None:
        match reply:
            case ArenaGranted(kind=kind):
                self._maps[reply.arena] = self._connection.map_arena(reply)
                if kind == "input":
                    self._answers[_ARENA] = reply
            case ArenaGone(arena):
                self._maps.pop(arena, None)
            case Refused():
                self._answers[_ARENA] = reply
            case MessageWaits(waited_s=waited_s, on=on):
                names = " or ".join(on)
                _logger.warning("waiting for a message for %.0f s, with %s", waited_s, names)
            case StoreWaits(waited_s=waited_s, on=on):
                _logger.warning("waiting for %.0f s: %s", waited_s, on)
            case StoreAnswered(call, data, more):
                whole = self._parts.setdefault(call, bytearray())
                whole += data
                if not more:
                    self._answers[call] = StoreAnswered(call, bytes(self._parts.pop(call)), more)
            case MessageSent(call) | MessageReceived(call) | MessageFailed(call):
                self._answers[call] = reply
            case _:
                raise ProtocolError(f"an answer to another question: {type(reply).__name__}")

    def _check_open(self) -> None:
        if self._ended is not None:
            # A copy: with the traceback of the original, arenas would stay mapped.
            raise type(self._ended)(str(self._ended))

    def _nonsense(self, what: str) -> AgentStopped:
        error = self._connection.nonsense(what)
        self._end(error)
        return error
