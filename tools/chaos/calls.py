"""What trainers call in a campaign, each call with inputs of which any result can be checked.

Values are whole numbers small enough that float32 adds them without rounding, so there is one right
sum, whatever the order. Each value depends on the trainer (a sum names its contributors), on the
step (a stale one is seen) and on the place (so is one that went astray).

A call that can't be done again without a lost rank raises at all others alike (O3, O4): that is a
right outcome too, and one that all must agree on.
"""

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

import pmesh

Values: TypeAlias = NDArray[np.float32]

PERIOD = 4099  # a prime: a segment, 65,536 values or a multiple, that goes astray changes the phase
MOST_TRAINERS = 8
_STEPS = 997  # a prime too; two steps with the same values are as far apart
_TRAINER = 1000.0  # more than _STEPS, so that steps and trainers don't mix
_PLACES = np.arange(PERIOD, dtype=np.float32)


def own_value(step: int, number: int) -> float:
    """What trainer `number`, 1 to 8, adds to the place; any sum of them tells who is in it.

    >>> own_value(3, 1) + own_value(3, 4)
    9006.0
    """
    return step % _STEPS + _TRAINER * (1 << number - 1)


def numbers_of(names: tuple[str, ...]) -> list[int]:
    """Of the machines `mac-1`, `mac-2`, ...

    >>> numbers_of(("mac-3", "mac-1"))
    [3, 1]
    """
    return [int(name.rpartition("-")[2]) for name in names]


