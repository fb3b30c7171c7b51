from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pmesh
from pmesh.errors import UsageError

TOTALS = st.integers(0, 10**6) | st.integers(0, 2**62)


@given(st.integers(1, 300), TOTALS)
def test_the_shards_of_all_ranks_follow_each_other_and_the_first_are_one_larger(
    world_size: int, total: int
) -> None:
    shards = [pmesh.Shard.of(rank, world_size, total) for rank in range(world_size)]
    assert [shard.begin for shard in shards] == [0, *(shard.end for shard in shards[:-1])]
    assert shards[-1].end == total
    larger = total % world_size
    assert [shard.size - total // world_size for shard in shards] == (
        [1] * larger + [0] * (world_size - larger)
    )


@given(st.integers(1, 9), st.integers(0, 40))
def test_each_value_has_one_owner_who_has_it_by_array_split(world_size: int, total: int) -> None:
    shards = [pmesh.Shard.of(rank, world_size, total) for rank in range(world_size)]
    cut = np.array_split(np.arange(total), world_size)
    for shard, values in zip(shards, cut, strict=True):
        assert [i for i in range(-1, total + 1) if shard.owns(i)] == values.tolist()


def test_a_rank_of_four_saves_three_quarters_and_of_nothing_nothing() -> None:
    assert pmesh.Shard.of(3, 4, 100).saving == 0.75
    assert pmesh.Shard.of(0, 1, 100).saving == 0.0
    assert pmesh.Shard.of(0, 4, 0).saving == 0.0


@dataclass
class SGD:
    """As torch's, of whose options only these count."""

    defaults: dict[str, object] = field(default_factory=dict[str, object])


class AdamW(SGD):
    pass


@pytest.mark.parametrize(
    ("optimizer", "values"),
    [
        ("sgd", 1),
        ("Lion", 1),
        ("AdamW", 2),
        (SGD({"momentum": 0}), 0),
        (SGD({"momentum": 0.9}), 1),
        (AdamW({"amsgrad": False}), 2),
        (AdamW({"amsgrad": True}), 3),
    ],
)
def test_an_optimizers_options_decide_how_many_bytes_it_keeps(
    optimizer: object, values: int
) -> None:
    shard = pmesh.Shard.of(1, 3, 10)
    assert shard.bytes(optimizer) == 3 * values * 4
    assert shard.bytes(optimizer, itemsize=2) == 3 * values * 2


@pytest.mark.parametrize(
    ("rank", "world_size", "total", "text"),
    [
        (0, 0, 5, "world_size is at least 1, not 0"),
        (3, 3, 5, "a rank of 3 is from 0 to 2, not 3"),
        (-1, 3, 5, "a rank of 3 is from 0 to 2, not -1"),
        (0, 3, -5, "total is at least 0, not -5"),
    ],
)
def test_numbers_that_are_out_of_range_are_named(
    rank: int, world_size: int, total: int, text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        pmesh.Shard.of(rank, world_size, total)


def test_an_optimizer_whose_state_depends_on_shapes_is_refused() -> None:
    with pytest.raises(UsageError, match="the state of 'adafactor' is not known"):
        pmesh.Shard.of(0, 2, 5).bytes("Adafactor")
