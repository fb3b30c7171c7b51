"""The units that a sharded optimizer updates: a bucket that is cut by values, or a whole array."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import mlx.core as mx

from pmesh.client.mesh import Mesh
from pmesh.client.trees.mlx import evaluate
from pmesh.core.ops.shard import Shard, kept_parts
from pmesh.errors import RosterChanged
from pmesh.mlx.flat import Flat, NamedArrays
from pmesh.mlx.shards import Span, cover

OptimizerState: TypeAlias = dict[str, mx.array]
"""An optimizer's state for one array, such as `m` and `v`."""

_optim: Any = importlib.import_module("mlx.optimizers")  # it has no types

ELEMENTWISE = frozenset(
    getattr(_optim, name)
    for name in ("SGD", "RMSprop", "Adagrad", "AdaDelta", "Adam", "AdamW", "Adamax", "Lion")
)
"""Optimizers that update each value by itself. A subclass may not, so it is not among them."""


@dataclass(frozen=True, slots=True)
class Among:
    """The ranks that units are sharded across, and the number of copies of each part."""

    mesh: Mesh
    rank: int
    size: int
    replicas: int
    timeout_s: float

    def check(self) -> None:
        """Raise RosterChanged if the ranks have changed."""
        if (self.mesh.rank, self.mesh.size) != (self.rank, self.size):
            raise RosterChanged("a rank was lost while an optimizer's state was shared out")

    def kept_parts(self, rank: int) -> list[int]:
        """Return the numbers of the parts that a rank keeps."""
        return kept_parts(rank, self.size, self.replicas)

    def all_gather(self, x: mx.array) -> mx.array:
        """Return the rows of all ranks, evaluated. Raises RosterChanged if a rank is lost."""
        found = self.mesh.all_gather(x, self.timeout_s)
        self.check()
        return found


class Unit(Protocol):
    """Arrays that are updated together."""

    optimizer: Any

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of its arrays."""
        ...

    @property
    def nbytes(self) -> int:
        """The bytes of state that this rank keeps."""
        ...

    def drop(self) -> None:
        """Drop the state."""
        ...

    def held(self) -> list[list[int]]:
        """Return the spans that this rank keeps, in a form that can be sent."""
        ...

    def reshard(self, among: Among, held: Sequence[list[list[int]]]) -> int:
        """Collect the state that this rank must keep; return how many values no rank had."""
        ...

    def lay_out(self, gradients: NamedArrays, share: float) -> mx.array:
        """Return the gradients times this rank's share, evaluated, in the dtype of the sum."""
        ...

    def step(self, among: Among, mean: Any, parameters: NamedArrays) -> NamedArrays:  # noqa: ANN401 - a Handle
        """Update the arrays; the state changes only once all ranks have the new parameters.

        Args:
            among: the ranks.
            mean: the handle that `start` returned.
            parameters: the model's parameters.
        """
        ...

    def start(self, among: Among, gradients: mx.array) -> Any:  # noqa: ANN401 - a Handle
        """Begin the sum of the gradients that `lay_out` returned."""
        ...

    def gather(self, among: Among, held: Sequence[list[list[int]]]) -> dict[str, OptimizerState]:
        """Return the whole state by path, on every rank."""
        ...

    def load(self, among: Among, states: dict[str, OptimizerState]) -> None:
        """Keep this rank's part of a state that `gather` returned."""
        ...


