"""Local updates, for slow links: each rank trains on its own, and all average now and then."""

import math
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar, cast, overload

import numpy as np

from pmesh.client.calls.queue import Handle, check_timeout
from pmesh.client.calls.reducing import DEFAULT_TIMEOUT_S
from pmesh.client.collective.bucketed import Arrays, take_apart
from pmesh.client.mesh import Mesh
from pmesh.compression.schemes import Scheme
from pmesh.core.ops.reductions import WIRE_DTYPES, Values
from pmesh.errors import UsageError

T = TypeVar("T")
S = TypeVar("S")

Named: TypeAlias = dict[str, Values]
"""Arrays by their path in the tree."""

_NOTHING = 1e-30  # the weight of a rank without progress: it matters only if no rank has any


@dataclass(frozen=True, slots=True)
class Nesterov:
    """An outer optimizer for `LocalUpdates`: SGD with Nesterov's momentum, as DiLoCo has it.

    Its momentum takes as much memory as the weights, in float32. An invalid option raises
    UsageError.
    """

    learning_rate: float = 0.7
    """The factor for the averaged change."""
    momentum: float = 0.9
    """The factor for the momentum of the round before; at least 0, less than 1."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise UsageError(f"an outer learning rate is more than 0, not {self.learning_rate}")
        if not 0 <= self.momentum < 1:
            raise UsageError(f"a momentum is at least 0 and less than 1, not {self.momentum}")


Outer: TypeAlias = Literal["average"] | Nesterov
_AVERAGE = Nesterov(learning_rate=1.0, momentum=0.0)


@dataclass(slots=True)
class _Sent:
    """This rank's contribution to an average that is under way or about to begin."""

    fragment: int
    progress: Named
    weight: float
    handle: Handle[Named] | None = None


