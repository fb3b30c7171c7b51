"""What a pipeline refuses before anything is sent, in one sentence each."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn, optimizers

import pmesh
from pmesh.errors import UsageError
from pmesh.mlx import ElasticPipeline, Pipeline, split_layers
from pmesh.mlx.pipeline.rules.checks import (
    DIFFERENT,
    NO_ARRAYS,
    NOTHING,
    check_by,
    check_communication,
    check_rows,
    check_whole,
)
from pmesh.testing import SimulatedMesh


@pytest.mark.parametrize("value", [2.5, "4", None, True, 0, -1])
def test_what_is_no_whole_number_or_too_small_is_refused_by_name(value: object) -> None:
    with pytest.raises(UsageError, match=r"^micro_batch_size is (a whole number|at least 1), not"):
        check_whole("micro_batch_size", value)


@pytest.mark.parametrize("by", ["ab", 5, [2.0, 2.0], [0, 4], [True, 3]])
def test_layers_that_are_no_list_of_whole_numbers_are_refused(by: object) -> None:
    with pytest.raises(UsageError, match="by"):
        check_by(by)
    assert check_by([1, 3]) == check_by((1, 3)) == (1, 3)


def test_a_kept_communication_is_refused_with_what_to_do_instead() -> None:
    check_communication("direct")
    with pytest.raises(UsageError, match="use ElasticPipeline to survive losses"):
        check_communication("store")
    with pytest.raises(UsageError, match="communication is 'direct', not 'x'"):
        check_communication("x")


@pytest.mark.parametrize(
    ("of_x", "of_y", "error"),
    [
        (NOTHING, 8, "rank 0 has passed no x"),
        (8, NOTHING, "rank 3 has passed no y"),
        (NO_ARRAYS, 8, "x on rank 0 is no array of MLX with rows"),
        (8, NO_ARRAYS, "y on rank 3 is no array of MLX with rows"),
        (8, DIFFERENT, "arrays of different numbers of rows"),
        (8, 7, "x on rank 0 has 8 rows and y on rank 3 has 7 rows"),
        (0, 0, "at least 1"),
    ],
)
def test_a_batch_whose_rows_do_not_fit_is_refused(of_x: int, of_y: int, error: str) -> None:
    with pytest.raises(UsageError, match=error):
        check_rows(of_x, of_y, 3)
    assert check_rows(8, 8, 3) == 8


def loss(output: mx.array, y: mx.array) -> mx.array:
    return mx.square(output - y).mean()


def test_a_pipeline_names_what_is_wrong_on_all_ranks_and_goes_on_with_what_is_right() -> None:
    def train(mesh: pmesh.Mesh) -> float:
        layers = [nn.Linear(4, 4) for _ in range(2)]
        odd: Any = "mse"
        with pytest.raises(UsageError, match="layer 1 of the model is of the type int"):
            split_layers([layers[0], 1], mesh)
        stage = split_layers(layers, mesh, by=[1, 1])
        with pytest.raises(UsageError, match="stage is what split_layers returns, not a Linear"):
            Pipeline(layers[0], mesh, loss)
        with pytest.raises(UsageError, match="loss is a function of the output and y, not 'mse'"):
            Pipeline(stage, mesh, odd)
        pipeline = Pipeline(stage, mesh, loss)
        x = mx.ones((8, 4))
        for wrong in (np.ones((8, 4)), [[1.0] * 4] * 8, mx.array(1.0), "abc", {"x": x}, [x]):
            with pytest.raises(UsageError, match="x on rank 0 is no array of MLX"):
                pipeline.step(wrong, x)
        with pytest.raises(UsageError, match="different numbers of rows"):
            pipeline.step(x, [x, x[:3]])
        return pipeline.step(x, x)[0]

    first, second = SimulatedMesh(2).run(train)
    assert first == second


def test_an_elastic_pipeline_names_what_is_wrong() -> None:
    def train(mesh: pmesh.Mesh) -> None:
        layers = [nn.Linear(4, 4) for _ in range(2)]
        with pytest.raises(UsageError, match=r"optimizer is one of mlx\.optimizers, not None"):
            ElasticPipeline(layers, mesh, loss, None)
        training = ElasticPipeline(layers, mesh, loss, optimizers.SGD(0.1))
        nothing: Any = None
        with pytest.raises(UsageError, match=r"batch\(0\) returns x and y, not NoneType"):
            list(training.train(lambda _: nothing, 1))
        x = mx.ones((4, 4))
        assert len(list(training.train(lambda _: (x, x), 2))) == 2
        assert list(training.train(lambda _: (x, x), 1)) == []  # it has made more

    SimulatedMesh(1).run(train)
