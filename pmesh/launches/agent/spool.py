"""Output that waits on the disk, so that a slow reader neither stops its writer nor fills memory.

The newest segments are kept; a reader that falls behind the oldest one skips what is gone. While
the disk takes nothing, a little waits in memory instead. No file stays open: an agent has many
spools, and few descriptors.
"""

import contextlib
import errno
import os
from collections import deque
from collections.abc import Callable, Generator
from pathlib import Path
from typing import NamedTuple, Protocol

import trio

from pmesh.home_paths import remove_tree
from pmesh.net.links.acceptor import RETRY_S

SEGMENT_BYTES = 16 * 1024 * 1024
MAX_SEGMENTS = 32  # 512 MiB: 80 minutes of 1,000 lines a second
MEMORY_BYTES = 512 * 1024  # of a segment in memory, of which there are two: what is on its way
_PASSES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})


class SpooledLines(NamedTuple):
    """Whole lines, read from a spool."""

    offset: int
    """Of their first byte; greater than what was asked for if older lines are gone."""
    data: bytes


class Spool:
    """Lines in files below a directory; offsets count from the first line ever written."""

    def __init__(
        self,
        directory: Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        segments: int = MAX_SEGMENTS,
        memory_bytes: int = MEMORY_BYTES,
        describe: Callable[[OSError], bytes] = lambda _: b"",
    ) -> None:
        """Write nothing yet.

        Args:
            directory: It is made for the first line.
            segment_bytes: After so many, a file is full.
            segments: How many there are at most.
            memory_bytes: After so many, the disk is tried again.
            describe: Returns a line for the readers, when the disk begins to refuse lines.
        """
        self.directory = directory
        self._segment_bytes = segment_bytes
        self._segments = deque[_Segment]()
        """The oldest first."""
        self._most = segments
        self._memory_bytes = memory_bytes
        self._describe = describe
        self.end = 0
        self.failed: OSError | None = None
        """Why the disk refuses lines now."""
        self._grown = trio.Event()

    def append(self, lines: bytes) -> None:
        """Add whole lines. Where the disk refuses them, only the latest are kept, in memory."""
        if not lines:
            return
        try:
            self._write(lines)
        except OSError as e:
            notice = self._describe(e) if self.failed is None else b""
            self.failed = e
            lines = notice + lines
            self._begin_in_memory().write(lines)
        self.end += len(lines)
        grown, self._grown = self._grown, trio.Event()
        grown.set()

    def _write(self, lines: bytes) -> None:
        """Write to the last segment, or to another file if that is full."""
        last = self._segments[-1] if self._segments else None
        if last is not None and last.end - last.start < last.most:
            last.write(lines)
            return
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        segment = _OnDisk(self.directory, self.end, self._segment_bytes)
        try:
            segment.write(lines)
        except OSError:
            segment.remove()
            raise
        self.failed = None
        self._add(segment)

    def _begin_in_memory(self) -> "_Segment":
        """Begin a segment that does not need the disk; of those there are two at most."""
        before = [one for one in self._segments if isinstance(one, _InMemory)]
        for old in before[:-1]:
            self._segments.remove(old)
        segment = _InMemory(self.end, self._memory_bytes)
        self._add(segment)
        return segment

    def _add(self, segment: "_Segment") -> None:
        self._segments.append(segment)
        if len(self._segments) > self._most:
            self._segments.popleft().remove()

    def read(self, offset: int, most: int) -> SpooledLines:
        """Return lines from the offset on, at most so many bytes; none if there are no more.

        A file that can't be read is skipped, as if its lines were too old.

        Raises:
            OSError: The system has no descriptor left; it may have one later.
        """
        for segment in self._segments:
            if offset < segment.end:
                offset = max(offset, segment.start)
                try:
                    data = segment.read(offset, min(most, segment.end - offset))
                except OSError as e:
                    if e.errno in _PASSES:
                        raise
                    data = b""
                if lines := data[: data.rfind(b"\n") + 1]:
                    return SpooledLines(offset, lines)
                offset = segment.end
        return SpooledLines(offset, b"")

    async def read_soon(self, offset: int, most: int) -> SpooledLines:
        """As `read`, as soon as the system has a descriptor for it."""
        while True:
            try:
                return self.read(offset, most)
            except OSError:
                await trio.sleep(RETRY_S)

    async def grown_beyond(self, offset: int) -> None:
        """Wait until there are lines after the offset."""
        while self.end <= offset:
            await self._grown.wait()

    def close(self) -> None:
        """Remove the files."""
        self._segments.clear()
        remove_tree(self.directory.parent, self.directory.name)


class _Segment(Protocol):
    start: int
    end: int
    most: int

    def write(self, lines: bytes) -> None: ...

    def read(self, offset: int, nbytes: int) -> bytes: ...

    def remove(self) -> None: ...


class _OnDisk:
    def __init__(self, directory: Path, start: int, most: int) -> None:
        self.start = self.end = start
        self.most = most
        self._path = directory / f"{start:020}.lines"
        with self._opened(os.O_WRONLY | os.O_CREAT | os.O_TRUNC):
            pass

    @contextlib.contextmanager
    def _opened(self, flags: int) -> Generator[int]:
        descriptor = os.open(self._path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def write(self, lines: bytes) -> None:
        """Write all, or raise OSError; what was written then is never read."""
        place = self.end - self.start
        view = memoryview(lines)
        with self._opened(os.O_WRONLY) as descriptor:
            while view:
                written = os.pwrite(descriptor, view, place)
                place, view = place + written, view[written:]
        self.end += len(lines)

    def read(self, offset: int, nbytes: int) -> bytes:
        with self._opened(os.O_RDONLY) as descriptor:
            return os.pread(descriptor, nbytes, offset - self.start)

    def remove(self) -> None:
        with contextlib.suppress(OSError):  # at the latest it goes with its directory
            self._path.unlink()


class _InMemory:
    def __init__(self, start: int, most: int) -> None:
        self.start = self.end = start
        self.most = most
        self._lines = bytearray()

    def write(self, lines: bytes) -> None:
        self._lines += lines
        self.end += len(lines)

    def read(self, offset: int, nbytes: int) -> bytes:
        begin = offset - self.start
        return bytes(self._lines[begin : begin + nbytes])

    def remove(self) -> None:
        self._lines.clear()
