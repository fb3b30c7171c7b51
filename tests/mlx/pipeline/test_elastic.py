"""A training in stages whose ranks are lost at chosen moments, and come back."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn, optimizers
from mlx.utils import tree_flatten

import pmesh
from pmesh.mlx import ElasticPipeline
from pmesh.testing import SimulatedMesh

STEPS, WIDTH, LAYERS = 6, 4, 6
Weights = dict[str, bytes]


class Layer(nn.Module):  # type: ignore[misc] # MLX's modules have no types
    """Calls `heed` in each forward pass."""

    def __init__(self, heed: Callable[[], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self._heed = heed

    def __call__(self, x: mx.array) -> mx.array:
        self._heed()
        found: mx.array = self.linear(x)
        return found


def batch(step: int) -> tuple[mx.array, mx.array]:
    x = mx.random.normal((8, WIDTH), key=mx.random.key(step))
    return x, mx.sin(x)


def loss_of(output: mx.array, y: mx.array) -> mx.array:
    return mx.square(output - y).mean()


class Trial:
    """Trains three stages; when a moment comes for the n-th time, ranks are lost and replaced."""

    def __init__(
        self, moment: str = "", victims: tuple[int, ...] = (), nth: int = 1, **options: float
    ) -> None:
        self._options: Any = {"wait_s": 60.0, **options}
        self.trainings: dict[int, ElasticPipeline] = {}
        self.simulated = SimulatedMesh(3, on_loss="continue")
        self._moment, self._victims, self._left = moment, victims, nth
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(len(victims) or 1)
        self.others: list[Future[Any]] = []

    def comes(self, moment: str) -> None:
        with self._lock:
            if moment != self._moment:
                return
            self._left -= 1
            if self._left:
                return
            for victim in self._victims:
                self.strike(victim)

    def strike(self, victim: int) -> None:
        self.simulated.lose(victim)
        self.others.append(self._pool.submit(self._replace))

    def _replace(self) -> tuple[int, list[tuple[int, float]], Weights]:
        with self.simulated.connect() as mesh:
            return self.train(mesh)

    def train(self, mesh: pmesh.Mesh) -> tuple[int, list[tuple[int, float]], Weights]:
        mx.random.seed(1)
        layers = [
            nn.Sequential(Layer(partial(self.comes, f"layer {i}")), nn.Tanh())
            for i in range(LAYERS)
        ]
        optimizer = optimizers.Adam(0.01)
        training = ElasticPipeline(layers, mesh, loss_of, optimizer, by=[2, 2, 2], **self._options)
        rank = mesh.rank
        self.trainings[rank] = training

        def read(step: int) -> tuple[mx.array, mx.array]:
            self.comes(f"batch of {rank}")
            return batch(step)

        assert training.step in range(STEPS + 1)
        values = list[tuple[int, float]]()
        for step, value in training.train(read, STEPS):
            values.append((step, value))
            self.comes(f"step of {rank}")
        weights = tree_flatten(training.stage.parameters())
        return training.number, values, {path: np.array(x).tobytes() for path, x in weights}

    def run(self) -> dict[int, Any]:
        found = [*self.simulated.run(self.train), *(other.result() for other in self.others)]
        return {number: (values, weights) for number, values, weights in found}


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, Any]:
    return Trial().run()


@pytest.mark.parametrize(
    ("moment", "nth", "victims"),
    [
        ("batch of 0", 1, (1,)),  # before the first step
        ("layer 0", 7, (1,)),  # in the middle of a step
        ("step of 0", 3, (2,)),  # when a step has just ended on the rank before
        ("batch of 1", 4, (0,)),  # the first stage, and rank 0
        ("layer 5", 9, (2,)),  # by itself, in its own passes
        ("step of 2", STEPS, (1,)),  # when the last step has ended
    ],
)
def test_a_rank_that_is_lost_and_comes_back_leaves_the_weights_as_they_were(
    undisturbed: dict[int, Any], moment: str, nth: int, victims: tuple[int, ...]
) -> None:
    trial = Trial(moment, victims, nth)
    found = trial.run()
    assert found.keys() == undisturbed.keys()
    assert trial.others
    for number, (values, weights) in found.items():
        expected, right = undisturbed[number]
        assert weights == right
        assert dict(expected).items() >= dict(values).items()


class CutOff(Trial):
    """Breaks the connections of a rank with its agent, as the agent's death does."""

    def strike(self, victim: int) -> None:
        training: Any = self.trainings[victim]
        for calls in (training._mesh, training._group):  # noqa: SLF001
            calls._place._session._connection.interrupt()  # noqa: SLF001


@pytest.mark.parametrize(
    ("moment", "nth", "victim"),
    [("layer 0", 7, 1), ("step of 0", 3, 2), ("step of 2", STEPS, 0)],
)
def test_a_rank_whose_agent_is_killed_comes_back_with_its_stage(
    undisturbed: dict[int, Any], moment: str, nth: int, victim: int
) -> None:
    found = CutOff(moment, (victim,), nth).run()
    assert found.keys() == undisturbed.keys()
    for number, (values, weights) in found.items():
        assert weights == undisturbed[number][1]
        assert dict(values) == dict(undisturbed[number][0])


