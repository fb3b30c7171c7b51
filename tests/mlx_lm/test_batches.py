import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.jobs.shares import deal_rows
from pmesh.errors import UsageError
from pmesh.mlx_lm.batches import Batches, pad
from pmesh.mlx_lm.libraries import mx, nn, trainer
from tests.mlx_lm.lora import TokenRows


def batches_of(count: int, batch_size: int, seed: int = 3) -> Batches:
    """Batches of rows of different lengths; a row's first token is its number, from 1."""
    rows = TokenRows([[row + 1, *range(row % 50)] for row in range(count)])
    return Batches(rows, batch_size=batch_size, max_length=64, seed=seed, name="training")


@given(batch_size=st.integers(1, 9), size=st.integers(1, 12), iteration=st.integers(0, 200))
def test_all_ranks_together_take_each_row_of_a_batch_once(
    batch_size: int, size: int, iteration: int
) -> None:
    batches = batches_of(20, batch_size)

    dealt = deal_rows(batch_size, [1] * size)
    shares = [batches.share(iteration, {batch_size: rows.tolist()}.__getitem__) for rows in dealt]

    taken = [int(row[0]) - 1 for share in shares if share is not None for row in share.tokens]
    assert sorted(taken) == sorted(batches.rows(iteration))
    assert len(taken) == batch_size


@given(iterations=st.lists(st.integers(0, 60), min_size=1))
def test_a_batch_depends_on_the_seed_and_the_iteration_alone(iterations: list[int]) -> None:
    asked_before = batches_of(40, 4)

    for iteration in iterations:
        assert asked_before.rows(iteration) == batches_of(40, 4).rows(iteration)
    others = [batches_of(40, 4, seed=4).rows(iteration) for iteration in range(10)]
    assert others != [asked_before.rows(iteration) for iteration in range(10)]


def test_each_epoch_has_every_batch_once_and_an_order_of_its_own() -> None:
    batches = batches_of(41, 4)

    epochs = [[tuple(batches.rows(10 * epoch + i)) for i in range(10)] for epoch in range(2)]

    assert len(batches) == 10
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
    assert len({row for batch in epochs[0] for row in batch}) == 40  # as mlx-lm, without the rest


def test_a_rank_without_a_row_has_no_share() -> None:
    assert batches_of(4, 2).share(0, lambda _: ()) is None


@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    offset=st.integers(0, 70),
    max_length=st.integers(2, 80),
)
def test_the_targets_are_those_that_the_loss_of_mlx_lm_counts(
    lengths: list[int], offset: int, max_length: int
) -> None:
    share = pad([([1] * length, offset) for length in lengths], max_length=max_length)

    counted = 0
    if share is not None:
        model = nn.Embedding(2, 2)
        loss, targets = trainer.default_loss(model, mx.array(share.tokens), mx.array(share.spans))
        counted = int(targets.item())
        assert np.isfinite(loss.item())
        assert share.targets == counted
    for length in lengths:  # rows that were left out would have counted nothing
        padded = pad([([1] * length, 0)], max_length=max_length)
        assert padded is not None
        assert padded.tokens.shape[1] <= max_length


def test_rows_that_are_too_long_are_cut_and_counted() -> None:
    share = pad([(range(100), 0), (range(5), 0)], max_length=40)

    assert share is not None
    assert share.tokens.shape == (2, 40)
    assert share.tokens[0].tolist() == list(range(40))
    assert share.truncated == 1


def test_a_row_whose_prompt_fills_the_length_is_left_out() -> None:
    assert pad([(range(100), 60)], max_length=40) is None
    share = pad([(range(100), 60), (range(5), 2)], max_length=40)
    assert share is not None
    assert share.tokens[:, :5].tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("batch_size", [0, 21])
def test_a_batch_that_the_data_set_can_not_fill_is_refused(batch_size: int) -> None:
    with pytest.raises(UsageError, match=r"the training set has 20 rows, and --batch-size"):
        batches_of(20, batch_size)
