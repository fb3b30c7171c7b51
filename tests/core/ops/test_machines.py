"""All-reduce with several ranks on a machine: folded there, planned among the machines."""

import itertools
from collections.abc import Sequence
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.ops.cost import EdgeCost
from pmesh.core.ops.kinds import KINDS, Setting
from pmesh.core.ops.machines import for_ranks, machines_of, place_of, plan_block, plan_fold
from pmesh.core.ops.moving import plan_all_gather
from pmesh.core.ops.plan import RankPlan
from pmesh.core.ops.reductions import REDUCTIONS, WIRE_DTYPES, Values, check_reduction
from pmesh.core.topology.ranks import edges_among, join_ranks
from pmesh.core.views.rosters import in_ring_order
from pmesh.core.wire.calls import Call
from pmesh.core.wire.trainer import StartOp, WireDtype
from pmesh.ids import Member, OpNumber
from pmesh.net.sessions.combining import InNumpy
from tests.worlds.builders import ANNA, BERT, CARA, make_trainer
from tests.worlds.plans import Bytes, PlanWorld, TurnOrder

STRATEGIES = ("", "ring", "tree", "centralized", "direct", "chain", "hierarchical")
PLACEMENTS = st.lists(st.integers(0, 3), min_size=3, max_size=7).filter(machines_of)


def allowed(dtype: str, reduction: str) -> bool:
    try:
        check_reduction(reduction, dtype)
    except ValueError:
        return False
    return True


PAIRS = [pair for pair in itertools.product(WIRE_DTYPES, REDUCTIONS) if allowed(*pair)]


def folded(sources: Sequence[Values], dtype: str, reduction: str) -> Values:
    """What the first rank of a machine takes to the network."""
    if len(sources) == 1:
        return sources[0]
    results = [np.zeros_like(source).view(np.uint8) for source in sources]
    plan = plan_fold(sources[0].nbytes, len(sources))
    work = InNumpy(
        plan,
        [source.view(np.uint8).data for source in sources],
        [result.data for result in results],
        dtype=dtype,
        reduction="sum" if reduction == "mean" else reduction,
    )
    assert work.work()
    assert not any(result.any() for at, result in enumerate(results) if at != 1)
    return results[1].view(sources[0].dtype)


@given(
    hosts=PLACEMENTS,
    pair=st.sampled_from(PAIRS),
    strategy=st.sampled_from(STRATEGIES),
    count=st.integers(1, 50),
    seed=st.integers(0, 99),
)
def test_all_machines_get_the_same_bits_and_those_of_ranks_if_the_order_does_not_matter(
    hosts: list[int], pair: tuple[WireDtype, str], strategy: str, count: int, seed: int
) -> None:
    dtype, reduction = pair
    call = Call("all_reduce", dtype, (count,), reduction, strategy=strategy)
    request = StartOp(OpNumber(0), call, dtype, count, 0, 1.0)
    dice, plan_of = np.random.default_rng(seed), KINDS["all_reduce"].plan
    sources = [dice.integers(0, 3, count).astype(WIRE_DTYPES[dtype]) for _ in hosts]
    machines, size, nbytes = machines_of(hosts), len(hosts), sources[0].nbytes
    places = len(machines)
    plans = [
        for_ranks(plan_of(Setting(request=request, rank=place, size=places)), size)
        for place in range(places)
    ]
    brought = [folded([sources[r] for r in ranks], dtype, reduction) for ranks in machines]
    order = TurnOrder(seed=seed, room=2)
    among = PlanWorld(plans, brought, reduction=reduction).run(order, [nbytes] * places)
    assert len({result.tobytes() for result in among}) == 1
    uneven = [(row * 0.7 - row.size / 3).astype(WIRE_DTYPES[dtype]) for row in brought]
    rounded = PlanWorld(plans, uneven, reduction=reduction).run(order, [nbytes] * places)
    assert len({result.tobytes() for result in rounded}) == 1
    flat = [plan_of(Setting(request=request, rank=rank, size=size)) for rank in range(size)]
    # Small whole numbers: the order matters for none of them, nor does it for their mean.
    by_ranks = PlanWorld(flat, sources, reduction=reduction).run(order, [nbytes] * size)
    assert among[0].tobytes() == by_ranks[0].tobytes()


