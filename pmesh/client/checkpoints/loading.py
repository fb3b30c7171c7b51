"""How ranks load a save: they agree on the latest whole one, and send each other missing parts."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from pmesh.client.checkpoints.files import DamagedError, manifests_in, read_part
from pmesh.client.checkpoints.layout import (
    Contents,
    Manifest,
    SaveHolding,
    SaveKey,
    SaveReport,
    decode_manifest_untrusted,
    holding_of,
    layout_digest,
    machines_with,
    merged,
    missing_parts,
)
from pmesh.client.collective.told import read_untrusted
from pmesh.client.mesh import Mesh
from pmesh.core.ops.reductions import Values
from pmesh.errors import NotEnoughRanks, RankLost, RosterChanged, UsageError

CHUNK_BYTES = 16 * 1024 * 1024  # sent to each rank in one op; each op costs a round trip

_logger = logging.getLogger("pmesh")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSave:
    """A whole save in this rank's memory."""

    manifest: Manifest
    """The manifest of some rank."""
    arrays: tuple[Values, ...]
    """The arrays, flat uint8, by number."""


def load_together(mesh: Mesh, folder: Path) -> LoadedSave | None:
    """Load the latest save of which the ranks' disks have all parts; None if there is no save.

    Raises:
        NotEnoughRanks: there are saves, but each lacks parts that are on other machines.
        UsageError: the folder can't be read, or all that the ranks' folders have is damaged.
        PmeshError: as for `all_reduce`.
    """
    while True:
        try:
            return _load(mesh, folder)
        except (RankLost, RosterChanged):  # all ranks raise it
            _logger.warning("checkpoints: a rank was lost while loading; the others begin again")


def _load(mesh: Mesh, folder: Path) -> LoadedSave | None:
    manifests, wrong = manifests_in(folder)
    for what in wrong:
        _logger.warning("checkpoints: %s; it does not count", what)
    mine = SaveReport(tuple(holding_of(manifest) for manifest in manifests), "".join(wrong[:1]))
    told = mesh.all_gather_object(mine)
    reports = read_untrusted(told, SaveReport, mesh.names, "its saves")
    saves = merged([holding for report in reports for holding in report.holdings])
    reasons: list[str] = []
    for save in saves:
        lacking = missing_parts(save)
        found = None if lacking else _Attempt(mesh, folder, manifests, save).run()
        if isinstance(found, LoadedSave):
            for reason in reasons:
                _logger.warning("checkpoints: %s; step %d is loaded", reason, save.key.step)
            return found
        reasons.append(_reason(save, lacking or found or []))
    damaged = next((report.failed for report in reports if report.failed), "")
    if not reasons and damaged:  # not by a crash: a new training would replace what can be rescued
        raise UsageError(
            f"no checkpoint can be read: {damaged}. Bring the file back from a copy; or, to begin "
            "anew, remove the folders of checkpoints on every machine"
        )
    if not reasons:
        return None
    raise NotEnoughRanks(
        f"no checkpoint is whole: {'; '.join(reasons[:3])}. Start the script there too, with their "
        f"folders. To begin anew without them, remove {folder} on every machine"
    )


def _reason(save: SaveHolding, lacking: Sequence[int]) -> str:
    where = ", ".join(machines_with(lacking, save.names, save.replicas))
    parts = ", ".join(str(part + 1) for part in lacking)
    return f"step {save.key.step} lacks part {parts} of {len(save.names)}, saved by {where}"


