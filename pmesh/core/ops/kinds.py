"""What each kind of op is: one table, which trainers, agents and views read alike.

A new collective is a row of `KINDS`, with a plan from `moving` or `reducing` if none here fits, and
a method in `pmesh.client.calls`. Where each rank only gives a row to a table that all get, the
kinds `exchange` (int64) and `collect` (bytes) serve without a new row. An input must not hold
ranks: an op may run again after a loss (O4), with other ranks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import msgspec

from pmesh.core.ops.cost import Edges, choose, is_far, segment_bytes_of
from pmesh.core.ops.moving import (
    plan_all_gather,
    plan_all_to_all,
    plan_broadcast,
    plan_gather,
    plan_scatter,
)
from pmesh.core.ops.plan import SMALL_BYTES, RankPlan
from pmesh.core.ops.reduce_scatter import plan_reduce, plan_reduce_scatter
from pmesh.core.ops.reducing import (
    plan_along_ring,
    plan_centralized,
    plan_chain,
    plan_direct,
    plan_exchange,
    plan_hierarchical,
    plan_tree,
)
from pmesh.core.ops.reductions import WIRE_DTYPES
from pmesh.core.wire.trainer import MAX_ROW_VALUES, SYNC_VALUES, StartOp, WireDtype


class Extent(NamedTuple):
    """How many values one rank gives, and how many it gets."""

    gives: int
    gets: int


class Row(NamedTuple):
    """The row that each rank gives to a table, of `least` to `most` values."""

    dtype: WireDtype
    least: int = 0
    most: int = 2**63

    def fits(self, request: StartOp) -> bool:
        """Return whether the request gives such a row."""
        return request.wire_dtype == self.dtype and self.least <= request.count <= self.most


Amount: TypeAlias = Callable[[StartOp, int, int], int]
"""Returns how many values a request means for a rank, in a world of some size."""


def _count(request: StartOp, _rank: int, _size: int) -> int:
    return request.count


def _one_for_each(request: StartOp, _rank: int, size: int) -> int:
    return request.count * size


def _part(request: StartOp, rank: int, _size: int) -> int:
    return request.parts[rank]


def _all_parts(request: StartOp, _rank: int, _size: int) -> int:
    return sum(request.parts)


def _all_parts_in(request: StartOp, _rank: int, size: int) -> int:
    if len(request.parts_in) != size:
        raise ValueError(f"{len(request.parts_in)} parts from {size} ranks")
    return sum(request.parts_in)


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """All on which a rank's plan of an op depends."""

    request: StartOp
    rank: int
    size: int
    root: int = 0
    """The root's current rank."""
    reach: int | None = None
    """For a broadcast; see `plan_broadcast`."""
    edges: Edges | None = None
    """The costs of the edges, if the ranks have agreed on them."""
    in_place: bool = False
    """For an all_gather; see `plan_all_gather`."""

    @property
    def at(self) -> dict[str, int]:
        """The arguments `rank` and `size` of a plan."""
        return {"rank": self.rank, "size": self.size}

    def summing(self, count: int) -> dict[str, int]:
        """Return the arguments of a plan that reduces `count` values."""
        return {"rank": self.rank, "size": self.size, "count": count, "itemsize": self.itemsize}

    @property
    def rooted(self) -> dict[str, int]:
        """The arguments `rank`, `size` and `root` of a plan."""
        return {"rank": self.rank, "size": self.size, "root": self.root}

    @property
    def itemsize(self) -> int:
        """The bytes of one value."""
        return WIRE_DTYPES[self.request.wire_dtype].itemsize

    @property
    def nbytes(self) -> int:
        """The bytes of this rank's values."""
        return self.request.count * self.itemsize

    @property
    def parts(self) -> tuple[int, ...]:
        """The bytes of the part of each rank."""
        return tuple(part * self.itemsize for part in self.request.parts)

    @property
    def parts_in(self) -> tuple[int, ...]:
        """The bytes of the part that an all_to_all gets from each rank."""
        return tuple(part * self.itemsize for part in self.request.parts_in)


def _plan_sum_of_tables(here: Setting) -> RankPlan:
    """Plan a sum of tables, each of which has the row of its own rank, and zeros."""
    return _plan_integers(here, here.request.count * here.size)


def _plan_integers(here: Setting, count: int) -> RankPlan:
    """Plan a sum of integers, in which the order does not matter: over far edges, in one hop."""
    nbytes = count * here.itemsize
    if here.edges is not None and is_far(here.edges) and nbytes <= SMALL_BYTES:
        return plan_exchange(**here.at, nbytes=nbytes)
    return _plan_sum(here, count)


def _plan_sum(here: Setting, count: int | None = None) -> RankPlan:
    """Plan a sum, of the request's values, by the strategy of the call, or else by the cheapest."""
    call, edges = here.request.call, here.edges
    count = here.request.count if count is None else count
    match call.strategy or ("ring" if edges is None else choose(edges, count * here.itemsize)):
        case "tree":
            return plan_tree(**here.summing(count))
        case "centralized":
            return plan_centralized(**here.summing(count))
        case "hierarchical":
            alone = tuple((rank,) for rank in range(here.size))
            islands = (edges and edges.islands) or alone
            return plan_hierarchical(**here.summing(count), islands=islands)
        case "chain":
            line = edges.line if edges else tuple(range(here.size))
            return plan_chain(**here.summing(count), line=line)
        case "direct":
            return plan_direct(**here.summing(count))
        case _:
            return plan_along_ring(
                rank=here.rank,
                size=here.size,
                count=count,
                dtype=here.request.wire_dtype,
                reduction=call.reduction or "sum",
                segment_bytes=None if edges is None else segment_bytes_of(edges),
            )


