"""What a mesh keeps from one compressed call to the next.

That is what compression has left out of each model's values, and the measurements of `Auto`: it
tries each way a few times, all ranks compare the times, and then it uses the fastest way.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from pmesh.client.collective.bucketed import Arrays
from pmesh.client.session.arenas import KeptValues, Residuals
from pmesh.client.session.session import TrainerSession
from pmesh.client.trees.arrays import digest
from pmesh.compression.blocks import Float32s
from pmesh.core.ops.reductions import Values
from pmesh.errors import UsageError
from pmesh.ids import TrainerId

_logger = logging.getLogger("pmesh")

_PIECE_VALUES = 64 * 1024  # so few fit the CPU's cache
_RESIDUAL, _STEP = "residual", "step"


ROUNDS = 3
"""How often each way is tried. The first time does not count: memory is fresh, code may not be
compiled, and connections start slowly."""


@dataclass(slots=True)
class Trials:
    """The trials with one tree among the same ranks. All ranks have the same agreed times."""

    trainers: tuple[TrainerId, ...]
    ways: int
    """The number of ways to try."""
    begun: int = 0
    """Trials that have succeeded here; the ranks have not yet agreed on the time of the last."""
    own_ns: int = 0
    """The time of the last trial on this rank."""
    agreed_ns: list[int] = field(default_factory=list[int])
    """The time of each trial on the slowest rank."""

    def compare(self, latest: Mapping[TrainerId, tuple[int, int]]) -> None:
        """Handle what `latest` returned on each rank, in the same order on all.

        The trials start again if the ranks or their order have changed, or if a rank has not taken
        part in all of them.
        """
        trainers = tuple(latest)
        same = trainers == self.trainers and {begun for begun, _ in latest.values()} == {self.begun}
        if not same:
            self.trainers, self.begun, self.agreed_ns = trainers, 0, []
        elif self.begun > len(self.agreed_ns):
            self.agreed_ns.append(max(took for _, took in latest.values()))

    def latest(self) -> tuple[int, int]:
        """Return how many trials have succeeded on this rank, and how long the last took."""
        return self.begun, self.own_ns

    def progress(self) -> str:
        """Return the number of the next trial, for a person."""
        return f"{self.begun + 1} of {ROUNDS * self.ways}"

    @property
    def are_over(self) -> bool:
        """True if all trials are done and their times agreed."""
        return len(self.agreed_ns) == ROUNDS * self.ways

    @property
    def next_way(self) -> int:
        """The way to try next."""
        return self.begun % self.ways

    def note(self, took_ns: int) -> None:
        """Note that the trial has succeeded here, and so on all ranks."""
        self.begun += 1
        self.own_ns = took_ns

    def best_ns(self) -> list[int]:
        """Return the shortest time of each way, once the trials are over."""
        counted = self.agreed_ns[self.ways :]
        return [min(counted[way :: self.ways]) for way in range(self.ways)]

    def winner(self, min_gain: float) -> int:
        """Return the fastest way, or the first, no compression, if the gain is too small."""
        best_ns = self.best_ns()
        fastest = min(range(self.ways), key=best_ns.__getitem__)
        return fastest if best_ns[fastest] * min_gain <= best_ns[0] else 0


@dataclass(slots=True)
class Memory:
    """What is kept of one tree of one model."""

    layout: str
    """A digest of the shapes."""
    count: int
    """The number of values of the whole tree."""
    step: int = 0
    """The number of compressed calls that have succeeded; all ranks take over the highest."""
    residuals: list[Residuals] = field(default_factory=list[Residuals])
    """The residual of each bucket, in the tree's order; empty before a call with feedback."""
    warm: dict[str, Float32s] = field(default_factory=dict[str, Float32s])
    """The start of PowerSGD's next power iteration, by its spec."""
    trials: Trials | None = None

    def fits(self, layout: str, count: int) -> bool:
        """Return True if it belongs to arrays of these shapes, with `count` values in all."""
        return self.layout == layout and self.count == count

    def divide(self, counts: tuple[int, ...], session: TrainerSession, *, in_arenas: bool) -> None:
        """Divide the residual into one for each bucket; its values stay the same.

        Args:
            counts: the number of values of each bucket.
            session: runs the next ops.
            in_arenas: True if the agent reads and writes the residuals.
        """
        if tuple(each.values.size for each in self.residuals) != counts:
            whole = self.residual()
            for each in self.residuals:
                session.drop(each)
            ends = np.cumsum(counts).tolist()
            self.residuals = [
                in_memory(whole[end - count : end]) for end, count in zip(ends, counts, strict=True)
            ]
        if in_arenas:
            self.residuals = _all_of_session(self.residuals, session)

    def residual(self) -> Float32s:
        """Return a copy of all that was left out, in the tree's order; zeros if nothing was."""
        parts = [each.values for each in self.residuals]
        whole = np.concatenate(parts) if parts else np.zeros(self.count, np.float32)
        return cast("Float32s", whole)

    def norm(self) -> float | None:
        """Return the L2 norm of what was left out on this rank; None without feedback."""
        if not self.residuals:
            return None
        return math.sqrt(sum(_squares(each.values) for each in self.residuals))


