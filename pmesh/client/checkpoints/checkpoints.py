"""`pmesh.Checkpoints`: each rank writes its share of the job's state to its own disk."""

import logging
import operator
import os
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, SupportsIndex, cast

import numpy as np

from pmesh.client.checkpoints.files import (
    DamagedError,
    Disk,
    manifests_in,
    read_own,
    remove_saves_before,
    write_save,
)
from pmesh.client.checkpoints.layout import (
    FORMAT,
    Contents,
    Manifest,
    SaveHolding,
    SaveReport,
    Wish,
    contents_of,
    holding_of,
    layout_digest,
    next_serial,
    outdated_by,
    save_id_of,
)
from pmesh.client.checkpoints.loading import LoadedSave, load_together, whole_saves
from pmesh.client.collective.differences import state_differences
from pmesh.client.collective.told import read_untrusted
from pmesh.client.mesh import Mesh
from pmesh.client.trees.raw import RawArray
from pmesh.client.trees.state import describe, rebuild_untrusted
from pmesh.core.ops.reductions import Values
from pmesh.core.ops.shard import kept_parts
from pmesh.errors import ProtocolError, RosterChanged, UsageError
from pmesh.home_paths import expand_user, is_in_launch_copy

REST = 19.0
"""Seconds of rest after each second of processor time: a save takes a twentieth of one core."""

_NOTHING = np.empty(0, np.uint8)  # takes the place of an array that this rank does not write
_logger = logging.getLogger("pmesh")


class Loaded(NamedTuple):
    """The result of `Checkpoints.load`."""

    step: int
    """The step that was passed to `save`."""
    state: Any
    """The state that was saved, the same on all ranks."""
    own: Any
    """The `own` that this rank had passed to `save`; None if the folder has none."""


