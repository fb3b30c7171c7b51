"""A trainer's second connection to its agent, for messages and the job's store.

Several calls of any threads may run at the same time. The first thread that waits reads for all of
them, and wakes the others at each reply. If so many sends are under way that shared memory or
descriptors run short, further sends wait here (`Sends`) and begin when others have ended.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pmesh.client.session.arenas import Mapped, map_arena, tracked
from pmesh.client.session.connection import AgentConnection, error_of, mesh_ended
from pmesh.client.session.interrupts import Postponed, wait
from pmesh.core.ops.reductions import Values
from pmesh.core.values import Verdict
from pmesh.core.wire.calls import Envelope
from pmesh.core.wire.session import (
    SESSION_VERSION,
    ArenaGone,
    ArenaGranted,
    DropArena,
    MessageFailed,
    Refused,
    WantArena,
)
from pmesh.errors import AgentStopped, MeshClosed, PmeshError, ProtocolError, UsageError
from pmesh.ids import JobName, TrainerId
from pmesh.p2p.client.sends import Send, Sends
from pmesh.p2p.wire import (
    ATTACHED_REPLIES,
    MAX_MESSAGES,
    Attach,
    AttachedReply,
    AttachedRequest,
    MessageReceived,
    MessageSent,
    MessageWaits,
    ReceiveMessage,
    SendMessage,
)
from pmesh.store.wire import (
    MAX_STORE_DATA_BYTES,
    Answer,
    Command,
    StoreAnswered,
    StoreCall,
    StoreWaits,
    decode_answer_untrusted,
    encode,
)

KEPT_INPUTS = 4  # arenas kept for later sends: faulting in fresh memory costs more than a copy
_ARENA = -1
"""The key of the reply to WantArena, which has no call."""
_NOTHING = -2
"""The key of no reply."""
_ANY = -3
"""The key of the end of any call."""
_LEAST_S = 1e-3  # a send that has used up its time here still fails with the agent's OpTimedOut

_logger = logging.getLogger("pmesh")


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message that has been received."""

    source: TrainerId
    envelope: Envelope
    data: Values
    """Flat uint8; the caller may keep it."""


def attach(home: Path, job: JobName, trainer: TrainerId) -> "P2PSession":
    """Open the trainer's second connection to the agent; the caller closes it.

    Raises:
        HistorySuperseded: the agent does not know this trainer any more.
        AgentNotRunning: there is no agent.
    """
    connection = AgentConnection(home, ATTACHED_REPLIES)
    try:
        connection.send(Attach(SESSION_VERSION, job, trainer))
        reply = connection.receive()
    except BaseException:
        connection.close()
        raise
    if isinstance(reply, Refused):
        connection.close()
        raise error_of(reply.verdict)
    return P2PSession(connection)


