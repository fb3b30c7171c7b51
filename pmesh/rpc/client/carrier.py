"""Carries frames and arrays between ranks: a connection to the agent, and the thread that reads it.

Frames that are posted while others travel go together in the next batch. So a single call takes one
message each way, and many calls share theirs.
"""

import contextlib
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np

from pmesh.client.calls import threads
from pmesh.client.session.connection import mesh_ended
from pmesh.core.ops.reductions import Values
from pmesh.core.wire.calls import Envelope
from pmesh.errors import OpTimedOut, PmeshError, ProtocolError, RankLost, RunError, UsageError
from pmesh.ids import TrainerId
from pmesh.p2p.client.session import Arrived, P2PSession
from pmesh.p2p.wire import MAX_MESSAGES
from pmesh.rpc.client.values import Came
from pmesh.rpc.wire import (
    BATCH_BYTES,
    FIRST_ARRAY,
    FRAMES,
    AnyFrame,
    Apart,
    decode_untrusted,
    encode,
    join,
)

BATCHES = 2  # on the way to a rank at a time: one travels while the next one fills
RECEIVES = 2  # from each rank: one is posted while the other one's frames are handled
TICK_S = 0.25  # how soon a newcomer is heard, an object that nobody refers to is let go, and so on

ARRAYS_ASKED = 256  # receives at a time, for all ranks: an agent keeps those of a trainer in a list
ARRAYS_SENT = MAX_MESSAGES * 3 // 4  # sends at a time: the rest is for receives and frames
_LEAST_S = 1e-3  # a receive whose time is over still ends as others do

BORROWED_BYTES = 1024 * 1024  # at least: a session lends few, and to copy less costs nothing

_logger = logging.getLogger("pmesh")

Failed: TypeAlias = Callable[[PmeshError], None]
"""Called if an array was not sent."""
Taker: TypeAlias = Callable[[Came], None]
"""Takes an array that has arrived."""
_Ended: TypeAlias = Callable[[P2PSession, int], None]
"""Handles the end of one send or receive, whose result it takes."""


