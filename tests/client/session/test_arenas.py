"""Where values lie in memory that the agent shares, and when that goes back to it."""

import gc
import mmap
import os
import resource
import sys

import numpy as np
import pytest

from pmesh.client.session.arenas import InputRegion, Mapped, UsersArrays, map_arena, values_in
from pmesh.core.ops.reductions import Values
from pmesh.core.wire.session import ArenaGranted, ArenaKind
from pmesh.errors import ProtocolError
from pmesh.net.sessions.arenas import create_arena

PAGE = mmap.PAGESIZE
COUNT = PAGE // 4


@pytest.fixture
def memory() -> mmap.mmap:
    """Two pages, of which the first is an arena: what follows it is someone else's."""
    return mmap.mmap(-1, 2 * PAGE)


@pytest.fixture
def arena(memory: mmap.mmap) -> Mapped:
    return Mapped(7, PAGE, memory)


def beside(memory: mmap.mmap, first: int, count: int) -> Values:
    return np.frombuffer(memory, np.float32, count, offset=4 * first)


def test_values_are_found_within_their_arena_and_not_beyond(
    memory: mmap.mmap, arena: Mapped
) -> None:
    users = UsersArrays()
    x = users.input(arena, values_in(arena, "float32", COUNT))
    assert users.region_of(x, "float32") == InputRegion(7, 0)
    assert users.region_of(x[-1:], "float32") == InputRegion(7, PAGE - 4)
    for first, count in ((0, COUNT + 1), (COUNT - 1, 2), (COUNT, 1), (COUNT, COUNT)):
        assert users.region_of(beside(memory, first, count), "float32") is None


def test_results_are_not_found(arena: Mapped) -> None:
    users = UsersArrays()
    x = users.result(arena, values_in(arena, "float32", COUNT))
    assert users.region_of(x, "float32") is None


def test_what_was_dropped_is_found_no_more(memory: mmap.mmap, arena: Mapped) -> None:
    users = UsersArrays()
    x = users.input(arena, values_in(arena, "float32", COUNT))
    assert users.take_dropped() == []
    del x
    gc.collect()
    same = beside(memory, 0, COUNT)
    assert users.region_of(same, "float32") is not None  # its address belongs to nobody else yet
    assert users.take_dropped() == [7]
    assert users.take_dropped() == []
    assert users.region_of(same, "float32") is None


def test_an_arena_that_is_too_small_or_was_not_granted_is_nonsense(arena: Mapped) -> None:
    with pytest.raises(ProtocolError, match=f"{COUNT + 1} values of float32 in an arena of {PAGE}"):
        values_in(arena, "float32", COUNT + 1)
    with pytest.raises(ProtocolError, match="not granted"):
        values_in(None, "float32", 1)
    assert values_in(None, "float32", 0).size == 0


@pytest.mark.skipif(sys.platform != "linux", reason="macOS can't map all pages at once")
@pytest.mark.parametrize("kind", ["input", "output"])
def test_the_pages_of_an_arena_are_mapped_at_once(kind: ArenaKind) -> None:
    pages = 1024
    made = create_arena(kind, 7, pages * PAGE)
    granted = ArenaGranted(made.number, kind, made.nbytes)
    memory = map_arena(granted, os.dup(made.descriptor)).memory
    view = np.frombuffer(memory, np.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    if kind == "input":
        view[::PAGE] = 1
    assert view[::PAGE].sum() == pages * (kind == "input")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < pages // 8
    del view
    made.close()
