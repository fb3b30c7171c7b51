"""The arenas of a session, which are kept for further ops.

The first touch of fresh memory costs more than a copy, so an arena whose op has ended waits for the
next op of its size. When a trainer changes phase, old sizes stay unused; they are closed when a new
arena is made.
"""

import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterator
from typing import Generic, TypeVar, TypeVarTuple, Unpack

import trio

from pmesh.core.wire.session import ArenaKind
from pmesh.errors import ProtocolError, UsageError
from pmesh.net.sessions.arenas import Arena, arena_bytes, create_arena

H = TypeVar("H", bound=Hashable)
_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")


class Budget(Generic[H]):
    """An amount of which each holder may take half of what the others leave.

    A single holder gets a half, each of two a third, each of n an (n + 1)-th part. This is the
    dynamic threshold with alpha = 1 by which switches share the memory of their queues (Choudhury
    and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998).

    >>> budget = Budget[str](limit=12)
    >>> budget.take("a", 6), budget.take("a", 1), budget.take("b", 3), budget.take("b", 1)
    (True, False, True, False)
    """

    def __init__(self, *, limit: int) -> None:
        self.limit = limit
        self._held: Counter[H] = Counter()

    @property
    def held(self) -> int:
        """The amount that all holders have together."""
        return self._held.total()

    def held_by(self, holder: H) -> int:
        return self._held[holder]

    def allowed(self, holder: H) -> int:
        """Return the most that this holder may have now; the last unit goes to the first caller."""
        left_by_others = self.limit - self.held + self._held[holder]
        return max(left_by_others // 2, min(left_by_others, 1))

    def take(self, holder: H, amount: int) -> bool:
        """Take the amount, or return False if this holder may not have it."""
        if self._held[holder] + amount > self.allowed(holder):
            return False
        self._held[holder] += amount
        return True

    def give_back(self, holder: H, amount: int) -> None:
        self._held[holder] -= amount
        if not self._held[holder]:
            del self._held[holder]  # processes come and go


TOO_LARGE_FACTOR = 4  # an arena more than this much too large stays free for larger ops
IDLE_S = 10.0  # training steps are faster: an arena idle this long belongs to a past phase
MAX_ARENAS = 64  # each costs a descriptor on both sides; a training loop needs 2 or 3
MAX_INPUT_ARENAS = 256  # as above; compression keeps two for each of its dozens of buckets
MAX_LENT = 16  # results that a trainer keeps; leaves room beside 32 unstable results
INLINE_BYTES = 1024 * 1024  # up to here, making and closing takes less than 0.5 ms: no thread


class ArenaBudget:
    """The memory and descriptors that the arenas of all local programs may use together.

    A program may have half of what the others leave, over all its sessions: otherwise one that
    opens many sessions would take everything.
    """

    def __init__(self, *, files: int, nbytes: int) -> None:
        self.files = Budget[int](limit=files)
        self.memory = Budget[int](limit=nbytes)
        self.pools: set[_Pool] = set()


class ArenaShare:
    """One program's share of the budget."""

    def __init__(self, budget: ArenaBudget, pid: int) -> None:
        self._files, self._memory, self._pid = budget.files, budget.memory, pid
        self.pools = budget.pools
        """The pools of all programs, whose idle arenas are closed if there is no room."""

    @property
    def allowed_bytes(self) -> int:
        """The most that the program may hold now."""
        return self._memory.allowed(self._pid)

    def has_room(self, nbytes: int) -> bool:
        """Return True if `take` would succeed."""
        return self._lack(nbytes) is None

    def take(self, nbytes: int) -> None:
        """Count a new arena of this size. Raises UsageError if there is no room."""
        lack = self._lack(nbytes)
        if lack is not None:
            raise UsageError(lack)
        self._memory.take(self._pid, nbytes)
        self._files.take(self._pid, 1)

    def give_back(self, nbytes: int) -> None:
        self._memory.give_back(self._pid, nbytes)
        self._files.give_back(self._pid, 1)

    def _lack(self, nbytes: int) -> str | None:
        held, allowed = self._memory.held_by(self._pid), self.allowed_bytes
        if held + nbytes > allowed:
            return (
                f"no shared memory for {_mib(nbytes)} more: this program's arenas hold "
                f"{_mib(held)}, {_mib(allowed)} are allowed, which is half of what other programs "
                f"leave of {_mib(self._memory.limit)}; pass smaller arrays or buckets"
            )
        held, allowed = self._files.held_by(self._pid), self._files.allowed(self._pid)
        if held + 1 > allowed:
            return (
                f"no file descriptor for another arena: this program has {held}, {allowed} are "
                f"allowed, which is half of what other programs leave of {self._files.limit}; "
                "raise the limit of open files with 'ulimit -n' before 'pmesh up'"
            )
        return None


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"


class _Pool:
    """Arenas of one kind, for repeated use.

    `acquire` raises UsageError if the share or `most` would be exceeded.
    """

    def __init__(
        self,
        kind: ArenaKind,
        numbers: Iterator[int],
        share: ArenaShare,
        *,
        most: int,
    ) -> None:
        self._kind: ArenaKind = kind
        self._share = share
        self._count = 0  # including arenas that are being made
        self._most = most
        self._numbers = numbers
        self._in_use: set[Arena] = set()
        self._free: dict[Arena, float] = {}  # the time of release
        self.gone: list[int] = []
        """The arenas closed since they were last read from here."""
        self.delivered = list[Arena]()
        """What the trainer was given since the last `acquire`. It counts as a user."""
        self._read = list[Arena]()
        """What it was given between the last two, and may still read."""
        self._adopted = False
        """Whether there are aliases for which idle arenas have not been closed yet."""
        self.on_shortage: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
        """Gives up what is held for later ops."""
        share.pools.add(self)

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory, in use or free."""
        return sum(arena.nbytes for arena in (*self._in_use, *self._free))

    async def acquire(self, nbytes: int, *, follows: bool = False) -> Arena:
        """Return an arena of at least `nbytes` for exclusive use until `release`.

        If it `follows`, the trainer has not read yet what it was given since the last `acquire`.
        """
        size = arena_bytes(nbytes)
        if not follows:  # `next_turn`, a frame less
            for read in self._read:
                read.users -= 1
            self._read, self.delivered = self.delivered, []
        if self._adopted:
            self._adopted = False
            await self.close_idle()
        arena, best = None, size * TOO_LARGE_FACTOR + 1
        for free in self._free:
            if size <= free.nbytes < best and free.may_be_written:
                arena, best = free, free.nbytes
        if arena is None:
            arena = await self._create(size)
        else:
            del self._free[arena]
        arena.users += 1
        self._in_use.add(arena)
        return arena

    def next_turn(self) -> None:
        """Note that the trainer calls again: it has read all but what it was given since."""
        for read in self._read:
            read.users -= 1
        self._read, self.delivered = self.delivered, []

    def adopt(self, other: Arena) -> Arena | None:
        """Return an alias of another session's arena until `release`; None if there is no room.

        It counts as an arena of the same size, since it keeps the memory.
        """
        first = other.of or other
        arena = next((free for free in self._free if free.of is first), None)
        if arena is None:
            if self._count >= self._most or not self._share.has_room(other.nbytes):
                return None
            self._share.take(other.nbytes)
            self._count += 1
            self._adopted = True
            arena = other.alias(next(self._numbers))
        self._free.pop(arena, None)
        arena.users += 1
        self._in_use.add(arena)
        return arena

    def release(self, arena: Arena) -> None:
        arena.users -= 1
        self._in_use.remove(arena)
        self._free[arena] = trio.current_time()

    async def aclose(self) -> None:
        """Close every arena, even those in use."""
        self._share.pools.discard(self)
        await self._close([*self._in_use, *self._free])

    async def close_idle(self) -> None:
        now = trio.current_time()
        await self._close([a for a, since in self._free.items() if now - since >= IDLE_S])

    async def close_free(self) -> None:
        await self._close(list(self._free))

    async def _create(self, size: int) -> Arena:
        await self.close_idle()
        if not self._share.has_room(size):
            for other in list(self._share.pools):
                await other.close_idle()
        if self._count >= self._most or not self._share.has_room(size):
            await self.on_shortage()
            await self.close_free()
        if self._count >= self._most:
            raise UsageError(f"this trainer has {self._most} {self._kind} arenas: drop some arrays")
        self._share.take(size)  # before the arena is made, as other tasks also take
        self._count += 1
        try:
            return await self._make(size)
        except BaseException:
            self._forget(size)
            raise

    async def _make(self, size: int) -> Arena:
        number = next(self._numbers)
        if size <= INLINE_BYTES:
            await trio.lowlevel.checkpoint()  # a program may ask for hundreds at once
            return create_arena(self._kind, number, size)
        return await _in_thread(create_arena, self._kind, number, size)

    def _forget(self, size: int) -> None:
        self._share.give_back(size)
        self._count -= 1

    async def _close(self, arenas: list[Arena]) -> None:
        for arena in arenas:
            self._in_use.discard(arena)
            self._free.pop(arena, None)
            if self._kind == "output":  # of an input nobody asks: the trainer knows by itself
                self.gone.append(arena.number)
            self._forget(arena.nbytes)
        last = [arena for arena in arenas if arena.leave()]
        small = [arena for arena in last if arena.nbytes <= INLINE_BYTES]
        large = [arena for arena in last if arena.nbytes > INLINE_BYTES]
        for arena in small:
            arena.close()
        if large:
            with trio.CancelScope(shield=True):  # no list has them any more, so nothing else would
                await _in_thread(_close_all, large)


class _Held:
    """Arenas held by ops or by the trainer; an arena that is not held returns to its pool."""

    def __init__(self, pool: _Pool) -> None:
        self._pool = pool
        self._trainers: dict[int, Arena] = {}
        self._ops: dict[Arena, int] = {}

    def on_shortage(self, give_up: Callable[[], Awaitable[None]]) -> None:
        """Let this be called before an arena is refused: it may release others."""
        self._pool.on_shortage = give_up

    def __contains__(self, number: int) -> bool:
        return number in self._trainers

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory, in use or free."""
        return self._pool.nbytes

    def release(self, arena: Arena) -> None:
        """End the use of an arena by an op."""
        left = self._ops[arena] = self._ops[arena] - 1
        if not left and arena.number not in self._trainers:
            self._recycle(arena)

    def drop(self, number: int) -> None:
        """End the use of an arena by the trainer. Raises ProtocolError if it has no such arena."""
        arena = self._of_trainer(number)
        del self._trainers[number]
        if not self._ops[arena]:
            self._recycle(arena)

    async def aclose(self) -> None:
        """Close every arena, even those in use."""
        self._trainers.clear()
        self._ops.clear()
        await self._pool.aclose()

    def _of_trainer(self, number: int) -> Arena:
        arena = self._trainers.get(number)
        if arena is None:
            raise ProtocolError(f"the trainer holds no arena {number}")
        return arena

    def _recycle(self, arena: Arena) -> None:
        del self._ops[arena]
        self._pool.release(arena)


class InputArenas(_Held):
    """The input arenas of one session, which the trainer fills and ops read.

    The trainer may drop one that an op still needs: a broadcast's root does so at once, because its
    input is the retained result (O2).
    """

    def __init__(self, numbers: Iterator[int], share: ArenaShare) -> None:
        super().__init__(_Pool("input", numbers, share, most=MAX_INPUT_ARENAS))
        self._lasting: set[int] = set()
        self._taken_back: set[int] = set()

    async def create(self, nbytes: int, *, lasting: bool = False) -> Arena:
        """Return an arena for the trainer (`WantArena`). Raises UsageError beyond the limits."""
        arena = await self._pool.acquire(nbytes)
        self._trainers[arena.number] = arena
        self._ops[arena] = 0
        if lasting:
            self._lasting.add(arena.number)
        return arena

    def drop(self, number: int) -> None:
        """Also of an arena that was taken back."""
        if number in self._taken_back:
            self._taken_back.remove(number)
            return
        super().drop(number)
        self._lasting.discard(number)

    def was_taken_back(self, number: int) -> bool:
        """Return True if the trainer had this arena, and does not know yet that it has rested."""
        return number in self._taken_back

    async def rest(self) -> None:
        """Take back and close what the trainer needs for ops alone, and does not need between."""
        for number, arena in list(self._trainers.items()):
            if number not in self._lasting and not self._ops[arena]:
                super().drop(number)
                self._taken_back.add(number)
        await self._pool.close_free()

    def hold(self, number: int, nbytes: int, *, offset: int = 0) -> Arena:
        """Hold an arena until `release`, for an op that reads `nbytes` from `offset` on.

        Raises:
            ProtocolError: The trainer has no such arena, or it is too small.
        """
        arena = self._of_trainer(number)
        if not 0 <= offset <= arena.nbytes - nbytes:
            text = f"{nbytes} bytes at {offset} are not within an arena of {arena.nbytes} bytes"
            raise ProtocolError(text)
        self._ops[arena] += 1
        return arena


class OutputArenas(_Held):
    """The output arenas of one session, which an op holds until its result is stable (O2).

    A result that was delivered is not overwritten by the next op, during which the trainer may
    still read it. The trainer may read arenas that are lent to it for as long as it likes. A result
    that several ranks of this agent have is in one memory, of which the others have aliases.
    """

    def __init__(self, numbers: Iterator[int], share: ArenaShare) -> None:
        super().__init__(_Pool("output", numbers, share, most=MAX_ARENAS))
        self._share = share
        self.gone = self._pool.gone
        """What `take_gone` returns next."""
        self._dropped = trio.Event()
        self._lent: set[int] = set()
        self._reserved: Arena | None = None

    async def acquire(self, nbytes: int, *, follows: bool = False) -> Arena:
        """Return an arena for use until `release`. Raises UsageError beyond the limits.

        For `follows` see `StartOp`.
        """
        if self._reserved is not None:
            arena, self._reserved = self._reserved, None
            self.next_turn()
            self.hold(arena)
            return arena
        arena = await self._pool.acquire(nbytes, follows=follows)
        self._ops[arena] = 1
        return arena

    def reserve(self, arena: Arena) -> None:
        """Let the next `acquire` return this arena, which is in use and large enough."""
        self._reserved = arena

    def adopt(self, other: Arena) -> Arena | None:
        """Return an alias of another session's arena until `release`; None if there is no room.

        It is the same one as long as an op or the trainer holds it.
        """
        first = other.of or other
        arena = next((held for held in self._ops if held.of is first), None)
        arena = arena or self._pool.adopt(other)
        if arena is not None:
            self._ops[arena] = self._ops.get(arena, 0) + 1
        return arena

    def hold(self, arena: Arena) -> None:
        """Hold an arena that is in use once more, until `release`."""
        self._ops[arena] += 1

    def next_turn(self) -> None:
        """Note a call for which nothing is acquired, as its arena is held already."""
        self._pool.next_turn()

    def deliver(self, arena: Arena) -> None:
        """Keep what is in it until the trainer's second call of `acquire`, which may read it."""
        arena.users += 1
        self._pool.delivered.append(arena)

    async def acquire_in_turn(self, nbytes: int) -> Arena:
        """As `acquire`, but wait if the trainer holds arenas that it will drop once it has read."""
        while True:
            dropped = self._dropped
            try:
                return await self.acquire(nbytes)
            except (UsageError, OSError):
                if self._trainers.keys() <= self._lent and not dropped.is_set():
                    raise
            await dropped.wait()

    def drop(self, number: int) -> None:
        """Also let those go on who wait for room."""
        super().drop(number)
        self._lent.discard(number)
        self._dropped.set()
        self._dropped = trio.Event()

    def may_lend(self, arenas: Collection[Arena]) -> bool:
        """Return whether enough would remain for ops if the trainer held all of these, too."""
        all_lent = {*self._trainers.values(), *arenas}
        lent_bytes = sum(lent.nbytes for lent in all_lent)
        return len(all_lent) <= MAX_LENT and lent_bytes <= self._share.allowed_bytes // 2

    def lend(self, arena: Arena) -> bool:
        """Let the trainer hold it too, unless too little would remain for ops."""
        if not self.may_lend([arena]):
            return False
        self.note_lent(arena)
        return True

    def note_lent(self, arena: Arena) -> None:
        """Note that the trainer holds it, as it was told already."""
        self.give(arena)
        self._lent.add(arena.number)

    def give(self, arena: Arena) -> None:
        """Let the trainer hold it too, in any case."""
        self._trainers[arena.number] = arena

    def take_gone(self) -> tuple[int, ...]:
        """Return the arenas closed since the last call, which the trainer must unmap."""
        gone = tuple(self.gone)
        self.gone.clear()
        return gone

    async def rest(self) -> None:
        """Close what neither an op nor the trainer holds."""
        await self._pool.close_free()


class SessionArenas:
    """All shared memory of one session, within its program's share."""

    def __init__(self, share: ArenaShare) -> None:
        numbers = itertools.count()
        self.inputs = InputArenas(numbers, share)
        self.outputs = OutputArenas(numbers, share)

    def drop(self, number: int) -> None:
        """End the trainer's use of an arena (`DropArena`). Raises ProtocolError if it has none."""
        held = self.outputs if number in self.outputs else self.inputs
        held.drop(number)

    async def aclose(self) -> None:
        """Close every arena, even those in use: the trainer is gone, or the agent ends."""
        await self.inputs.aclose()
        await self.outputs.aclose()


async def _in_thread(call: Callable[[Unpack[_Args]], _T], *args: *_Args) -> _T:
    try:
        return await trio.to_thread.run_sync(call, *args)
    except RuntimeError:  # the system has no thread left: this one does it
        return call(*args)


def _close_all(arenas: list[Arena]) -> None:
    for arena in arenas:
        arena.close()