class Feedback:
    """The memories of a mesh, or of a group."""

    def __init__(self) -> None:
        self._memories: dict[str, Memory] = {}
        self._replaced: list[Residuals] = []
        """The residuals of memories that are gone, which may still hold arenas of a session."""
        self._scratch: Float32s = np.empty(0, np.float32)
        self._clipped = 0
        self._clipped_told = 0

    def of(self, model: str, arrays: Arrays) -> Memory:
        """Return the memory for these arrays; a new one if there is none for their shapes."""
        key = f"{model}|{digest(arrays.tree.paths)}"
        shapes = [leaf.values.shape for leaf in arrays.leaves]
        layout = digest([str(shape) for shape in shapes])
        count = sum(leaf.values.size for leaf in arrays.leaves)
        memory = self._memories.get(key)
        if memory is not None and memory.fits(layout, count):
            return memory
        if memory is not None and memory.norm():
            _logger.warning(
                "arrays have other shapes than in the last call: what compression had left out of "
                "them, a norm of %.3g, is dropped; if these are another model's, name it: "
                "PowerSGD(model='critic')",
                memory.norm(),
            )
        self._replaced += [] if memory is None else memory.residuals
        memory = self._memories[key] = Memory(layout, count)
        return memory

    def give_back(self, session: TrainerSession) -> None:
        """Give the arenas of residuals back that no memory has any more."""
        replaced, self._replaced = self._replaced, []
        for each in replaced:
            session.drop(each)

    def scratch(self, count: int) -> Float32s:
        """Return memory for one bucket's values; it is reused, since fresh memory is slow."""
        if self._scratch.size < count:
            self._scratch = np.empty(count, np.float32)
        return self._scratch[:count]

    def note_clipped(self, count: int, what: str) -> None:
        """Warn of clipped values: the first time, and each time their number has doubled."""
        self._clipped += count
        if count and self._clipped >= 2 * self._clipped_told:
            self._clipped_told = self._clipped
            _logger.warning(
                "%d values were larger than 65504 and were clipped by %s in this call, %d since "
                "the beginning; bf16 has no such limit",
                count,
                what,
                self._clipped,
            )

    def state(self) -> dict[str, Values]:
        """Return all memories as copies, in numpy arrays."""
        state: dict[str, Values] = {}
        for key, memory in self._memories.items():
            name = f"{key}|{memory.layout}|{memory.count}|"
            state[name + _STEP] = np.array(memory.step)
            if memory.residuals:
                state[name + _RESIDUAL] = memory.residual()
            state |= {name + spec: warm.copy() for spec, warm in memory.warm.items()}
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Replace all memories by what `state` has returned.

        Raises:
            UsageError: `state` can't have returned this.
        """
        memories: dict[str, Memory] = {}
        try:
            for name, value in state.items():
                model, paths, layout, count, what = name.split("|")
                memory = memories.setdefault(f"{model}|{paths}", Memory(layout, int(count)))
                _load_into(memory, what, np.asarray(value))
        except (ValueError, TypeError, AttributeError) as e:
            raise UsageError(f"this is not what error_feedback_state() has returned: {e}") from e
        self._replaced += [each for old in self._memories.values() for each in old.residuals]
        self._memories = memories


def in_memory(values: Float32s) -> Residuals:
    """Return residuals of these values, which they keep, in memory that the agent can't read."""
    return Residuals(KeptValues(-1, values), KeptValues(-1, np.empty_like(values)))


def _all_of_session(every: list[Residuals], session: TrainerSession) -> list[Residuals]:
    """Return the same residuals in arenas; if there is no room for all, those made are dropped."""
    found: list[Residuals] = []
    try:
        for each in every:
            found.append(_of_session(each, session))  # noqa: PERF401 - those before one that fails
    except UsageError:
        for each in found:
            if each not in every:
                session.drop(each)
        raise
    return found


def _of_session(residuals: Residuals, session: TrainerSession) -> Residuals:
    if session.has(residuals):
        return residuals
    made = session.residuals(residuals.values.size)
    np.copyto(made.values, residuals.values)
    return made


def _squares(values: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]") -> float:
    pieces = range(0, values.size, _PIECE_VALUES)
    return sum(float(np.dot(piece, piece)) for piece in _cut(values, pieces))


def _cut(values: Any, starts: Iterable[int]) -> Iterable[Any]:  # noqa: ANN401 - numpy's slices
    return (values[start : start + _PIECE_VALUES] for start in starts)


def _load_into(memory: Memory, what: str, value: Values) -> None:
    if what == _STEP:
        memory.step = int(value)
        return
    values = cast("Float32s", value.astype(np.float32))
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError(f"{what} must be finite numbers in one dimension")
    if what == _RESIDUAL:
        if values.size != memory.count:
            raise ValueError(f"{values.size} residuals of {memory.count} values")
        memory.residuals = [in_memory(values)]
    else:
        memory.warm[what] = values