@given(hosts=st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_each_rank_is_at_one_machine_and_machines_are_in_ring_order(hosts: list[int]) -> None:
    machines = machines_of(hosts)
    assert bool(machines) == (1 < len(set(hosts)) < len(hosts))
    assert [m[0] for m in machines] == sorted(m[0] for m in machines)
    for place, ranks in enumerate(machines):
        assert len({hosts[rank] for rank in ranks}) == 1
        assert list(ranks) == sorted(ranks)
        assert {place_of(machines, rank) for rank in ranks} == {place}
    assert sum(map(len, machines)) == (len(hosts) if machines else 0)


def test_costs_are_those_of_the_edges_between_machines() -> None:
    """An edge within a machine would make islands of its ranks, and hide the slowest of others."""
    near, far = EdgeCost(1, 500), EdgeCost(100, 8000)
    hosts = (0, 0, 1, 1, 2)
    edges = join_ranks(tuple(tuple(near if a == b else far for b in hosts) for a in hosts))
    assert edges.islands
    among = edges_among(edges, [ranks[0] for ranks in machines_of(hosts)])
    assert not among.islands
    assert among.costs[0][1:] == (far, far)
    assert len(among.line) == 3


def test_a_barrier_folds_nothing() -> None:
    assert plan_fold(0, 3).folds == ()


@given(
    hosts=PLACEMENTS.map(sorted),
    nbytes=st.lists(st.integers(0, 40), min_size=7, max_size=7),
    segment_bytes=st.sampled_from([8, 512]),
    seed=st.integers(0, 99),
)
def test_an_all_gather_has_the_blocks_of_each_machine_as_one(
    hosts: list[int], nbytes: list[int], segment_bytes: int, seed: int
) -> None:
    sizes, machines, dice = tuple(nbytes[: len(hosts)]), machines_of(hosts), Random(seed)  # noqa: S311 - no secret
    blocks = [np.frombuffer(dice.randbytes(size), np.uint8) for size in sizes]
    ofs = tuple(sum(sizes[rank] for rank in ranks) for ranks in machines)
    plans, sources, results = list[RankPlan](), list[Values](), list[int | Bytes]()
    for place, ranks in enumerate(machines):
        plans.append(
            plan_all_gather(
                rank=place,
                size=len(machines),
                nbytes=ofs,
                segment_bytes=segment_bytes,
                in_place=len(ranks) > 1,
            )
        )
        sources.append(blocks[ranks[0]] if len(ranks) == 1 else np.empty(0, np.uint8))
        results.append(sum(sizes) if len(ranks) == 1 else put_together(blocks, ranks))
    done = PlanWorld(plans, sources).run(TurnOrder(seed=seed, room=2), results)
    assert {result.tobytes() for result in done} == {np.concatenate(blocks).tobytes()}


def put_together(blocks: Sequence[Bytes], ranks: tuple[int, ...]) -> Bytes:
    """The result of a machine's first rank as the network's part begins."""
    sizes = tuple(block.nbytes for block in blocks)
    results = [np.zeros(sum(sizes), np.uint8) for _ in ranks]
    work = InNumpy(
        plan_block(sizes, ranks),
        [blocks[rank].data for rank in ranks],
        [result.data for result in results],
        dtype="uint8",
        reduction="sum",
    )
    assert work.work()
    assert not any(result.any() for result in results[1:])
    return results[0]


@given(
    trainers=st.lists(st.sampled_from([ANNA, BERT, CARA]), min_size=1, max_size=7),
    ids=st.permutations(range(7)),
    ring=st.permutations([ANNA, BERT, CARA]),
)
def test_the_ranks_of_a_machine_are_side_by_side(
    trainers: list[Member], ids: list[int], ring: list[Member]
) -> None:
    """An all_gather needs it: the blocks of a machine are one."""
    made = [make_trainer(id_, member) for id_, member in zip(ids, trainers, strict=False)]
    hosts = [trainer.member for trainer in in_ring_order(made, ring)]
    ranks = [*itertools.chain(*machines_of(hosts))]
    assert ranks in ([], [*range(len(hosts))])