class Events(Protocol):
    """What happens to the carrier. Its thread calls these one after the other."""

    def received(self, source: TrainerId, frame: AnyFrame) -> None:
        """Handle a frame."""
        ...

    def lost(self, rank: TrainerId, why: RankLost) -> None:
        """Handle the loss of a rank; nothing comes from it any more."""
        ...

    def cut_off(self, why: PmeshError) -> None:
        """Handle the end of the connection: all ranks are lost to this one, for now."""
        ...

    def tick(self) -> None:
        """Do what is due; called every TICK_S."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Awaited:
    """An array that a frame has announced, and that is to be received."""

    apart: Apart
    deadline: float
    taker: Taker


@dataclass(slots=True, eq=False)
class _Box:
    """What is to be sent to one rank, and the receives that wait for what it sends."""

    frames: deque[bytes] = field(default_factory=deque[bytes])
    batches: int = 0
    """Those on the way."""
    receives: deque[int] = field(default_factory=deque[int])
    arrived: dict[int, Arrived | None] = field(default_factory=dict[int, Arrived | None])
    """By receive: a later one may have ended first."""
    awaited: deque[_Awaited] = field(default_factory=deque[_Awaited])
    asked: int = 0
    """How many arrays are being received; they come in the order of the frames."""


class Carrier:
    """The connection of one trainer for its calls. Any thread may call."""

    def __init__(
        self,
        open_session: Callable[[], P2PSession],
        peers: Callable[[], Sequence[TrainerId]],
        events: Events,
    ) -> None:
        """`open_session` attaches to the agent, or raises; `peers` are the other ranks now."""
        self._open_session = open_session
        self._peers = peers
        self._events = events
        self._lock = threading.RLock()
        self._session: P2PSession | None = None
        self._boxes: dict[TrainerId, _Box] = {}
        self._lost: dict[TrainerId, RankLost] = {}
        self._ends: dict[int, _Ended] = {}
        self._tags = itertools.count(FIRST_ARRAY)
        self._sending = 0
        """How many arrays are on the way."""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self.borrows = False
        """Large arrays may arrive read-only, in shared memory, which saves a copy."""

    def start(self) -> None:
        """Receive from now on, as soon as this trainer is in its job."""
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threads.start(self._run, "pmesh-rpc")

    def close(self) -> None:
        """End the connection and the thread."""
        self._closed.set()
        with self._lock:
            if self._session is not None:
                self._session.close("it was closed")

    def next_tag(self) -> int:
        """Return the tag of an array that travels by itself."""
        return next(self._tags)

    def post(
        self,
        to: TrainerId,
        frame: AnyFrame,
        arrays: Sequence[tuple[int, Values]] = (),
        *,
        timeout_s: float = math.inf,
        failed: Failed | None = None,
    ) -> None:
        """Send a frame, and arrays by their tags; return before they have arrived.

        Frames arrive in the order of these calls. The arrays may be changed once this has returned.

        Args:
            to: the rank.
            frame: the frame.
            arrays: the arrays that it announces, flat uint8.
            timeout_s: how long the receiver may take until it receives the arrays.
            failed: called if an array can't be sent.

        Raises:
            RankLost: it is lost.
            UsageError: there is no memory for an array, or too many are on the way.
            PmeshError: there is no connection.
        """
        encoded = encode(frame)
        with self._lock:
            session = self._opened()
            if self._sending + len(arrays) > ARRAYS_SENT:
                raise UsageError(
                    f"at most {ARRAYS_SENT} large arrays are on the way to other ranks at a time, "
                    f"and there would be {self._sending + len(arrays)}: send fewer in a call, "
                    "or wait for calls that have begun"
                )
            box = self._box(session, to)
            box.frames.append(encoded)
            self._flush(session, to, box)
            for tag, data in arrays:
                envelope = Envelope(tag, "uint8", (data.size,), data.size)
                call = session.begin_send(to, envelope, data, timeout_s)
                self._sending += 1
                self._ends[call] = self._sent(failed)

    def receive(
        self, source: TrainerId, arrays: Sequence[Apart], timeout_s: float, takers: Sequence[Taker]
    ) -> None:
        """Receive arrays that a frame has announced. Called by the events' thread.

        Each comes to its taker; None or an error in its place if it can't come.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            session = self._opened()
            box = self._box(session, source)
            for apart, taker in zip(arrays, takers, strict=True):
                box.awaited.append(_Awaited(apart, deadline, taker))
            self._ask_for_arrays(session, source, box)

    # --- inside

    def _opened(self) -> P2PSession:
        if self._closed.is_set():
            raise mesh_ended("it was closed")
        if self._session is None:
            self._session = self._open_session()
            self._session.follow_ends()
            self.start()
        return self._session

    def _box(self, session: P2PSession, rank: TrainerId) -> _Box:
        if rank in self._lost:
            raise RankLost(str(self._lost[rank]))
        if rank not in self._boxes:
            box = self._boxes[rank] = _Box()
            for _ in range(RECEIVES):
                self._receive_frames(session, rank, box)
        return self._boxes[rank]

    def _receive_frames(self, session: P2PSession, rank: TrainerId, box: _Box) -> None:
        call = session.begin_receive((rank,), FRAMES, math.inf)
        box.receives.append(call)

        def ended(session: P2PSession, call: int) -> None:
            try:
                box.arrived[call] = session.end(call, 0)
            except RankLost as e:
                self._lose(rank, e)
                return
            with self._lock:
                self._receive_frames(session, rank, box)
            while box.receives[0] in box.arrived:
                for frame in _frames_untrusted(box.arrived.pop(box.receives.popleft())):
                    self._events.received(rank, frame)

        self._ends[call] = ended

    def _ask_for_arrays(self, session: P2PSession, source: TrainerId, box: _Box) -> None:
        """Receive the arrays that are to come next, a few at a time; the caller holds the lock."""
        while box.awaited and box.asked < max(1, ARRAYS_ASKED // len(self._boxes)):
            awaited = box.awaited.popleft()
            apart, left_s = awaited.apart, max(awaited.deadline - time.monotonic(), _LEAST_S)
            borrows = self.borrows and apart.nbytes >= BORROWED_BYTES
            call = session.begin_receive((source,), apart.tag, left_s, borrows=borrows)
            box.asked += 1
            self._ends[call] = self._array_came(source, box, awaited)

    def _array_came(self, source: TrainerId, box: _Box, awaited: _Awaited) -> _Ended:
        def ended(session: P2PSession, call: int) -> None:
            awaited.taker(_array_of(session, call, awaited.apart))
            with self._lock:
                box.asked -= 1
                if self._boxes.get(source) is box:
                    self._ask_for_arrays(session, source, box)

        return ended

    def _sent(self, failed: Failed | None) -> _Ended:
        def ended(session: P2PSession, call: int) -> None:
            with self._lock:
                self._sending -= 1
            try:
                session.end(call, 0)
            except (RankLost, OpTimedOut):
                return  # the receiver is lost, or needs it no more
            except UsageError as e:
                if failed is not None:
                    failed(e)

        return ended

    def _flush(self, session: P2PSession, to: TrainerId, box: _Box) -> None:
        """Send the frames that wait, unless enough are on the way; the caller holds the lock."""
        while box.frames and box.batches < BATCHES:
            batch, size = [box.frames.popleft()], 0
            while box.frames and (size := size + len(batch[-1])) + len(box.frames[0]) < BATCH_BYTES:
                batch.append(box.frames.popleft())
            data: Values = np.frombuffer(join(batch), np.uint8)
            envelope = Envelope(FRAMES, "uint8", (data.size,), data.size)
            try:
                call = session.begin_send(to, envelope, data, math.inf)
            except UsageError:  # no memory now; the next tick tries again
                box.frames.extendleft(reversed(batch))
                return
            box.batches += 1

            def ended(session: P2PSession, call: int) -> None:
                with contextlib.suppress(RankLost):  # the receives report it
                    session.end(call, 0)
                with self._lock:
                    box.batches -= 1
                    if self._boxes.get(to) is box:
                        self._flush(session, to, box)

            self._ends[call] = ended

    def _lose(self, rank: TrainerId, why: RankLost) -> None:
        with self._lock:
            known = self._boxes.pop(rank, None)
            self._lost[rank] = why
        if known is not None:
            self._events.lost(rank, why)

    # --- the thread

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                with self._lock:
                    session = self._opened()
                self._carry(session)
            except PmeshError as e:
                self._cut_off(e)
                self._closed.wait(TICK_S)
            except Exception as e:
                _logger.exception("an error of pmesh ends the calls that are under way")
                self._cut_off(RunError(f"an error of pmesh: {type(e).__name__}: {e}"))
                self._closed.wait(TICK_S)
        self._cut_off(mesh_ended("it was closed"))

    def _carry(self, session: P2PSession) -> None:
        next_tick = 0.0
        while True:
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + TICK_S
                self._keep_up(session)
                self._events.tick()
            call = session.next_end(TICK_S)
            if call is not None:
                with self._lock:  # whoever began the call has noted what is to follow
                    ended = self._ends.pop(call, None)
                if ended is not None:
                    ended(session, call)

    def _keep_up(self, session: P2PSession) -> None:
        """Receive from newcomers, forget those that are gone, send what had to wait."""
        peers = self._peers()
        with self._lock:
            for gone in self._lost.keys() - set(peers):
                del self._lost[gone]
            for rank in peers:
                if rank not in self._lost:
                    self._box(session, rank)
            for rank, box in self._boxes.items():
                self._flush(session, rank, box)

    def _cut_off(self, why: PmeshError) -> None:
        with self._lock:
            session, self._session = self._session, None
            self._boxes.clear()
            self._lost.clear()
            self._ends.clear()
            self._sending = 0
        if session is not None:
            session.close(str(why))
            self._events.cut_off(why)


def _array_of(session: P2PSession, call: int, apart: Apart) -> Came:
    try:
        arrived = session.end(call, 0)
    except (RankLost, OpTimedOut):
        return None
    except UsageError as e:  # there is no memory for it
        return e
    data = None if arrived is None else arrived.data
    return data if data is not None and data.size == apart.nbytes else None


def _frames_untrusted(arrived: Arrived | None) -> Sequence[AnyFrame]:
    try:
        return decode_untrusted(b"" if arrived is None else arrived.data.tobytes())
    except ProtocolError as e:
        _logger.warning("a rank has sent what is no call: %s", e)
        return ()
