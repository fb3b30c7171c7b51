"""Where the bytes of a state arrive: memory that is faulted in ahead of them, hashed as they come.

The first touch of fresh memory can cost more than the network, most of all where a virtual machine
must get it from its host. A thread does it for the next chunks while one is on its way.
"""

import mmap
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import numpy as np
import xxhash

from pmesh.core.reductions import Values

AHEAD_CHUNKS = 4  # more hides no more, and takes the cores from the first chunks


class Arrival:
    """The bytes of one state, taken in chunks of one size but for the last.

    Use it in a `with` statement: leaving that ends its thread.
    """

    def __init__(self, nbytes: int, *, chunk_bytes: int) -> None:
        self.arrived = 0
        """How many bytes have."""
        self.values: Values = np.empty(nbytes, np.uint8)
        """Flat; what has not arrived is garbage."""
        self.hasher = xxhash.xxh3_128()
        """Of what has arrived."""
        starts = range(0, nbytes, chunk_bytes)
        self._untouched = deque(self.values[start : start + chunk_bytes] for start in starts)
        self._ahead: deque[tuple[Values, Future[None]]] = deque()
        self._thread = ThreadPoolExecutor(1, "pmesh-sync")

    def __enter__(self) -> Self:
        for _ in range(AHEAD_CHUNKS):
            self._touch_next()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._thread.shutdown(cancel_futures=True)

    def take(self, chunk: Values) -> None:
        """Copy the next chunk (flat uint8) to where it belongs."""
        into, touched = self._ahead.popleft()
        if not touched.cancel():
            touched.result()  # a touch writes: never after the bytes have come
        self._touch_next()
        np.copyto(into, chunk)
        self.hasher.update(into.data)
        self.arrived += chunk.size

    def _touch_next(self) -> None:
        if self._untouched:
            memory = self._untouched.popleft()
            self._ahead.append((memory, self._thread.submit(_touch, memory)))


def _touch(memory: Values) -> None:
    memory[:: mmap.PAGESIZE] = 0  # without the GIL
