"""The calls of the campaigns, each with inputs of which any result can be checked.

A call that can't be done again without a lost rank raises at all others alike (O3, O4): that is a
right outcome too, and one that all must agree on.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

import pmesh
from tools.chaos.compressed_calls import average, cast, one_bit, power_sgd, random_k, top_k
from tools.chaos.pattern import Pattern, Values, digest, numbers_of
from tools.chaos.trials import At, Outcome, Trial

PIECE_VALUES = 1 << 20
"""At most so many go to another rank in one call: what all get together is as large as a sum."""
GROUP_BYTES = 1 << 18

LOST = (pmesh.RankLost, pmesh.RosterChanged)


def _sum(at: At, **more: Any) -> Trial:  # noqa: ANN401 - of all_reduce
    x = at.pattern.input(at.step, at.number)
    return Trial(
        lambda: at.mesh.all_reduce(x, **more),
        lambda result: Outcome(digest(result), at.is_sum(result)),
    )


def _shared(at: At) -> Trial:
    """Without copies, twice: what the first call has brought stays while the second runs."""
    x = at.mesh.empty(at.input().shape)
    x[:] = at.input()

    def call() -> tuple[Values, str, Values]:
        first = at.mesh.all_reduce(x, copy=False)
        before = digest(first)
        return first, before, at.mesh.all_reduce(x, copy=False)

    def judge(results: tuple[Values, str, Values]) -> Outcome:
        first, before, second = results
        return Outcome(digest(second), digest(first) == before and at.is_sum(second))

    return Trial(call, judge)


def _reduce(at: At) -> Trial:
    root, x = at.step % at.mesh.size, at.input()
    return Trial(
        lambda: at.mesh.reduce(x, root=root),
        lambda result: Outcome("reduced", result is None or at.is_sum(result)),
    )


def _broadcast(at: At) -> Trial:
    root, x = at.step % at.mesh.size, at.input()
    right = at.input(at.numbers[root])
    return Trial(
        lambda: at.mesh.broadcast(x, root=root),
        lambda result: Outcome(digest(result), np.array_equal(result, right)),
    )


def _reduce_scatter(at: At) -> Trial:
    x = at.input().reshape(-1)

    def judge(result: Values) -> Outcome:
        own = np.array_split(at.whole().reshape(-1), at.mesh.size)[at.mesh.rank]
        return Outcome("scattered", np.array_equal(result, own))

    return Trial(lambda: at.mesh.reduce_scatter(x), judge)


def _all_gather(at: At) -> Trial:
    x = _piece(at.input())

    def judge(result: Values) -> Outcome:
        right = np.concatenate([_piece(at.input(number)) for number in at.numbers])
        return Outcome(digest(result), np.array_equal(result, right))

    return Trial(lambda: at.mesh.all_gather(x), judge)


def _gather(at: At) -> Trial:
    root, x = at.step % at.mesh.size, _piece(at.input())

    def judge(result: Values | None) -> Outcome:
        right = np.stack([_piece(at.input(number)) for number in at.numbers])
        return Outcome("gathered", result is None or np.array_equal(result, right))

    return Trial(lambda: at.mesh.gather(x, root=root, stacked=True), judge)


def _scatter(at: At) -> Trial:
    root, rank, size = at.step % at.mesh.size, at.mesh.rank, at.mesh.size
    xs = np.array_split(at.input().reshape(-1), size) if rank == root else None
    right = np.array_split(at.input(at.numbers[root]).reshape(-1), size)[rank]
    return Trial(
        lambda: at.mesh.scatter(xs, root=root),
        lambda result: Outcome("scattered", np.array_equal(result, right)),
    )


def _all_to_all(at: At) -> Trial:
    size, rank = at.mesh.size, at.mesh.rank
    xs = np.array_split(_piece(at.input()), size)
    right = [np.array_split(_piece(at.input(number)), size)[rank] for number in at.numbers]

    def judge(results: list[Values]) -> Outcome:
        return Outcome("exchanged", all(map(np.array_equal, results, right)))

    return Trial(lambda: at.mesh.all_to_all(xs), judge)


def _objects(at: At) -> Trial:
    def judge(told: list[dict[str, int]]) -> Outcome:
        right = [{"number": number, "step": at.step} for number in at.numbers]
        return Outcome(str(told), told == right)

    return Trial(lambda: at.mesh.all_gather_object({"number": at.number, "step": at.step}), judge)


def _object(at: At) -> Trial:
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

    return Trial(call, lambda result: Outcome(str(result), result == right))


def _group(at: At) -> Trial:
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

    def judge(result: tuple[Values | None, list[int], bool]) -> Outcome:
        got, numbers, alike = result
        right = got is None or small.is_right(got, at.step, numbers)
        return Outcome("grouped", alike and right)

    return Trial(call, judge)


def _all_say(mesh: pmesh.Mesh, color: int, what: str) -> tuple[bool, tuple[str, ...]]:
    """Whether all ranks of each color that are left say the same, and who is left."""
    said = zlib.crc32(what.encode())
    votes = np.full((2, 2), -(1 << 62), np.int64)
    votes[color] = said, -said
    most, left = _all_reduced(mesh, votes)
    return all(high == -low for high, low in most if high >= 0), left


def _envelopes(at: At) -> Trial:
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

    def judge(result: tuple[Values | None, int, bool]) -> Outcome:
        got, number, due = result
        right = not due if got is None else np.array_equal(got, _piece(at.input(number)))
        return Outcome("told", right)

    return Trial(call, judge)


def _all_reduced(
    mesh: pmesh.Mesh, x: NDArray[np.int64]
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """The largest of each value, and whose values they are of: alike at all that are left (I3)."""
    most = mesh.all_reduce(x, op="max")
    assert mesh.last_op is not None  # noqa: S101 - as of just now
    return most, mesh.last_op.names


def _piece(x: Values) -> Values:
    return x.reshape(-1)[:PIECE_VALUES]


_STRATEGIES = ("tree", "centralized", "hierarchical")
CALLS: Mapping[str, Sequence[Callable[[At], Trial]]] = MappingProxyType(
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


def prepare(kind: str, at: At) -> Trial:
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

    def judge(result: Any) -> Outcome:  # noqa: ANN401 - likewise
        return failed(result) if isinstance(result, Exception) else trial.judge(result)

    return Trial(call, judge)


def failed(why: Exception) -> Outcome:
    """Of a call that is bound to its ranks: right, if all say the same."""
    return Outcome(type(why).__name__, right=True)