class Checkpoints:
    """Saves of a job's state; each rank writes a share of each save to a folder on its own disk.

    The arrays are divided into one part per rank. Rank r writes part r and the parts of the next
    `replicas - 1` ranks, as safetensors files, each first under another name; at the end it writes
    a manifest. A save counts if the present ranks have all its parts on their disks. So a crash at
    any moment leaves the save before intact, and with `replicas=2` any one machine may be missing.

    All ranks must make the same calls: `save` and `load` are collective. Use it in a `with`
    statement, or call `close`, which waits for the last save.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        mesh: Mesh,
        *,
        every_s: float | None = None,
        keep: int = 3,
        replicas: int = 2,
        asynchronous: bool = True,
    ) -> None:
        """Use a folder, which the first save creates.

        Args:
            folder: a folder on this machine; ranks may also share one, as on a network drive.
            mesh: from `pmesh.connect`.
            every_s: `save` does nothing until this many seconds have passed since the last save; it
                costs a small op each time. None: each call saves.
            keep: how many whole saves to keep; while one is written there is one more.
            replicas: on how many disks each part is stored.
            asynchronous: write in a thread, with a twentieth of a core, while training continues.

        Raises:
            UsageError: a number is too small; the folder leads nowhere; or it lies in the copy in
                which `pmesh run --sync` runs this program, where the next launch would not find it.
        """
        if keep < 1 or replicas < 1 or (every_s is not None and every_s < 0):
            raise UsageError(
                "Checkpoints: keep and replicas are at least 1, every_s at least 0, not "
                f"keep={keep}, replicas={replicas}, every_s={every_s}"
            )
        try:
            self._folder = expand_user(Path(folder)).resolve()
        except (OSError, RuntimeError) as e:  # the current directory was removed
            raise UsageError(f"Checkpoints({os.fspath(folder)!r}): {e}; give another folder") from e
        if is_in_launch_copy(self._folder):
            raise UsageError(
                f"Checkpoints({os.fspath(folder)!r}) lies in this launch's own copy of the "
                "directory, where no later 'pmesh run --sync' would find it; give a folder outside "
                f"of it, such as Checkpoints({f'~/checkpoints/{self._folder.name}'!r})"
            )
        self._mesh = mesh
        self._every_s = every_s
        self._keep = keep
        self._replicas = replicas
        self._asynchronous = asynchronous
        self._thread = ThreadPoolExecutor(1, "pmesh-checkpoint")
        self._hurry = threading.Event()
        self._under_way: Future[Manifest] | None = None
        self._worked_until_s = 0.0
        self._copies: dict[str, Values] = {}
        self._failed: UsageError | None = None
        self._is_closed = False
        self._began = time.monotonic()
        self._has_saved: bool | None = None
        """False if `save` was called but never was due; None if it was not called."""

    def __repr__(self) -> str:
        return f"<Checkpoints in {self._folder}>"

    @property
    def is_saving(self) -> bool:
        """True while this rank writes its share of a save."""
        return self._under_way is not None and not self._under_way.done()

    def save(
        self,
        state: object,
        step: int,
        *,
        own: object = None,
        copy: bool = True,
        now: bool = False,
    ) -> bool:
        """Save a state if a save is due; the ranks agree on that.

        If an earlier save is under way, this one waits for it; with `every_s` no save is due until
        then. If a rank can't write, it warns, and its training continues; the save still counts if
        other ranks have its parts.

        Args:
            state: as for `mesh.sync`, and the same on all ranks, so best what `sync` has returned.
            step: a whole number of 64 bits, which `load` returns.
            own: a state that only this rank has, such as `mesh.error_feedback_state()`. Only this
                rank's disk gets it.
            copy: with False nothing is copied; you promise that no array is written to until
                `wait()` returns or the next save begins. MLX arrays are never copied.
            now: save whatever `every_s` says, as at the last step.

        Returns:
            True if a save has begun; with `asynchronous=False`, if it is on the disks.

        Raises:
            UsageError: the step is no such number, `close` was called, or the ranks have different
                states or steps; with `asynchronous=False` also
                if parts could not be written at all.
            UnsupportedArray: the state holds something that can't be saved.
            PmeshError: as for `all_reduce`.
        """
        step = _checked_step(step)
        if self._is_closed:
            raise UsageError("these checkpoints are closed: save before close() or inside `with`")
        if self._every_s is not None and not self._is_due(self._every_s, now=now):
            self._has_saved = bool(self._has_saved)
            return False
        self._has_saved = True
        self._settle()
        manifest, arrays, private = self._prepared(state, step, own)
        self._began = time.monotonic()
        share = {number for part in manifest.digests for number in manifest.contents.order(part)}
        copies = copy and self._asynchronous
        kept = [
            self._kept(f"{number}", array, copy=copies) if number in share else _NOTHING
            for number, array in enumerate(arrays)
        ]
        kept_own = [
            self._kept(f"own {number}", array, copy=copies) for number, array in enumerate(private)
        ]
        self._hurry.clear()
        pace = self._rest if self._asynchronous else _do_nothing
        self._under_way = self._thread.submit(
            write_save, self._folder, manifest, kept, kept_own, Disk(pace=pace)
        )
        if not self._asynchronous:
            self._settle()
            self._check_whole(manifest)
        return True

    def wait(self) -> None:
        """Wait until this rank's share of the last save is on its disk.

        Raises:
            UsageError: it could not be written.
        """
        self._settle()
        if self._failed is not None:
            raise self._failed

    def load(self, like: object = None) -> Loaded | None:
        """Load the latest save of which the ranks have all parts, whatever the number of ranks.

        Each rank reads the parts on its disk, and the ranks send each other those that are missing.

        Args:
            like: a state as the script makes it. If the save lacks one of its arrays, or has it
                with another shape or dtype, that is an error. The classes of named tuples and the
                devices of torch tensors are taken from it.

        Returns:
            None if there is no save, and for a newcomer to a running job, which gets the job's
            state in its first `mesh.sync`.

        Raises:
            NotEnoughRanks: there are saves, but each lacks parts that are on other machines.
            UsageError: the save is of another model, or the folder can't be read.
            PmeshError: as for `all_reduce`.
        """
        if self._mesh.rank < 0:
            return None
        self._settle()
        found = load_together(self._mesh, self._folder)
        self._began = time.monotonic()
        if found is None:
            return None
        step, header = found.manifest.step, found.manifest.contents.header
        state = self._rebuilt(header, found.arrays, like, step)
        differs = "" if like is None else state_differences(like, state, source="disk")
        if differs:
            raise UsageError(
                f"step {step} in {self._folder} is of another model: {differs}; give Checkpoints "
                "another folder, or make the model as it was"
            )
        return Loaded(step, state, self._own(found))

    def close(self) -> None:
        """Wait for the save under way; warn if it failed, or if no save was made at all."""
        self._settle()
        if self._has_saved is False:
            self._has_saved = None
            _logger.warning(
                "checkpoints: nothing was saved in %s, as %g s, of every_s, had not passed; call "
                "save with now=True at the last step",
                self._folder,
                self._every_s,
            )
        self._is_closed = True
        self._thread.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _kept(self, name: str, array: RawArray, *, copy: bool) -> Values:
        """Copy the bytes of an array into memory that is reused by the next save.

        The first touch of fresh memory takes several times as long as the copy.
        """
        if not copy or array.library == "mlx":
            return array.data
        kept = self._copies.get(name)
        if kept is None or kept.size != array.data.size:
            kept = self._copies[name] = np.empty(array.data.size, np.uint8)
        np.copyto(kept, array.data)
        return kept

    def _is_due(self, every_s: float, *, now: bool) -> bool:
        """Return True if a rank has `now`, or if none is writing and a rank's time has come."""
        ages = np.array([not self.is_saving, self._began - time.monotonic(), not now])
        all_idle, oldest, none_wants = self._mesh.all_reduce(ages, "min")
        return not none_wants or (bool(all_idle) and -float(oldest) >= every_s)

    def _gather(self, mine: object) -> list[Any]:
        """Gather an object of each rank; if a rank is lost meanwhile, of those that are left."""
        while True:
            try:
                return self._mesh.all_gather_object(mine)
            except RosterChanged:  # all ranks raise it
                _logger.warning(
                    "checkpoints: a rank was lost in a save; the others save without it"
                )

    def _prepared(
        self, state: object, step: int, own: object
    ) -> tuple[Manifest, tuple[RawArray, ...], tuple[RawArray, ...]]:
        """Agree with the other ranks on what is saved; remove old saves."""
        described, private = describe(state), describe(own)
        layout = layout_digest(contents_of(described, 1))
        on_disk = manifests_in(self._folder)[0]
        holdings = tuple(holding_of(manifest) for manifest in on_disk)
        told = self._gather(Wish(secrets.token_hex(4), layout, step, holdings))
        wishes = read_untrusted(told, Wish, self._mesh.names, "its saves")
        if any((wish.layout, wish.step) != (layout, step) for wish in wishes):
            raise UsageError(
                f"the ranks save different states: {_differing(wishes, self._mesh.names)}. Call "
                "save with what mesh.sync has returned, and pass what differs by rank as own="
            )
        every = [holding for wish in wishes for holding in wish.holdings]
        self._forget(on_disk, every)
        rank, size = self._mesh.rank, len(wishes)
        manifest = Manifest(
            format=FORMAT,
            serial=next_serial(wishes),
            step=step,
            save_id=save_id_of(wishes),
            saved_at=time.time(),
            rank=rank,
            names=tuple(self._mesh.names),
            replicas=self._replicas,
            contents=contents_of(described, size),
            digests=dict.fromkeys(kept_parts(rank, size, self._replicas), ""),
            own=None if own is None else contents_of(private, 1),
        )
        return manifest, described.arrays, private.arrays

    def _forget(self, on_disk: Sequence[Manifest], claimed: Sequence[SaveHolding]) -> None:
        """Remove the saves that are older than the whole ones to keep."""
        oldest = outdated_by(on_disk, claimed, self._keep)
        if oldest is not None:
            remove_saves_before(self._folder, oldest)

    def _check_whole(self, manifest: Manifest) -> None:
        """Check the save with all ranks; all raise UsageError if no disk has some part."""
        on_disk = manifests_in(self._folder)[0]
        holdings = tuple(holding_of(each) for each in on_disk)
        told = self._gather(SaveReport(holdings, str(self._failed or "")))
        reports = read_untrusted(told, SaveReport, self._mesh.names, "its saves")
        every = [holding for report in reports for holding in report.holdings]
        if manifest.key not in whole_saves(every):
            why = next((report.failed for report in reports if report.failed), "a rank was lost")
            raise UsageError(f"step {manifest.step} is not saved: {why}")
        self._forget(on_disk, every)

    def _settle(self) -> None:
        """Wait for the save under way, which no longer rests."""
        under_way = self._under_way
        if under_way is None:
            return
        self._hurry.set()
        wait([under_way])  # after Ctrl-C it stays under way, so nobody writes to its arrays
        self._under_way = None
        try:
            under_way.result()
            self._failed = None
        except UsageError as e:
            self._failed = e
            _logger.warning("checkpoints: %s", e)

    def _rest(self) -> None:
        worked_s = time.thread_time() - self._worked_until_s
        if threading.main_thread().is_alive():
            self._hurry.wait(max(0.0, worked_s) * REST)
        self._worked_until_s = time.thread_time()

    def _rebuilt(
        self, header: bytes, arrays: tuple[Values, ...], like: object, step: int
    ) -> object:
        try:
            return rebuild_untrusted(header, arrays, like)
        except ProtocolError as e:
            raise UsageError(
                f"step {step} in {self._folder} was saved by another version of pmesh: {e}"
            ) from e

    def _own(self, found: LoadedSave) -> object:
        """Return the `own` of this rank in the same save, if this folder has it."""
        manifests = [
            manifest
            for manifest in manifests_in(self._folder)[0]
            if manifest.key == found.manifest.key and manifest.own is not None
        ]
        if len(manifests) > 1:  # several ranks share the folder
            manifests = [m for m in manifests if m.rank == self._mesh.rank]
        if not manifests:
            return None
        try:
            arrays = tuple(read_own(self._folder, manifests[0]))
        except DamagedError as e:
            _logger.warning("checkpoints: %s; this rank goes on without it", e)
            return None
        header = cast("Contents", manifests[0].own).header
        return self._rebuilt(header, arrays, None, found.manifest.step)


def _do_nothing() -> None: ...


def _checked_step(step: object) -> int:
    """Return a number of Python or numpy as an int; raise UsageError for anything else."""
    try:
        whole = operator.index(cast("SupportsIndex", step))
    except TypeError:
        whole = 2**63
    if not -(2**63) <= whole < 2**63:
        raise UsageError(f"the step of a save is a whole number of 64 bits, not {step!r:.99}")
    return whole


def _differing(wishes: Sequence[Wish], names: tuple[str, ...]) -> str:
    """Name a rank that saves something else than rank 0.

    >>> _differing([Wish("a", "x", 5, ()), Wish("b", "x", 6, ())], ("mac-1", "mac-2"))
    'rank 1 (mac-2) has step 6, rank 0 (mac-1) has step 5'
    """
    first = wishes[0]
    odd = next(
        rank
        for rank, wish in enumerate(wishes)
        if (wish.layout, wish.step) != (first.layout, first.step)
    )
    who = f"rank {odd} ({names[odd]})"
    if wishes[odd].step != first.step:
        return f"{who} has step {wishes[odd].step}, rank 0 ({names[0]}) has step {first.step}"
    return f"{who} has other arrays or plain values than rank 0 ({names[0]})"
