"""Which arenas a session has, and who uses them: kept for the next op rather than made anew.

The first touch of fresh memory costs more than a copy, so an arena whose op has ended waits for the
next op of its size. A trainer in another phase leaves arenas that nobody asks for any more; they go
when a new one is made.
"""

import itertools
from collections.abc import Iterator

import psutil
import trio

from pmesh.core.session import ArenaKind
from pmesh.errors import ProtocolError, UsageError
from pmesh.net.arenas import Arena, arena_bytes, create_arena

TOO_LARGE_FACTOR = 4  # an arena this much larger than asked for stays free for larger ops
IDLE_S = 10.0  # training steps come faster: what rests longer belongs to a past phase
MAX_ARENAS = 64  # each costs a descriptor on both sides; a training loop needs 2 or 3
MAX_INPUT_ARENAS = 256  # likewise; compression keeps two for each bucket, of which it has dozens
MAX_LENT = 16  # results that a trainer keeps; beside those that are unstable (32) others find room
INLINE_BYTES = 1024 * 1024  # making and closing takes less than 0.5 ms up to here: no thread


class _Pool:
    """Arenas of one kind that are used, and used again.

    Raises from `acquire`: UsageError where `limit_bytes` or `most` would be exceeded.
    """

    def __init__(
        self,
        kind: ArenaKind,
        numbers: Iterator[int],
        *,
        limit_bytes: int,
        most: int,
        spares_the_last: bool,
    ) -> None:
        self._kind: ArenaKind = kind
        self._most = most
        self._spares_the_last = spares_the_last
        self._numbers = numbers
        self._limit_bytes = limit_bytes
        self._in_use: set[Arena] = set()
        self._free: dict[Arena, float] = {}  # since when
        self._gone: list[int] = []
        self._last: Arena | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory, in use or waiting."""
        return sum(arena.nbytes for arena in (*self._in_use, *self._free))

    async def acquire(self, nbytes: int) -> Arena:
        """An arena of at least `nbytes` that nobody else uses, until `release`."""
        size = arena_bytes(nbytes)
        free = (arena for arena in self._free if arena is not self._last)
        fitting = (arena for arena in free if size <= arena.nbytes <= size * TOO_LARGE_FACTOR)
        arena = min(fitting, key=lambda arena: arena.nbytes, default=None)
        if arena is None:
            arena = await self._create(size)
        else:
            del self._free[arena]
        self._in_use.add(arena)
        self._last = arena if self._spares_the_last else None
        return arena

    def release(self, arena: Arena) -> None:
        """The arena may be written again."""
        self._in_use.remove(arena)
        self._free[arena] = trio.current_time()

    def take_gone(self) -> tuple[int, ...]:
        """The numbers of arenas closed since the last call: the trainer shall unmap them."""
        gone, self._gone = tuple(self._gone), []
        return gone

    async def aclose(self) -> None:
        """Close every arena, also those in use."""
        await self._close([*self._in_use, *self._free])

    async def _create(self, size: int) -> Arena:
        now = trio.current_time()
        await self._close([a for a, since in self._free.items() if now - since >= IDLE_S])
        if not self._has_room(size):
            await self._close(list(self._free))
        if not self._has_room(size):
            raise UsageError(
                f"no shared memory for {size / 2**20:,.0f} MiB more: this trainer's {self._kind} "
                f"arenas hold {self.nbytes / 2**20:,.0f} MiB, "
                f"{self._limit_bytes / 2**20:,.0f} MiB are allowed; pass smaller arrays or buckets"
            )
        number = next(self._numbers)
        if size <= INLINE_BYTES:
            return create_arena(self._kind, number, size)
        return await trio.to_thread.run_sync(create_arena, self._kind, number, size)

    def _has_room(self, size: int) -> bool:
        count = len(self._in_use) + len(self._free)
        return count < self._most and self.nbytes + size <= self._limit_bytes

    async def _close(self, arenas: list[Arena]) -> None:
        for arena in arenas:
            self._in_use.discard(arena)
            self._free.pop(arena, None)
            self._gone.append(arena.number)
        small = [arena for arena in arenas if arena.nbytes <= INLINE_BYTES]
        large = [arena for arena in arenas if arena.nbytes > INLINE_BYTES]
        for arena in small:
            arena.close()
        if large:
            with trio.CancelScope(shield=True):  # they are in no list any more: now or never
                await trio.to_thread.run_sync(_close_all, large)


class _Held:
    """Arenas that ops hold, and the trainer; each goes back to its pool when nobody does."""

    def __init__(self, pool: _Pool) -> None:
        self._pool = pool
        self._trainers: dict[int, Arena] = {}
        self._ops: dict[Arena, int] = {}

    def __contains__(self, number: int) -> bool:
        """Whether the trainer holds it."""
        return number in self._trainers

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory, in use or waiting."""
        return self._pool.nbytes

    def release(self, arena: Arena) -> None:
        """An op needs it no more."""
        self._ops[arena] -= 1
        self._recycle(arena)

    def drop(self, number: int) -> None:
        """The trainer needs it no more; raises ProtocolError if it holds no such."""
        arena = self._of_trainer(number)
        del self._trainers[number]
        self._recycle(arena)

    async def aclose(self) -> None:
        """Close every arena, also those in use."""
        self._trainers.clear()
        self._ops.clear()
        await self._pool.aclose()

    def _of_trainer(self, number: int) -> Arena:
        arena = self._trainers.get(number)
        if arena is None:
            raise ProtocolError(f"the trainer holds no arena {number}")
        return arena

    def _recycle(self, arena: Arena) -> None:
        if self._ops[arena] == 0 and arena.number not in self._trainers:
            del self._ops[arena]
            self._pool.release(arena)


