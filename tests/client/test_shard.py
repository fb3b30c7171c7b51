import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pmesh
from pmesh.client.mesh import deal, order_of
from tests.worlds.watched_agent import WatchedAgent, run_ranks


@given(st.integers(0, 300), st.integers(0, 350), st.integers(1, 9), st.integers(0, 3))
def test_the_shards_of_all_ranks_are_what_is_left_of_the_epoch(
    dataset_len: int, position: int, size: int, epoch: int
) -> None:
    order = order_of(dataset_len, epoch=epoch, seed=1)
    shards = [deal(order, position=position, rank=rank, size=size) for rank in range(size)]
    assert sorted(np.concatenate(shards).tolist()) == sorted(order[position:].tolist())
    assert sorted(order.tolist()) == list(range(dataset_len))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 7)), max_size=20))
def test_an_epoch_is_complete_whatever_comes_and_goes_between_steps(
    steps: list[tuple[int, int]],
) -> None:
    order, position, taken = order_of(100, epoch=0, seed=0), 0, list[int]()
    for size, batch in steps:
        for rank in range(size):
            taken += deal(order, position=position, rank=rank, size=size)[:batch].tolist()
        position += batch * size
    assert sorted(taken) == sorted(order[:position].tolist())


def test_the_order_is_the_same_on_every_machine_and_with_every_version() -> None:
    # Another order would mix up the ranks' shards.
    assert order_of(8, epoch=0, seed=0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert order_of(8, epoch=1, seed=0).tolist() == [5, 3, 7, 2, 4, 1, 0, 6]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [order_of(50, epoch=e, seed=s).tolist() for e in range(3) for s in range(3)]
    assert len({tuple(order) for order in orders}) == 9


def test_a_mesh_deals_among_its_ranks(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> list[int]:
        first = mesh.shard(100, epoch=2, position=40, seed=7)
        assert first.dtype == np.int64
        assert np.array_equal(first, mesh.shard(100, epoch=2, position=40, seed=7))
        assert not np.array_equal(first, mesh.shard(100, epoch=3, position=40, seed=7))
        return [int(i) for i in first]

    shards = run_ranks(agent.home, 3, program)
    assert sorted(itertools.chain(*shards)) == sorted(order_of(100, epoch=2, seed=7)[40:].tolist())


def test_at_the_end_of_an_epoch_nothing_is_left(agent: WatchedAgent) -> None:
    with pmesh.connect("job", home=agent.home) as mesh:
        assert mesh.shard(10, position=10).size == 0
        assert mesh.shard(10, position=11).size == 0
        assert mesh.shard(0).size == 0


@pytest.mark.parametrize("name", ["dataset_len", "epoch", "position", "seed"])
def test_a_number_that_can_not_be_is_named(agent: WatchedAgent, name: str) -> None:
    with pmesh.connect("job", home=agent.home) as mesh:
        numbers = {"dataset_len": 10, name: -1}
        with pytest.raises(pmesh.UsageError, match=f"{name} is at least 0 .* not -1"):
            mesh.shard(**numbers)
