"""The losses and rows of the steps of an ElasticTrainer."""

import math

import pytest

from pmesh.torch.steps import Steps


def test_a_log_has_the_mean_loss_since_the_last_one() -> None:
    steps = Steps()
    logs = []
    for loss in (3.0, 1.0, 5.0):
        steps.note(loss)
        if loss != 3.0:
            steps.correct(log := {"loss": 0.1, "learning_rate": 0.5})
            logs.append(log)

    assert logs == [{"loss": 2.0, "learning_rate": 0.5}, {"loss": 5.0, "learning_rate": 0.5}]


def test_the_loss_of_a_training_is_that_of_all_its_steps() -> None:
    steps = Steps()
    for loss in (3.0, None, 1.0):
        steps.note(loss)
        steps.correct({"loss": 0.1})

    steps.correct(logs := {"train_loss": 0.1})

    assert logs == {"train_loss": 2.0}


def test_a_newcomer_logs_what_the_others_log() -> None:
    steps, newcomer = Steps(), Steps()
    steps.note(3.0)
    newcomer.losses = steps.losses
    for each in (steps, newcomer):
        each.note(2.0)
        each.correct(log := {"loss": 0.1})
        assert log == {"loss": 2.5}


def test_without_a_loss_there_is_no_mean() -> None:
    Steps().correct(logs := {"loss": 0.1, "train_loss": 0.1})

    assert all(map(math.isnan, logs.values()))


@pytest.mark.parametrize(
    ("rows", "parts", "counts"),
    [([7, 3, 5], [[7, 3], [5]], True), ([7, 3], [[7, 3]], True), ([], [[0]], False)],
)
def test_a_share_is_computed_in_parts_that_fit(
    rows: list[int], parts: list[list[int]], *, counts: bool
) -> None:
    steps = Steps()

    assert steps.share(rows, at_once=2) == parts
    assert steps.sizes == [len(part) for part in parts]
    assert steps.counts is counts
