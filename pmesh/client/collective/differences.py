"""Which arrays differ between the trees of ranks, in one all-reduce or in a `sync`, by path."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np

from pmesh.client.collective.bucketed import Arrays
from pmesh.client.collective.gather_ops import Head, cut, exchange, move
from pmesh.client.link.session import TrainerSession
from pmesh.client.trees.arrays import flatten
from pmesh.errors import AgentStopped, HistorySuperseded, OpMismatch, PmeshError

MOST_SHOWN = 3
_RANK = re.compile(r"\brank \d+ \(")
_TREE = re.compile(r"\b(?:tree|average_gradients) [0-9a-f]{8}[,)]")

Leaves: TypeAlias = Mapping[str, str]
"""By path the shape and dtype."""


def name_differences(
    session: TrainerSession, error: OpMismatch, arrays: Arrays, *, timeout_s: float
) -> OpMismatch:
    """Exchange the trees' paths, shapes and dtypes, if all ranks called with a tree.

    Every rank gets the same `error` for the same op, so all of them come here, or none (I5). Where
    it says that a rank had not called yet, that rank may call something else: nothing is exchanged.

    Raises:
        AgentStopped: the agent has gone meanwhile.
        HistorySuperseded: the job has gone on without this rank meanwhile.
    """
    text = str(error)
    size = len(session.world.trainers)
    if not len(_RANK.findall(text)) == len(_TREE.findall(text)) == size:
        return error
    try:
        trees = _gather(session, arrays, timeout_s)
    except (AgentStopped, HistorySuperseded):
        raise  # this rank is apart from its job from now on
    except PmeshError:
        return error  # a rank was lost meanwhile; what is known says enough
    labels = [f"on rank {rank} ({name})" for rank, name in enumerate(session.ranks.names)]
    said = _differences(trees, labels)
    return OpMismatch(f"{text.partition(' differs: ')[0]} differs: {said}" if said else text)


def state_differences(own: object, received: object, *, source: str) -> str:
    """What a rank loses when the state from a `sync` takes the place of its own; empty: nothing.

    That are arrays of another shape or dtype, and those that only its own state has. Arrays that
    only the received state has are no reason: a newcomer's optimizer has not made its own yet.

    Args:
        own: the state that the rank has passed.
        received: what `sync` returns instead.
        source: whose state that was, as in "rank 0 (mac-1)".
    """
    here, there = _arrays_of(own), _arrays_of(received)
    if all(there.get(path) == leaf for path, leaf in here.items()):
        return ""
    return _differences([here, there], ["here", f"on {source}"])


def _arrays_of(state: object) -> Leaves:
    tree = flatten(state)
    arrays = ((path, cast("Any", x)) for path, x in zip(tree.paths, tree.leaves, strict=True))
    return {
        path: f"{tuple(x.shape)} {str(x.dtype).rpartition('.')[2]}"
        for path, x in arrays
        if hasattr(x, "dtype")
    }


def _gather(session: TrainerSession, arrays: Arrays, timeout_s: float) -> list[Leaves]:
    tree = {
        path: f"{leaf.values.shape} {leaf.dtype}"
        for path, leaf in zip(arrays.tree.paths, arrays.leaves, strict=True)
    }
    data = np.frombuffer(msgspec.msgpack.encode(tree), np.uint8)
    head = Head("numpy", "uint8", (data.size,))
    table = exchange(session, head, what="trees", timeout_s=timeout_s)
    sizes = [each.shape[0] for each in table.heads if each is not None]
    moved = move(session, table, "all_gather", [data], parts=sizes, timeout_s=timeout_s)
    pieces = cut(moved.data, sizes)
    return [cast("Leaves", msgspec.msgpack.decode(piece.tobytes())) for piece in pieces]


def _differences(trees: Sequence[Leaves], labels: Sequence[str]) -> str:
    """The paths that the trees differ in, at most three, and how many more there are.

    >>> _differences([{"w": "(2,) float32"}, {"w": "(3,) float32"}], ["here", "on rank 1 (b)"])
    'w: (2,) float32 here, (3,) float32 on rank 1 (b)'
    >>> _differences([{"w": "x"}, {"w": "x", "extra": "y"}], ["here", "on rank 1 (b)"])
    'extra: only on rank 1 (b)'
    """
    found = list(_each_difference(trees, labels))
    more = [f"and {len(found) - MOST_SHOWN} more"] if len(found) > MOST_SHOWN else []
    return "; ".join([*found[:MOST_SHOWN], *more])


def _each_difference(trees: Sequence[Leaves], labels: Sequence[str]) -> Iterator[str]:
    for path in dict.fromkeys(path for tree in trees for path in tree):
        ranks: dict[str | None, list[str]] = {}
        for tree, label in zip(trees, labels, strict=True):
            ranks.setdefault(tree.get(path), []).append(label)
        if len(ranks) == 1:
            continue
        absent = ranks.pop(None, [])
        if absent and len(ranks) == 1:
            here = next(iter(ranks.values()))
            few = f"only {_few(here)}" if len(here) <= len(absent) else f"not {_few(absent)}"
            yield f"{path}: {few}"
        else:
            yield f"{path}: " + ", ".join(f"{leaf} {_few(on)}" for leaf, on in ranks.items())


def _few(labels: Sequence[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{labels[0]} and {len(labels) - 1} more"
