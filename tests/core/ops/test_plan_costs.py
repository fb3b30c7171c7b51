"""The table of docs/explanation/algorithms.md, compared with plans and predictions."""

import itertools
import math
from collections.abc import Callable
from types import CodeType

import pytest

from pmesh.core.ops.cost import EdgeCost, Strategy, predict_ns
from pmesh.core.ops.moving import (
    plan_all_gather,
    plan_all_to_all,
    plan_broadcast,
    plan_gather,
    plan_scatter,
)
from pmesh.core.ops.plan import RankPlan
from pmesh.core.ops.reduce_scatter import plan_reduce, plan_reduce_scatter
from pmesh.core.ops.reducing import (
    plan_centralized,
    plan_chain,
    plan_direct,
    plan_hierarchical,
    plan_ring,
    plan_tree,
)
from pmesh.core.topology.ranks import join_ranks
from tests.docs.pages import DOCS, read, table_rows

PAGE = read(DOCS / "explanation" / "algorithms.md")
TABLE = PAGE.partition("<!-- costs: begin -->")[2].partition("<!-- costs: end -->")[0]
BLOCK = 4 * math.lcm(*range(1, 10))
"""Bytes for each rank, so that whatever number of islands divides the whole."""


def islands_in(size: int) -> tuple[tuple[int, ...], ...]:
    """Three ranks, two, and one each: as far as there are ranks."""
    ends = [min(end, size) for end in (0, 3, 5, *range(6, size + 1))]
    return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(ends) if a < b)


