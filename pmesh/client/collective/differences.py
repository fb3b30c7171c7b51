"""Find which arrays differ between the trees of ranks, in one all-reduce or in a `sync`."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np

from pmesh.client.collective.bucketed import Arrays
from pmesh.client.collective.gather_ops import Head, build
from pmesh.client.session.rows import exchange_rows
from pmesh.client.session.session import TrainerSession
from pmesh.client.trees.arrays import Leaf, Tree, digest, flatten
from pmesh.client.trees.raw import library_of
from pmesh.core.ops.reductions import Values
from pmesh.core.wire.calls import Call
from pmesh.errors import AgentStopped, HistorySuperseded, OpMismatch, PmeshError

MOST_SHOWN = 3
_RANK = re.compile(r"\brank \d+ \(")
_TREE = re.compile(r"\b(?:tree|average_gradients) [0-9a-f]{8}(?: by [0-9a-f]{8})?[,)]")
_AVERAGE = re.compile(r"\baverage_gradients ([0-9a-f]{8})((?: by [0-9a-f]{8})?)[,)]")
_UNCALLED = "not called yet"

Leaves: TypeAlias = Mapping[str, str]
"""The shape and dtype of the array at each path."""
_Heads: TypeAlias = dict[str, Head | None]
"""The head of the array at each path; None for a None."""
_decoder = msgspec.json.Decoder(_Heads)


def name_differences(
    session: TrainerSession, error: OpMismatch, arrays: Arrays, *, timeout_s: float
) -> OpMismatch:
    """Return an error that names the differences, if all ranks called with a tree.

    For that the ranks exchange their paths, shapes and dtypes. Every rank gets the same `error` for
    the same op, so all of them do so, or none (I5). If it says that a rank had not called yet, they
    exchange nothing, as that rank may call something else.

    Raises:
        AgentStopped: the agent has stopped meanwhile.
        HistorySuperseded: the job has continued without this rank meanwhile.
    """
    text = str(error)
    size = len(session.world.trainers)
    if not len(_RANK.findall(text)) == len(_TREE.findall(text)) == size:
        return error
    try:
        trees = _exchange_trees(session, arrays, timeout_s)
    except (AgentStopped, HistorySuperseded):
        raise  # this rank is cut off from its job from now on
    except PmeshError:
        return error  # a rank was lost meanwhile; the first error is good enough
    labels = [f"on rank {rank} ({name})" for rank, name in enumerate(session.ranks.names)]
    arrays_of_any = {path for tree in trees for path, head in tree.items() if head}
    shown = [
        {path: _shown(head) for path, head in tree.items() if path in arrays_of_any}
        for tree in trees
    ]
    said = _differences(shown, labels)
    if not said:
        return error
    if "average_gradients" in text and any("None" in tree.values() for tree in shown):
        said += "; average_gradients(..., missing='zeros') counts None as zeros"
    return OpMismatch(f"{text.partition(' differs: ')[0]} differs: {said}")


def only_orders_differ(error: OpMismatch, arrays: Arrays) -> bool:
    """Return True if all ranks that have called average the same gradients, in different buckets.

    This happens if some ranks have arrays of MLX and others not, or fill dicts in another order.
    What the ranks do then must depend on the text alone, which is the same on all of them.
    """
    text = str(error)
    calls = _AVERAGE.findall(text)
    return (
        len(calls) + text.count(_UNCALLED) == len(_RANK.findall(text))
        and {tree for tree, _ in calls} == {arrays.digest()}
        and len({order for _, order in calls}) > 1
    )


def fill_missing(session: TrainerSession, arrays: Arrays, *, timeout_s: float) -> Arrays:
    """Return the same arrays, with zeros where this rank has None and another rank an array.

    This takes one small op, and another one if the ranks' trees differ. If they differed only by
    None, all ranks then have arrays at the same paths.
    """
    others: dict[str, Head] = {}
    for heads in _exchange_trees(session, arrays, timeout_s):
        for path, head in heads.items():
            if head is not None:
                others.setdefault(path, head)
    whole = flatten(arrays.tree.source, with_none=True)
    own, like = iter(arrays.leaves), next(iter(arrays.tree.leaves), None)
    found: list[Leaf | None] = []
    for name, x in zip(_names(whole.paths), whole.leaves, strict=True):
        if x is None:
            found.append(_zeros(others[name], like) if name in others else None)
        else:
            found.append(next(own))

    def rebuild(results: Sequence[object]) -> object:
        given = iter(results)
        return whole.rebuild([None if leaf is None else next(given) for leaf in found])

    paths = (path for path, leaf in zip(whole.paths, found, strict=True) if leaf is not None)
    leaves = tuple(leaf for leaf in found if leaf is not None)
    values = tuple(leaf.values for leaf in leaves)
    tree = Tree(paths=tuple(paths), leaves=values, rebuild=rebuild, source=rebuild(values))
    return Arrays(tree, leaves)


def _zeros(head: Head, like: object) -> Leaf:
    """Return zeros of this rank's library; if it has no arrays, of the other rank's library."""
    own = head._replace(library=library_of(like) or head.library)

    def rebuild(fresh: Values) -> object:
        return build(own, fresh.reshape(-1).view(np.uint8), like)

    values = np.zeros(head.shape, "uint16" if head.dtype == "bfloat16" else head.dtype)
    copies = own.library == "mlx"
    return Leaf(dtype=head.dtype, values=values, rebuild=rebuild, rebuild_copies=copies)


def state_differences(own: object, received: object, *, source: str) -> str:
    """Describe what a rank loses when the state from a `sync` replaces its own; empty if nothing.

    It loses arrays that have another shape or dtype, and those that only its own state has. Arrays
    that only the received state has do not count, as a newcomer's optimizer may have none yet.

    Args:
        own: the state that the rank has passed.
        received: the state that `sync` returns instead.
        source: the rank that had it, as in "rank 0 (mac-1)".
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


