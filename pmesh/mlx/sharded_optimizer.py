"""An optimizer whose state is sharded across the ranks: the first stage of ZeRO."""

import logging
import math
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np

from pmesh.client.calls.queue import check_timeout
from pmesh.client.calls.reducing import DEFAULT_TIMEOUT_S
from pmesh.client.mesh import Mesh
from pmesh.client.trees.mlx import evaluate
from pmesh.errors import RosterChanged, UsageError
from pmesh.mlx.flat import Flat, NamedArrays, as_arrays, utils
from pmesh.mlx.shards import buckets_of, owners_of
from pmesh.mlx.units import Among, OptimizerState, ShardedBucket, Unit, Whole, is_elementwise

_logger = logging.getLogger("pmesh")

DEFAULT_BUCKET_BYTES = 32 * 1024 * 1024  # as in average_gradients


class ShardedOptimizer:
    """An optimizer of MLX whose state is sharded across the ranks (ZeRO-1).

    Each of n ranks keeps the state of its part of the parameters, an n-th of the memory.
    `update` replaces `average_gradients` and the optimizer's own `update`::

        optimizer = pmesh.mlx.ShardedOptimizer(optim.AdamW(1e-3), mesh)
        while mesh.step < STEPS:
            parameters, optimizer.state = mesh.sync((model.parameters(), optimizer.state))
            model.update(parameters)
            loss, gradients = loss_and_gradients(model, x, y)
            optimizer.update(model, gradients, weight=len(x))

    For each bucket of parameters, `reduce_scatter` gives each rank its part of the summed
    gradients, the rank applies the optimizer to that part, and `all_gather` shares the results.
    That sends the same bytes as `average_gradients`. SGD, RMSprop, Adagrad, AdaDelta, Adam, AdamW,
    Adamax and Lion are cut by values. Other optimizers, such as Adafactor, Muon and your own, get
    whole arrays, each on one rank; that sends 1.5 times the bytes. Each optimizer of a
    `MultiOptimizer` is handled according to its kind. This is ZeRO-1 (Rajbhandari et al. 2020,
    arXiv 1910.02054, section 5.1).

    When ranks are lost or enter, the next `update`, or the rest of the current one, shards the
    state anew. With `replicas=1` the state of a lost rank's part is lost: it begins again as at the
    first step, and the logger `pmesh` warns. Adam has no bias correction by default, so it takes
    some large steps then. With `replicas=2` the next rank keeps a copy of each part, and one rank
    at a time can be lost without any effect. The copy takes as much memory again. With two ranks it
    adds half as many bytes on the network, with more ranks less.

    Args:
        optimizer: a new optimizer of `mlx.optimizers`.
        mesh: this rank's mesh.
        replicas: the number of ranks that keep each part of the state.
        bucket_bytes: the size of the buckets in bytes; an array is never split between buckets.
        timeout_s: the timeout of each op, in seconds.

    Raises:
        UsageError: an option is out of range.
    """

    def __init__(
        self,
        optimizer: Any,  # noqa: ANN401 - MLX's optimizers have no types
        mesh: Mesh,
        *,
        replicas: int = 1,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        if replicas < 1:
            raise UsageError(f"replicas is at least 1, not {replicas}")
        if bucket_bytes < 1:
            raise UsageError(f"bucket_bytes is at least 1, not {bucket_bytes}")
        self._optimizer = optimizer
        self._optimizers: list[Any] = list(getattr(optimizer, "optimizers", [optimizer]))
        self._mesh = mesh
        self._replicas = replicas
        self._bucket_bytes = bucket_bytes
        self._timeout_s = check_timeout(timeout_s)
        self._units: list[Unit] = []
        self._among: Among | None = None
        self._lineage = 0
        """A number that changes each time the state is sharded; 0 if this rank never took part."""

    @property
    def optimizer(self) -> Any:  # noqa: ANN401 - as above
        """The wrapped optimizer. Change its options in the same way on all ranks."""
        return self._optimizer

    @property
    def state(self) -> dict[str, Any]:
        """The values that are equal on all ranks, such as the step, for `mesh.sync`.

        A newcomer assigns the state of another rank; that drops the sharded state that it kept.
        """
        return {"optimizers": [each.state for each in self._optimizers], "shared": self._lineage}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        steps = [int(each["step"].item()) for each in state["optimizers"]]
        mine = [int(each.step.item()) for each in self._optimizers]
        if state["shared"] != self._lineage or steps != mine:  # all `load_state` have one number
            self._among, self._lineage = None, state["shared"]
            for unit in self._units:
                unit.drop()
        for each, own in zip(self._optimizers, state["optimizers"], strict=True):
            each.state = own

    @property
    def step(self) -> mx.array:
        """The number of updates so far."""
        return cast("mx.array", self._optimizers[0].step)

    @property
    def learning_rate(self) -> mx.array:
        """The optimizer's learning rate. Set the same value on all ranks."""
        return cast("mx.array", self._optimizer.learning_rate)

    @learning_rate.setter
    def learning_rate(self, rate: float | mx.array) -> None:
        self._optimizer.learning_rate = rate

    @property
    def nbytes(self) -> int:
        """The bytes of state that this rank keeps."""
        return sum(unit.nbytes for unit in self._units)

    def update(self, model: Any, gradients: Any, weight: float = 1.0) -> None:  # noqa: ANN401 - as above
        """Update a model by the mean of all ranks' gradients, as one machine would.

        The new parameters are evaluated, and have the same bits on every rank. If a rank is lost
        during the call, the remaining buckets are updated without its gradients.

        Args:
            model: the model; its parameters are replaced, bucket by bucket.
            gradients: the gradients of this rank's batch, with the same paths in each call. Pass
                them unevaluated: then a bucket is computed while the previous one travels.
            weight: this rank's weight in the mean, such as its number of samples; with 0 its
                gradients are not read.

        Raises:
            UsageError: the gradients have other paths than before, or the weights add up to 0.
            PmeshError: as for `reduce_scatter` and `all_gather`, but never RosterChanged. All ranks
                still have the same parameters; some of them may have been updated.
        """
        if not (math.isfinite(weight) and weight >= 0):
            raise UsageError(f"a weight is a number of samples, at least 0, not {weight}")
        flat = as_arrays(gradients)
        self._plan(flat)
        done, has_begun = 0, False
        while done < len(self._units):
            try:
                share = self._agree(weight)
                if not has_begun:  # an update that could not begin is none
                    self._advance()
                    has_begun = True
                for fresh in self._steps(self._units[done:], model, flat, share):
                    model.update(utils.tree_unflatten(list(fresh.items())))
                    done += 1
            except RosterChanged:
                continue  # on all ranks alike: they shard the state anew, and repeat this unit

    def gather_state(self) -> dict[str, Any]:
        """Return the whole state, as the unsharded optimizer has it. All ranks must call this.

        On every rank it takes as much memory as without sharding.

        Raises:
            UsageError: there was no update yet.
            PmeshError: as for `all_gather`.
        """
        if self._among is None:
            raise UsageError("there is no state before the first update")
        among = self._among
        held = self._mesh.all_gather_object([unit.held() for unit in self._units], self._timeout_s)
        found: list[dict[str, Any]] = []
        for optimizer in self._optimizers:
            own = [i for i, unit in enumerate(self._units) if unit.optimizer is optimizer]
            states: dict[str, OptimizerState] = {}
            for i in own:
                states |= self._units[i].gather(among, [its[i] for its in held])
            flat = [(f"{path}.{key}", x) for path in states for key, x in states[path].items()]
            found.append({**optimizer.state, **(utils.tree_unflatten(flat) if flat else {})})
        return found[0] if self._optimizer is self._optimizers[0] else {"states": found}

    def load_state(self, state: dict[str, Any], parameters: Any) -> None:  # noqa: ANN401 - as above
        """Continue from a state that `gather_state` returned. All ranks must call this.

        Args:
            state: the state, the same on all ranks, such as from a checkpoint.
            parameters: the parameters that get gradients: `model.trainable_parameters()`.
        """
        self._plan(as_arrays(parameters))
        among = self._among = self._among_now()
        self._give_owners(among.size)
        states = state.get("states", [state])
        for optimizer, own in zip(self._optimizers, states, strict=True):
            scalars = {key: x for key, x in own.items() if isinstance(x, mx.array)}
            optimizer.state = {key: scalars[key] for key in optimizer.state if key in scalars}
            flat = as_arrays(own)
            for unit in self._units:
                if unit.optimizer is optimizer:
                    unit.load(among, {path: _below(flat, path) for path in unit.paths})
        self._lineage = 1  # any number will do if it is the same on all ranks

    def _plan(self, arrays: NamedArrays) -> None:
        """Cut the arrays into units, once. The last arrays come first, as their gradients do."""
        paths = set(arrays)
        if self._units:
            if paths != {path for unit in self._units for path in unit.paths}:
                raise UsageError("these gradients have other paths than those of the first update")
            return
        filters: Sequence[Any] = getattr(self._optimizer, "filters", [_takes_all])
        chosen: dict[str, int] = {}
        for path in reversed(arrays):
            chosen[path] = next(i for i, f in enumerate(filters) if f(path, arrays[path]))
        for index, optimizer in enumerate(self._optimizers):
            own = {path: arrays[path] for path, chosen_one in chosen.items() if chosen_one == index}
            if is_elementwise(optimizer):
                self._units += _sharded_buckets(optimizer, own, self._bucket_bytes)
            else:
                self._units += [Whole(optimizer, p, x.shape, x.dtype) for p, x in own.items()]

    def _advance(self) -> None:
        """Advance the step and the schedules."""
        for each in self._optimizers:
            each.apply_gradients({}, {})
            evaluate([each.state])

    def _among_now(self) -> Among:
        mesh = self._mesh
        return Among(mesh, mesh.rank, mesh.size, self._replicas, self._timeout_s)

    def _agree(self, weight: float) -> float:
        """Return this rank's share of all weights, once the state is sharded across all ranks.

        A newcomer may have the number of a lost rank, so the ranks also exchange whether their
        state is stale.
        """
        while True:
            stale = self._among != self._among_now()
            total, others = self._mesh.all_reduce(
                np.array([weight, stale], np.float64), "sum", self._timeout_s
            ).tolist()
            if not total:
                raise UsageError("nothing to average: the weights of all ranks add up to 0")
            if not others and self._among == self._among_now():
                return float(weight / total)
            self._share_out()

    def _share_out(self) -> None:
        own = [secrets.randbits(62), [unit.held() for unit in self._units]]
        told = self._mesh.all_gather_object(own, self._timeout_s)
        among = self._among_now()
        if len(told) != among.size:
            raise RosterChanged("a rank was lost while an optimizer's state was shared out")
        self._among = None
        self._give_owners(among.size)
        lost = sum(
            unit.reshard(among, [held[i] for _, held in told]) for i, unit in enumerate(self._units)
        )
        is_new = not any(spans for _, held in told for spans in held)
        self._among, self._lineage = among, told[0][0]
        if lost and not is_new:
            _logger.warning(
                "%d values of the optimizer's state are lost with the ranks that had them, and "
                "begin anew; replicas=2 would have kept them",
                lost,
            )

    def _give_owners(self, size: int) -> None:
        whole = {unit.path: unit for unit in self._units if isinstance(unit, Whole)}
        sizes = {path: math.prod(unit.shape) for path, unit in whole.items()}
        for path, owner in owners_of(sizes, size).items():
            whole[path].owner = owner

    def _steps(
        self,
        units: Sequence[Unit],
        model: Any,  # noqa: ANN401 - as above
        gradients: NamedArrays,
        share: float,
    ) -> Iterator[NamedArrays]:
        """Update one unit after another, and compute the next gradients while one sum travels."""
        among = cast("Among", self._among)
        laid_out = units[0].lay_out(gradients, share)
        for i, unit in enumerate(units):
            mean = unit.start(among, laid_out)
            if i + 1 < len(units):
                laid_out = units[i + 1].lay_out(gradients, share)
            parameters = as_arrays(model.trainable_parameters())
            yield unit.step(among, mean, parameters)


def _takes_all(_path: str, _x: mx.array) -> bool:
    return True


def _sharded_buckets(optimizer: Any, arrays: NamedArrays, bucket_bytes: int) -> list[Unit]:  # noqa: ANN401 - as above
    units: list[Unit] = []
    for dtype in dict.fromkeys(x.dtype for x in arrays.values()):
        nbytes = {path: x.nbytes for path, x in arrays.items() if x.dtype == dtype}
        units += [
            ShardedBucket(optimizer, Flat.of({path: arrays[path] for path in paths}))
            for paths in buckets_of(nbytes, bucket_bytes)
        ]
    return units


def _below(flat: NamedArrays, path: str) -> OptimizerState:
    return {p[len(path) + 1 :]: x for p, x in flat.items() if p.rpartition(".")[0] == path}