class LocalUpdates:
    """Rounds in which each rank trains on its own, and then all ranks average their weights.

    Each rank takes `inner_steps` steps with an optimizer of its own, or as many as it can in
    `round_s` seconds. Then the ranks average the changes of their weights. So a rank sends as many
    bytes in a round as in one step of `average_gradients`::

        local = pmesh.LocalUpdates(mesh, inner_steps=50)
        while local.round < 100:
            weights, shared = local.begin(weights, shared)  # newcomers enter here
            for _ in local.steps():
                weights = ...                               # a step of this rank alone
            weights = local.end(weights, samples=50 * BATCH)
        weights = local.finish(weights)

    After `end` all ranks have the same weights, bit for bit. The state of each optimizer stays on
    its rank, as in DiLoCo. Draw samples with a seed that depends on `mesh.rank` and `local.round`,
    so that the ranks draw different ones.

    If a rank is lost in a round, its work of that round is lost. A newcomer gets the weights of the
    others in `begin`. If `end` raises, nothing was averaged on any rank: each rank keeps its
    progress in its weights, and the next `end` sends it.

    It is not the same as synchronous training: docs/how-to/slow-links.md has measured losses, which
    are higher by 12 % with 50 steps a round, and by 24 % with 500, at the beginning of a training,
    and by 0.5 and 1.1 % after 3,000 synchronous steps.

    The method is that of DiLoCo (arXiv 2311.08105: after a pretraining, 8 workers with 500 steps a
    round were as good as synchronous training) and of OpenDiLoCo (2407.07852). INTELLECT-1
    (2412.01152) sent the changes as int8. `fragments` and `delayed` are those of Streaming DiLoCo
    (2501.18512), without its mixing of local and global weights. For MuLoCo (2505.23725) train with
    Muon; for SparseLoCo (2508.15706) pass `compression=pmesh.TopK(...)`. Decoupled DiLoCo is
    2604.21428.

    Args:
        mesh: this rank's mesh.
        inner_steps: how many steps a rank takes from one average to the next.
        round_s: for how many seconds a rank trains in a round, for machines of unequal speed. If
            `inner_steps` is given too, a round ends with whichever comes first.
        outer: "average" takes the mean of all ranks' weights. `pmesh.Nesterov()` treats the mean
            change as a gradient, as the papers do. It needs an inner learning rate that was tuned
            with it: in a prototype on a small model, a rate that was tuned without it ended at
            seven times the loss.
        compression: as for `average_gradients`, for the changes. What it leaves out is added in the
            next round.
        fragments: cut the weights into so many parts, and average one part after each
            `inner_steps / fragments` steps. The bytes are the same, but are never sent all at once.
            `round` then counts these shorter rounds.
        delayed: send the changes of a round while the next round runs, and apply their average at
            its end; each rank keeps its own progress of that next round. Call `finish` so that the
            ranks end with the same weights.
        timeout_s: for each op.

    Raises:
        UsageError: an option is out of range.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        inner_steps: int | None = None,
        round_s: float | None = None,
        outer: Outer = "average",
        compression: Scheme | str | None = None,
        fragments: int = 1,
        delayed: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        if inner_steps is None and round_s is None:
            raise UsageError("a round ends after inner_steps=..., or round_s=...: pass one")
        if fragments < 1:
            raise UsageError(f"fragments is at least 1, not {fragments}")
        if inner_steps is not None and inner_steps < fragments:
            raise UsageError(f"inner_steps is at least {fragments}, not {inner_steps}")
        self._mesh = mesh
        self._inner_steps = inner_steps
        self._round_s = None if round_s is None else check_timeout(round_s, "round_s")
        self._outer = _checked_outer(outer)
        self._compression: Scheme | str = "none" if compression is None else compression
        self._delayed = delayed
        self._timeout_s = check_timeout(timeout_s)
        self._round = 0
        self._anchor: Named = {}
        """The weights that are the same on all ranks; float32 for float16 and bfloat16."""
        self._momentum: Named = {}
        self._samples = [0.0] * fragments
        """How many samples this rank has taken since each fragment was last averaged."""
        self._of_round = 0.0
        """Those of a round whose `end` has not returned: it may be repeated."""
        self._sent: _Sent | None = None
        self._fragments: list[frozenset[str]] = []

    def __repr__(self) -> str:
        return f"<LocalUpdates, round {self._round}>"

    @property
    def round(self) -> int:
        """The number of rounds that have ended; a newcomer takes over the job's number."""
        return self._round

    @overload
    def begin(self, weights: T) -> tuple[T, None]: ...
    @overload
    def begin(self, weights: T, shared: S) -> tuple[T, S]: ...
    def begin(self, weights: T, shared: object = None) -> tuple[T, object]:
        """Begin a round: one `mesh.sync`, in which trainers enter the job or come back to it.

        Args:
            weights: a tree of floating-point arrays. In the first round these are the initial
                weights, and all ranks take those of rank 0; later it is what `end` has returned.
            shared: anything else that must be the same on all ranks, as for `mesh.sync`; not the
                state of this rank's optimizer.

        Returns:
            The weights to continue with, and what all ranks share. A rank that has stayed in the
            job gets its own `weights` back.

        Raises:
            UsageError: the job's weights have other paths or shapes; or its ranks have another
                `outer`, `fragments` or `delayed`.
            PmeshError: as for `mesh.sync`.
        """
        arrays = take_apart(weights, reduction="mean")
        if not self._anchor:
            self._start_from(arrays)
        self._count_round()
        state = {
            "weights": self._anchor,
            "momentum": self._momentum,
            "round": self._round,
            "sent": -1 if self._sent is None else self._sent.fragment,
            "options": self._options,
            "shared": shared,
        }
        synced = self._mesh.sync(state, self._timeout_s)
        if synced is not state:
            weights = cast("T", self._take_over(synced, arrays))
        if self._sent is not None:
            self._sent.handle = self._start(self._sent)
        return weights, synced["shared"]

    def steps(self) -> Iterator[int]:
        """Yield the steps of a round: 0, 1 and so on, at least one.

        With `round_s` the last step is the first one that ends after that time.
        """
        seconds = math.inf if self._round_s is None else self._round_s / len(self._samples)
        steps, ends_at = self._steps_of_round(), time.monotonic() + seconds
        step = 0
        while step == 0 or (step < steps and time.monotonic() < ends_at):
            yield step
            step += 1

    def end(self, weights: T, samples: float = 1.0) -> T:
        """End a round: average the changes of the weights.

        Args:
            weights: the weights after this rank's steps of the round.
            samples: how many samples this rank took, at least 0; its weight in the average.

        Returns:
            The weights to continue with, like `weights`. Those that were averaged are the same on
            all ranks; with `delayed` each rank has its own later progress on top.

        Raises:
            UsageError: `begin` was not called, or the weights have other paths or shapes.
            PmeshError: as for `average_gradients`; no rank has averaged anything, and all may
                repeat the call.
        """
        arrays = self._checked(weights)
        if not (math.isfinite(samples) and samples >= 0):
            raise UsageError(f"samples is a number, at least 0, not {samples}")
        fragment = self._round % len(self._samples)
        self._of_round = samples
        if self._delayed:
            result = self._arrive(arrays)
            self._sent = self._progress(fragment, take_apart(result))
        else:
            result = self._exchange(fragment, arrays)
        self._count_round()
        self._samples[fragment] = 0.0
        self._round += 1
        return cast("T", result)

    def finish(self, weights: T) -> T:
        """Average what is not averaged yet, after the last round.

        All ranks must call it. Without `delayed` and `fragments` there is nothing to average.

        Returns:
            The weights, which are now the same on all ranks.

        Raises:
            UsageError: `begin` was not called, or the weights have other paths or shapes.
            PmeshError: as for `average_gradients`; no rank has averaged anything, and all may
                repeat the call.
        """
        arrays = self._checked(weights)
        self._count_round()
        if self._sent is not None:  # its progress is still part of `weights`, and is sent with them
            self._samples[self._sent.fragment] += self._sent.weight
            self._sent = None
        if self._delayed or len(self._samples) > 1:
            fragments = range(len(self._samples))
            handles = [self._start(self._progress(each, arrays)) for each in fragments]
            means = [handle.wait() for handle in handles]  # all, or a repeated call averages twice
            self._samples = [0.0] * len(self._samples)
            for mean in means:
                if any(change.any() for change in mean.values()):  # else momentum alone would move
                    self._step_outer(mean)
        return self.common(weights)

    def common(self, weights: T) -> T:
        """Return the weights that are the same on all ranks, as of the last average, without an op.

        Args:
            weights: an example: the tree's structure, and the library and dtypes of its arrays.

        Raises:
            UsageError: `begin` was not called, or the weights have other paths or shapes.
        """
        return cast("T", self._common(self._checked(weights)))

    def _common(self, arrays: Arrays) -> object:
        return _like(arrays, self._anchor)

    def _count_round(self) -> None:
        self._samples = [before + self._of_round for before in self._samples]
        self._of_round = 0.0

    def _steps_of_round(self) -> float:
        if self._inner_steps is None:
            return math.inf
        parts, turn = len(self._samples), self._round % len(self._samples)
        return (turn + 1) * self._inner_steps // parts - turn * self._inner_steps // parts

    def _start_from(self, arrays: Arrays) -> None:
        if len(arrays.leaves) < len(self._samples):
            raise UsageError(
                f"{len(arrays.leaves)} arrays can't be cut into {len(self._samples)} fragments"
            )
        self._anchor = _named(arrays)
        if self._outer.momentum:
            self._momentum = {path: np.zeros_like(x) for path, x in self._anchor.items()}
        self._fragments = _cut(self._anchor, len(self._samples))

    @property
    def _options(self) -> dict[str, float | int]:
        """Return what must be the same on all ranks."""
        outer = self._outer
        return {
            "learning_rate": outer.learning_rate,
            "momentum": outer.momentum,
            "fragments": len(self._samples),
            "delayed": self._delayed,
        }

    def _take_over(self, synced: Any, arrays: Arrays) -> object:  # noqa: ANN401 - a state of `begin`
        """Take over the state of another rank; return its weights."""
        if _shapes(synced["weights"]) != _shapes(self._anchor):
            self._anchor = {}
            raise UsageError(
                "the job trains other weights: their paths or shapes differ from these"
            )
        if synced["options"] != self._options:
            self._anchor = {}
            raise UsageError(
                f"the job's ranks have {_options_text(synced['options'])}; pass the same, not "
                f"{_options_text(self._options)}"
            )
        self._anchor, self._momentum = synced["weights"], synced["momentum"]
        self._round = synced["round"]
        self._samples = [0.0] * len(self._samples)
        self._sent = None
        if synced["sent"] >= 0:
            fragment = int(synced["sent"])
            nothing = {
                path: np.zeros_like(self._anchor[path]) for path in self._fragments[fragment]
            }
            self._sent = _Sent(fragment, nothing, 0.0)
        return self._common(arrays)

    def _checked(self, weights: object) -> Arrays:
        if not self._anchor:
            raise UsageError("call 'weights, shared = local.begin(weights, shared)' first")
        arrays = take_apart(weights, reduction="mean")
        values = (leaf.values for leaf in arrays.leaves)
        if _shapes(dict(zip(arrays.tree.paths, values, strict=True))) != _shapes(self._anchor):
            raise UsageError("these weights have other paths or shapes than those of begin")
        return arrays

    def _progress(self, fragment: int, arrays: Arrays) -> _Sent:
        """Return the change of a fragment's weights since they were the same on all ranks."""
        changed = _named(arrays, self._fragments[fragment])
        self._subtract_common(changed, arrays)
        return _Sent(fragment, changed, self._samples[fragment] + self._of_round)

    def _subtract_common(self, named: Named, arrays: Arrays) -> None:
        """Subtract the common weights, rounded to the dtype in which the ranks began with them.

        Otherwise the rounding error of float16 or bfloat16 would count as progress, and undo
        changes that are smaller than the dtype's steps.
        """
        for path, leaf in zip(arrays.tree.paths, arrays.leaves, strict=True):
            if path in named:
                common = self._anchor[path]
                if leaf.dtype != leaf.wire:
                    common = _named(take_apart({path: leaf.like(common.reshape(-1))}))[path]
                named[path] -= common

    def _exchange(self, fragment: int, arrays: Arrays) -> object:
        """Average a fragment now; return the weights, with the common ones in that fragment."""
        sent = self._progress(fragment, arrays)
        self._step_outer(self._start(sent).wait())
        return _like(arrays, {path: self._anchor[path] for path in sent.progress})

    def _start(self, sent: _Sent) -> Handle[Named]:
        """Begin the average of all ranks' changes."""
        return self._mesh.average_gradients(
            sent.progress,
            max(sent.weight, _NOTHING),
            timeout_s=self._timeout_s,
            compression=self._compression,
            async_op=True,
        )

    def _arrive(self, weights: Arrays) -> object:
        """Wait for the average that was under way; return it with this rank's later progress."""
        sent, self._sent = self._sent, None
        if sent is None:
            return weights.tree.source
        if sent.handle is None:  # no `begin` has sent it
            self._samples[sent.fragment] += sent.weight
            return weights.tree.source
        try:
            mean = sent.handle.wait()
        except BaseException:
            self._samples[sent.fragment] += sent.weight
            raise
        moved = _named(weights, self._fragments[sent.fragment])
        self._subtract_common(moved, weights)
        for path in moved:
            moved[path] -= sent.progress[path]
        self._step_outer(mean)
        for path in moved:
            moved[path] += self._anchor[path]
        return _like(weights, moved)

    def _step_outer(self, mean: Named) -> None:
        """Add the mean change, by numpy, so that all ranks get the same bits on any hardware."""
        rate, momentum = self._outer.learning_rate, self._outer.momentum
        for path, change in mean.items():
            step = change
            if momentum:
                kept = self._momentum[path]
                kept *= momentum
                kept += change
                step = change + momentum * kept
            self._anchor[path] += rate * step


