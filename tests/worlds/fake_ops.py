"""What the ops of a fake agent come to: numpy for the ring."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from pmesh.compression.blocks import Float32s
from pmesh.compression.codecs import codec_of
from pmesh.core.ops.kinds import KINDS, ring_codec_name
from pmesh.core.wire.link import Call
from pmesh.core.wire.local import StartOp
from tests.worlds.coded_rings import Coded, reduce_coded

Numbers: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[Any]]"
UFUNCS: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "mean": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
}


class Given(NamedTuple):
    """What a rank has started an op with."""

    request: StartOp
    values: Numbers
    residual: "Numbers | None" = None
    """Its own copy."""
    residual_out: "Numbers | None" = None
    """The arena itself."""


def coded_result_of(given: Sequence[Given], rank: int) -> tuple[Numbers, int]:
    """What one rank gets of an all-reduce that is compressed at every hop, and its clipped values.

    Its new residual is written; those of the others when they get theirs.
    """
    request = given[rank].request
    codec = codec_of(ring_codec_name(request.call.compression))
    ranks = [
        Coded(
            as_float32(one.values),
            None if one.residual is None else as_float32(one.residual),
            None if one.residual_out is None or i != rank else as_float32(one.residual_out),
        )
        for i, one in enumerate(given)
    ]
    reduction = request.call.reduction
    result, clipped = reduce_coded(codec, ranks, reduction=reduction, op=request.op)
    return result, clipped[rank]


def as_float32(values: Numbers) -> Float32s:
    return cast("Float32s", values)


def result_of(given: Sequence[Given], rank: int, root: int | None) -> Numbers:
    """What one rank gets of an op.

    Args:
        given: by rank.
        rank: whose result.
        root: which rank it is now, if the op has one.
    """
    request = given[rank].request
    call, values = request.call, [one.values for one in given]
    result: Numbers = np.empty(0, request.wire_dtype)
    match call.kind:
        case "barrier":
            pass
        case "all_reduce":
            result = _reduce(call, values)
        case "reduce" if rank == root:
            result = _reduce(call, values)
        case "reduce_scatter":
            result = _cut(_reduce(call, values), request.parts)[rank]
        case "broadcast":
            result = values[root or 0]
        case "scatter":
            result = _cut(values[root or 0], request.parts)[rank]
        case "all_to_all":
            got = [_cut(one.values, one.request.parts)[rank] for one in given]
            assert [piece.size for piece in got] == [*request.parts_in]
            result = np.concatenate(got)
        case "gather" if rank == root:
            result = np.concatenate(values)
        case "reduce" | "gather":
            pass
        case kind:
            assert kind == "all_gather" or KINDS[kind].row
            result = np.concatenate(values)
    return result


def _cut(values: Numbers, parts: Sequence[int]) -> list[Numbers]:
    assert sum(parts) == values.size
    return np.split(values, np.cumsum(parts)[:-1].tolist())


def _reduce(call: Call, inputs: list[Numbers]) -> Numbers:
    with np.errstate(all="ignore"):
        total: Numbers = functools.reduce(UFUNCS[call.reduction], inputs)
    return total / len(inputs) if call.reduction == "mean" else total
