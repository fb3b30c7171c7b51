"""A trainer's session with its agent: one op after the other, through arenas.

If something unexpected happens in the middle of an exchange, it is unknown which reply comes next.
So the session ends, and each later call raises an error with the reason.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import msgspec
import numpy as np

from pmesh.client.session.arenas import (
    InputRegion,
    KeptValues,
    Mapped,
    Residuals,
    UsersArrays,
    map_arena,
    values_in,
)
from pmesh.client.session.connection import (
    ANSWER_S,
    FIRST_ANSWER_S,
    AgentConnection,
    error_of,
    mesh_ended,
)
from pmesh.client.session.waiting import WaitNotices
from pmesh.compression.blocks import Float32s
from pmesh.core.jobs.call_count import CallCount
from pmesh.core.ops.kinds import KINDS, extent_of
from pmesh.core.ops.reductions import WIRE_DTYPES, Values
from pmesh.core.values import Comparison
from pmesh.core.wire.calls import Call
from pmesh.core.wire.session import ArenaGone, ArenaGranted, DropArena, Refused, WantArena
from pmesh.core.wire.trainer import (
    ENTERS,
    MAX_COMPRESSION_TEXT,
    ComparesStates,
    Compresses,
    Connect,
    Joined,
    Leave,
    OpDone,
    OpFailed,
    RanksLost,
    ReportsNumbers,
    StartOp,
    StillWaiting,
    TrainerReply,
    TrainerRequest,
    WireDtype,
    World,
)
from pmesh.errors import (
    HistorySuperseded,
    PmeshError,
    ProtocolError,
    UsageError,
)
from pmesh.ids import OpNumber, TrainerId

_RESIDUAL_BYTES = 4  # float32
_ALIGNMENT_BYTES = 64  # a cache line, and a multiple of every dtype's size

_logger = logging.getLogger("pmesh")


@dataclass(frozen=True, slots=True)
class Done:
    """An op that has completed."""

    op: OpNumber
    world: World
    """The ranks whose values are in the result (O5), as `TrainerSession.ranks` counts them."""
    values: Values
    """The result; read it before the next op, or in the `meanwhile` of that."""
    clipped: int = 0
    """The number of finite values that the compression has clipped on this rank."""
    lent: bool = False
    """True if the caller may keep the values."""


@dataclass(frozen=True, slots=True)
class Early:
    """An op that is sent before the one before it has ended. It gives as many values as it gets."""

    call: Call
    wire: str
    count: int
    """The number of its values, at least 1."""
    fill: Callable[[Values], None]
    """Writes them into shared memory."""


class TrainerSession:
    """A blocking session for one thread at a time; only `interrupt` may come from another."""

    def __init__(self, connection: AgentConnection[TrainerReply]) -> None:
        self._connection = connection
        self.world = World(-1, (), ())
        """The ranks in the order of the agents' ring, as in `Call.root` and in tables."""
        self.order: tuple[TrainerId, ...] | None = None
        """The order of the ranks of a group; None for the order of the ring."""
        self.step = 0
        """`mesh.step` after the next `sync`, for `pmesh status`."""
        self.share_percent = -1
        """This rank's share of the rows, for `pmesh status`."""
        self.reports: dict[str, float] = {}
        """What the trainer has reported, for `pmesh status`; replaced at once, by any thread."""
        self._reports_sent = self.reports
        self._comparison: ComparesStates | None = None  # not sent yet
        self._own = 0.0, time.monotonic()
        """How long it has computed until when; replaced at once, as any thread reads it."""
        self._input: Mapped | None = None
        self._sent: Mapped | None = None
        """The input of the last broadcast of which this rank was the root."""
        self._ahead: Mapped | None = None
        self._ahead_is_filled = False
        self._outputs: dict[int, Mapped] = {}
        self._begun = deque[StartOp]()
        self._residuals: set[Residuals] = set()
        self._users = UsersArrays()
        self.next_op = OpNumber(0)
        self.calls = CallCount()
        self._compression = ""
        self.enters = False
        """True if the next op must be the `sync` in which it enters the job, or comes back."""
        self._waiting = WaitNotices()
        self.ended: str | None = None
        """Why the session has ended."""

    def join(self, request: Connect) -> Joined:
        """Join a job; return when it begins, or if it runs already. Raises the agent's error."""
        reply = self._exchange(request)
        if isinstance(reply, Joined):
            self.world = reply.world
            self.enters = reply.world.rank < 0
            return reply
        raise self._answer_error(reply)

    @property
    def own_s(self) -> float:
        """How many seconds the trainer has spent outside of requests: it computes meanwhile."""
        own_s, since = self._own
        return own_s + max(0.0, time.monotonic() - since)

    @property
    def ranks(self) -> World:
        """The world as the user counts its ranks."""
        world, order = self.world, self.order
        if order is None or not set(world.trainers) <= set(order):
            return world
        places = sorted(range(len(world.trainers)), key=lambda i: order.index(world.trainers[i]))
        return World(
            places.index(world.rank) if world.rank >= 0 else -1,
            tuple(world.trainers[i] for i in places),
            tuple(world.names[i] for i in places),
        )

    @property
    def places(self) -> tuple[int, ...]:
        """The place of each rank in the ring."""
        return tuple(self.world.trainers.index(trainer) for trainer in self.ranks.trainers)

    def input_values(
        self, dtype: str, count: int, *, room_bytes: int, retained: bool = False
    ) -> Values:
        """Return shared memory for an op's values, which is reused, also across ops.

        Args:
            dtype: one of WIRE_DTYPES.
            count: the number of values.
            room_bytes: the most that later ops of the same call need, to request memory only once.
            retained: whether a broadcast's root sends from it: only the agent reuses it then (O2).
        """
        if self._sent is not None:
            self._drop(self._sent)
            self._sent = None
        if count == 0:
            return np.empty(0, WIRE_DTYPES[dtype])
        nbytes = count * WIRE_DTYPES[dtype].itemsize
        if retained:
            region = self._sent = self._want_arena_instead_of_input(nbytes)
        elif self._input is not None and self._input.nbytes >= nbytes:
            return values_in(self._input, dtype, count)
        else:
            self._drop(self._input)
            self._input = None
            region = self._input = self._want_arena(max(nbytes, room_bytes))
        with self._end_on_error():  # the agent may have granted too little
            return values_in(region, dtype, count)

    def _want_arena_instead_of_input(self, nbytes: int) -> Mapped:
        try:
            return self._want_arena(nbytes)
        except UsageError:
            if self._input is None:
                raise
            self._drop(self._input)
            self._input = None
            return self._want_arena(nbytes)

    def _drop(self, arena: Mapped | None) -> None:
        if arena is not None:
            self._drop_arena(arena.number)

    def empty(self, dtype: str, count: int) -> Values:
        """Return flat values for the user to fill, in an arena that is dropped with the last view.

        Raises:
            UsageError: the agent has no room for them.
        """
        if count == 0:
            return np.empty(0, WIRE_DTYPES[dtype])
        arena = self._want_arena(count * WIRE_DTYPES[dtype].itemsize, lasting=True)
        with self._end_on_error():
            return self._users.input(arena, values_in(arena, dtype, count))

    def region_of(self, values: Values, wire: str) -> InputRegion | None:
        """Return where an op can read these values without a copy; None if it can't."""
        return self._users.region_of(values, wire) if self._users.inputs else None

    def prepare_ahead(self, nbytes: int) -> None:
        """Ask for the memory of `values_ahead`, before an op runs."""
        if self._ahead is not None and self._ahead.nbytes < nbytes:
            self._drop(self._ahead)
            self._ahead = None
        if self._ahead is None and nbytes:
            self._ahead = self._want_arena(nbytes)

    def values_ahead(self, dtype: str, count: int) -> Values:
        """Return memory for the next op's values while an op runs; used if that succeeds."""
        with self._end_on_error():
            values = values_in(self._ahead, dtype, count)
        self._ahead_is_filled = True
        return values

    def residuals(self, count: int) -> Residuals:
        """Return two zeroed arenas for what compressed all-reduces of `count` values round away.

        Raises:
            UsageError: the agent has no room for them.
        """
        committed = self._zeros(count)
        try:
            attempt = self._zeros(count)
        except UsageError:
            self._drop_arena(committed.arena)
            raise
        made = Residuals(committed, attempt)
        self._residuals.add(made)
        return made

    def has(self, residuals: Residuals) -> bool:
        """Return True if the residuals are this session's, and have not been dropped."""
        return residuals in self._residuals

    def drop(self, residuals: Residuals) -> None:
        """Give the arenas of residuals back; do nothing if they are not this session's."""
        if not self.has(residuals):
            return
        self._residuals.remove(residuals)
        for kept in (residuals.committed, residuals.attempt):
            if kept.arena >= 0:
                self._drop_arena(kept.arena)

    def run_op(
        self,
        call: Call,
        dtype: str,
        count: int,
        *,
        timeout_s: float,
        parts: tuple[int, ...] = (),
        parts_in: tuple[int, ...] = (),
        residuals: Residuals | None = None,
        meanwhile: Callable[[], None] | None = None,
        region: InputRegion | None = None,
        borrows: bool = False,
    ) -> Done:
        """Run one op. If this rank gives values, they are those in `input_values`.

        They are those in `values_ahead` if the `meanwhile` of the op before has filled it. With a
        `region` they are the values there; a broadcast's root can't have one. `meanwhile` runs
        during the op; it must not fail, as an error in it ends the session. With `borrows` the
        caller may keep the result if it is `lent`. For the other arguments see `StartOp`.

        If the trainer is not in the job, a `sync` enters it, or comes back to it (O6). A compressed
        all-reduce adds the residuals to the values. If it succeeds, what it has rounded away here
        is the new residual (O9).

        Raises:
            ValueError: the residuals are another session's, or not as many as the values.
            PmeshError: the op failed, with the same error on all ranks; the session continues. Or
                it is AgentStopped, and the session has ended.
        """
        enters = self.enters and call.kind == "sync"
        number = OpNumber(ENTERS) if enters else self.next_op
        wire = cast("WireDtype", dtype)
        kept = (-1, -1) if residuals is None else self._arenas_of(residuals, count)
        world = self.world
        is_root = call.kind == "broadcast" and call.root == world.rank
        request = StartOp(
            number,
            call,
            wire,
            count,
            -1,
            timeout_s,
            parts,
            parts_in,
            *kept,
            borrows=borrows,
            step=self.step,
            share_percent=self.share_percent,
        )
        before = extent_of(request, rank=world.rank, size=len(world.trainers))
        source = (self._sent if is_root else self._input) if before.gives else None
        if region is None and source is not None:
            region = InputRegion(source.number, 0)
        if region is not None:
            request = msgspec.structs.replace(request, arena=region.arena, offset=region.offset)
        self._ahead_is_filled = False
        self.calls.ops += 1
        if self.ended is not None:
            raise mesh_ended(self.ended)
        try:
            reply = self._converse(request, meanwhile)
            if isinstance(reply, OpDone) and (reply.op == number or (enters and reply.op >= 0)):
                self._op_has_ended(reply, consumed=True)
                if residuals is not None and self.world.rank >= 0:
                    residuals.swap()  # O9: also if the result was fetched
                return self._done(request, reply, before.gets, source if is_root else None)
        except BaseException as e:
            self._end_by(e)
            raise
        raise self._failure(request, reply)

    @property
    def has_begun(self) -> bool:
        """True if `end_op` has not ended all that `begin_ops` has laid out."""
        return bool(self._begun)

    def begin_ops(self, ops: Sequence[Early], *, timeout_s: float) -> None:
        """Lay out ops that the first `end_op` sends at once, so that none waits for this process.

        Raises:
            UsageError: the agent has no room for their values.
            MeshClosed: the session has ended.
        """
        self.check_open()
        sizes = [op.count * WIRE_DTYPES[op.wire].itemsize for op in ops]
        starts = [0, *accumulate(-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in sizes)]
        region, requests = self.input_values("uint8", starts[-1], room_bytes=0), list[StartOp]()
        arena = -1 if self._input is None else self._input.number
        for op, size, start in zip(ops, sizes, starts, strict=False):
            op.fill(region[start : start + size].view(WIRE_DTYPES[op.wire]))
            number, wire = OpNumber(self.next_op + len(requests)), cast("WireDtype", op.wire)
            what = number, op.call, wire, op.count, arena, timeout_s
            requests.append(StartOp(*what, offset=start, follows=bool(requests)))
        self._ahead_is_filled = False
        self._begun.extend(requests)

    def end_op(self) -> Done:
        """Return when the next of the ops that `begin_ops` has laid out has ended.

        Raises:
            PmeshError: as for `run_op`. The ops after it are void then: `has_begun` is False.
        """
        request = self._begun.popleft()
        self.calls.ops += 1
        try:
            reply = self._converse(request, sent=request.follows)
            if isinstance(reply, OpDone) and reply.op == request.op:
                self._op_has_ended(reply, consumed=True)
                return self._done(request, reply, request.count, None)
        except BaseException as e:
            self._end_by(e)
            raise
        self._begun.clear()
        raise self._failure(request, reply)

    def _failure(self, request: StartOp, reply: TrainerReply) -> PmeshError:
        """Return the error of an op that has failed."""
        if not isinstance(reply, OpFailed) or request.op not in {reply.op, ENTERS}:
            return self._answer_error(reply)
        self._op_has_ended(reply, consumed=reply.consumed)
        error = error_of(reply.verdict)
        self.enters = self.enters or isinstance(error, HistorySuperseded)
        return error

    def _done(self, request: StartOp, reply: OpDone, gets: int, retained: Mapped | None) -> Done:
        """Return the result of an op: `gets` values, or as many as its table has now."""
        call, world = request.call, self.world
        if call.kind == "sync":
            self.calls.synced()
        if KINDS[call.kind].row:
            # A table has a row for each rank after the op; a root has its rank from before.
            gets = extent_of(request, rank=world.rank, size=len(world.trainers)).gets
        arena = retained or self._outputs.get(reply.arena)
        values = values_in(arena, request.wire_dtype, gets)
        if reply.lent and arena is not None:
            values = self._users.result(arena, values)
        return Done(reply.op, self.ranks, values, reply.clipped, reply.lent)

    def show_compression(self, text: str) -> None:
        """Send the text on compression for `pmesh status`, if it has changed."""
        if text != self._compression:
            self._tell(Compresses(text[:MAX_COMPRESSION_TEXT]))
            self._compression = text

    def show_comparison(self, found: Comparison) -> None:
        """Send what the ranks have found of their states; if all is well, with the next request."""
        self._comparison = ComparesStates(found)
        if found.differing:
            self._tell(*self._take_comparison())

    def _tell(self, *said: Compresses | ComparesStates) -> None:
        self.check_open()
        with self._end_on_error():
            self._connection.send(*said)

    def _arenas_of(self, residuals: Residuals, count: int) -> tuple[int, int]:
        if not self.has(residuals):
            raise ValueError("residuals of another session: copy their values into new ones")
        if residuals.values.size != count:
            raise ValueError(f"{residuals.values.size} residuals of {count} values")
        return residuals.committed.arena, residuals.attempt.arena

    def _zeros(self, count: int) -> KeptValues:
        arena = self._want_arena(count * _RESIDUAL_BYTES, lasting=True) if count else None
        with self._end_on_error():
            values = values_in(arena, "float32", count)
        values.fill(0)  # the agent does not clear an arena before it grants it again
        return KeptValues(-1 if arena is None else arena.number, cast("Float32s", values))

    def _want_arena(self, nbytes: int, *, lasting: bool = False) -> Mapped:
        reply = self._exchange(WantArena(nbytes, lasting))
        if not isinstance(reply, ArenaGranted):
            raise self._answer_error(reply)
        with self._end_on_error():
            return map_arena(reply, self._connection.take_descriptor())

    def _begin_elsewhere(self, request: StartOp) -> StartOp:
        """Send a request again, and what has begun, with the values in another arena."""
        arena = self._move_input(request.arena)
        begun = [msgspec.structs.replace(each, arena=arena) for each in (request, *self._begun)]
        self._connection.send(*begun)
        self._begun = deque(begun[1:])
        return begun[0]

    def _move_input(self, number: int) -> int:
        """Move the op's values to another arena; return its number."""
        if self._sent is not None and self._sent.number == number:
            old, self._sent = self._sent, None
            new = self._sent = self._want_arena(old.nbytes)
        elif self._input is not None and self._input.number == number:
            old, self._input = self._input, None
            new = self._input = self._want_arena(old.nbytes)
        else:
            raise ProtocolError(f"arena {number} is no input of the agent's to take back")
        np.frombuffer(new.memory, np.uint8, old.nbytes)[:] = np.frombuffer(old.memory, np.uint8)
        return new.number

    def _drop_arena(self, number: int) -> None:
        with self._end_on_error():
            self._connection.send(DropArena(number))

    def _op_has_ended(self, reply: OpDone | OpFailed, *, consumed: bool) -> None:
        if reply.op >= 0:  # otherwise the trainer has not entered yet
            self.next_op = OpNumber(reply.op + consumed)
            self.enters = False
        self.world = reply.world or self.world
        if self._ahead_is_filled and isinstance(reply, OpDone):
            self._input, self._ahead = self._ahead, self._input

    def check_open(self) -> None:
        """Raise MeshClosed, with the reason, if the session has ended."""
        if self.ended is not None:
            raise mesh_ended(self.ended)

    def leave(self) -> None:
        """End on purpose, without waiting: the others see that this rank has left the job."""
        if self.ended is None:
            self._connection.send_last(Leave())
            self.end("it was closed")

    def end(self, reason: str) -> None:
        """End at once; without `leave`, the others see a crash."""
        self.ended = self.ended or reason
        self._connection.close()
        self._input = self._sent = self._ahead = None
        self._begun.clear()
        self._outputs.clear()
        self._residuals.clear()
        self._users = UsersArrays()

    def interrupt(self, reason: str) -> None:
        """Make the call in another thread raise MeshClosed."""
        self.ended = self.ended or reason
        self._connection.interrupt()

    def _exchange(self, request: TrainerRequest) -> TrainerReply:
        self.check_open()
        with self._end_on_error():
            return self._converse(request)

    def _converse(
        self,
        request: TrainerRequest,
        meanwhile: Callable[[], None] | None = None,
        *,
        sent: bool = False,
    ) -> TrainerReply:
        """Send a request and what has begun; return the reply that ends it.

        All replies before that are handled. What is `sent` already is not sent again.
        """
        due_s = FIRST_ANSWER_S if isinstance(request, Connect) else ANSWER_S
        own_s, since = self._own
        self._own = own_s + max(0.0, time.monotonic() - since), math.inf
        if not sent:
            dropped = self._users.dropped and self._users.take_dropped()
            reports = () if self.reports is self._reports_sent else self._take_reports()
            compared = () if self._comparison is None else self._take_comparison()
            before = *map(DropArena, dropped), *reports, *compared
            self._connection.send(*before, request, *self._begun)
        if meanwhile is not None:
            meanwhile()
        waited = False
        while True:
            match reply := self._connection.receive(due_s=due_s):
                case StillWaiting():
                    waited = True
                    self._waiting.note(reply)
                case RanksLost(losses):
                    _warn_of(losses)
                case ArenaGranted(kind="output"):
                    self._outputs[reply.arena] = map_arena(
                        reply, self._connection.take_descriptor()
                    )
                case ArenaGone(arena) if isinstance(request, StartOp) and arena == request.arena:
                    # The agent took the arena back while the group was idle, and waits for
                    # another one before it begins the op.
                    request = self._begin_elsewhere(request)
                case ArenaGone(arena):
                    self._outputs.pop(arena, None)
                case _:
                    if waited:
                        self._waiting.end()
                    self._own = self._own[0], time.monotonic()
                    return reply

    def _take_reports(self) -> tuple[ReportsNumbers, ...]:
        """Return what was reported since the last request."""
        self._reports_sent = reports = self.reports
        return (ReportsNumbers(reports),)

    def _take_comparison(self) -> tuple[ComparesStates, ...]:
        found, self._comparison = self._comparison, None
        return () if found is None else (found,)

    @contextmanager
    def _end_on_error(self) -> Generator[None]:
        """End the session if anything is raised inside, also a KeyboardInterrupt."""
        try:
            yield
        except BaseException as e:
            self._end_by(e)
            raise

    def _end_by(self, e: BaseException) -> None:
        """End the session by an error; raise another one if that tells the user more."""
        self._waiting.end()
        closed = self.ended
        self.end(f"{type(e).__name__}: {e}".rstrip(": "))
        if closed is not None and isinstance(e, PmeshError):
            raise mesh_ended(closed) from e
        if isinstance(e, ProtocolError):
            raise self._connection.nonsense(str(e)) from e

    def _answer_error(self, reply: TrainerReply) -> PmeshError:
        if isinstance(reply, Refused):
            return error_of(reply.verdict)
        self.end(f"the agent answered with {type(reply).__name__}")
        return self._connection.nonsense(f"an answer to another question: {type(reply).__name__}")


def _warn_of(losses: Sequence[str]) -> None:
    for loss in losses:
        _logger.warning("%s", loss)
