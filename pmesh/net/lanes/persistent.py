"""Calls that a trainer repeats, answered by a thread of the native library (native/persistent.c).

MPI calls them persistent collectives. A request that is equal, but for its numbers, to one that
Python has run among the same ranks needs no decision of Python's: the thread compares its bytes,
runs the plan, and answers. Without the library Python does so each time.

The thread serves until it is recalled, something comes that it does not know, or an op does not end
soon. Python then goes on exactly there.
"""

import ctypes
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol, TypeAlias

import trio

from pmesh.core.ops.plan import RankPlan
from pmesh.core.wire.records import RecordHeader
from pmesh.native.layout import (
    LOGGED_OPS,
    EndedOpStruct,
    MessageStruct,
    PersistentStruct,
    RunState,
    SlotStruct,
    WhyStopped,
    address_of,
)
from pmesh.net.lanes.lane import Lane
from pmesh.net.lanes.native import KeptThreads, PreparedOp, values_of

MOST_WAIT_S = 0.1  # for the other ranks of an op; then Python goes on with it
NO_LIMIT: Final = 2**63 - 1
NOTHING: Final = memoryview(bytearray())
_NO_ARENAS: Final[Mapping[int, memoryview]] = MappingProxyType({})

Message: TypeAlias = tuple[bytes, ...]
"""An encoded message of a session, cut where its numbers stand."""


