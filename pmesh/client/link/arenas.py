"""Shared memory as a trainer has it: mapped arenas, the user's arrays over them, residuals.

A residual is what a compressed all-reduce has rounded away here, to be added to the next values.
"""

import mmap
import os
import weakref
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pmesh.compression.blocks import Float32s
from pmesh.core.ops.reductions import WIRE_DTYPES, Values
from pmesh.core.wire.local import ArenaGranted
from pmesh.errors import ProtocolError


@dataclass(frozen=True, slots=True, eq=False)
class Mapped:
    """An arena in this process. It is unmapped when the last array over it is gone."""

    number: int
    nbytes: int
    memory: mmap.mmap


@dataclass(frozen=True, slots=True)
class Region:
    """Values that lie in an input arena, where the user has put them."""

    arena: int
    offset: int
    """In bytes."""


def map_arena(granted: ArenaGranted, descriptor: int) -> Mapped:
    """An arena that the agent has granted; closes the descriptor.

    Raises:
        ProtocolError: no agent grants such a thing.
    """
    access = mmap.PROT_READ | (mmap.PROT_WRITE if granted.kind == "input" else 0)
    try:
        # The size is the message's: macOS rounds what fstat says up to a page.
        memory = mmap.mmap(descriptor, granted.nbytes, prot=access)
    except (OSError, ValueError, OverflowError) as e:
        raise ProtocolError(f"arena {granted.arena} can't be mapped: {e}") from e
    finally:
        os.close(descriptor)
    return Mapped(granted.arena, granted.nbytes, memory)


def values_in(arena: Mapped | None, dtype: str, count: int) -> Values:
    """The first values in an arena; raises ProtocolError if they can't lie there."""
    if count == 0:
        return np.empty(0, WIRE_DTYPES[dtype])
    if arena is None:
        raise ProtocolError("a result in an arena that was not granted")
    if count * WIRE_DTYPES[dtype].itemsize > arena.nbytes:
        raise ProtocolError(f"{count} values of {dtype} in an arena of {arena.nbytes} bytes")
    return np.frombuffer(arena.memory, WIRE_DTYPES[dtype], count)


class UsersArrays:
    """Arrays of the user's in a session's arenas: input that lies there, and results that stay.

    Python drops them in any thread, at any moment; `take_dropped` then says which arenas the agent
    may have back. Until it does, an address belongs to one array.
    """

    def __init__(self) -> None:
        self._inputs: dict[int, tuple[Mapped, int]] = {}  # with the address
        self._dropped: deque[int] = deque()

    def result(self, arena: Mapped, values: Values) -> Values:
        """The same values, whose arena stays until the last view of them is gone."""
        return _tracked(values, arena.number, self._dropped)

    def input(self, arena: Mapped, values: Values) -> Values:
        """The same, to be written by the user, and found by `region_of`."""
        self._inputs[arena.number] = arena, _address(values)
        return _tracked(values, arena.number, self._dropped)

    def region_of(self, values: Values, wire: str) -> Region | None:
        """Where these values lie in an arena as they would be sent; None: they don't."""
        flags = values.flags
        plain = flags.c_contiguous and flags.aligned and values.dtype == WIRE_DTYPES[wire]
        if not self._inputs or not values.size or not plain:
            return None
        address = _address(values)
        for number, (arena, start) in self._inputs.items():
            if start <= address and address + values.nbytes <= start + arena.nbytes:
                return Region(number, address - start)
        return None

    def take_dropped(self) -> list[int]:
        """The numbers of arenas whose arrays are gone since the last call."""
        gone = [self._dropped.popleft() for _ in range(len(self._dropped))]
        for number in gone:
            self._inputs.pop(number, None)
        return gone


class _Owner:
    """The base of an array and all its views: it ends with the last of them."""

    def __init__(self, values: Values) -> None:
        self.__array_interface__ = values.__array_interface__
        self._values = values


def _tracked(values: Values, number: int, dropped: deque[int]) -> Values:
    owner = _Owner(values)
    weakref.finalize(owner, dropped.append, number).atexit = False
    return np.asarray(owner)


def _address(values: Values) -> int:
    address: int = values.__array_interface__["data"][0]
    return address


class Kept(NamedTuple):
    """Values that outlive an op, in memory that the agent can reach."""

    arena: int
    """-1 where there is no agent, or there are no values."""
    values: Float32s


class Residuals:
    """The residual of one bucket, committed, and room for that of the op under way (O9).

    An op reads the one and writes the other, in each attempt anew. They change places once it is
    done: so an op that runs again without a rank that was lost, or one that fails, begins with the
    residual that was there before.
    """

    __slots__ = ("_attempt", "_committed")

    def __init__(self, committed: Kept, attempt: Kept) -> None:
        """Raises ValueError unless both have one length; the first op reads `committed`."""
        if committed.values.shape != attempt.values.shape:
            raise ValueError(f"{attempt.values.size} values beside {committed.values.size}")
        self._committed = committed
        self._attempt = attempt

    @property
    def values(self) -> Float32s:
        """float32[count]: the committed residual, to be read or written between ops.

        Another array after each op. It can still be read when its session has ended.
        """
        return self._committed.values

    @property
    def committed(self) -> Kept:
        """What the next op reads."""
        return self._committed

    @property
    def attempt(self) -> Kept:
        """What the next op writes."""
        return self._attempt

    def swap(self) -> None:
        """Commit the attempt: an op has completed with this rank's values."""
        self._committed, self._attempt = self._attempt, self._committed