def _checked_outer(outer: object) -> Nesterov:
    if outer == "average":
        return _AVERAGE
    if not isinstance(outer, Nesterov):
        raise UsageError(f"outer is 'average' or pmesh.Nesterov(...), not {outer!r}")
    return outer


def _options_text(options: dict[str, float | int]) -> str:
    """Describe options that all ranks must have.

    >>> _options_text({"learning_rate": 1.0, "momentum": 0.0, "fragments": 2, "delayed": False})
    "outer='average', fragments=2, delayed=False"
    """
    outer = Nesterov(options["learning_rate"], options["momentum"])
    shown = repr("average") if outer == _AVERAGE else repr(outer)
    return f"outer={shown}, fragments={options['fragments']}, delayed={options['delayed']}"


def _shapes(named: Named) -> dict[str, tuple[int, ...]]:
    return {path: x.shape for path, x in named.items()}


def _named(arrays: Arrays, paths: Collection[str] | None = None) -> Named:
    """Return copies of the arrays, or of those with these paths, in the dtype that is sent."""
    named: Named = {}
    for path, leaf in zip(arrays.tree.paths, arrays.leaves, strict=True):
        if paths is None or path in paths:
            named[path] = np.empty(leaf.values.shape, WIRE_DTYPES[leaf.wire])
            leaf.fill(named[path].reshape(-1))
    return named


def _like(arrays: Arrays, named: Named) -> object:
    """Return the user's tree, with the new values for the paths in `named`."""
    leaves = [
        leaf.like(named[path].reshape(-1)) if path in named else own
        for path, leaf, own in zip(
            arrays.tree.paths, arrays.leaves, arrays.tree.leaves, strict=True
        )
    ]
    return arrays.tree.rebuild(leaves)


def _cut(named: Named, parts: int) -> list[frozenset[str]]:
    """Return the paths of each fragment: sorted, and cut into parts of about equal bytes."""
    found: list[list[str]] = [[] for _ in range(parts)]
    total = sum(x.nbytes for x in named.values())
    before = 0
    for path, x in sorted(named.items()):
        middle = (2 * before + x.nbytes) * parts // max(2 * total, 1)
        found[min(middle, parts - 1)].append(path)
        before += x.nbytes
    return [frozenset(paths) for paths in found]