@dataclass(slots=True)
class ShardedBucket:
    """A bucket of arrays of one dtype, with an elementwise optimizer.

    The arrays form one flat array, and each rank updates its part of it.
    """

    optimizer: Any
    flat: Flat
    states: dict[Span, OptimizerState] = field(default_factory=dict[Span, OptimizerState])

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of its arrays."""
        return self.flat.paths

    @property
    def nbytes(self) -> int:
        """The bytes of state that this rank keeps."""
        return sum(x.nbytes for state in self.states.values() for x in state.values())

    def drop(self) -> None:
        """Drop the state."""
        self.states = {}

    def held(self) -> list[list[int]]:
        """Return the spans that this rank keeps."""
        return [list(span) for span in self.states]

    def reshard(self, among: Among, held: Sequence[list[list[int]]]) -> int:
        """Collect the state that this rank must keep; return how many values no rank had."""
        wanted = self._wanted(among)
        givers = self._givers(held)
        if not givers:
            self.states = {span: self._initial(span.size) for span in wanted}
            return 0
        found: dict[Span, OptimizerState] = {span: {} for span in wanted}
        for key, values in self._collected(among, givers):
            for span in wanted:
                found[span][key] = mx.contiguous(values[span.begin : span.end])
            evaluate([state[key] for state in found.values()])
        self.states = found
        return self.flat.count - sum(span.size for _, span in givers)

    def lay_out(self, gradients: NamedArrays, share: float) -> mx.array:
        """Return the gradients times this rank's share, evaluated, in the dtype of the sum."""
        flat = self.flat.cut(gradients, Span(0, self.flat.count))
        wide = flat if self.flat.dtype == mx.complex64 else flat.astype(mx.float32)
        scaled = _scaled(wide, share)
        evaluate([scaled])
        return scaled

    def start(self, among: Among, gradients: mx.array) -> Any:  # noqa: ANN401 - a Handle
        """Begin the sum of the gradients that `lay_out` returned."""
        return among.mesh.reduce_scatter(gradients, "sum", among.timeout_s, async_op=True)

    def step(self, among: Among, mean: Any, parameters: NamedArrays) -> NamedArrays:  # noqa: ANN401 - a Handle
        """Update this rank's values, and gather those of the others."""
        own = mean.wait()
        among.check()
        means = [own, *self._replicated(among, own)]
        fresh: dict[Span, OptimizerState] = {}
        updated: list[mx.array] = []
        for span, gradient in zip(self._wanted(among), means, strict=True):
            state = dict(self.states[span])
            values = self.flat.cut(parameters, span)
            updated.append(
                self.optimizer.apply_single(gradient.astype(self.flat.dtype), values, state)
            )
            fresh[span] = state
        evaluate([updated, fresh])
        values = among.all_gather(updated[0])
        self.states = fresh
        return self.flat.take_apart(values)

    def gather(self, among: Among, held: Sequence[list[list[int]]]) -> dict[str, OptimizerState]:
        """Return the whole state by path, on every rank."""
        found: dict[str, OptimizerState] = {path: {} for path in self.paths}
        for key, values in self._collected(among, self._givers(held)):
            for path, part in self.flat.take_apart(values).items():
                found[path][key] = part
        return found

    def load(self, among: Among, states: dict[str, OptimizerState]) -> None:
        """Keep this rank's part of a state that `gather` returned."""
        self.states = {
            span: {
                key: mx.contiguous(self.flat.cut({p: states[p][key] for p in self.paths}, span))
                for key in self._initial(1)
            }
            for span in self._wanted(among)
        }
        evaluate([self.states])

    def _wanted(self, among: Among) -> list[Span]:
        shards = (
            Shard.of(part, among.size, self.flat.count) for part in among.kept_parts(among.rank)
        )
        return [Span(shard.begin, shard.end) for shard in shards]

    def _givers(self, held: Sequence[list[list[int]]]) -> list[tuple[int, Span]]:
        return cover([[Span(*span) for span in spans] for spans in held], self.flat.count)

    def _initial(self, count: int) -> OptimizerState:
        state: OptimizerState = {}
        self.optimizer.init_single(mx.zeros(count, self.flat.dtype), state)
        return state

    def _replicated(self, among: Among, own: mx.array) -> list[mx.array]:
        """Receive the mean gradients of the replicas that this rank keeps."""
        others = among.kept_parts(among.rank)[1:]
        if not others:
            return []
        nothing = mx.zeros(0, own.dtype)
        sent = [
            own if rank != among.rank and among.rank in among.kept_parts(rank) else nothing
            for rank in range(among.size)
        ]
        received = among.mesh.all_to_all(sent, among.timeout_s)
        among.check()
        return [received[part] for part in others]

    def _collected(
        self, among: Among, givers: Sequence[tuple[int, Span]]
    ) -> "list[tuple[str, mx.array]]":
        """Return each array of the whole state, gathered from the ranks."""
        return [(key, self._put_together(among, givers, key)) for key in self._initial(1)]

    def _put_together(self, among: Among, givers: Sequence[tuple[int, Span]], key: str) -> mx.array:
        mine = [self._kept(span)[key] for rank, span in givers if rank == among.rank]
        empty = self._initial(0)[key]
        gathered = among.all_gather(mx.concatenate([empty, *mine]))
        found: list[mx.array] = [empty]
        at = 0
        begins = [sum(s.size for r, s in givers if r < rank) for rank in range(among.size)]
        for rank, span in givers:
            if at < span.begin:
                found.append(self._initial(span.begin - at)[key])
            found.append(gathered[begins[rank] : begins[rank] + span.size])
            begins[rank] += span.size
            at = span.end
        found.append(self._initial(self.flat.count - at)[key])
        return mx.concatenate(found)

    def _kept(self, span: Span) -> OptimizerState:
        """Return the state of a span that lies within one that this rank keeps."""
        whole = next(s for s in self.states if s.begin <= span.begin and span.end <= s.end)
        begin, end = span.begin - whole.begin, span.end - whole.begin
        return {key: x[begin:end] for key, x in self.states[whole].items()}


