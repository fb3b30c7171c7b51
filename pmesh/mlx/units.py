"""What a sharded optimizer updates at once: a bucket by its rows, or one whole array."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import mlx.core as mx

from pmesh.client.mesh import Mesh
from pmesh.client.trees.mlx import evaluate
from pmesh.errors import RosterChanged
from pmesh.mlx.flat import Arrays, Flat
from pmesh.mlx.shards import Span, cover, parts_of, span_of

State: TypeAlias = dict[str, mx.array]
"""What an optimizer keeps of one array, such as `m` and `v`."""

_optim: Any = importlib.import_module("mlx.optimizers")  # it has no types

ELEMENTWISE = frozenset(
    getattr(_optim, name)
    for name in ("SGD", "RMSprop", "Adagrad", "AdaDelta", "Adam", "AdamW", "Adamax", "Lion")
)
"""Exactly these: a subclass may look at whole arrays."""


@dataclass(frozen=True, slots=True)
class Among:
    """The ranks among which units are shared out, and how often."""

    mesh: Mesh
    rank: int
    size: int
    replicas: int
    timeout_s: float

    def check(self) -> None:
        """Raises RosterChanged if these are not the ranks any more."""
        if (self.mesh.rank, self.mesh.size) != (self.rank, self.size):
            raise RosterChanged("a rank was lost while an optimizer's state was shared out")

    def kept_parts(self, rank: int) -> list[int]:
        """Which parts a rank keeps."""
        return parts_of(rank, self.size, self.replicas)

    def all_gather(self, x: mx.array) -> mx.array:
        """The rows of all ranks, evaluated; raises RosterChanged if one is lost."""
        found = self.mesh.all_gather(x, self.timeout_s)
        self.check()
        return found


class Unit(Protocol):
    """Arrays that are updated together."""

    optimizer: Any

    @property
    def paths(self) -> tuple[str, ...]:
        """Of its arrays."""
        ...

    @property
    def nbytes(self) -> int:
        """What this rank keeps of the state."""
        ...

    def drop(self) -> None:
        """Keep nothing any more."""
        ...

    def held(self) -> list[list[int]]:
        """What this rank keeps, as it is told to the others."""
        ...

    def reshard(self, among: Among, held: Sequence[list[list[int]]]) -> int:
        """Keep what this rank has to among these; returns how many values nobody had."""
        ...

    def lay_out(self, gradients: Arrays, share: float) -> mx.array:
        """The gradients times this rank's share, evaluated, in the dtype that they are added in."""
        ...

    def step(self, among: Among, mean: Any, parameters: Arrays) -> Arrays:  # noqa: ANN401 - a Handle
        """Update; the state changes only when all ranks have the new parameters.

        Args:
            among: the ranks.
            mean: a handle of what `start` has begun.
            parameters: all of them.
        """
        ...

    def start(self, among: Among, gradients: mx.array) -> Any:  # noqa: ANN401 - a Handle
        """Begin to add up what was laid out."""
        ...

    def gather(self, among: Among, held: Sequence[list[list[int]]]) -> dict[str, State]:
        """The whole state by path, on every rank."""
        ...

    def load(self, among: Among, states: dict[str, State]) -> None:
        """Keep this rank's part of what `gather` has returned."""
        ...


@dataclass(slots=True)
class Rows:
    """A bucket of arrays of one dtype whose optimizer treats each value by itself.

    They lie one behind the other, and each rank updates its part of these values.
    """

    optimizer: Any
    flat: Flat
    states: dict[Span, State] = field(default_factory=dict[Span, State])

    @property
    def paths(self) -> tuple[str, ...]:
        """Of its arrays."""
        return self.flat.paths

    @property
    def nbytes(self) -> int:
        """What this rank keeps of the state."""
        return sum(x.nbytes for state in self.states.values() for x in state.values())

    def drop(self) -> None:
        """Keep nothing any more."""
        self.states = {}

    def held(self) -> list[list[int]]:
        """The spans that this rank keeps."""
        return [list(span) for span in self.states]

    def reshard(self, among: Among, held: Sequence[list[list[int]]]) -> int:
        """Keep what this rank has to among these; returns how many values nobody had."""
        wanted = self._wanted(among)
        givers = self._givers(held)
        if not givers:
            self.states = {span: self._initial(span.size) for span in wanted}
            return 0
        found: dict[Span, State] = {span: {} for span in wanted}
        for key, values in self._collected(among, givers):
            for span in wanted:
                found[span][key] = mx.contiguous(values[span.begin : span.end])
            evaluate([state[key] for state in found.values()])
        self.states = found
        return self.flat.count - sum(span.size for _, span in givers)

    def lay_out(self, gradients: Arrays, share: float) -> mx.array:
        """The gradients times this rank's share, evaluated, in the dtype that they are added in."""
        flat = self.flat.cut(gradients, Span(0, self.flat.count))
        wide = flat if self.flat.dtype == mx.complex64 else flat.astype(mx.float32)
        scaled = wide * share
        evaluate([scaled])
        return scaled

    def start(self, among: Among, gradients: mx.array) -> Any:  # noqa: ANN401 - a Handle
        """Begin to add up what was laid out."""
        return among.mesh.reduce_scatter(gradients, "sum", among.timeout_s, async_op=True)

    def step(self, among: Among, mean: Any, parameters: Arrays) -> Arrays:  # noqa: ANN401 - a Handle
        """Update this rank's values, and get those of the others."""
        own = mean.wait()
        among.check()
        means = [own, *self._replicated(among, own)]
        fresh: dict[Span, State] = {}
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

    def gather(self, among: Among, held: Sequence[list[list[int]]]) -> dict[str, State]:
        """The whole state by path, on every rank."""
        found: dict[str, State] = {path: {} for path in self.paths}
        for key, values in self._collected(among, self._givers(held)):
            for path, part in self.flat.take_apart(values).items():
                found[path][key] = part
        return found

    def load(self, among: Among, states: dict[str, State]) -> None:
        """Keep this rank's part of what `gather` has returned."""
        self.states = {
            span: {
                key: mx.contiguous(self.flat.cut({p: states[p][key] for p in self.paths}, span))
                for key in self._initial(1)
            }
            for span in self._wanted(among)
        }
        evaluate([self.states])

    def _wanted(self, among: Among) -> list[Span]:
        return [span_of(part, self.flat.count, among.size) for part in among.kept_parts(among.rank)]

    def _givers(self, held: Sequence[list[list[int]]]) -> list[tuple[int, Span]]:
        return cover([[Span(*span) for span in spans] for spans in held], self.flat.count)

    def _initial(self, count: int) -> State:
        state: State = {}
        self.optimizer.init_single(mx.zeros(count, self.flat.dtype), state)
        return state

    def _replicated(self, among: Among, own: mx.array) -> list[mx.array]:
        """The mean gradients of the other parts that this rank keeps, from their ranks."""
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
        """Each array of the whole state, put together of what the ranks have."""
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

    def _kept(self, span: Span) -> State:
        """A part of what this rank keeps."""
        whole = next(s for s in self.states if s.begin <= span.begin and span.end <= s.end)
        begin, end = span.begin - whole.begin, span.end - whole.begin
        return {key: x[begin:end] for key, x in self.states[whole].items()}