class P2PSession:
    """Sends, receives and store calls over one attached connection."""

    def __init__(self, connection: AgentConnection[AttachedReply]) -> None:
        self._connection = connection
        self._news = threading.Condition()
        self._reading = False
        self._answers: dict[int, AttachedReply | Arrived] = {}
        self._under_way: set[int] = set()
        self._forgotten: deque[int] = deque()
        """Calls whose handles are gone. The garbage collector appends, in any thread."""
        self._calls = 0
        self._sending = threading.Lock()
        self._wanting = threading.Lock()
        self._starting = threading.Lock()
        self._sends = Sends()
        self._inputs: list[Mapped] = []
        self._lent: dict[int, Mapped] = {}
        self._maps: dict[int, Mapped] = {}
        self._dropped: deque[int] = deque()
        """Arenas that are free, which the agent does not know yet. The garbage collector appends,
        too, in any thread."""
        self._parts: dict[int, bytearray] = {}
        """The parts of the store's answers that have arrived."""
        self._finished: deque[int] | None = None
        """The calls that have ended, if `next_end` is to return them."""
        self._ended: PmeshError | None = None

    @property
    def has_ended(self) -> bool:
        """True if further calls need another connection."""
        return self._ended is not None

    def begin_send(self, to: TrainerId, envelope: Envelope, data: Values, timeout_s: float) -> int:
        """Begin to send an array's bytes, or queue them; return the number of the call.

        Raises:
            UsageError: too many calls are under way.
        """
        self._read_pending()
        with self._sending:
            call = self._next_call()
        send = Send(call, to, envelope, data, time.monotonic() + timeout_s)
        with self._news:
            starts = self._sends.begin(send)
        if starts:
            self._start(send)
            failed = self._answers.get(call)
            if isinstance(failed, MessageFailed):  # there is no memory, and none will be freed
                self.end(call, None)
        return call

    def begin_receive(
        self,
        sources: tuple[TrainerId, ...],
        tag: int,
        timeout_s: float,
        *,
        borrows: bool = False,
    ) -> int:
        """Begin to receive a message from one of the sources; return the number of the call.

        Args:
            sources: who may send it.
            tag: its tag.
            timeout_s: until the receive fails.
            borrows: the data may be read-only, in shared memory.

        Raises:
            UsageError: too many calls are under way.
        """
        self._read_pending()
        with self._sending:
            call = self._next_call()
            self._send(ReceiveMessage(call, sources, tag, timeout_s, borrows))
        self._report_dropped()
        return call

    def follow_ends(self) -> None:
        """Let `next_end` return the calls that begin from now on."""
        self._finished = deque()

    def next_end(self, timeout_s: float) -> int | None:
        """Wait until some send or receive has ended; return its number, of each once, for `end`.

        It may also return the number of a call whose `begin_send` has raised an error.

        Returns:
            None if no call has ended within `timeout_s`.

        Raises:
            PmeshError: the session has ended.
        """
        deadline = time.monotonic() + timeout_s
        with self._end_if_torn():
            while not self._finished:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return None
                self._read_some(left_s, _ANY)
                self._start_queued()
        return self._finished.popleft()

    def forget(self, call: int) -> None:
        """Drop the call's result, which nobody will take; any thread may call this at any time."""
        self._forgotten.append(call)

    def ask_store(self, command: Command, timeout_s: float) -> Answer:
        """Run a command in the job's store and return its answer. Raises PmeshError as `end`."""
        data = encode(command)
        begins = range(0, len(data), MAX_STORE_DATA_BYTES)
        parts = [data[begin : begin + MAX_STORE_DATA_BYTES] for begin in begins]
        with self._sending:
            call, last = self._next_call(), len(parts) - 1
            self._send(
                *(StoreCall(call, part, i < last, timeout_s) for i, part in enumerate(parts))
            )
        with self._end_if_torn():
            match reply := self._await(call, None):
                case StoreAnswered(data=answer):
                    return decode_answer_untrusted(answer)
                case MessageFailed():
                    raise error_of(reply.verdict)
                case _:
                    raise self._nonsense(type(reply).__name__)

    def done(self, call: int) -> bool:
        """Return True if a call has ended, with a result or an error."""
        try:
            with self._end_if_torn():
                while call in self._under_way and call not in self._answers:
                    if not self._read_some(0.0, call):
                        break
                    self._start_queued()
        except PmeshError:
            return True
        return call in self._answers or call not in self._under_way or self.has_ended

    def end(self, call: int, timeout_s: float | None) -> Arrived | None:
        """Wait for a call; return the message if it is a receive.

        Raises:
            TimeoutError: the call is still under way.
            PmeshError: the call failed; MeshClosed or AgentStopped if the connection has ended.
        """
        with self._end_if_torn():
            match reply := self._await(call, timeout_s):
                case MessageSent():
                    return None
                case MessageFailed():
                    raise error_of(reply.verdict)
                case Arrived():
                    return reply
                case _:
                    raise self._nonsense(type(reply).__name__)

    def close(self, reason: str) -> None:
        """End the session; threads that wait get MeshClosed, with this reason."""
        self._end(mesh_ended(reason))

    @contextlib.contextmanager
    def _end_if_torn(self) -> Generator[None]:
        """End the session if Ctrl-C interrupts a call, as nobody would take its answer."""
        with Postponed():
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
            self._sends = Sends()
            self._lent.clear()
            self._news.notify_all()

    # --- sends

    def _start(self, send: Send) -> bool:
        """Hand a send to the agent; return False if it must wait for memory of other sends."""
        nbytes = send.envelope.nbytes
        with self._end_if_torn():
            arena = self._take_input(nbytes) if nbytes else None
            if isinstance(arena, Verdict):
                return not self._put_back(send, arena)
            if arena is not None:
                np.frombuffer(arena.memory, np.uint8, nbytes)[:] = send.data
                self._lent[send.call] = arena
            number = -1 if arena is None else arena.number
            left_s = max(send.deadline - time.monotonic(), _LEAST_S)
            with self._sending:
                self._send(SendMessage(send.call, send.to, send.envelope, number, left_s))
            with self._news:
                self._sends.started(send)
            self._report_dropped()
        return True

    def _put_back(self, send: Send, why: Verdict) -> bool:
        with self._news:
            waits = self._sends.put_back(send)
            if not waits:
                self._note_end(send.call, MessageFailed(send.call, why))
                self._news.notify_all()
        return waits

    def _start_queued(self) -> None:
        """Start the queued sends that may start; one thread at a time, to keep their order."""
        while self._sends.queued and self._starting.acquire(blocking=False):
            try:
                with self._news:
                    send = self._sends.next()
                if send is None or not self._start(send):
                    return
            finally:
                self._starting.release()

    def _take_input(self, nbytes: int) -> Mapped | Verdict:
        """Return an arena to write to, or why there is none."""
        with self._wanting, self._end_if_torn():
            with self._news:
                fitting = [arena for arena in self._inputs if arena.nbytes >= nbytes]
                if fitting:
                    best = min(fitting, key=lambda arena: arena.nbytes)
                    self._inputs.remove(best)
                    return best
            granted = self._want(nbytes)
            if isinstance(granted, Verdict) and self._inputs:  # these are too small, but take room
                with self._news:
                    self._dropped += [arena.number for arena in self._inputs]
                    self._inputs.clear()
                granted = self._want(nbytes)
            return granted

    def _want(self, nbytes: int) -> Mapped | Verdict:
        with self._sending:
            self._send(WantArena(nbytes))
        match reply := self._await(_ARENA, None):
            case ArenaGranted():
                return self._maps.pop(reply.arena)
            case Refused():
                return reply.verdict
            case _:
                raise self._nonsense(type(reply).__name__)

    def _sent(self, call: int) -> None:
        """Handle the end of a send, whether it failed or not."""
        with self._news:
            self._sends.ended(call)
            arena = self._lent.pop(call, None)
            if arena is None:
                return
            self._inputs.append(arena)
            if len(self._inputs) > KEPT_INPUTS:
                smallest = min(self._inputs, key=lambda arena: arena.nbytes)
                self._inputs.remove(smallest)
                self._dropped.append(smallest.number)

    def _arrived(self, reply: MessageReceived) -> Arrived:
        """Copy the message out of its arena, as other messages wait for room, or borrow it."""
        envelope = reply.envelope
        if not envelope.nbytes:
            return Arrived(reply.source, envelope, np.empty(0, np.uint8))
        arena = self._maps.get(reply.arena)
        if arena is None or arena.nbytes < envelope.nbytes:
            raise ProtocolError("a message in an arena that was not granted")
        data = np.frombuffer(arena.memory, np.uint8, envelope.nbytes)
        if reply.lent:
            lent = tracked(data, reply.arena, self._dropped)
            return Arrived(reply.source, envelope, lent)
        data = data.copy()
        self._dropped.append(reply.arena)
        return Arrived(reply.source, envelope, data)

    def _report_dropped(self) -> None:
        """Tell the agent which arenas are free; a thread that is sending already does it."""
        while self._dropped and self._ended is None and self._sending.acquire(blocking=False):
            try:
                self._send()
            finally:
                self._sending.release()

    # --- messages

    def _next_call(self) -> int:
        self._check_open()
        if len(self._under_way) >= MAX_MESSAGES:
            raise UsageError(
                f"at most {MAX_MESSAGES} sends and receives at a time: wait for some of them"
            )
        self._calls += 1
        self._under_way.add(self._calls)
        return self._calls

    def _read_pending(self) -> None:
        """Read what has arrived, as the agent waits for that; drop results of forgotten calls."""
        with self._end_if_torn():
            while self._under_way and not self._reading and self._read_some(0.0, _NOTHING):
                pass
            with self._news:
                for _ in range(len(self._forgotten)):
                    call = self._forgotten.popleft()
                    if call in self._answers or call not in self._under_way:
                        self._answers.pop(call, None)
                        self._under_way.discard(call)
                    else:
                        self._forgotten.append(call)  # once it has ended
        self._start_queued()

    def _send(self, *requests: AttachedRequest) -> None:
        """Send requests, and the numbers of free arenas."""
        self._check_open()
        dropped = [DropArena(self._dropped.popleft()) for _ in range(len(self._dropped))]
        try:
            self._connection.send(*dropped, *requests)
        except BaseException as e:
            self._end(e)
            if isinstance(e, AgentStopped):  # another thread may have closed it
                self._check_open()
            raise

    def _await(self, call: int, timeout_s: float | None) -> AttachedReply | Arrived:
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
            if call != _ARENA:  # with _ARENA a send is just being started
                self._start_queued()
        self._under_way.discard(call)
        return reply

    def _read_some(self, timeout_s: float | None, call: int) -> bool:
        """Read a reply, or wait until another thread has; return True if one may have arrived."""
        with self._news:
            # It may have arrived since the caller has checked.
            if call in self._answers or (call == _ANY and self._finished):
                return True
            self._check_open()
            if self._reading:
                return wait(lambda: self._news.wait(timeout_s), otherwise=True)
            self._reading = True
        reply: AttachedReply | None = None
        try:
            reply = self._connection.receive_within(timeout_s)
            if reply is not None:
                self._sort(reply)
        except ProtocolError as e:
            raise self._nonsense(str(e)) from e
        except BaseException as e:
            self._end(e)
            if isinstance(e, PmeshError):
                self._check_open()  # raise what ended it first
            raise
        finally:
            with self._news:
                self._reading = False
                if self._ended is not None:
                    self._connection.close()
                self._news.notify_all()
        self._report_dropped()
        return reply is not None

    def _sort(self, reply: AttachedReply) -> None:
        match reply:
            case ArenaGranted(kind=kind):
                self._maps[reply.arena] = map_arena(reply, self._connection.take_descriptor())
                if kind == "input":
                    self._answers[_ARENA] = reply
            case ArenaGone(arena):
                self._maps.pop(arena, None)
            case Refused():
                self._answers[_ARENA] = _no_last_words(reply)
            case MessageWaits() | StoreWaits():
                _warn_of_a_wait(reply)
            case StoreAnswered(call, data, more):
                whole = self._parts.setdefault(call, bytearray())
                whole += data
                if not more:
                    self._answers[call] = StoreAnswered(call, bytes(self._parts.pop(call)), more)
            case MessageReceived(call):
                self._note_end(call, self._arrived(reply))
            case MessageSent(call) | MessageFailed(call):
                self._note_end(call, reply)
                self._sent(call)
            case _:
                raise ProtocolError(f"an answer to another question: {type(reply).__name__}")

    def _note_end(self, call: int, reply: MessageSent | MessageFailed | Arrived) -> None:
        self._answers[call] = reply
        if self._finished is not None:
            self._finished.append(call)

    def _check_open(self) -> None:
        if self._ended is not None:
            # A copy: with the traceback of the original, arenas would stay mapped.
            raise type(self._ended)(str(self._ended))

    def _nonsense(self, what: str) -> AgentStopped:
        error = self._connection.nonsense(what)
        self._end(error)
        return error


def _no_last_words(refused: Refused) -> Refused:
    """Return the refusal of an arena; raise the error by which the agent has ended the session."""
    if refused.verdict.error == "AgentStopped":
        raise error_of(refused.verdict)
    return refused


def _warn_of_a_wait(waits: MessageWaits | StoreWaits) -> None:
    if isinstance(waits, StoreWaits):
        _logger.warning("waiting for %.0f s: %s", waits.waited_s, waits.on)
    else:
        names = " or ".join(waits.on)
        _logger.warning("waiting for a message for %.0f s, with %s", waits.waited_s, names)
