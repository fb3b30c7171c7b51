"""reduce_scatter: an array is reduced, and each rank gets a part of its first dimension."""

from dataclasses import replace
from typing import cast

import numpy as np

from pmesh.client.calls import ALONE, LastOp
from pmesh.client.leaves import Leaf
from pmesh.client.op_session import OpSession
from pmesh.client.orders import Order
from pmesh.core.messages import Call
from pmesh.core.reductions import WIRE_DTYPES, Values
from pmesh.core.schedule import chunk_bounds
from pmesh.core.session import World


def run_reduce_scatter(
    session: OpSession, order: Order, leaf: Leaf, *, reduction: str, timeout_s: float
) -> tuple[Values, LastOp]:
    """This rank's part, as `numpy.array_split` cuts the first dimension."""
    world = session.world
    places = order.places(world)
    rows = leaf.values.shape[0]
    bounds = chunk_bounds(rows, len(places))
    width = leaf.values.size // rows if rows else 0
    ranks = sorted(range(len(places)), key=places.__getitem__)  # of each place
    region = session.input_values(leaf.wire, leaf.values.size, room_bytes=0)
    begin = 0
    for rank in ranks:
        part = _part_of(leaf, bounds[rank], bounds[rank + 1])
        part.fill(region[begin : begin + part.values.size])
        begin += part.values.size
    call = Call("reduce_scatter", leaf.dtype, leaf.values.shape, reduction)
    done = session.run_op(
        call,
        leaf.wire,
        leaf.values.size,
        timeout_s=timeout_s,
        parts=tuple((bounds[rank + 1] - bounds[rank]) * width for rank in ranks),
    )
    seen = order.seen(done.world)
    own = _part_of(leaf, bounds[seen.rank], bounds[seen.rank + 1])
    return cast("Values", own.like(done.values)), LastOp.among(done.op, seen, region.nbytes)


def reduce_scatter_alone(leaf: Leaf, world: World) -> tuple[Values, LastOp]:
    """The part of a rank that is alone: the whole."""
    region = np.empty(leaf.values.size, WIRE_DTYPES[leaf.wire])
    leaf.fill(region)
    return cast("Values", leaf.like(region)), LastOp.among(ALONE, world, region.nbytes)


def _part_of(leaf: Leaf, begin: int, end: int) -> Leaf:
    return replace(leaf, values=leaf.values[begin:end])
