"""Output that waits on the disk."""

import errno
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from pmesh.net.local.spool import Spool


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


def test_a_full_disk_loses_lines_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path / "x")

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", refuse)
    spool.append(b"lost\n")
    assert spool.failed is not None
    spool.append(b"lost, too\n")
    assert spool.end == 0
    spool.close()