@dataclass(slots=True)
class Whole:
    """An array that one rank updates as a whole, as Adafactor and Muon require."""

    optimizer: Any
    path: str
    shape: tuple[int, ...]
    dtype: mx.Dtype
    owner: int = 0
    state: OptimizerState | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of the array."""
        return (self.path,)

    @property
    def nbytes(self) -> int:
        """The bytes of state that this rank keeps."""
        return sum(x.nbytes for x in (self.state or {}).values())

    def drop(self) -> None:
        """Drop the state."""
        self.state = None

    def held(self) -> list[list[int]]:
        """Return a span that stands for the whole state, if this rank keeps it."""
        return [] if self.state is None else [[0, 1]]

    def reshard(self, among: Among, held: Sequence[list[list[int]]]) -> int:
        """Collect the state that this rank must keep; return how many values no rank had."""
        keepers = {rank for rank in range(among.size) if self.owner in among.kept_parts(rank)}
        holders = {rank for rank, spans in enumerate(held) if spans}
        initial = self._initial()
        if holders and not keepers <= holders:
            initial = self._from(min(holders), among)
        elif self.state is not None:
            initial = self.state
        self.state = initial if among.rank in keepers else None
        return 0 if holders else sum(x.size for x in initial.values())

    def lay_out(self, gradients: NamedArrays, share: float) -> mx.array:
        """Return the gradient times this rank's share, evaluated, in the dtype of the sum."""
        gradient = gradients[self.path]
        wide = gradient if self.dtype == mx.complex64 else gradient.astype(mx.float32)
        scaled = _scaled(wide, share)
        evaluate([scaled])
        return scaled

    def start(self, among: Among, gradients: mx.array) -> Any:  # noqa: ANN401 - a Handle
        """Begin the sum on all ranks: a reduce to the owner would fail if the owner is lost."""
        return among.mesh.all_reduce(gradients, "sum", among.timeout_s, async_op=True)

    def step(self, among: Among, mean: Any, parameters: NamedArrays) -> NamedArrays:  # noqa: ANN401 - a Handle
        """Update the array if this rank keeps it; every rank gets the result of the owner."""
        gradient = mean.wait()
        among.check()
        fresh: OptimizerState | None = None
        flat = mx.zeros(0, self.dtype)
        if self.state is not None:
            fresh = dict(self.state)
            updated = self.optimizer.apply_single(
                gradient.astype(self.dtype), parameters[self.path], fresh
            )
            evaluate([updated, fresh])
            if among.rank == self.owner:
                flat = mx.flatten(updated)
        values = among.all_gather(flat)
        self.state = fresh
        whole = mx.reshape(values, self.shape)
        evaluate([whole])
        return {self.path: whole}

    def gather(self, among: Among, held: Sequence[list[list[int]]]) -> dict[str, OptimizerState]:
        """Return the whole state, on every rank."""
        holders = [rank for rank, spans in enumerate(held) if spans]
        return {self.path: self._from(min(holders), among) if holders else self._initial()}

    def load(self, among: Among, states: dict[str, OptimizerState]) -> None:
        """Keep the state if this rank is to have it."""
        kept = self.owner in among.kept_parts(among.rank)
        self.state = dict(states[self.path]) if kept else None

    def _initial(self) -> OptimizerState:
        state: OptimizerState = {}
        self.optimizer.init_single(mx.zeros(self.shape, self.dtype), state)
        return state

    def _from(self, holder: int, among: Among) -> OptimizerState:
        """Return the state of one rank, on every rank."""
        found: OptimizerState = {}
        for key, initial in self._initial().items():
            own = self.state[key] if self.state is not None and among.rank == holder else None
            flat = mx.zeros(0, initial.dtype) if own is None else mx.flatten(own)
            found[key] = mx.reshape(among.all_gather(flat), initial.shape)
        evaluate([found])
        return found


def _scaled(gradients: mx.array, share: float) -> mx.array:
    """Return the gradients times this rank's share; those of no rows, which may be NaN, as 0."""
    return gradients * share if share else mx.zeros_like(gradients)


def is_elementwise(optimizer: object) -> bool:
    """Return True if the optimizer updates each value by itself."""
    return type(optimizer) in ELEMENTWISE
