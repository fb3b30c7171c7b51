"""What each rank gives to an op and gets of it."""

from collections.abc import Callable

import msgspec
import pytest
from msgspec.structs import replace

from pmesh.core.ops.cost import EdgeCost
from pmesh.core.ops.kinds import KINDS, Extent, Row, Setting, extent_of
from pmesh.core.ops.plan import RankPlan
from pmesh.core.ops.reducing import (
    plan_centralized,
    plan_chain,
    plan_direct,
    plan_hierarchical,
    plan_ring,
    plan_tree,
)
from pmesh.core.topology.ranks import join_ranks
from pmesh.core.wire.calls import Call
from pmesh.core.wire.trainer import StartOp
from pmesh.ids import OpNumber


def start(kind: str, root: int = -1, parts: tuple[int, ...] = (), **more: object) -> StartOp:
    call = Call(kind, "float32", (7,), root=root)
    return StartOp(OpNumber(0), call, "float32", 7, 0, 1.0, parts, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("request_", "at_0", "at_1"),
    [
        (start("all_reduce"), (7, 7), (7, 7)),
        (start("barrier"), (7, 7), (7, 7)),
        (start("exchange"), (7, 21), (7, 21)),
        (start("sync"), (7, 21), (7, 21)),
        (start("collect"), (7, 21), (7, 21)),
        (start("broadcast", 1), (0, 7), (7, 7)),
        (start("reduce", 1), (7, 0), (7, 7)),
        (start("all_gather", parts=(1, 2, 3)), (1, 6), (2, 6)),
        (start("gather", 1, (1, 2, 3)), (1, 0), (2, 6)),
        (start("scatter", 1, (1, 2, 3)), (0, 1), (6, 2)),
        (start("reduce_scatter", parts=(1, 2, 3)), (6, 1), (6, 2)),
        (start("all_to_all", parts=(1, 2, 3), parts_in=(4, 0, 0)), (6, 4), (6, 4)),
    ],
)
def test_gives_and_gets(request_: StartOp, at_0: Extent, at_1: Extent) -> None:
    assert extent_of(request_, rank=0, size=3) == at_0
    assert extent_of(request_, rank=1, size=3) == at_1


def test_parts_that_are_not_one_for_each_rank_are_refused() -> None:
    with pytest.raises(ValueError, match="2 parts for 3 ranks"):
        extent_of(start("gather", 0, (1, 2)), rank=0, size=3)
    with pytest.raises(ValueError, match="1 parts from 3 ranks"):
        extent_of(start("all_to_all", parts=(1, 2, 3), parts_in=(6,)), rank=0, size=3)


@pytest.mark.parametrize(
    ("kind", "steps"), [("sync", 1), ("exchange", 1), ("barrier", 1), ("all_reduce", 2)]
)
@pytest.mark.parametrize("size", [3, 8])
def test_on_a_long_way_small_ops_wait_once_or_twice_once_the_ranks_know_what_edges_cost(
    kind: str, steps: int, size: int
) -> None:
    wifi = EdgeCost(alpha_ns=4_000_000, beta_ps=80_000)
    here = Setting(request=start(kind), rank=1, size=size)
    assert KINDS[kind].plan(here).steps == 2 * (size - 1)
    here = replace(here, edges=join_ranks(((wifi,) * size,) * size))
    assert KINDS[kind].plan(here).steps == steps


def test_a_large_table_is_not_sent_to_every_rank() -> None:
    wifi = EdgeCost(alpha_ns=4_000_000, beta_ps=80_000)
    request = msgspec.structs.replace(start("exchange"), wire_dtype="int64", count=2000)
    here = Setting(request=request, rank=1, size=3, edges=join_ranks(((wifi,) * 3,) * 3))
    assert KINDS["exchange"].plan(here).bytes_sent == 2 * 2 * 8 * 2000


def test_on_a_long_way_a_ring_has_shorter_records() -> None:
    """So that a rank passes on the first of a chunk while the rest of it is still on its way."""
    call = Call("all_reduce", "float32", (3 * 80_000,), strategy="ring")
    request = msgspec.structs.replace(start("all_reduce"), call=call, count=3 * 80_000)
    for alpha_ns, records in ((100_000, 4 * 1), (5_000_000, 4 * 1), (75_000_000, 4 * 5)):
        edge = EdgeCost(alpha_ns=alpha_ns, beta_ps=40_000)
        edges = join_ranks(((edge,) * 3,) * 3)
        plan = KINDS["all_reduce"].plan(Setting(request=request, rank=1, size=3, edges=edges))
        assert plan.steps == 4
        assert [len(sends) for sends in plan.sends.values()] == [records]


@pytest.mark.parametrize(
    ("strategy", "plan"),
    [
        ("ring", plan_ring),
        ("tree", plan_tree),
        ("centralized", plan_centralized),
        ("chain", lambda **at: plan_chain(**at, line=(0, 1, 2))),
        ("direct", plan_direct),
        ("hierarchical", lambda **at: plan_hierarchical(**at, islands=((0,), (1,), (2,)))),
    ],
)
def test_a_strategy_that_the_call_names_makes_the_plan(
    strategy: str, plan: Callable[..., RankPlan]
) -> None:
    request = start("all_reduce")
    call = replace(request.call, strategy=strategy)
    here = Setting(request=replace(request, call=call), rank=1, size=3)
    assert KINDS["all_reduce"].plan(here) == plan(rank=1, size=3, count=7, itemsize=4)


def test_a_row_of_a_table_has_the_dtype_and_the_length_that_were_agreed() -> None:
    row = Row("float32", least=7, most=8)
    assert row.fits(start("sync"))
    assert not row.fits(replace(start("sync"), count=9))
    assert not row.fits(replace(start("sync"), count=6))
    assert not Row("int64").fits(start("sync"))