def _exchange_trees(session: TrainerSession, arrays: Arrays, timeout_s: float) -> list[_Heads]:
    """Return the tree of each rank; if a rank is lost meanwhile, those of the others."""
    own = _heads_of(arrays)
    data = msgspec.json.encode(own)
    row = [int(digest([data.decode()]), 16), len(data)]
    call = Call("exchange", "int64", (len(row),), tree="trees")
    rows, _ = exchange_rows(session, row, call, timeout_s=timeout_s)
    if all(each == row for each in rows):
        return [own] * len(rows)
    size = max(nbytes for _, nbytes in rows)
    padded = np.frombuffer(data.ljust(size), np.uint8)
    session.input_values("uint8", size, room_bytes=0)[:] = padded
    call = Call("collect", "uint8", (size,), tree="trees")
    done = session.run_op(call, "uint8", size, timeout_s=timeout_s)
    by_place = [_decoder.decode(data.tobytes()) for data in done.values.reshape(-1, size)]
    return [by_place[place] for place in session.places]


def _heads_of(arrays: Arrays) -> _Heads:
    whole, leaves = flatten(arrays.tree.source, with_none=True), iter(arrays.leaves)
    return {
        name: None if x is None else _head_of(x, next(leaves))
        for name, x in zip(_names(whole.paths), whole.leaves, strict=True)
    }


def _names(paths: Sequence[str]) -> Iterator[str]:
    """Yield a name for each path: two paths may be equal, and some are no Unicode.

    >>> list(_names(["a.b", "a.b"]))
    ['a.b', 'a.b (2)']
    """
    counts = Counter[str]()
    for path in paths:
        name = path.encode(errors="backslashreplace").decode()
        counts[name] += 1
        yield name if counts[name] == 1 else f"{name} ({counts[name]})"


def _head_of(x: object, leaf: Leaf) -> Head:
    return Head(cast("str", library_of(x)), leaf.dtype, leaf.values.shape)


def _shown(head: Head | None) -> str:
    return "None" if head is None else f"{head.shape} {head.dtype}"


def _differences(trees: Sequence[Leaves], labels: Sequence[str]) -> str:
    """Describe the paths in which the trees differ, at most three, and count the others.

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
