"""A rank dies at any byte of a save: what others load is a whole save, the one before or this."""

import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pmesh.client.checkpoints import files
from pmesh.client.checkpoints.files import (
    Disk,
    manifests_in,
    read_part,
    remove_saves_before,
    write_save,
)
from pmesh.client.checkpoints.layout import (
    FORMAT,
    Manifest,
    contents_of,
    holding_of,
    merged,
    missing_parts,
)
from pmesh.client.trees.state import describe
from pmesh.core.ops.shard import kept_parts
from pmesh.errors import UsageError
from pmesh.ids import path_name
from tests.worlds.faults import Faults

SIZE = 3
EVERY_BYTES = 997


class ProcessIsGone(BaseException):
    """The process is gone: nothing is cleaned up."""


def disk_with(budget: int, error: BaseException) -> Disk:
    """One that takes so many bytes, and then fails."""
    left = budget

    def write(file: int, data: memoryview) -> int:
        nonlocal left
        if not left:
            raise error
        written = os.write(file, data[:left])
        left -= written
        return written

    return Disk(write=write)


def manifest_of(rank: int, step: int) -> tuple[Manifest, list[Any]]:
    random = np.random.default_rng(step)
    state = {f"layer{i}": random.random((25, 583)) for i in range(9)}  # 1 MB in all
    described = describe(state)
    manifest = Manifest(
        format=FORMAT,
        serial=step,
        step=step,
        save_id=path_name("id"),
        saved_at=0.0,
        rank=rank,
        names=("a", "b", "c"),
        replicas=2,
        contents=contents_of(described, SIZE),
        digests=dict.fromkeys(kept_parts(rank, SIZE, 2), ""),
    )
    return manifest, [array.data for array in described.arrays]


def save(folder: Path, rank: int, step: int, disk: Disk) -> None:
    manifest, arrays = manifest_of(rank, step)
    write_save(folder, manifest, arrays, [], disk)


def loaded_step(folders: list[Path]) -> int:
    """The latest whole save, read and compared."""
    found = [manifest for folder in folders for manifest in manifests_in(folder)[0]]
    save = next(s for s in merged([holding_of(m) for m in found]) if not missing_parts(s))
    _, arrays = manifest_of(0, save.key.step)
    for folder in folders:
        for manifest in manifests_in(folder)[0]:
            for part in manifest.digests if manifest.key == save.key else ():
                for number, data in read_part(folder, manifest, part).items():
                    assert data.tobytes() == arrays[number].tobytes()
    return save.key.step


@pytest.mark.parametrize("rank", range(SIZE))
def test_a_kill_at_any_byte_of_a_save_leaves_a_whole_step(
    tmp_path: Path, faults: Faults, rank: int
) -> None:
    faults.instead(files, "_flush", lambda _: None)  # no power is lost here
    folders = [tmp_path / str(r) for r in range(SIZE)]
    for r, folder in enumerate(folders):
        save(folder, r, 1, Disk())
    # The others have not saved step 2: the killed rank's share is needed for it, and never whole.
    total = 0

    def count(file: int, data: memoryview) -> int:
        nonlocal total
        total += len(data)
        return os.write(file, data)

    save(tmp_path / "measured", rank, 2, Disk(write=count))
    assert total > 600_000
    other = (rank + 1) % SIZE
    save(folders[other], other, 2, Disk())  # with this one's share step 2 is whole

    for budget in range(0, total, EVERY_BYTES):
        with pytest.raises(ProcessIsGone):
            save(folders[rank], rank, 2, disk_with(budget, ProcessIsGone()))
        assert not list(folders[rank].glob("save-*-step-2-*/rank-*.json"))
        if budget % (50 * EVERY_BYTES) == 0:
            assert loaded_step(folders) == 1
        for rest in folders[rank].glob("save-*-step-2-*/*"):
            rest.unlink()
        for rest in folders[rank].glob("save-*-step-2-*/.*"):
            rest.unlink()

    save(folders[rank], rank, 2, Disk())
    assert loaded_step(folders) == 2


def test_a_full_disk_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path, 0, 1, Disk())
    before = list(tmp_path.rglob("*"))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(UsageError, match="No space left on device; free some space"):
        save(tmp_path, 0, 2, disk_with(500_000, full))

    assert list(tmp_path.rglob("*")) == before


def test_a_manifest_of_another_format_is_named(tmp_path: Path) -> None:
    save(tmp_path, 0, 1, Disk())
    (path,) = tmp_path.glob("*/rank-*.json")
    manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, format=2)))

    found, wrong = manifests_in(tmp_path)
    assert found == []
    assert "a manifest of format 2, not 1" in wrong[0]


def test_no_save_is_written_or_removed_through_a_link(tmp_path: Path) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "saves"
    save(elsewhere, 0, 1, Disk())
    before = sorted(elsewhere.rglob("*"))
    folder.mkdir()
    for step in (1, 2):
        (folder / manifest_of(0, step)[0].key.folder).symlink_to(next(elsewhere.iterdir()))

    with pytest.raises(UsageError, match="can't save step 2"):
        save(folder, 0, 2, Disk())
    remove_saves_before(folder, manifest_of(0, 2)[0].key)

    assert sorted(elsewhere.rglob("*")) == before
    assert not [path for path in before if path.is_dir() and not list(path.iterdir())]


def test_a_write_that_fails_removes_what_it_has_created_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, Disk())  # another rank, on a drive that they share
    before = sorted(tmp_path.rglob("*"))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for budget in (100_000, 500_000, 700_000):  # part 3, which both have, then part 1
        with pytest.raises(UsageError, match="No space left"):
            save(tmp_path, 2, 2, disk_with(budget, full))

        assert sorted(tmp_path.rglob("*")) == before
