"""A trainer's shared memory: mapped arenas, the user's arrays in them, and residuals.

A residual is what a compressed all-reduce has rounded away here; the next one adds it.
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
from pmesh.core.wire.session import ArenaGranted
from pmesh.errors import ProtocolError


@dataclass(frozen=True, slots=True, eq=False)
class Mapped:
    """An arena in this process. It is unmapped when the last array over it is gone."""

    number: int
    nbytes: int
    memory: mmap.mmap


@dataclass(frozen=True, slots=True)
class InputRegion:
    """A place in an input arena that holds values of the user's."""

    arena: int
    offset: int
    """The start, in bytes."""


_FLAGS = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
"""All pages are there already: to map them at once takes a fifth of the time of so many faults.
macOS has no flag for it."""


def map_arena(granted: ArenaGranted, descriptor: int) -> Mapped:
    """Map an arena that the agent has granted, and close the descriptor.

    Raises:
        ProtocolError: it can't be mapped.
    """
    access = mmap.PROT_READ | (mmap.PROT_WRITE if granted.kind == "input" else 0)
    try:
        # The message has the size: fstat on macOS rounds it up to a page.
        memory = mmap.mmap(descriptor, granted.nbytes, flags=_FLAGS, prot=access)
    except (OSError, ValueError, OverflowError) as e:
        raise ProtocolError(f"arena {granted.arena} can't be mapped: {e}") from e
    finally:
        os.close(descriptor)
    return Mapped(granted.arena, granted.nbytes, memory)


def values_in(arena: Mapped | None, dtype: str, count: int) -> Values:
    """Return the first values in an arena; raise ProtocolError if it is missing or too small."""
    if count == 0:
        return np.empty(0, WIRE_DTYPES[dtype])
    if arena is None:
        raise ProtocolError("a result in an arena that was not granted")
    if count * WIRE_DTYPES[dtype].itemsize > arena.nbytes:
        raise ProtocolError(f"{count} values of {dtype} in an arena of {arena.nbytes} bytes")
    return np.frombuffer(arena.memory, WIRE_DTYPES[dtype], count)


class UsersArrays:
    """The user's arrays in a session's arenas: inputs, and results that the user may keep.

    Python drops them in any thread, at any moment. `take_dropped` returns the arenas that the agent
    may have back. Until then an address belongs to one array.
    """

    def __init__(self) -> None:
        self.inputs: dict[int, tuple[Mapped, int]] = {}  # each with its address
        self.dropped: deque[int] = deque()
        """The numbers that `take_dropped` returns next."""

    def result(self, arena: Mapped, values: Values) -> Values:
        """Return the same values; their arena stays until the last view of them is gone."""
        return tracked(values, arena.number, self.dropped)

    def input(self, arena: Mapped, values: Values) -> Values:
        """Return the same values, for the user to write; `region_of` finds them."""
        self.inputs[arena.number] = arena, _address(values)
        return tracked(values, arena.number, self.dropped)

    def region_of(self, values: Values, wire: str) -> InputRegion | None:
        """Return where these values lie in an arena, ready to be sent; None if they do not."""
        flags = values.flags
        plain = flags.c_contiguous and flags.aligned and values.dtype == WIRE_DTYPES[wire]
        if not values.size or not plain:
            return None
        address = _address(values)
        for number, (arena, start) in self.inputs.items():
            if start <= address and address + values.nbytes <= start + arena.nbytes:
                return InputRegion(number, address - start)
        return None

    def take_dropped(self) -> list[int]:
        """Return the numbers of the arenas whose arrays are gone since the last call."""
        gone = list[int]()
        while self.dropped:
            gone.append(self.dropped.popleft())
            self.inputs.pop(gone[-1], None)
        return gone


class _Owner:
    """The base of an array and all its views; it lives as long as any of them."""

    def __init__(self, values: Values) -> None:
        self.__array_interface__ = values.__array_interface__
        self._values = values


def tracked(values: Values, number: int, dropped: deque[int]) -> Values:
    """Return the same values; once the last view of them is gone, `dropped` has their arena."""
    owner = _Owner(values)
    weakref.finalize(owner, dropped.append, number).atexit = False
    return np.asarray(owner)


def _address(values: Values) -> int:
    address: int = values.__array_interface__["data"][0]
    return address


class KeptValues(NamedTuple):
    """Values that outlive an op, in memory that the agent can reach."""

    arena: int
    """The arena's number; -1 if the values are not in an arena, or there are none."""
    values: Float32s


class Residuals:
    """The committed residual of one bucket, and room for that of the op under way (O9).

    Each attempt of an op reads the first and writes the second, and they are swapped once the op is
    done. So when an op is repeated without a lost rank, or fails, the residual from before it is
    still there.
    """

    __slots__ = ("_attempt", "_committed")

    def __init__(self, committed: KeptValues, attempt: KeptValues) -> None:
        """Raise ValueError unless both have the same length; the first op reads `committed`."""
        if committed.values.shape != attempt.values.shape:
            raise ValueError(f"{attempt.values.size} values beside {committed.values.size}")
        self._committed = committed
        self._attempt = attempt

    @property
    def values(self) -> Float32s:
        """float32[count]: the committed residual, to be read or written between ops.

        It is another array after each op. It can still be read when its session has ended.
        """
        return self._committed.values

    @property
    def committed(self) -> KeptValues:
        """The memory that the next op reads."""
        return self._committed

    @property
    def attempt(self) -> KeptValues:
        """The memory that the next op writes."""
        return self._attempt

    def swap(self) -> None:
        """Commit the attempt, after an op has completed with this rank's values."""
        self._committed, self._attempt = self._attempt, self._committed
