"""The agent's side of the shared memory that carries tensors between it and its trainers.

An *input* arena is written by the trainer and read by the agent. An *output* arena is written only
by the agent, so that a trainer can't corrupt data that are being forwarded: on Linux a seal makes
the kernel refuse writable mappings, on macOS the trainer gets a read-only descriptor. So several
trainers may have the same memory, each as an arena of its own session. An arena never changes its
size, so neither side can take memory away from the other.
"""

import contextlib
import fcntl
import importlib
import mmap
import os
import secrets
import sys
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

import numpy as np

from pmesh.core.wire.session import ArenaKind

SMALLEST_BYTES = 64 * 1024  # so that small ops of any size share one arena
_TOUCH_BYTES = 32 * 1024 * 1024  # faulted in at once; other threads may run between pieces
_F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h, since 5.1; in Python's fcntl module only from 3.13


@dataclass(slots=True, eq=False, kw_only=True)
class Arena:
    """One piece of shared memory. `memory` is writable here, whatever the trainer may do."""

    number: int
    """Its number in the session's messages."""
    kind: ArenaKind
    nbytes: int
    memory: memoryview
    descriptor: int
    """Passed to the trainer; open as long as the arena, so that it can't be lost on the way."""
    _map: mmap.mmap = field(repr=False)
    of: "Arena | None" = None
    """The arena whose memory this is, if it is an alias: nothing is written through an alias."""
    users: int = 0
    """How many need what is in it, of those for whom its session's pool counts."""
    _all: "set[Arena]" = field(default_factory=set["Arena"], repr=False)
    """All arenas with this memory; one set for all of them."""

    def __post_init__(self) -> None:
        self._all.add(self)

    @property
    def may_be_written(self) -> bool:
        """Whether nobody needs what is in the memory, also through an alias."""
        for arena in self._all:
            if arena.users:
                return False
        return self.of is None

    def alias(self, number: int) -> "Arena":
        """Return an arena of another session with the same memory, which lasts as long as both."""
        return replace(self, number=number, of=self.of or self, users=0)

    def leave(self) -> bool:
        """Give it up; return whether it was the last one with its memory, which `close` frees."""
        if self.of is not None and self.users:
            self.of.users += 1  # for good: its trainer may read on, and nobody would know
        self._all.remove(self)
        return not self._all

    def close(self) -> None:
        """Free the memory, or leave that to the last view that is still held."""
        os.close(self.descriptor)
        with contextlib.suppress(BufferError):  # a worker of a cancelled op still reads
            self.memory.release()
            self._map.close()


def arena_bytes(nbytes: int) -> int:
    """Round the size of a request up by at most a quarter, so that sizes recur.

    >>> arena_bytes(1), arena_bytes(65_537), arena_bytes(1_000_000)
    (65536, 81920, 1048576)
    """
    step = max(1 << (max(nbytes, 1) - 1).bit_length() >> 3, mmap.PAGESIZE)
    return max(-(-nbytes // step) * step, SMALLEST_BYTES)


def create_arena(kind: ArenaKind, number: int, nbytes: int) -> Arena:
    """Create an arena of exactly `nbytes` (more than 0), with all of its memory present.

    Faulting in costs more than copying and holds no GIL: call this in a thread for large sizes.

    Raises:
        OSError: The system has no memory or no descriptor left.
    """
    shared_memory = _SHARED_MEMORY.get(sys.platform, _shared_memory_linux)
    mapped, descriptor = shared_memory(kind, nbytes)
    present = np.frombuffer(mapped, np.uint8)
    for start in range(0, nbytes, _TOUCH_BYTES):
        present[start : start + _TOUCH_BYTES : mmap.PAGESIZE] = 0
    del present
    return Arena(
        number=number,
        kind=kind,
        nbytes=nbytes,
        memory=memoryview(mapped),
        descriptor=descriptor,
        _map=mapped,
    )


def _shared_memory_linux(kind: ArenaKind, nbytes: int) -> tuple[mmap.mmap, int]:
    if sys.platform == "darwin":  # pragma: no cover - for mypy, which looks for what Macs lack
        raise OSError("macOS has no memfd_create")
    descriptor = os.memfd_create(f"pmesh-{kind}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with _closing_on_failure(descriptor):
        os.ftruncate(descriptor, nbytes)
        mapped = mmap.mmap(descriptor, nbytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        if kind == "output":
            seals |= _F_SEAL_FUTURE_WRITE  # only the mapping above stays writable
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return mapped, descriptor


class _PosixShm(Protocol):
    """The interface of multiprocessing's extension module, which has no stubs."""

    def shm_open(self, path: str, flags: int, mode: int) -> int: ...
    def shm_unlink(self, path: str) -> None: ...


def _shared_memory_macos(kind: ArenaKind, nbytes: int) -> tuple[mmap.mmap, int]:
    posix_shm = cast("_PosixShm", importlib.import_module("_posixshmem"))  # Linux may lack it
    name = f"/pmesh-{secrets.token_hex(8)}"  # macOS: 31 bytes at most
    descriptor = posix_shm.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
    with _closing_on_failure(descriptor):
        try:
            passed = (
                posix_shm.shm_open(name, os.O_RDONLY, mode=0) if kind == "output" else descriptor
            )
        finally:
            posix_shm.shm_unlink(name)
    with _closing_on_failure(descriptor, passed):
        os.ftruncate(descriptor, nbytes)  # macOS allows this once: the size is final
        mapped = mmap.mmap(descriptor, nbytes)
    if passed != descriptor:
        os.close(descriptor)
    return mapped, passed


@contextlib.contextmanager
def _closing_on_failure(*descriptors: int) -> Generator[None]:
    try:
        yield
    except BaseException:
        for descriptor in set(descriptors):
            os.close(descriptor)
        raise


_SHARED_MEMORY = {"darwin": _shared_memory_macos}
"""By `sys.platform`; Linux is the default."""