class InputArenas(_Held):
    """The input arenas of one session: the trainer's to fill, and an op's to read.

    The trainer may drop one that an op still needs: a broadcast's root does so at once, because its
    input is the retained result (O2).
    """

    def __init__(self, numbers: Iterator[int], *, limit_bytes: int) -> None:
        most = MAX_INPUT_ARENAS
        pool = _Pool("input", numbers, limit_bytes=limit_bytes, most=most, spares_the_last=False)
        super().__init__(pool)

    async def create(self, nbytes: int) -> Arena:
        """An arena for the trainer (`WantArena`); raises UsageError beyond the limits."""
        arena = await self._pool.acquire(nbytes)
        self._trainers[arena.number] = arena
        self._ops[arena] = 0
        return arena

    def hold(self, number: int, nbytes: int, *, offset: int = 0) -> Arena:
        """The arena of which an op will read `nbytes`, from `offset` on, until `release`.

        Raises:
            ProtocolError: the trainer has no such arena, or it is smaller.
        """
        arena = self._of_trainer(number)
        if not 0 <= offset <= arena.nbytes - nbytes:
            text = f"an op of {nbytes} bytes at {offset} in an arena of {arena.nbytes}"
            raise ProtocolError(text)
        self._ops[arena] += 1
        return arena


class OutputArenas(_Held):
    """The output arenas of one session: an op's, until its result is stable (O2).

    Nobody gets the last one again at once: the trainer may read a result while its next op runs.
    Those that it is lent it may read for as long as it likes.
    """

    def __init__(self, numbers: Iterator[int], *, limit_bytes: int) -> None:
        most = MAX_ARENAS
        pool = _Pool("output", numbers, limit_bytes=limit_bytes, most=most, spares_the_last=True)
        super().__init__(pool)
        self._most_lent_bytes = limit_bytes // 2

    async def acquire(self, nbytes: int) -> Arena:
        """An arena that nobody else uses, until `release`; raises UsageError beyond the limits."""
        arena = await self._pool.acquire(nbytes)
        self._ops[arena] = 1
        return arena

    def lend(self, arena: Arena) -> bool:
        """Let the trainer hold it too, unless it holds too much: ops need arenas of their own."""
        lent_bytes = sum(lent.nbytes for lent in self._trainers.values())
        if len(self._trainers) >= MAX_LENT or lent_bytes + arena.nbytes > self._most_lent_bytes:
            return False
        self.give(arena)
        return True

    def give(self, arena: Arena) -> None:
        """Let the trainer hold it too, in any case."""
        self._trainers[arena.number] = arena

    def take_gone(self) -> tuple[int, ...]:
        """The numbers of arenas closed since the last call: the trainer shall unmap them."""
        return self._pool.take_gone()


class SessionArenas:
    """All shared memory of one session; each kind may hold a quarter of the machine's memory."""

    def __init__(self, *, limit_bytes: int | None = None) -> None:
        limit = psutil.virtual_memory().total // 4 if limit_bytes is None else limit_bytes
        numbers = itertools.count()
        self.inputs = InputArenas(numbers, limit_bytes=limit)
        self.outputs = OutputArenas(numbers, limit_bytes=limit)

    def drop(self, number: int) -> None:
        """The trainer needs an arena no more (`DropArena`); ProtocolError if it holds no such."""
        held = self.outputs if number in self.outputs else self.inputs
        held.drop(number)

    async def aclose(self) -> None:
        """Close every arena, also those in use: the trainer is gone, or the agent ends."""
        await self.inputs.aclose()
        await self.outputs.aclose()


def _close_all(arenas: list[Arena]) -> None:
    for arena in arenas:
        arena.close()
