"""Carries out an op whose ranks are all at this agent, within its shared memory.

It goes by slices of 64 KiB, which any number of threads may share: each does the next one that none
has begun. The native library does them (native/combine.c), or numpy where it is missing.
"""

import ctypes
import os
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, Protocol

import numpy as np
import trio
from outcome import Error, Outcome, Value, capture

from pmesh import native
from pmesh.core.ops.reductions import (
    REDUCTIONS,
    WIRE_DTYPES,
    Values,
    accumulate,
    finish,
    make_nan_equal,
)
from pmesh.core.ops.together import Fold, Together, ValuesAt
from pmesh.native.layout import address_of

SLICE_BYTES: Final = 64 * 1024
INLINE_BYTES: Final = 512 * 1024
"""That the event loop moves itself, in less than 0.1 ms: a thread takes longer to wake up."""
MOST_THREADS: Final = 8
"""Fewer than these fill the memory of every machine that we know."""

PLACE = np.dtype([("offset", np.uint64), ("rank", np.uint32)], align=True)
"""`struct pmesh_place`."""
FOLD = np.dtype([("nbytes", np.uint64), ("takes", np.uint32, 2), ("gives", np.uint32, 2)])
"""`struct pmesh_fold`."""


class Combining(ctypes.Structure):
    """`struct pmesh_combining`."""

    _fields_ = (
        ("folds", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("sources", ctypes.c_void_p),
        ("source_bytes", ctypes.c_void_p),
        ("results", ctypes.c_void_p),
        ("result_bytes", ctypes.c_void_p),
        ("fold_count", ctypes.c_uint32),
        ("place_count", ctypes.c_uint32),
        ("ranks", ctypes.c_uint32),
        ("dtype", ctypes.c_int32),
        ("reduction", ctypes.c_int32),
        ("makes_nan_equal", ctypes.c_uint32),
        ("taken", ctypes.c_uint64),
        ("folded", ctypes.c_void_p),
        ("stopped", ctypes.c_bool),
    )
    taken: int


class Slices(Protocol):
    """The work of one op."""

    @property
    def taken(self) -> int:
        """How many slices have been begun."""
        ...

    def work(self) -> bool:
        """Do slices until none is left; return False if stopped before. For any thread."""
        ...

    def stop(self) -> None:
        """Make `work` return after its slice, in every thread."""
        ...


def slices_of(
    plan: Together,
    sources: Sequence[memoryview],
    results: Sequence[memoryview],
    *,
    dtype: str,
    reduction: str,
) -> "InLibrary | InNumpy":
    """Return what carries out the plan.

    Args:
        plan: what to do.
        sources: the values of each rank; their trainers may write there meanwhile.
        results: writable, of each rank. Nothing else writes there, and none overlaps a source.
        dtype: one of WIRE_DTYPES.
        reduction: as `check_reduction` allows; only for plans that reduce.

    Raises:
        ValueError: the plan does not fit this memory.
    """
    library = native.library()
    if library is None or (plan.reduces and not adds(library, dtype, reduction)):
        return InNumpy(plan, sources, results, dtype=dtype, reduction=reduction)
    return InLibrary(library, plan, sources, results, dtype=dtype, reduction=reduction)


@lru_cache(maxsize=128)
def adds(library: ctypes.CDLL, dtype: str, reduction: str) -> bool:
    """Return whether the library can reduce such values."""
    return bool(library.pmesh_itemsize(_DTYPES[dtype], _REDUCTIONS[reduction]))


_DTYPES: Final = {name: number for number, name in enumerate(WIRE_DTYPES)}
_REDUCTIONS: Final = {name: number for number, name in enumerate(REDUCTIONS)}
_NO_FIT: Final = "the values do not fit the memory of all ranks"


class InLibrary:
    """Slices that the native library does; for the arguments see `slices_of`."""

    def __init__(
        self,
        library: ctypes.CDLL,
        plan: Together,
        sources: Sequence[memoryview],
        results: Sequence[memoryview],
        *,
        dtype: str,
        reduction: str,
    ) -> None:
        self._library = library
        flat = self._flat = _laid_out(plan)
        self._kept = regions = (*sources, *results)
        self._memory = array("Q", [*map(address_of, regions), *map(len, regions)])
        (at, _), size = self._memory.buffer_info(), plan.size
        self._state = state = _combining(flat, plan, dtype, reduction)
        state.sources, state.results = at, at + 8 * size
        state.source_bytes, state.result_bytes = at + 16 * size, at + 24 * size
        self._op = ctypes.byref(self._state)
        self._folded = memoryview(b"")
        if not library.pmesh_combining_fits(self._op):
            raise ValueError(_NO_FIT)

    @property
    def taken(self) -> int:
        return self._state.taken

    def by_parts(self) -> int:
        """Let a plan have the slices of the only fold done in any order, in place of `work`.

        Returns the address of their `struct pmesh_combining`; 0 if there is no fold, or several.
        """
        if len(self._flat.folds) != 1:
            return 0
        nbytes = int(self._flat.folds["nbytes"][0])
        self._folded = memoryview(bytearray(-(-nbytes // SLICE_BYTES)))
        self._state.folded = address_of(self._folded)
        return ctypes.addressof(self._state)

    def work(self) -> bool:
        done: bool = self._library.pmesh_combine(self._op)
        return done

    def stop(self) -> None:
        self._library.pmesh_combining_stop(self._op)


class Meeting:
    """Where the calls of all ranks meet that the library answers (native/meeting.c)."""

    def __init__(
        self,
        library: ctypes.CDLL,
        plan: Together,
        *,
        dtype: str,
        reduction: str,
        shares: bool,
        has_others: bool,
    ) -> None:
        """Lay out what is done whenever all ranks are there.

        Args:
            library: the native library.
            plan: what is done.
            dtype: as in `slices_of`.
            reduction: likewise.
            shares: whether the result of rank 0 is that of all, and lies where all can read it.
            has_others: whether rank 0 exchanges it with ranks elsewhere first.

        Raises:
            OSError: the system has no memory.
        """
        self._flat = _laid_out(plan)
        op = _combining(self._flat, plan, dtype, reduction)
        self.address: int = library.pmesh_meeting_new(ctypes.byref(op), shares, has_others) or 0
        """Where the library finds it, as long as this object lives."""
        if not self.address:
            raise OSError("the system has no memory for the meeting of ranks")
        weakref.finalize(self, library.pmesh_meeting_free, self.address).atexit = False


def _combining(flat: "_Flat", plan: Together, dtype: str, reduction: str) -> Combining:
    """Return an op whose memory is not known yet."""
    return Combining(
        folds=flat.at_folds,
        places=flat.at_places,
        fold_count=len(flat.folds),
        place_count=len(flat.places),
        ranks=plan.size,
        dtype=_DTYPES[dtype] if plan.reduces else -1,
        reduction=_REDUCTIONS[reduction] if plan.reduces else -1,
        makes_nan_equal=plan.makes_nan_equal,
    )


class InNumpy:
    """Slices that numpy does."""

    def __init__(
        self,
        plan: Together,
        sources: Sequence[memoryview],
        results: Sequence[memoryview],
        *,
        dtype: str,
        reduction: str,
    ) -> None:
        if not all(_fits(fold, sources, results) for fold in plan.folds):
            raise ValueError(_NO_FIT)
        self._plan, self._sources, self._results = plan, sources, results
        self._dtype, self._reduction = WIRE_DTYPES[dtype], reduction
        self._left: Iterator[tuple[Fold, int]] = (
            (fold, begin) for fold in plan.folds for begin in range(0, fold.nbytes, SLICE_BYTES)
        )
        self._worked_on = threading.Lock()
        self._stopped = False
        self.taken = 0

    def by_parts(self) -> int:
        """Return 0: the library, which runs plans, can't do these."""
        return 0

    def work(self) -> bool:
        if not self._worked_on.acquire(blocking=False):
            return True  # one thread does it all: Python would let no other one in for long
        for fold, begin in self._left:
            if self._stopped:
                return False
            self.taken += 1
            self._do(fold, begin, min(SLICE_BYTES, fold.nbytes - begin))
        return True

    def stop(self) -> None:
        self._stopped = True

    def _do(self, fold: Fold, begin: int, nbytes: int) -> None:
        plan = self._plan
        dtype = self._dtype if plan.reduces else np.dtype(np.uint8)

        def at(memory: Sequence[memoryview], place: ValuesAt) -> Values:
            start = place.offset + begin
            return np.frombuffer(memory[place.rank][start : start + nbytes], dtype)

        first, *others = (at(self._results, place) for place in fold.gives)
        take, *more = (at(self._sources, place) for place in fold.takes)
        first[:] = take
        for values in more:
            accumulate(self._reduction, first, values)
        if plan.reduces:
            finish(self._reduction, first, len(fold.takes))
        if plan.makes_nan_equal:
            make_nan_equal(first)
        for result in others:
            result[:] = first


def _fits(fold: Fold, sources: Sequence[memoryview], results: Sequence[memoryview]) -> bool:
    places = [(sources, place) for place in fold.takes] + [(results, p) for p in fold.gives]
    return all(place.offset + fold.nbytes <= of[place.rank].nbytes for of, place in places)


class _Flat(NamedTuple):
    """The folds and the places of a plan as the library reads them, and where they lie."""

    folds: Values
    places: Values
    at_folds: int
    at_places: int


@lru_cache(maxsize=64)
def _laid_out(plan: Together) -> _Flat:
    places, folds = list[tuple[int, int]](), list[tuple[int, tuple[int, int], tuple[int, int]]]()
    for fold in plan.folds:
        begin, middle = len(places), len(places) + len(fold.takes)
        places += [(place.offset, place.rank) for place in (*fold.takes, *fold.gives)]
        folds.append((fold.nbytes, (begin, middle), (middle, len(places))))
    tables = np.array(folds, FOLD), np.array(places, PLACE)
    return _Flat(*tables, *(table.__array_interface__["data"][0] for table in tables))


# --- in threads


class CombiningRun:
    """One op at work. Its tasks await `ended`, and none of them goes on while a thread works."""

    def __init__(self, slices: Slices, moving_bytes: int) -> None:
        self._slices = slices
        self._moving_bytes = moving_bytes
        self._lock = threading.Lock()
        self._at_work = 0
        self._whole = True
        self._failure: BaseException | None = None

    @property
    def taken(self) -> int:
        """How many slices have been begun: while it grows, the op moves."""
        return self._slices.taken

    def stop(self) -> None:
        """Make it end after the slices that are being done (V3); any thread may call this."""
        self._slices.stop()

    def start(self, ended: Callable[[], None]) -> bool:
        """Do a small op at once, and return True; else begin, and call `ended` in the event loop.

        It is called once no thread works any more, however that came.
        """
        if self._moving_bytes <= INLINE_BYTES:
            self._whole = self._slices.work()
            return True
        token = trio.lowlevel.current_trio_token()

        def leave(result: Outcome[bool]) -> None:
            with self._lock:
                self._at_work -= 1
                if isinstance(result, Error):
                    self._failure = result.error
                elif isinstance(result, Value):
                    self._whole &= result.value
                is_last = not self._at_work
            if is_last:
                token.run_sync_soon(ended)

        self._at_work = min(os.cpu_count() or 1, MOST_THREADS)
        for _ in range(self._at_work):
            try:
                trio.lowlevel.start_thread_soon(self._slices.work, leave)
            except RuntimeError:  # the system has no thread left: this one does it
                leave(capture(self._slices.work))
        return False

    def result(self) -> bool:
        """Return whether it was done before anything stopped it; raise what went wrong in it."""
        if self._failure is not None:
            raise self._failure
        return self._whole