class Pattern:
    """The inputs of one trainer, and the right results, for ops of about `nbytes`."""

    def __init__(self, nbytes: int) -> None:
        self._input: Values = np.empty((max(1, nbytes // (4 * PERIOD)), PERIOD), np.float32)

    @property
    def nbytes(self) -> int:
        """Of one input: a whole number of periods."""
        return self._input.nbytes

    def input(self, step: int, number: int) -> Values:
        """What the trainer gives; valid until the next call."""
        np.copyto(self._input, _PLACES + np.float32(own_value(step, number)))
        return self._input

    def is_right(self, result: Values, step: int, numbers: Collection[int]) -> bool:
        """Whether every value is the sum over exactly these trainers."""
        added = np.float32(sum(own_value(step, number) for number in numbers))
        right = _PLACES * np.float32(len(numbers)) + added
        return result.shape == self._input.shape and bool((result == right).all())


def digest(result: Values) -> str:
    """128 bits that differ where two results differ in any bit."""
    return xxhash.xxh3_128_hexdigest(result.data)


class CallOutcome(NamedTuple):
    """What a call has come to on one rank."""

    digest: str
    """Alike on all ranks."""
    right: bool


@dataclass(frozen=True, slots=True)
class At:
    """One trainer in one step."""

    mesh: pmesh.Mesh
    pattern: Pattern
    number: int
    step: int

    @property
    def numbers(self) -> list[int]:
        """Before a call: who takes part; after it: whose values are in the result."""
        return numbers_of(self.mesh.names)

    def total(self) -> float:
        """What they have added up to, but for the places."""
        return sum(own_value(self.step, number) for number in self.numbers)

    def mine(self) -> float:
        """What this trainer adds to that."""
        return own_value(self.step, self.number)

    def input(self, number: int | None = None) -> Values:
        """What a trainer, this one unless told otherwise, gives to a sum; a copy."""
        return self.pattern.input(self.step, self.number if number is None else number).copy()

    def is_sum(self, result: Values) -> bool:
        """Whether it is the sum over those who have contributed, in every bit."""
        return self.pattern.is_right(result, self.step, self.numbers)

    def whole(self) -> Values:
        places = np.arange(PERIOD, dtype=np.float32) * np.float32(len(self.numbers))
        rows = self.pattern.nbytes // (4 * PERIOD)
        return np.tile(places + np.float32(self.total()), (rows, 1))


class CheckedCall(NamedTuple):
    """A call that is ready to be made, and judged."""

    call: Callable[[], Any]
    judge: Callable[[Any], CallOutcome]


RATIO = 0.01
LIGHT = 2.0**-10  # of values that pass float16 in range
MATRIX_NOISE, BLOCK_NOISE, HOP_NOISE = 1e-3, 1e-5, 0.03


def cast(at: At, compression: str) -> CheckedCall:
    """What rounds every value, at each hop or once."""
    x = at.input() * np.float32(LIGHT)
    return CheckedCall(
        lambda: at.mesh.all_reduce(x, compression=compression),
        lambda result: _near(result, at.whole() * np.float32(LIGHT), HOP_NOISE),
    )


def average(at: At) -> CheckedCall:
    """What feedback adds to a mean is what the call before has rounded away: as little."""
    grads = {"w": at.input() * np.float32(LIGHT), "b": np.full(3, 4, np.float32)}

    def judge(result: Mapping[str, Values]) -> CallOutcome:
        mean = at.whole() * np.float32(LIGHT / at.mesh.size)
        near = _near(result["w"], mean, HOP_NOISE)
        return near._replace(right=near.right and np.allclose(result["b"], 4, rtol=HOP_NOISE))

    return CheckedCall(lambda: at.mesh.average_gradients(grads, compression="int8"), judge)


def top_k(at: At) -> CheckedCall:
    """As many values as are kept, in places that all share: nothing is left out."""
    values = np.zeros(at.pattern.nbytes // 4, np.float32)
    places = (np.arange(int(values.size * RATIO)) * 97 + at.step) % values.size
    values[places] = 1
    x = values * np.float32(at.mine())
    return CheckedCall(
        lambda: at.mesh.all_reduce(x, compression=pmesh.TopK(RATIO)),
        lambda result: _near(result, values * np.float32(at.total()), BLOCK_NOISE),
    )


def random_k(at: At) -> CheckedCall:
    """What is kept is the sum, as many times as large as there are places for each that is kept."""
    x = at.input()

    def judge(result: Values) -> CallOutcome:
        kept = np.nonzero(result)
        right = at.whole()[kept] * np.float32(result.size / max(1, kept[0].size))
        enough = 0.09 * result.size < kept[0].size < 0.11 * result.size
        return CallOutcome(digest(result), enough and _near(result[kept], right, BLOCK_NOISE).right)

    return CheckedCall(lambda: at.mesh.all_reduce(x, compression=pmesh.RandomK(0.1)), judge)


def one_bit(at: At) -> CheckedCall:
    """All values of one magnitude: the mean magnitude of a block is theirs."""
    signs = np.where(at.input(1) % 3 == 0, np.float32(-1), np.float32(1))
    x = signs * np.float32(at.mine())
    return CheckedCall(
        lambda: at.mesh.all_reduce(x, compression="onebit"),
        lambda result: _near(result, signs * np.float32(at.total()), BLOCK_NOISE),
    )


def power_sgd(at: At) -> CheckedCall:
    """A matrix of rank 1, as is a sum of them."""
    row = at.input(1)[:1] * np.float32(LIGHT)
    base = row * np.arange(1, at.input().shape[0] + 1, dtype=np.float32)[:, None]
    x = base * np.float32(at.mine())
    return CheckedCall(
        lambda: at.mesh.all_reduce(x, compression=pmesh.PowerSGD(2)),
        lambda result: _near(result, base * np.float32(at.total()), MATRIX_NOISE),
    )


def _near(result: Values, right: Values, limit: float) -> CallOutcome:
    error = np.linalg.norm((result - right).reshape(-1)) / np.linalg.norm(right.reshape(-1))
    return CallOutcome(digest(result), result.shape == right.shape and bool(error <= limit))


PIECE_VALUES = 1 << 20
"""At most so many go to another rank in one call: what all get together is as large as a sum."""
GROUP_BYTES = 1 << 18

LOST = (pmesh.RankLost, pmesh.RosterChanged)


def _sum(at: At, **more: Any) -> CheckedCall:  # noqa: ANN401 - of all_reduce
    x = at.pattern.input(at.step, at.number)
    return CheckedCall(
        lambda: at.mesh.all_reduce(x, **more),
        lambda result: CallOutcome(digest(result), at.is_sum(result)),
    )


def _shared(at: At) -> CheckedCall:
    """Without copies, twice: what the first call has brought stays while the second runs."""
    x = at.mesh.empty(at.input().shape)
    x[:] = at.input()

    def call() -> tuple[Values, str, Values]:
        first = at.mesh.all_reduce(x, copy=False)
        before = digest(first)
        return first, before, at.mesh.all_reduce(x, copy=False)

    def judge(results: tuple[Values, str, Values]) -> CallOutcome:
        first, before, second = results
        return CallOutcome(digest(second), digest(first) == before and at.is_sum(second))

    return CheckedCall(call, judge)


def _reduce(at: At) -> CheckedCall:
    root, x = at.step % at.mesh.size, at.input()
    return CheckedCall(
        lambda: at.mesh.reduce(x, root=root),
        lambda result: CallOutcome("reduced", result is None or at.is_sum(result)),
    )


def _broadcast(at: At) -> CheckedCall:
    root, x = at.step % at.mesh.size, at.input()
    right = at.input(at.numbers[root])
    return CheckedCall(
        lambda: at.mesh.broadcast(x, root=root),
        lambda result: CallOutcome(digest(result), np.array_equal(result, right)),
    )


def _reduce_scatter(at: At) -> CheckedCall:
    x = at.input().reshape(-1)

    def judge(result: Values) -> CallOutcome:
        own = np.array_split(at.whole().reshape(-1), at.mesh.size)[at.mesh.rank]
        return CallOutcome("scattered", np.array_equal(result, own))

    return CheckedCall(lambda: at.mesh.reduce_scatter(x), judge)


def _all_gather(at: At) -> CheckedCall:
    x = _piece(at.input())

    def judge(result: Values) -> CallOutcome:
        right = np.concatenate([_piece(at.input(number)) for number in at.numbers])
        return CallOutcome(digest(result), np.array_equal(result, right))

    return CheckedCall(lambda: at.mesh.all_gather(x), judge)


def _gather(at: At) -> CheckedCall:
    root, x = at.step % at.mesh.size, _piece(at.input())

    def judge(result: Values | None) -> CallOutcome:
        right = np.stack([_piece(at.input(number)) for number in at.numbers])
        return CallOutcome("gathered", result is None or np.array_equal(result, right))

    return CheckedCall(lambda: at.mesh.gather(x, root=root, stacked=True), judge)


def _scatter(at: At) -> CheckedCall:
    root, rank, size = at.step % at.mesh.size, at.mesh.rank, at.mesh.size
    xs = np.array_split(at.input().reshape(-1), size) if rank == root else None
    right = np.array_split(at.input(at.numbers[root]).reshape(-1), size)[rank]
    return CheckedCall(
        lambda: at.mesh.scatter(xs, root=root),
        lambda result: CallOutcome("scattered", np.array_equal(result, right)),
    )


def _all_to_all(at: At) -> CheckedCall:
    size, rank = at.mesh.size, at.mesh.rank
    xs = np.array_split(_piece(at.input()), size)
    right = [np.array_split(_piece(at.input(number)), size)[rank] for number in at.numbers]

    def judge(results: list[Values]) -> CallOutcome:
        return CallOutcome("exchanged", all(map(np.array_equal, results, right)))

    return CheckedCall(lambda: at.mesh.all_to_all(xs), judge)


def _objects(at: At) -> CheckedCall:
    def judge(told: list[dict[str, int]]) -> CallOutcome:
        right = [{"number": number, "step": at.step} for number in at.numbers]
        return CallOutcome(str(told), told == right)

    return CheckedCall(
        lambda: at.mesh.all_gather_object({"number": at.number, "step": at.step}), judge
    )


def _object(at: At) -> CheckedCall:
    """Behind a barrier, which goes on without who is lost."""
    root = at.step % at.mesh.size
    told = {"number": at.number, "step": at.step}
    right = {"number": at.numbers[root], "step": at.step}

    def call() -> object:
        root_name = at.mesh.names[root]
        at.mesh.barrier()
        if root_name not in at.mesh.names:
            raise pmesh.RankLost(f"{root_name} was to tell it")
        return at.mesh.broadcast_object(told, root=at.mesh.names.index(root_name))

    return CheckedCall(call, lambda result: CallOutcome(str(result), result == right))


def _group(at: At) -> CheckedCall:
    """Even and odd ranks, each for themselves: a loss breaks a group at all its ranks, or not."""
    small = Pattern(GROUP_BYTES)
    x = small.input(at.step, at.number)

    def call() -> tuple[Values | None, list[int], bool]:
        before, color, got, numbers = at.mesh.names, at.mesh.rank % 2, None, list[int]()
        with suppress(pmesh.GroupBroken):
            if group := at.mesh.split(color):
                with closing(group):
                    got = group.all_reduce(x)
                    numbers = numbers_of(group.names)
        agreed, left = _all_say(at.mesh, color, "broken" if got is None else digest(got))
        return got, numbers, agreed and (got is not None or left != before)

    def judge(result: tuple[Values | None, list[int], bool]) -> CallOutcome:
        got, numbers, alike = result
        right = got is None or small.is_right(got, at.step, numbers)
        return CallOutcome("grouped", alike and right)

    return CheckedCall(call, judge)


def _all_say(mesh: pmesh.Mesh, color: int, what: str) -> tuple[bool, tuple[str, ...]]:
    """Whether all ranks of each color that are left say the same, and who is left."""
    said = zlib.crc32(what.encode())
    votes = np.full((2, 2), -(1 << 62), np.int64)
    votes[color] = said, -said
    most, left = _all_reduced(mesh, votes)
    return all(high == -low for high, low in most if high >= 0), left


def _envelopes(at: At) -> CheckedCall:
    """To the next trainer and from the previous one, each once and in order, or it is lost.

    The all-reduces tell all that are left the same ring: from who was there before the messages,
    and who is afterwards.
    """
    x, nothing = _piece(at.input()), np.zeros(1, np.int64)

    def call() -> tuple[Values | None, int, bool]:
        mesh, sending, got = at.mesh, None, None
        _, ring = _all_reduced(mesh, nothing)
        if len(ring) == 1:
            return None, at.number, False
        own = ring.index(mesh.names[mesh.rank])
        to, from_ = ring[(own + 1) % len(ring)], ring[own - 1]
        with suppress(pmesh.RankLost):
            if to in mesh.names:
                sending = mesh.send(x, mesh.names.index(to), async_op=True)
        with suppress(pmesh.RankLost):
            if from_ in mesh.names:
                got = mesh.recv_like(x, mesh.names.index(from_))
        with suppress(pmesh.RankLost):
            if sending is not None:
                sending.wait()
        _, left = _all_reduced(mesh, nothing)
        (number,) = numbers_of((from_,))
        return got, number, from_ in left

    def judge(result: tuple[Values | None, int, bool]) -> CallOutcome:
        got, number, due = result
        right = not due if got is None else np.array_equal(got, _piece(at.input(number)))
        return CallOutcome("told", right)

    return CheckedCall(call, judge)


def _all_reduced(
    mesh: pmesh.Mesh, x: NDArray[np.int64]
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """The largest of each value, and whose values they are of: alike at all that are left (I3)."""
    most = mesh.all_reduce(x, op="max")
    assert mesh.last_op is not None  # noqa: S101 - as of just now
    return most, mesh.last_op.names


def _piece(x: Values) -> Values:
    return x.reshape(-1)[:PIECE_VALUES]


_STRATEGIES = ("tree", "centralized", "hierarchical", "chain", "direct")
CALLS: Mapping[str, Sequence[Callable[[At], CheckedCall]]] = MappingProxyType(
    {
        "sum": (_sum,),
        "collectives": (
            _reduce,
            _broadcast,
            _reduce_scatter,
            _all_gather,
            _gather,
            _scatter,
            _all_to_all,
            _objects,
            _object,
            _group,
            _envelopes,
            _shared,
            *(partial(_sum, strategy=name) for name in _STRATEGIES),
        ),
        "compressed": (
            *(partial(cast, compression=name) for name in ("bf16", "fp16", "int8")),
            average,
            top_k,
            random_k,
            one_bit,
            power_sgd,
        ),
    }
)
"""What a campaign's trainers call, in turn, step by step."""


def prepare(kind: str, at: At) -> CheckedCall:
    """The call of this step.

    A sum goes on without who is lost. Of the others some can't: that they raise is an outcome too.
    """
    calls = CALLS[kind]
    trial = calls[at.step % len(calls)](at)
    if kind == "sum":
        return trial

    def call() -> Any:  # noqa: ANN401 - whatever a collective returns
        try:
            return trial.call()
        except LOST as e:
            return e

    def judge(result: Any) -> CallOutcome:  # noqa: ANN401 - likewise
        return failed(result) if isinstance(result, Exception) else trial.judge(result)

    return CheckedCall(call, judge)


def failed(why: Exception) -> CallOutcome:
    """Of a call that is bound to its ranks: right, if all say the same."""
    return CallOutcome(type(why).__name__, right=True)
