"""Output that waits on the disk."""

import errno
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from pmesh.launches.agent.spool import Spool


def read_all(spool: Spool, most: int) -> bytes:
    offset, data = 0, b""
    while (piece := spool.read(offset, most)).data:
        assert piece.data.endswith(b"\n")
        offset = piece.offset + len(piece.data)
        data += piece.data
    return data


@given(st.lists(st.binary(max_size=30).filter(lambda data: b"\n" not in data), max_size=20))
def test_what_is_read_is_what_was_written_in_whole_lines(lines: list[bytes]) -> None:
    with TemporaryDirectory() as folder:
        spool = Spool(Path(folder) / "x", segment_bytes=40)
        for line in lines:
            spool.append(line + b"\n")
        assert read_all(spool, 40) == b"".join(line + b"\n" for line in lines)
        spool.close()


def test_beyond_the_bound_the_oldest_lines_are_gone(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "x", segment_bytes=10, segments=2)
    for number in range(10):
        spool.append(b"line no %d\n" % number)  # 10 bytes
    assert spool.read(0, 100) == (80, b"line no 8\n")
    assert spool.read(90, 100) == (90, b"line no 9\n")
    assert spool.read(100, 100) == (100, b"")
    assert len(list((tmp_path / "x").iterdir())) == 2
    spool.close()
    assert not (tmp_path / "x").exists()


async def test_a_reader_waits_for_more(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "x")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(spool.grown_beyond, 0)
        await trio.testing.wait_all_tasks_blocked()
        spool.append(b"more\n")
    spool.close()


class FillableDisk:
    """`os.pwrite`, which can be told that the disk is full; it then writes a part first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        self._write = os.pwrite
        monkeypatch.setattr(os, "pwrite", self.write)

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        if self.is_full:
            self._write(descriptor, data[:1], offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._write(descriptor, data, offset)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FillableDisk:
    return FillableDisk(monkeypatch)


def test_a_full_disk_is_told_of_and_the_latest_lines_stay(
    tmp_path: Path, disk: FillableDisk
) -> None:
    spool = Spool(tmp_path / "x", memory_bytes=10, describe=lambda e: f"{e.strerror}\n".encode())
    spool.append(b"stored\n")
    disk.is_full = True
    for number in range(3):
        spool.append(b"line %d\n" % number)
    assert spool.failed is not None
    assert read_all(spool, 100) == b"stored\nNo space left on device\nline 0\nline 1\nline 2\n"
    for number in range(3, 50):
        spool.append(b"line %d\n" % number)
    kept = read_all(spool, 100)
    assert kept.startswith(b"stored\nline ")
    assert kept.endswith(b"line 48\nline 49\n")
    assert len(kept) < 100  # memory is bounded
    spool.close()


def test_a_reader_that_is_behind_learns_how_much_is_gone(
    tmp_path: Path, disk: FillableDisk
) -> None:
    spool = Spool(tmp_path / "x", memory_bytes=10)
    disk.is_full = True
    for _ in range(10):
        spool.append(b"ten bytes\n")
    piece = spool.read(0, 100)
    assert (piece.offset, piece.data) == (80, b"ten bytes\n")
    spool.close()


def test_a_disk_that_has_room_again_is_used_again(tmp_path: Path, disk: FillableDisk) -> None:
    spool = Spool(tmp_path / "x", memory_bytes=10, describe=lambda _: b"full\n")
    disk.is_full = True
    spool.append(b"ten bytes\n")
    disk.is_full = False
    spool.append(b"stored\n")
    assert spool.failed is None
    assert read_all(spool, 100) == b"full\nten bytes\nstored\n"
    spool.append(b"too\n")
    assert read_all(spool, 100) == b"full\nten bytes\nstored\ntoo\n"
    spool.close()


def test_memory_is_forgotten_like_files(tmp_path: Path, disk: FillableDisk) -> None:
    spool = Spool(tmp_path / "x", segment_bytes=10, segments=1, memory_bytes=10)
    disk.is_full = True
    spool.append(b"ten bytes\n")
    disk.is_full = False
    spool.append(b"ten bytes\n")
    assert spool.read(0, 100) == (10, b"ten bytes\n")
    disk.is_full = True
    spool.append(b"ten bytes\n")
    spool.close()
    assert spool.read(0, 100) == (0, b"")


class Descriptors:
    """`os.open`, which can be told that the system has none left, or that a file is damaged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: int | None = None
        self._open = os.open
        monkeypatch.setattr(os, "open", self.open)

    def open(self, path: Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        return self._open(path, flags, mode, dir_fd=dir_fd)


@pytest.fixture
def descriptors(monkeypatch: pytest.MonkeyPatch) -> Descriptors:
    return Descriptors(monkeypatch)


async def test_a_reader_waits_for_a_descriptor_and_loses_nothing(
    tmp_path: Path, descriptors: Descriptors
) -> None:
    spool = Spool(tmp_path / "x", memory_bytes=10)
    spool.append(b"stored\n")
    descriptors.error = errno.EMFILE
    spool.append(b"in memory\n")
    with pytest.raises(OSError, match="Too many open files"):
        spool.read(0, 100)
    pieces = list[bytes]()

    async def read() -> None:
        pieces.append((await spool.read_soon(0, 100)).data)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        assert not pieces
        descriptors.error = None
    assert pieces == [b"stored\n"]
    assert spool.read(7, 100) == (7, b"in memory\n")
    spool.close()


def test_a_file_that_can_not_be_read_is_skipped(tmp_path: Path, descriptors: Descriptors) -> None:
    spool = Spool(tmp_path / "x", segment_bytes=10)
    spool.append(b"ten bytes\n")
    spool.append(b"and more\n")
    descriptors.error = errno.EIO
    assert spool.read(0, 100) == (19, b"")
    descriptors.error = None
    (tmp_path / "x" / f"{0:020}.lines").unlink()
    assert spool.read(0, 100) == (10, b"and more\n")
    spool.close()


def test_output_keeps_no_file_open(tmp_path: Path) -> None:
    before = psutil.Process().num_fds()
    spool = Spool(tmp_path / "x", segment_bytes=10)
    for _ in range(20):
        spool.append(b"ten bytes\n")
    assert spool.read(0, 100).data
    assert psutil.Process().num_fds() == before
    spool.close()
