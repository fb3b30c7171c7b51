import errno
import fcntl
import importlib
import mmap
import os
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.wire.session import ArenaKind
from pmesh.net.sessions import arenas
from pmesh.net.sessions.arenas import Arena, arena_bytes, create_arena
from tests.worlds.faults import Faults
from tests.worlds.lanes import shared_memory
from tests.worlds.system import be_on

MIB = 1024 * 1024


@pytest.fixture(params=["this system", "macOS"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The macOS path runs wherever `_posixshmem` exists: Linux too."""
    name: str = request.param
    if name == "macOS":
        be_on(monkeypatch, "darwin")
    return name


@pytest.mark.parametrize("kind", ["input", "output"])
@pytest.mark.usefixtures("system")
def test_the_trainer_reads_what_the_agent_writes(kind: ArenaKind) -> None:
    arena = create_arena(kind, 7, MIB)
    with mmap.mmap(arena.descriptor, MIB, prot=mmap.PROT_READ) as trainers:
        arena.memory[:5] = b"hello"
        assert trainers[:5] == b"hello"
        assert (arena.number, arena.nbytes, len(arena.memory)) == (7, MIB, MIB)
    arena.close()


@pytest.mark.usefixtures("system")
def test_the_agent_reads_what_the_trainer_writes_to_an_input() -> None:
    arena = create_arena("input", 0, MIB)
    with mmap.mmap(arena.descriptor, MIB) as trainers:
        trainers[-5:] = b"hello"
    assert bytes(arena.memory[-5:]) == b"hello"
    arena.close()


@pytest.mark.usefixtures("system")
def test_the_trainer_cannot_write_to_an_output() -> None:
    arena = create_arena("output", 0, MIB)
    with pytest.raises(OSError, match=r"Permission|not permitted"):
        mmap.mmap(arena.descriptor, MIB)
    with pytest.raises(OSError, match=r"Bad file|not permitted"):
        os.pwrite(arena.descriptor, b"x", 0)
    assert bytes(arena.memory[:1]) == b"\0"
    arena.close()


@pytest.mark.skipif(sys.platform != "linux", reason="seals; macOS refuses a second ftruncate")
@pytest.mark.parametrize("kind", ["input", "output"])
@pytest.mark.parametrize("size", [0, 2 * MIB])
def test_nobody_changes_the_size_of_an_arena(kind: ArenaKind, size: int) -> None:
    arena = create_arena(kind, 0, MIB)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.descriptor, size)
    with pytest.raises(PermissionError):  # nor takes the seals off
        fcntl.fcntl(arena.descriptor, fcntl.F_ADD_SEALS, 0)
    arena.close()


@pytest.mark.usefixtures("system")
def test_closing_gives_back_every_descriptor() -> None:
    before = shared_memory()
    made: list[Arena] = [create_arena("output", i, MIB) for i in range(3)]
    assert shared_memory() - before
    for arena in made:
        arena.close()
    assert shared_memory() <= before


def test_closing_while_a_view_is_held_leaves_the_memory_until_the_view_ends() -> None:
    arena = create_arena("input", 0, MIB)
    view = arena.memory[10:20]
    arena.close()
    view[:] = b"still here"
    assert bytes(view) == b"still here"


@pytest.mark.usefixtures("system")
def test_a_failure_while_making_one_leaks_nothing(faults: Faults) -> None:
    faults.fail(os, "ftruncate", OSError(errno.ENOMEM, "no memory"))
    before = shared_memory()
    for kind in ("input", "output"):
        with pytest.raises(OSError, match="no memory"):
            create_arena(kind, 0, MIB)
    assert shared_memory() <= before


@pytest.mark.parametrize("kind", ["input", "output"])
def test_on_macos_the_name_is_short_and_gone_at_once(
    kind: ArenaKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module("_posixshmem")
    opened: list[str] = []
    unlinked: list[str] = []

    def shm_open(path: str, flags: int, mode: int) -> int:
        opened.append(path)
        return int(real.shm_open(path, flags, mode=mode))

    def shm_unlink(path: str) -> None:
        unlinked.append(path)
        real.shm_unlink(path)

    fake = SimpleNamespace(shm_open=shm_open, shm_unlink=shm_unlink)
    monkeypatch.setitem(sys.modules, "_posixshmem", fake)
    be_on(monkeypatch, "darwin")
    create_arena(kind, 0, MIB).close()
    assert len(opened) == (2 if kind == "output" else 1)
    assert len(set(opened)) == 1
    assert unlinked == opened[:1]
    assert len(opened[0]) <= 31


@given(st.integers(min_value=0, max_value=2**40))
def test_sizes_are_rounded_up_by_at_most_a_quarter_and_recur(nbytes: int) -> None:
    size = arena_bytes(nbytes)
    assert nbytes <= size <= max(nbytes * 1.25 + mmap.PAGESIZE, arenas.SMALLEST_BYTES)
    assert size % mmap.PAGESIZE == 0
    assert arena_bytes(size) == size


def test_an_arena_is_all_present_when_it_is_made() -> None:
    arena = create_arena("output", 0, 4 * MIB)
    # st_blocks counts what is allocated, in units of 512 bytes on every system.
    if sys.platform == "linux":
        assert os.fstat(arena.descriptor).st_blocks * 512 >= 4 * MIB
    arena.close()
