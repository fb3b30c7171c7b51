"""`pmesh checkpoint`: looks into folders of checkpoints, without a mesh."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from pmesh.client.checkpoints.files import DamagedError, export_file, manifests_in, read_part
from pmesh.client.checkpoints.layout import (
    Manifest,
    SaveKey,
    holding_of,
    layout_digest,
    machines_with,
    merged,
    missing_parts,
)
from pmesh.core.ops.reductions import Values
from pmesh.errors import UsageError
from pmesh.home_paths import expand_user
from pmesh.terminal.lines import complain, say
from pmesh.terminal.rows import Rows, output


def list_checkpoints(folders: Sequence[Path]) -> int:
    """`pmesh checkpoint list`: one row for each save of which something is there."""
    found = _manifests(folders)
    rows: list[list[str]] = []
    for save in merged([holding_of(manifest) for _, manifest in found]):
        manifest = next(m for _, m in found if m.key == save.key)
        lacking = missing_parts(save)
        saved = datetime.fromtimestamp(manifest.saved_at, UTC).astimezone()
        rows.append(
            [
                str(save.key.step),
                f"{saved:%Y-%m-%d %H:%M:%S}",
                f"{manifest.contents.nbytes / 1e6:.1f} MB",
                f"{len(save.names) - len(lacking)} of {len(save.names)}",
                ", ".join(dict.fromkeys(save.names)),
            ]
        )
    output().print(Rows(("step", "saved", "size", "parts here", "machines"), rows))
    return 0


def show_checkpoint(folders: Sequence[Path], step: int | None) -> int:
    """`pmesh checkpoint show`: the arrays of one save, and where each is."""
    chosen = _chosen(_manifests(folders), step)
    manifest = chosen[0][1]
    here = {part for _, each in chosen for part in each.digests}
    rows = [
        [
            array.name,
            array.dtype,
            " x ".join(map(str, array.shape)) or "1",
            str(part + 1),
            "here" if part in here else "elsewhere",
        ]
        for part in range(manifest.contents.parts)
        for array in manifest.contents.arrays[slice(*manifest.contents.cuts[part : part + 2])]
    ]
    say(f"step {manifest.step}, saved by {', '.join(dict.fromkeys(manifest.names))}")
    output().print(Rows(("array", "dtype", "shape", "part", "where"), rows))
    return 0


def export_checkpoint(folders: Sequence[Path], to: Path, step: int | None) -> int:
    """`pmesh checkpoint export`: one save as one safetensors file.

    Raises:
        UsageError: a part is in none of the folders, or the file can't be written.
    """
    chosen = _chosen(_manifests(folders), step)
    manifest = chosen[0][1]
    size = len(manifest.names)
    arrays: dict[int, Values] = {}
    lacking: list[int] = []
    for part in range(size):
        found = _read_any([(f, m) for f, m in chosen if part in m.digests], part)
        if found is None:
            lacking.append(part)
        else:
            arrays |= found
    if lacking:
        where = ", ".join(machines_with(lacking, manifest.names, manifest.replicas))
        raise UsageError(
            f"step {manifest.step} lacks part {', '.join(str(p + 1) for p in lacking)} of {size}, "
            f"saved by {where}; copy the folder from there and name both"
        )
    ordered = [arrays[number] for number in range(len(manifest.contents.arrays))]
    metadata = {"format": "np", "pmesh_step": str(manifest.step)}
    export_file(expand_user(to).resolve(), manifest.contents, ordered, metadata)
    say(f"step {manifest.step} is in {to}: {len(ordered)} array{'' if len(ordered) == 1 else 's'}")
    return 0


def _manifests(folders: Sequence[Path]) -> list[tuple[Path, Manifest]]:
    if not folders:
        raise UsageError("name a folder: what the script gives to pmesh.Checkpoints")
    found: list[tuple[Path, Manifest]] = []
    any_is_damaged = False
    places = [expand_user(folder) for folder in folders]
    for place in places:
        manifests, wrong = manifests_in(place)
        any_is_damaged = any_is_damaged or bool(wrong)
        found += [(place, manifest) for manifest in manifests]
        for what in wrong:
            complain(f"{what}; it does not count")
    if not found:
        cure = "name the folder that the script gives to pmesh.Checkpoints"
        if any_is_damaged:
            cure = "copy the folder of another machine, and name that one too"
        where = ", ".join(map(str, folders))
        if not any(place.exists() for place in places):
            cure = f"there is no such folder; {cure}"
        raise UsageError(f"no checkpoint in {where} can be used; {cure}")
    return found


def _chosen(
    found: Sequence[tuple[Path, Manifest]], step: int | None
) -> list[tuple[Path, Manifest]]:
    """All manifests of the latest save of that step; of any step, the latest that is whole."""
    saves = merged([holding_of(manifest) for _, manifest in found])
    fitting = [save for save in saves if step is None or save.key.step == step]
    if not fitting:
        steps = ", ".join(str(save.key.step) for save in saves)
        raise UsageError(f"there is no step {step}; there are {steps}")
    best = next((save for save in fitting if not missing_parts(save)), fitting[0])

    def is_of(key: SaveKey, manifest: Manifest) -> bool:
        return key == best.key and layout_digest(manifest.contents) == best.layout

    return [(folder, manifest) for folder, manifest in found if is_of(manifest.key, manifest)]


def _read_any(copies: Sequence[tuple[Path, Manifest]], part: int) -> dict[int, Values] | None:
    for folder, manifest in copies:
        try:
            return read_part(folder, manifest, part)
        except DamagedError as e:
            complain(str(e))
    return None