def around_numbers(one: bytes, other: bytes) -> Message:
    """Return what two messages have in common that differ in their numbers, all below 128.

    >>> around_numbers(b"op 1 from 1 on", b"op 2 from 2 on")
    (b'op ', b' from ', b' on')
    """
    places = [at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    begins = [0, *(place + 1 for place in places)]
    return tuple(one[begin:end] for begin, end in zip(begins, [*places, len(one)], strict=True))


class PersistentCall(NamedTuple):
    """One call, as the library is to answer it."""

    plan: RankPlan
    """What an op does; without works."""
    lanes: Sequence[Lane]
    """As `pmesh.net.lanes.native.begin` takes them, from and to other agents."""
    header: RecordHeader
    """As there; the library writes its op and `completed`."""
    source: memoryview
    """The trainer's values, if its request does not say where they begin."""
    arena: memoryview
    """The memory in which it lies otherwise."""
    itemsize: int
    """Of a value."""
    nbytes: int
    """Of the result."""
    scratch: memoryview
    dtype: str
    """As in `begin`."""
    reduction: str
    request: Message
    """What the trainer sends, around the number of the op, and perhaps two more."""
    says_place: bool
    """Whether the request says where in the arena its values begin."""
    says_step: bool
    """Whether it says the trainer's step, as its last number."""
    reply: Message
    """What it gets, around the number of the op and, if there is a result, of its arena."""
    lending: Message
    """The same if the trainer keeps the result until it drops the arena; empty if it may not."""
    meeting: "Meeting | None" = None
    """Where the ranks of this agent meet, if it has several."""
    rank: int = 0
    """As which one it comes there."""
    folded: "memoryview | None" = None
    """Where their values are folded, which the plan exchanges over the lanes. Of their first one,
    if there are ranks elsewhere; those beside it have no lanes."""


class Meeting(Protocol):
    """Where ranks of one agent meet (`pmesh.net.sessions.combining`)."""

    @property
    def address(self) -> int:
        """Where the library finds it, as long as this lives."""
        ...


class EndedOp(NamedTuple):
    """An op that the library has run and answered."""

    number: int
    step: int
    """What its request has said; 0 for nothing."""
    call: int
    """The place of its call."""
    result: int
    """The place of the arena with its result, if it has any."""
    began_s: float
    """When, on a clock that stops while the machine sleeps."""
    ended_s: float
    receiving_s: float
    """For how long its lanes have waited in the middle of records."""


class BegunOp(NamedTuple):
    """An op that has begun and not ended. Python has not read its request yet."""

    number: int
    call: int
    result: int
    threads: KeptThreads
    """Go on with it: call `finish` or `abandon`."""


class PersistentCalls:
    """The calls of one trainer that a thread of the library answers, all among the same ranks."""

    def __init__(self, library: ctypes.CDLL, session: int, drop: Message) -> None:
        """Begin without a call.

        Args:
            library: the native library.
            session: the descriptor of the trainer's connection.
            drop: what the trainer sends when it drops an arena, around its number.

        Raises:
            LaneBroken: the system has no room for a pipe.
            OSError: it has no room for a thread.
        """
        self._library = library
        self._threads = KeptThreads(library)
        self._state = PersistentStruct(
            session=session,
            runner=self._threads.address,
            drop=_laid_out(drop),
            most_wait_s=MOST_WAIT_S,
        )
        self._server = ctypes.c_void_p(library.pmesh_server_new(ctypes.byref(self._state)))
        if not self._server:
            self._threads.free()
            raise OSError("the system has no thread left")
        self._stopped: int = library.pmesh_server_fd(self._server)
        self._log = (EndedOpStruct * LOGGED_OPS)()
        self._calls: list[tuple[PersistentCall, PreparedOp]] = []
        self._lanes: list[Lane] = []
        self._kept = drop
        self.serves = False
        """Whether the thread may serve now."""
        self.begun: BegunOp | None = None
        """What had begun when the thread was stopped; None once somebody goes on with it."""

    def close(self) -> None:
        """End the thread; the calls' memory is not used any more."""
        self.recall()
        if self.begun is not None:
            self.begun.threads.abandon()
        self._library.pmesh_server_free(self._server)
        self._threads.free()

    # --- while no thread serves

    def __len__(self) -> int:
        """Return how many calls it has."""
        return len(self._calls)

    def put(self, place: int, call: PersistentCall, first: memoryview) -> None:
        """Add a call, or put it in the place of another one.

        Args:
            place: at most the number of calls, and below MOST_CALLS.
            call: the call.
            first: the memory of any of the results, with room for its own.
        """
        source = call.source if call.folded is None else call.folded
        regions = source, first[: call.nbytes], call.scratch
        values = values_of(call.dtype, call.reduction)
        op = PreparedOp(call.plan, call.lanes, call.header, regions, values=values)
        struct = self._state.calls[place]
        struct.op, struct.request = op.address, _laid_out(call.request)
        struct.reply, struct.lending = _laid_out(call.reply), _laid_out(call.lending)
        struct.source = address_of(call.source)
        struct.arena, struct.arena_bytes = address_of(call.arena), len(call.arena)
        struct.itemsize = call.itemsize
        struct.says_place, struct.says_step = call.says_place, call.says_step
        struct.meeting = 0 if call.meeting is None else call.meeting.address
        struct.rank = call.rank
        struct.folded = 0 if call.folded is None else address_of(call.folded)
        self._calls[place : place + 1] = [(call, op)]
        self._state.call_count = len(self._calls)
        self._lanes += [lane for lane in call.lanes if lane not in self._lanes]

    def write_into(
        self, own: Mapping[int, memoryview], shared: Mapping[int, memoryview] = _NO_ARENAS
    ) -> None:
        """Let the results lie in the memory of these arenas, in turn.

        Args:
            own: at most MOST_SLOTS, by number.
            shared: as many, which all ranks have that meet: for what a meeting writes once.
        """
        free_at = {slot.number: slot.free_at for slot in self._slots}
        arenas = [(n, memory, False) for n, memory in own.items()]
        arenas += [(n, memory, True) for n, memory in shared.items()]
        for slot, (number, memory, is_shared) in zip(self._state.slots, arenas, strict=False):
            slot.memory, slot.nbytes, slot.number = address_of(memory), len(memory), number
            slot.free_at, slot.shared = free_at.get(number, 0), is_shared
        self._state.slot_count = len(arenas)

    @property
    def _slots(self) -> list[SlotStruct]:
        return self._state.slots[: self._state.slot_count]

    def clear(self) -> None:
        """Forget all calls."""
        self._calls.clear()
        self._lanes.clear()
        self._state.call_count = 0

    def serve(
        self,
        number: int,
        *,
        limit: int = NO_LIMIT,
        kept: Collection[int] = (),
        lent: Collection[int] = (),
        may_lend: bool = False,
        unread: bytes = b"",
    ) -> None:
        """Let the thread serve ops from this number on, below the limit; `recall` must follow.

        Args:
            number: of the next op.
            limit: of the first op that it must not serve.
            kept: the arenas, by number, with results that others may ask for until this op ends.
            lent: those that the trainer holds.
            may_lend: whether it may be lent more, as long as OWN_SLOTS remain.
            unread: what the trainer has sent already, at most UNREAD_BYTES.

        Raises:
            LaneBroken: one of the lanes is closed. Then nobody serves.
        """
        for lane in self._lanes:
            lane.check_open()
        for lane in self._lanes:
            lane.share_state()
            lane.lend(self.recall)
        for slot in self._slots:
            if slot.number in kept:
                slot.free_at = max(slot.free_at, number + 1)
            slot.lent = slot.number in lent
        self._state.next, self._state.limit, self._state.may_lend = number, limit, may_lend
        self._state.unread_bytes = len(unread)
        ctypes.memmove(self._state.unread, unread, len(unread))
        self.serves = True
        self._library.pmesh_serve(self._server)

    @property
    def lent(self) -> list[int]:
        """The arenas that the trainer holds now, by number."""
        return [slot.number for slot in self._slots if slot.lent]

    def take_unread(self) -> bytes:
        """Return what the trainer has sent and nobody has answered."""
        count, self._state.unread_bytes = self._state.unread_bytes, 0
        return bytes(self._state.unread[:count])

    @property
    def trainer_is_stuck(self) -> bool:
        """Whether the trainer did not take the last reply, which is lost."""
        return self._state.why == WhyStopped.UNANSWERED

    # --- at any time

    async def stopped(self) -> None:
        """Wait until the thread serves no longer; `recall` must follow."""
        await trio.lowlevel.wait_readable(self._stopped)

    def vouch(self, until_us: int) -> None:
        """V8: let no op end after this time, on a clock that runs while the machine sleeps."""
        self._state.trusted_until_us = until_us

    def recall(self) -> None:
        """Let the thread serve no longer, and take the lanes back. It takes about a millisecond."""
        if not self.serves:
            return
        self._library.pmesh_recall(self._server)
        self.serves = False
        state, under_way, stop = self._state, tuple[Lane, ...](), None
        if state.why == WhyStopped.BEGUN:
            op = self._calls[state.call][1]
            under_way = tuple(op.lanes)
            self._threads.take_over(op, state.state)
            stop = self._threads.stop if state.state == RunState.RUNS else None
            self.begun = BegunOp(state.next, state.call, state.slot, self._threads)
            state.slots[state.slot].free_at = state.next + 2
        for lane in self._lanes:
            if lane in under_way:
                lane.pass_on(stop)
            else:
                lane.take_back()

    def take_ended(self) -> list[EndedOp]:
        """Return the ops that have ended since the last time."""
        count = self._library.pmesh_take_ended(ctypes.byref(self._state), self._log)
        return [
            EndedOp(e.number, e.step, e.call, e.slot, e.began_s, e.ended_s, e.receiving_s)
            for e in self._log[:count]
        ]


def _laid_out(message: Message) -> MessageStruct:
    struct = MessageStruct(count=len(message))
    for place, part in enumerate(message):
        struct.parts[place], struct.nbytes[place] = part, len(part)
    return struct