def all_reduce(make: Callable[..., RankPlan]) -> Callable[[int, int], RankPlan]:
    return lambda rank, size: make(rank=rank, size=size, count=size * BLOCK // 4, itemsize=4)


def hierarchical(rank: int, size: int) -> RankPlan:
    count, islands = size * BLOCK // 4, islands_in(size)
    return plan_hierarchical(rank=rank, size=size, count=count, itemsize=4, islands=islands)


def chain(rank: int, size: int) -> RankPlan:
    count, line = size * BLOCK // 4, tuple(range(size))
    return plan_chain(rank=rank, size=size, count=count, itemsize=4, line=line)


def blocks(make: Callable[..., RankPlan], **more: int) -> Callable[[int, int], RankPlan]:
    return lambda rank, size: make(rank=rank, size=size, nbytes=(BLOCK,) * size, **more)


def all_to_all(rank: int, size: int) -> RankPlan:
    return plan_all_to_all(rank=rank, size=size, to=(BLOCK,) * size, from_=(BLOCK,) * size)


def to_root(make: Callable[..., RankPlan]) -> Callable[[int, int], RankPlan]:
    return lambda rank, size: make(rank=rank, size=size, root=size // 2, nbytes=size * BLOCK)


PLANS: dict[tuple[str, str], Callable[[int, int], RankPlan]] = {
    ("all_reduce", "ring"): all_reduce(plan_ring),
    ("all_reduce", "tree"): all_reduce(plan_tree),
    ("all_reduce", "centralized"): all_reduce(plan_centralized),
    ("all_reduce", "hierarchical"): hierarchical,
    ("all_reduce", "chain"): chain,
    ("all_reduce", "direct"): all_reduce(plan_direct),
    ("reduce", "ring"): to_root(plan_reduce),
    ("broadcast", "ring"): to_root(plan_broadcast),
    ("reduce_scatter", "ring"): blocks(plan_reduce_scatter),
    ("all_gather", "ring"): blocks(plan_all_gather),
    ("gather", "straight to the root"): blocks(plan_gather, root=0),
    ("scatter", "straight from the root"): blocks(plan_scatter, root=0),
    ("all_to_all", "straight, one after the other"): all_to_all,
}
ROWS = {(name.strip("`"), by): (steps, sent) for name, by, steps, sent, _ in table_rows(TABLE)}


def evaluate(cell: str, size: int) -> float:
    formula: CodeType = compile(cell.strip("`"), "algorithms.md", "eval")
    islands = islands_in(size)
    names = {"n": size, "B": size * BLOCK, "k": len(islands), "m": max(map(len, islands))}
    return float(eval(formula, {"ceil": math.ceil, "log2": math.log2} | names))  # noqa: S307 - our own page


def test_the_page_tells_the_cost_of_every_plan() -> None:
    assert ROWS.keys() == PLANS.keys()


@pytest.mark.parametrize(
    ("row", "size"),
    [
        (row, size)
        for row in PLANS
        for size in range(2, 10)
        if row[1] != "hierarchical" or len(islands_in(size)) > 1  # one island is a ring
    ],
)
def test_the_steps_and_bytes_of_every_plan_are_those_of_the_page(
    row: tuple[str, str], size: int
) -> None:
    plans = [PLANS[row](rank, size) for rank in range(size)]
    assert max(plan.steps for plan in plans) == evaluate(ROWS[row][0], size)
    assert max(plan.bytes_sent for plan in plans) == evaluate(ROWS[row][1], size)


@pytest.mark.parametrize("row", PLANS)
def test_one_rank_alone_sends_nothing_and_waits_for_nobody(row: tuple[str, str]) -> None:
    plan = PLANS[row](0, 1)
    assert (plan.steps, plan.bytes_sent) == (0, 0)


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("strategy", ["ring", "tree", "centralized", "direct"])
def test_what_auto_expects_is_what_the_plans_do(strategy: Strategy, size: int) -> None:
    plans = [PLANS["all_reduce", strategy](rank, size) for rank in range(size)]
    alphas = join_ranks(((EdgeCost(alpha_ns=1, beta_ps=0),) * size,) * size)
    betas = join_ranks(((EdgeCost(alpha_ns=0, beta_ps=1000),) * size,) * size)
    assert predict_ns(strategy, alphas, size * BLOCK) == max(plan.steps for plan in plans)
    phases = 2 if strategy == "centralized" else 1  # the root receives it all, then sends it all
    sent = phases * max(plan.bytes_sent for plan in plans)
    assert predict_ns(strategy, betas, size * BLOCK) == sent


@pytest.mark.parametrize("size", range(2, 10))
def test_what_auto_expects_of_a_chain_is_the_whole_tensor_there_and_back(size: int) -> None:
    edges = join_ranks(((EdgeCost(alpha_ns=1, beta_ps=1000),) * size,) * size)
    one_record = 2 * (size - 1) * (1 + 600)
    assert predict_ns("chain", edges, 600) == one_record == chain(size - 1, size).steps * 601
    large = 2**40
    assert predict_ns("chain", edges, large) == pytest.approx(2 * large, rel=1e-4)


def test_what_auto_expects_of_islands_is_the_sum_of_their_parts() -> None:
    """Three islands of two: 2 steps and 2 B inside, 4 steps and 4/3 B between their first ranks."""
    fast, slow = EdgeCost(alpha_ns=1, beta_ps=1000), EdgeCost(alpha_ns=1000, beta_ps=10_000)
    costs = tuple(tuple(fast if a // 2 == b // 2 else slow for b in range(6)) for a in range(6))
    edges = join_ranks(costs)
    expected = (2 + 2 * 600) + (4 * 1000 + 800 * 10)
    assert predict_ns("hierarchical", edges, 600) == expected


@pytest.mark.parametrize("size", range(2, 10))
def test_between_islands_no_more_is_sent_than_in_a_ring_of_them(size: int) -> None:
    islands = islands_in(size)
    for island in islands:
        for rank in island:
            sends = hierarchical(rank, size).sends
            sent = sum(s.nbytes for peer in sends if peer not in island for s in sends[peer])
            k = len(islands)
            assert sent == (2 * (k - 1) * size * BLOCK // k if rank == island[0] and k > 1 else 0)