def test_the_states_before_a_step_stay_until_it_has_ended_after_a_loss_too() -> None:
    """A rank that has come back with its stage may be lost before its next copy has arrived."""

    def go_back(mesh: pmesh.Mesh) -> None:
        layers = [nn.Linear(WIDTH, WIDTH)]
        training: Any = ElasticPipeline(layers, mesh, loss_of, optimizers.SGD(0.1))
        list(training.train(batch, 2))
        assert training._own.keys() == {1, 2}  # noqa: SLF001
        training._copies = {1: "of the stage before"}  # noqa: SLF001
        training._restore(2)  # noqa: SLF001
        assert training._own.keys() == {1, 2}  # noqa: SLF001
        assert training._copies.keys() == {1}  # noqa: SLF001
        training._restore(1)  # noqa: SLF001
        assert training._own.keys() == {1}  # noqa: SLF001

    SimulatedMesh(1).run(go_back)


class Away(CutOff):
    """A rank is cut off, and comes back only when a new one computes its stage."""

    def __init__(self) -> None:
        super().__init__("step of 0", (1,), 3)
        self._computes, self._is_back = threading.Event(), threading.Event()
        self._newcomer = -1

    def strike(self, victim: int) -> None:
        training: Any = self.trainings[victim]
        mesh = training._mesh  # noqa: SLF001
        place = mesh._place  # noqa: SLF001
        sync, reconnect = mesh.sync, place._reconnect  # noqa: SLF001

        def late_sync(*given: object) -> object:
            assert self._computes.wait(60)
            return sync(*given)

        def told_reconnect(deadline: float) -> None:
            reconnect(deadline)
            self._is_back.set()

        mesh.sync, place._reconnect = late_sync, told_reconnect  # noqa: SLF001
        super().strike(victim)
        self.others.append(self._pool.submit(self._replace))

    def _replace(self) -> Any:  # noqa: ANN401
        self._newcomer = threading.get_ident()
        return super()._replace()

    def comes(self, moment: str) -> None:
        if threading.get_ident() == self._newcomer and moment.startswith("layer"):
            self._computes.set()
            assert self._is_back.wait(60)
        super().comes(moment)


def test_a_rank_whose_stage_another_one_has_got_meanwhile_ends_and_the_others_go_on(
    undisturbed: dict[int, Any],
) -> None:
    trial = Away()
    with pytest.raises(pmesh.UsageError, match="another one has its stage 1 of the pipeline"):
        trial.run()
    number, _, weights = trial.others[0].result()
    assert (number, weights) == (1, undisturbed[1][1])


class ForGood(Trial):
    """Nobody comes in place of a lost rank: the others go on with a stage less."""

    def __init__(self, moment: str, victim: int, nth: int) -> None:
        super().__init__(moment, (victim,), nth, fewer_after_s=0.01)

    def strike(self, victim: int) -> None:
        self.simulated.lose(victim)


@pytest.mark.parametrize(
    ("moment", "nth", "victim"),
    [
        ("batch of 0", 1, 1),  # before the first step
        ("layer 0", 7, 0),
        ("layer 5", 9, 2),  # the last stage, whose copy is at the first
        ("step of 0", STEPS, 1),  # when the last step has ended
    ],
)
def test_the_others_take_over_the_layers_of_a_rank_that_is_lost_for_good(
    undisturbed: dict[int, Any], moment: str, nth: int, victim: int
) -> None:
    found = ForGood(moment, victim, nth).run()
    assert sorted(found) == [0, 1]
    for values, _ in found.values():
        assert dict(undisturbed[0][0]).items() >= dict(values).items()
    joined = [weight for number in (0, 1) for weight in found[number][1].values()]
    assert joined == [w for number in (0, 1, 2) for w in undisturbed[number][1].values()]


def test_a_stage_that_is_lost_with_its_copy_ends_the_training_with_its_name() -> None:
    with pytest.raises(pmesh.errors.RosterChanged, match=r"stage \d of the pipeline is lost, as"):
        Trial("step of 0", (1, 2), 3).run()


def test_ranks_do_not_wait_for_ever() -> None:
    class Alone(Trial):
        def _replace(self) -> Any:  # noqa: ANN401
            return None

    with pytest.raises(pmesh.errors.NotEnoughRanks, match=r"2 of the 3 ranks .* within 0\.5 s"):
        Alone("step of 0", (1,), 2, wait_s=0.5).run()


def test_a_rank_with_another_model_is_refused_in_place_of_a_lost_one() -> None:
    class Wider(Trial):
        def _replace(self) -> Any:  # noqa: ANN401
            with self.simulated.connect() as mesh:
                layers = [nn.Linear(WIDTH + 1, WIDTH + 1) for _ in range(LAYERS)]
                return ElasticPipeline(layers, mesh, loss_of, optimizers.Adam(0.01), by=[2, 2, 2])

    trial = Wider("step of 0", (1,), 2, wait_s=5.0)
    with pytest.raises(pmesh.errors.NotEnoughRanks):
        trial.run()
    with pytest.raises(pmesh.UsageError, match="has another model or optimizer than the pipeline"):
        trial.others[0].result()


def test_one_rank_alone_trains_the_whole_model() -> None:
    def alone(mesh: pmesh.Mesh) -> tuple[list[int], float, int]:
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
        training = ElasticPipeline(layers, mesh, loss_of, optimizers.SGD(0.1))
        steps = [step for step, _ in training.train(batch, 2)]
        steps += [step for step, _ in training.train(batch, 3)]
        return steps, training.report().step_s, training.step

    ((steps, step_s, step),) = SimulatedMesh(1).run(alone)
    assert steps == [0, 1, 2]
    assert step_s > 0
    assert step == 3