class _Attempt:
    """Loads one save that is whole according to the manifests."""

    def __init__(
        self, mesh: Mesh, folder: Path, manifests: Sequence[Manifest], save: SaveHolding
    ) -> None:
        self._mesh = mesh
        self._folder = folder
        self._save = save
        self._mine = [
            manifest
            for manifest in manifests
            if manifest.key == save.key and layout_digest(manifest.contents) == save.layout
        ]
        self._arrays: dict[int, Values] = {}

    def run(self) -> LoadedSave | list[int]:
        """Return the save, or the parts of which every copy is damaged."""
        own = self._read()
        told = self._mesh.all_gather_object([sorted(own), bool(self._mine)])
        has = [set(parts) for parts, _ in told]
        lacking = [p for p in range(len(self._save.names)) if not any(p in parts for parts in has)]
        if lacking:
            return lacking
        manifest = self._agree_on_manifest([knows for _, knows in told])
        if self._mesh.size != len(has):  # the broadcast has gone on among the others
            raise RosterChanged("a rank was lost while a manifest was sent")
        self._exchange(manifest.contents, has)
        arrays = tuple(self._arrays[i] for i in range(len(manifest.contents.arrays)))
        return LoadedSave(manifest=manifest, arrays=arrays)

    def _read(self) -> set[int]:
        """Read the parts on this disk; return those that are not damaged."""
        sound: set[int] = set()
        for manifest in self._mine:
            for part, digest in manifest.digests.items():
                if part in sound:
                    continue
                if digest != self._save.digests[part]:
                    _logger.warning(
                        "checkpoints: part %d of step %d differs between ranks, so their states "
                        "did; that of another rank is loaded",
                        part + 1,
                        manifest.step,
                    )
                    continue
                try:
                    self._arrays |= read_part(self._folder, manifest, part)
                except DamagedError as e:
                    _logger.warning("checkpoints: %s; another copy is looked for", e)
                else:
                    sound.add(part)
        return sound

    def _agree_on_manifest(self, knows: Sequence[bool]) -> Manifest:
        if all(knows):
            return self._mine[0]
        root = knows.index(True)
        text = msgspec.json.encode(self._mine[0]) if self._mesh.rank == root else b""
        return decode_manifest_untrusted(self._mesh.broadcast_object(text, root))

    def _exchange(self, contents: Contents, has: Sequence[set[int]]) -> None:
        """Send each part from ranks that have it, only to those that lack it."""
        size, me = len(has), self._mesh.rank
        streams: list[list[list[int]]] = [[[] for _ in range(size)] for _ in range(size)]
        for part in range(contents.parts):
            holders = [rank for rank in range(size) if part in has[rank]]
            lackers = [rank for rank in range(size) if part not in has[rank]]
            for count, lacker in enumerate(lackers):
                source = holders[(part + count) % len(holders)]
                streams[source][lacker] += range(*contents.cuts[part : part + 2])
        lengths = [
            [sum(contents.arrays[i].nbytes for i in stream) for stream in row] for row in streams
        ]
        longest = max(length for row in lengths for length in row)
        for row in streams:
            for i in row[me]:
                self._arrays[i] = np.empty(contents.arrays[i].nbytes, np.uint8)
        out = [_ByteSequence([self._arrays[i] for i in stream]) for stream in streams[me]]
        into = [_ByteSequence([self._arrays[i] for i in row[me]]) for row in streams]
        for _ in range(0, longest, CHUNK_BYTES):
            blocks = [run.take(CHUNK_BYTES) for run in out]
            for rank, block in enumerate(self._mesh.all_to_all(blocks)):
                if rank != me:
                    into[rank].put(block)


class _ByteSequence:
    """Several arrays as one sequence of bytes, which is read or written from its start."""

    def __init__(self, arrays: Sequence[Values]) -> None:
        self._arrays = [array for array in arrays if array.size]

    def take(self, nbytes: int) -> Values:
        """Return the next bytes; fewer at the end."""
        return np.concatenate([np.empty(0, np.uint8), *self._next(nbytes)])

    def put(self, block: Values) -> None:
        """Write the next bytes."""
        start = 0
        for region in self._next(block.size):
            region[:] = block[start : start + region.size]
            start += region.size

    def _next(self, nbytes: int) -> list[Values]:
        pieces: list[Values] = []
        while nbytes and self._arrays:
            first = self._arrays.pop(0)
            pieces.append(first[:nbytes])
            if first.size > nbytes:
                self._arrays.insert(0, first[nbytes:])
            nbytes -= pieces[-1].size
        return pieces


def whole_saves(holdings: Sequence[SaveHolding]) -> list[SaveKey]:
    """Return the saves of which all parts exist, the latest first."""
    return [holding.key for holding in merged(holdings) if not missing_parts(holding)]
