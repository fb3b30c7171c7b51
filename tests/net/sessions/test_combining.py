"""Ops in shared memory: the native library and numpy give the same bits, and stop soon."""

import ctypes
import math
import threading
from collections.abc import Sequence

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from pmesh import native
from pmesh.core.ops.reductions import REDUCTIONS, WIRE_DTYPES, Values, check_reduction
from pmesh.core.ops.together import Fold, Together, ValuesAt
from pmesh.net.sessions import combining
from pmesh.net.sessions.combining import (
    FOLD,
    PLACE,
    SLICE_BYTES,
    Combining,
    CombiningRun,
    Slices,
    slices_of,
)
from tests.worlds.faults import Faults

LENGTH = 3 * SLICE_BYTES + 48  # a multiple of every size of values


def a_sum(ranks: int, nbytes: int, *, makes_nan_equal: bool = False) -> Together:
    takes = tuple(ValuesAt(rank, 0) for rank in range(ranks))
    return Together(
        ranks, (Fold(takes, takes, nbytes),), reduces=True, makes_nan_equal=makes_nan_equal
    )


def test_only_the_library_makes_parts_and_only_those_of_one_fold() -> None:
    one, none = a_sum(2, 36), Together(2, (), reduces=True, makes_nan_equal=False)
    two = [np.zeros(36, np.uint8).data for _ in range(2)]
    as_float = {"dtype": "float32", "reduction": "sum"}
    assert slices_of(one, two, two, **as_float).by_parts() > 0
    assert slices_of(none, two, two, **as_float).by_parts() == 0
    assert combining.InNumpy(one, two, two, **as_float).by_parts() == 0


def draw_values(nbytes: int, dtype: str, seed: int) -> Values:
    """Any numbers, with infinities, but no NaN: its sign depends on the processor."""
    drawn = np.random.default_rng(seed)
    kind, itemsize = WIRE_DTYPES[dtype].kind, WIRE_DTYPES[dtype].itemsize
    if kind in "fc":
        return drawn.normal(size=nbytes // itemsize * (1 + (kind == "c"))).astype(
            {"complex128": "f8", "complex64": "f4"}.get(dtype, dtype)
        )
    return drawn.integers(0, 2 if kind == "b" else 256, nbytes).astype(np.uint8)


def run_both(plan: Together, sources: list[Values], dtype: str, reduction: str) -> None:
    made = list[list[bytes]]()
    memory = [source.view(np.uint8).data for source in sources]
    for maker in (slices_of, combining.InNumpy):
        results = [np.full(LENGTH, 0xEE, np.uint8) for _ in sources]
        slices: Slices = maker(
            plan, memory, [r.data for r in results], dtype=dtype, reduction=reduction
        )
        workers = [threading.Thread(target=slices.work) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert slices.taken >= math.ceil(LENGTH / SLICE_BYTES)
        made.append([result.tobytes() for result in results])
    assert made[0] == made[1]
    assert len(set(made[0])) == 1


@given(
    ranks=st.integers(1, 4),
    dtype=st.sampled_from(sorted(WIRE_DTYPES)),
    reduction=st.sampled_from(REDUCTIONS),
    nan_equal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_library_and_numpy_give_the_same_bits(
    *, ranks: int, dtype: str, reduction: str, nan_equal: bool, seed: int
) -> None:
    try:
        check_reduction(reduction, dtype)
    except ValueError:
        reduction = "prod"
    sources = [draw_values(LENGTH, dtype, seed + rank) for rank in range(ranks)]
    run_both(a_sum(ranks, LENGTH, makes_nan_equal=nan_equal), sources, dtype, reduction)


@pytest.mark.parametrize("native_", [True, False])
@pytest.mark.parametrize(
    "fold",
    [
        Fold((ValuesAt(0, 8),), (ValuesAt(1, 0),), 64),
        Fold((ValuesAt(0, 0),), (ValuesAt(1, 8),), 64),
        Fold((ValuesAt(0, 0), ValuesAt(1, 4)), (ValuesAt(1, 0),), 64),
        Fold((ValuesAt(0, 0),), (ValuesAt(1, 0),), 1 << 40),
    ],
)
def test_a_plan_that_leaves_its_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch, fold: Fold, *, native_: bool
) -> None:
    if not native_:
        monkeypatch.setattr(native, "library", lambda: None)
    memory = [bytearray(64), bytearray(64)]
    with pytest.raises(ValueError, match="do not fit the memory"):
        slices_of(
            Together(2, (fold,), reduces=True, makes_nan_equal=False),
            *[[memoryview(each) for each in memory]] * 2,
            dtype="float32",
            reduction="sum",
        )


class EndlessSlices:
    """Slices that go on until they are stopped."""

    def __init__(self) -> None:
        self.taken = 0
        self._stop = threading.Event()

    def work(self) -> bool:
        assert self._stop.wait(10)
        return False

    def stop(self) -> None:
        self._stop.set()


async def test_what_is_stopped_ends_in_all_threads_before_it_is_said_to_have_ended() -> None:
    run, ended = CombiningRun(EndlessSlices(), 1 << 30), trio.Event()
    assert not run.start(ended.set)
    run.stop()
    await ended.wait()
    assert not run.result()


async def test_an_error_in_a_thread_is_raised_by_the_op() -> None:
    class Broken(EndlessSlices):
        def work(self) -> bool:
            raise MemoryError("no room")

    run, ended = CombiningRun(Broken(), 1 << 30), trio.Event()
    assert not run.start(ended.set)
    await ended.wait()
    with pytest.raises(MemoryError, match="no room"):
        run.result()


@pytest.mark.parametrize("native_", [True, False])
async def test_threads_that_the_system_refuses_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, faults: Faults, *, native_: bool
) -> None:
    faults.fail(trio.lowlevel, "start_thread_soon", RuntimeError("can't start new thread"))
    if not native_:
        monkeypatch.setattr(native, "library", lambda: None)
    sources = [np.ones(LENGTH // 4, np.float32)] * 2
    results = [np.zeros(LENGTH // 4, np.float32) for _ in sources]
    run, ended = CombiningRun(made(sources, results), 1 << 30), trio.Event()
    assert not run.start(ended.set)
    await ended.wait()
    assert run.result()
    assert run.taken >= LENGTH // SLICE_BYTES
    assert all((result == 2).all() for result in results)


def made(sources: Sequence[Values], results: Sequence[Values]) -> Slices:
    return slices_of(
        a_sum(2, LENGTH),
        [source.view(np.uint8).data for source in sources],
        [result.view(np.uint8).data for result in results],
        dtype="float32",
        reduction="sum",
    )


@pytest.mark.parametrize("native_", [True, False])
def test_what_was_stopped_before_does_nothing(
    monkeypatch: pytest.MonkeyPatch, *, native_: bool
) -> None:
    if not native_:
        monkeypatch.setattr(native, "library", lambda: None)
    results = [np.zeros(LENGTH // 4, np.float32) for _ in range(2)]
    slices = made([np.ones(LENGTH // 4, np.float32)] * 2, results)
    slices.stop()
    assert not slices.work()
    assert not any(result.any() for result in results)


def test_the_structs_are_those_of_the_library() -> None:
    library = native.library()
    assert library is not None
    offsets = [Combining.folded.offset, Combining.stopped.offset]
    sizes = [PLACE.itemsize, FOLD.itemsize, ctypes.sizeof(Combining), *offsets]
    assert library.pmesh_combining_layout()[: len(sizes)] == sizes