@dataclass(slots=True)
class Whole:
    """An array whose optimizer needs the whole of it, as Adafactor and Muon do: one rank's."""

    optimizer: Any
    path: str
    shape: tuple[int, ...]
    dtype: mx.Dtype
    owner: int = 0
    state: State | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """The one that it is."""
        return (self.path,)

    @property
    def nbytes(self) -> int:
        """What this rank keeps of the state."""
        return sum(x.nbytes for x in (self.state or {}).values())

    def drop(self) -> None:
        """Keep nothing any more."""
        self.state = None

    def held(self) -> list[list[int]]:
        """One span that stands for all if this rank keeps it."""
        return [] if self.state is None else [[0, 1]]

    def reshard(self, among: Among, held: Sequence[list[list[int]]]) -> int:
        """Keep what this rank has to among these; returns how many values nobody had."""
        keepers = {rank for rank in range(among.size) if self.owner in among.kept_parts(rank)}
        holders = {rank for rank, spans in enumerate(held) if spans}
        initial = self._initial()
        if holders and not keepers <= holders:
            initial = self._from(min(holders), among)
        elif self.state is not None:
            initial = self.state
        self.state = initial if among.rank in keepers else None
        return 0 if holders else sum(x.size for x in initial.values())

    def lay_out(self, gradients: Arrays, share: float) -> mx.array:
        """The gradient times this rank's share, evaluated, in the dtype that it is added in."""
        gradient = gradients[self.path]
        scaled = (gradient if self.dtype == mx.complex64 else gradient.astype(mx.float32)) * share
        evaluate([scaled])
        return scaled

    def start(self, among: Among, gradients: mx.array) -> Any:  # noqa: ANN401 - a Handle
        """Begin to add it up, for all: the op for one rank alone fails if that rank is lost."""
        return among.mesh.all_reduce(gradients, "sum", among.timeout_s, async_op=True)

    def step(self, among: Among, mean: Any, parameters: Arrays) -> Arrays:  # noqa: ANN401 - a Handle
        """Update it if this rank keeps it; all get what the owner has made of it."""
        gradient = mean.wait()
        among.check()
        fresh: State | None = None
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

    def gather(self, among: Among, held: Sequence[list[list[int]]]) -> dict[str, State]:
        """The whole state, on every rank."""
        holders = [rank for rank, spans in enumerate(held) if spans]
        return {self.path: self._from(min(holders), among) if holders else self._initial()}

    def load(self, among: Among, states: dict[str, State]) -> None:
        """Keep it if this rank has to."""
        kept = self.owner in among.kept_parts(among.rank)
        self.state = dict(states[self.path]) if kept else None

    def _initial(self) -> State:
        state: State = {}
        self.optimizer.init_single(mx.zeros(self.shape, self.dtype), state)
        return state

    def _from(self, holder: int, among: Among) -> State:
        """The state that one rank has, on every rank."""
        found: State = {}
        for key, initial in self._initial().items():
            own = self.state[key] if self.state is not None and among.rank == holder else None
            flat = mx.zeros(0, initial.dtype) if own is None else mx.flatten(own)
            found[key] = mx.reshape(among.all_gather(flat), initial.shape)
        evaluate([found])
        return found


def is_elementwise(optimizer: object) -> bool:
    """Whether it updates each value by what it keeps of that value alone."""
    return type(optimizer) in ELEMENTWISE
