"""Output that waits on the disk, so that a slow reader neither stops its writer nor fills memory.

The newest segments are kept; a reader that falls behind the oldest one skips what is gone.
"""

import os
import shutil
from collections import deque
from pathlib import Path
from typing import NamedTuple

import trio

SEGMENT_BYTES = 16 * 1024 * 1024
MAX_SEGMENTS = 32  # 512 MiB: 80 minutes of 1,000 lines a second


class Piece(NamedTuple):
    """Whole lines, read from a spool."""

    offset: int
    """Of their first byte; greater than what was asked for if older lines are gone."""
    data: bytes


class Spool:
    """Lines in files below a directory; offsets count from the first line ever written."""

    def __init__(
        self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES, segments: int = MAX_SEGMENTS
    ) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._segments = deque[tuple[int, int]]()
        """The offset and the descriptor of each, oldest first."""
        self._most = segments
        self.end = 0
        self.failed: OSError | None = None
        """Set once the disk has refused lines; they and later ones are dropped."""
        self._grown = trio.Event()

    def append(self, lines: bytes) -> None:
        """Add whole lines. A full disk loses them, and sets `failed`."""
        if not lines or self.failed is not None:
            return
        try:
            if not self._segments or self.end - self._segments[-1][0] >= self._segment_bytes:
                self._begin_segment()
            view = memoryview(lines)
            while view:
                view = view[os.write(self._segments[-1][1], view) :]
        except OSError as e:
            self.failed = e
            return
        self.end += len(lines)
        grown, self._grown = self._grown, trio.Event()
        grown.set()

    def _begin_segment(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._directory / f"{self.end:020}.lines"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._segments.append((self.end, os.open(path, flags, 0o600)))
        if len(self._segments) > self._most:
            offset, descriptor = self._segments.popleft()
            os.close(descriptor)
            (self._directory / f"{offset:020}.lines").unlink()

    def read(self, offset: int, most: int) -> Piece:
        """Return lines from the offset on, at most so many bytes; none if there are no more."""
        if self._segments:
            offset = max(offset, self._segments[0][0])
        for start, descriptor in reversed(self._segments):
            if start <= offset < self.end:
                data = os.pread(descriptor, most, offset - start)
                return Piece(offset, data[: data.rfind(b"\n") + 1])
        return Piece(offset, b"")

    async def grown_beyond(self, offset: int) -> None:
        """Wait until there are lines after the offset."""
        while self.end <= offset:
            await self._grown.wait()

    def close(self, *, keep: bool = False) -> None:
        """Remove the files, or only close them."""
        for _, descriptor in self._segments:
            os.close(descriptor)
        self._segments.clear()
        if not keep:
            shutil.rmtree(self._directory, ignore_errors=True)