def _at_root(amount: Amount) -> Amount:
    return lambda request, rank, size: (
        amount(request, rank, size) if rank == request.call.root else 0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpKind:
    """What holds for all ops of one kind."""

    plan: Callable[[Setting], RankPlan]
    gives: Amount | None = None
    """None: its `count`."""
    gets: Amount | None = None
    rooted: bool = False
    """The call names a root, which is a rank of its world."""
    reduces: bool = False
    """Values of several ranks become one."""
    bound: bool = False
    """O4: what a rank gets depends on which ranks take part, and no other rank has it. So the op
    can't run again among others, and its result can't be fetched. The request has `parts`."""
    barrier: bool = True
    """No rank ends the op before all have started it."""
    row: Row | None = None
    """If the result is a table: the row that each rank gives. After a loss such an op runs again
    among the ranks that are left."""


KINDS: Mapping[str, OpKind] = MappingProxyType(
    {
        "all_reduce": OpKind(plan=_plan_sum, reduces=True),
        "barrier": OpKind(plan=lambda here: _plan_integers(here, 0), reduces=True),
        "broadcast": OpKind(
            plan=lambda here: plan_broadcast(**here.rooted, nbytes=here.nbytes, reach=here.reach),
            gives=_at_root(_count),
            rooted=True,
            barrier=False,
        ),
        "reduce": OpKind(
            plan=lambda here: plan_reduce(**here.rooted, nbytes=here.nbytes),
            gets=_at_root(_count),
            rooted=True,
            reduces=True,
        ),
        "all_gather": OpKind(
            plan=lambda here: plan_all_gather(**here.at, nbytes=here.parts, in_place=here.in_place),
            gives=_part,
            gets=_all_parts,
            bound=True,
        ),
        "gather": OpKind(
            plan=lambda here: plan_gather(**here.rooted, nbytes=here.parts),
            gives=_part,
            gets=_at_root(_all_parts),
            rooted=True,
            bound=True,
            barrier=False,
        ),
        "scatter": OpKind(
            plan=lambda here: plan_scatter(**here.rooted, nbytes=here.parts),
            gives=_at_root(_all_parts),
            gets=_part,
            rooted=True,
            bound=True,
            barrier=False,
        ),
        "reduce_scatter": OpKind(
            plan=lambda here: plan_reduce_scatter(**here.at, nbytes=here.parts),
            gives=_all_parts,
            gets=_part,
            reduces=True,
            bound=True,
        ),
        "all_to_all": OpKind(
            plan=lambda here: plan_all_to_all(**here.at, to=here.parts, from_=here.parts_in),
            gives=_all_parts,
            gets=_all_parts_in,
            bound=True,
            barrier=False,
        ),
        # Newcomers enter a job in a `sync`.
        "sync": OpKind(
            plan=_plan_sum_of_tables,
            gets=_one_for_each,
            reduces=True,
            row=Row("int64", SYNC_VALUES, SYNC_VALUES),
        ),
        "exchange": OpKind(
            plan=_plan_sum_of_tables,
            gets=_one_for_each,
            reduces=True,
            row=Row("int64", most=MAX_ROW_VALUES),
        ),
        "collect": OpKind(
            plan=lambda here: plan_all_gather(
                rank=here.rank, size=here.size, nbytes=(here.nbytes,) * here.size
            ),
            gets=_one_for_each,
            row=Row("uint8"),
        ),
    }
)

BOUND_KINDS = frozenset(name for name, kind in KINDS.items() if kind.bound)


def extent_of(request: StartOp, *, rank: int, size: int) -> Extent:
    """Return what one rank of `size` gives and gets; a rank that gives nothing needs no arena.

    Raises:
        ValueError: the request does not have one part for each rank.
    """
    kind = KINDS[request.call.kind]
    if kind.bound and len(request.parts) != size:
        raise ValueError(f"{len(request.parts)} parts for {size} ranks")
    gives = request.count if kind.gives is None else kind.gives(request, rank, size)
    return Extent(gives, request.count if kind.gets is None else kind.gets(request, rank, size))


def nbytes_of(request: StartOp) -> int:
    """Return the bytes of the values that a rank names in its call: its own, or all parts."""
    parts, itemsize = request.parts, WIRE_DTYPES[request.wire_dtype].itemsize
    return (sum(parts) if parts else request.count) * itemsize


def ring_codec_name(compression: str) -> str:
    """Return the codec that a ring uses for a `Call.compression`; empty for none.

    A name with parentheses, as `topk(0.01)`, is that of a scheme which the trainers compute, around
    ops on the compressed values. The call names it so that all ranks use the same one.
    """
    return "" if "(" in compression else compression
