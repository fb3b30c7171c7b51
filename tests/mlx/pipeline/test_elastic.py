"""A training in stages whose ranks are lost at chosen moments, and come back."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn, optimizers
from mlx.utils import tree_flatten

import pmesh
from pmesh.client.session.session import TrainerSession
from pmesh.core.wire.trainer import Connect, Joined
from pmesh.ids import TrainerId
from pmesh.mlx import ElasticPipeline
from pmesh.mlx.pipeline.rules.keeping import KeptStates
from pmesh.mlx.pipeline.rules.meeting import Agreement, agree
from pmesh.mlx.pipeline.rules.takeover import plan_parcels
from pmesh.mlx.pipeline.stages import deal_anew
from pmesh.testing import SimulatedMesh
from tests.worlds.connections import Connections
from tests.worlds.faults import Faults, Real

STEPS, WIDTH, LAYERS = 6, 4, 6
BY = {3: [2, 2, 2], 5: [2, 1, 1, 1, 1]}
Weights = dict[str, bytes]


class HeedingLayer(nn.Module):  # type: ignore[misc] # MLX's modules have no types
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


class LossTrial:
    """Trains in stages; when a moment comes for the n-th time, ranks are lost and replaced."""

    drop = 0.0

    def __init__(
        self,
        moment: str = "",
        victims: tuple[int, ...] = (),
        nth: int = 1,
        *,
        ranks: int = 3,
        **options: Any,  # noqa: ANN401 - those of ElasticPipeline
    ) -> None:
        self._options: Any = {"wait_s": 60.0, "by": BY[ranks], **options}
        self.trainings: dict[int, ElasticPipeline] = {}
        self.meshes: dict[int, pmesh.Mesh] = {}
        self.trainers: dict[int, TrainerId] = {}
        self.simulated = SimulatedMesh(ranks, on_loss="continue")
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
            nn.Sequential(
                HeedingLayer(partial(self.comes, f"layer {i}")),
                nn.BatchNorm(WIDTH),
                nn.Tanh(),
                nn.Dropout(self.drop),
            )
            for i in range(LAYERS)
        ]
        optimizer = optimizers.Adam(0.01)
        training = ElasticPipeline(layers, mesh, loss_of, optimizer, **self._options)
        rank = mesh.rank
        self.trainings[rank], self.meshes[rank] = training, mesh
        self.trainers[rank] = mesh.trainers[rank]

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
    return LossTrial().run()


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
    trial = LossTrial(moment, victims, nth)
    found = trial.run()
    assert found.keys() == undisturbed.keys()
    assert trial.others
    for number, (values, weights) in found.items():
        expected, right = undisturbed[number]
        assert weights == right
        assert dict(expected).items() >= dict(values).items()


def test_layers_drop_again_what_they_had_dropped_before_a_loss() -> None:
    class Dropping(LossTrial):
        drop = 0.5

    undisturbed = Dropping().run()
    for number, (_, weights) in Dropping("layer 0", (1,), 7).run().items():
        assert weights == undisturbed[number][1]


def test_all_ranks_go_back_to_one_step_after_a_loss(faults: Faults) -> None:
    """And forget the states after it, which `KeptStates` does."""
    steps = list[int]()

    def go_back(real: Real, kept: KeptStates, step: int) -> None:
        real(kept, step)
        steps.append(step)

    faults.around(KeptStates, "go_back", go_back)
    LossTrial("step of 0", (2,), 3).run()
    assert len(steps) >= 6  # as they began, and after the loss
    (step,) = {*steps[-3:]}
    assert step > 0


class CutOff(LossTrial):
    """Breaks the connections of a rank with its agent, as the agent's death does."""

    def __init__(self, faults: Faults, moment: str, victims: tuple[int, ...], nth: int) -> None:
        super().__init__(moment, victims, nth)
        self._connections = Connections(faults)

    def strike(self, victim: int) -> None:
        self._connections.interrupt(self.trainers[victim])


@pytest.mark.parametrize(
    ("moment", "nth", "victim"),
    [("layer 0", 7, 1), ("step of 0", 3, 2), ("step of 2", STEPS, 0)],
)
def test_a_rank_whose_agent_is_killed_comes_back_with_its_stage(
    undisturbed: dict[int, Any], faults: Faults, moment: str, nth: int, victim: int
) -> None:
    found = CutOff(faults, moment, (victim,), nth).run()
    assert found.keys() == undisturbed.keys()
    for number, (values, weights) in found.items():
        assert weights == undisturbed[number][1]
        assert dict(values) == dict(undisturbed[number][0])


class Away(CutOff):
    """A rank is cut off, and comes back only when a new one computes its stage."""

    def __init__(self, faults: Faults) -> None:
        super().__init__(faults, "step of 0", (1,), 3)
        self._computes, self._is_back = threading.Event(), threading.Event()
        self._newcomer = self._away = -1
        faults.around(TrainerSession, "join", self._join)

    def strike(self, victim: int) -> None:
        mesh: Any = self.meshes[victim]
        sync = mesh.sync

        def late_sync(*given: object) -> object:
            self._away = threading.get_ident()
            assert self._computes.wait(60)
            return sync(*given)

        mesh.sync = late_sync
        super().strike(victim)
        self.others.append(self._pool.submit(self._replace))

    def _join(self, real: Real, session: TrainerSession, request: Connect) -> Joined:
        joined: Joined = real(session, request)
        if threading.get_ident() == self._away:
            self._is_back.set()
        return joined

    def _replace(self) -> Any:  # noqa: ANN401
        self._newcomer = threading.get_ident()
        return super()._replace()

    def comes(self, moment: str) -> None:
        if threading.get_ident() == self._newcomer and moment.startswith("layer"):
            self._computes.set()
            assert self._is_back.wait(60)
        super().comes(moment)


def test_a_rank_whose_stage_another_one_has_got_meanwhile_ends_and_the_others_go_on(
    undisturbed: dict[int, Any], faults: Faults
) -> None:
    trial = Away(faults)
    with pytest.raises(pmesh.UsageError, match="another one has its stage 1 of the pipeline"):
        trial.run()
    number, _, weights = trial.others[0].result()
    assert (number, weights) == (1, undisturbed[1][1])


class LostForGood(LossTrial):
    """Nobody comes in place of a lost rank: the others go on with a stage less."""

    def __init__(
        self,
        moment: str,
        victim: int,
        nth: int,
        *,
        then: tuple[str, int, int] = ("", 1, -1),
        **options: Any,  # noqa: ANN401 - as above
    ) -> None:
        super().__init__(moment, (victim,), nth, fewer_after_s=0.01, **options)
        self._then = then

    def strike(self, victim: int) -> None:
        self.simulated.lose(victim)
        (self._moment, self._left, after), self._then = self._then, ("", 1, -1)
        self._victims = (after,)

    @property
    def counts(self) -> list[int]:
        """How many layers each stage has at the end."""
        return [*min((each.stage.layout.counts for each in self.trainings.values()), key=len)]


def check_same(found: dict[int, Any], undisturbed: dict[int, Any], stages_left: int) -> None:
    """All layers of all stages have the weights of the training without a loss."""
    assert sorted(found) == [*range(stages_left)]
    for values, _ in found.values():
        assert dict(undisturbed[0][0]).items() >= dict(values).items()
    assert _weights_of(found) == _weights_of(undisturbed)


def _weights_of(found: dict[int, Any]) -> list[bytes]:
    return [weight for number in sorted(found) for weight in found[number][1].values()]


@pytest.mark.parametrize(
    ("moment", "nth", "victim"),
    [
        ("batch of 0", 1, 1),  # before the first step
        ("layer 0", 7, 0),
        ("layer 5", 9, 2),  # the last stage, whose copy is at the first
        ("step of 0", STEPS, 1),  # when the last step has ended
    ],
)
def test_the_layers_are_dealt_anew_when_a_rank_is_lost_for_good(
    undisturbed: dict[int, Any], moment: str, nth: int, victim: int
) -> None:
    trial = LostForGood(moment, victim, nth)
    check_same(trial.run(), undisturbed, 2)
    assert trial.counts == [3, 3]


def test_without_by_the_layers_are_dealt_anew_by_measured_speed(
    undisturbed: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    number = count()  # each measurement finds four times the speed of the one before
    monkeypatch.setattr("pmesh.mlx.pipeline.stages._speed", lambda: 4.0 ** next(number))
    trial = LostForGood("step of 0", 1, 3, by=None)
    check_same(trial.run(), undisturbed, 2)
    assert sorted(trial.counts) == [1, 5]


def test_layers_that_do_not_fit_as_they_would_be_dealt_go_to_the_rank_beside(
    undisturbed: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pmesh.mlx.pipeline.stages._memory", lambda: -(2**20))
    trial = LostForGood("step of 0", 1, 3)
    check_same(trial.run(), undisturbed, 2)
    assert trial.counts == [2, 4]


def test_ranks_may_be_lost_for_good_one_after_the_other(undisturbed: dict[int, Any]) -> None:
    # The first step that rank 2 ends then may be one before the loss.
    trial = LostForGood("step of 0", 1, 2, then=("step of 2", 3, 0))
    check_same(trial.run(), undisturbed, 1)


def test_a_rank_may_be_lost_for_good_before_any_has_its_stage(
    undisturbed: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = LostForGood("agreed", 1, 1)

    def agree_and_lose(*given: Any) -> Agreement:  # noqa: ANN401 - as they are
        trial.comes("agreed")
        return agree(*given)

    monkeypatch.setattr("pmesh.mlx.pipeline.elastic.agree", agree_and_lose)
    check_same(trial.run(), undisturbed, 2)


def test_a_layer_that_was_given_away_before_the_first_copy_is_as_it_was_made(
    undisturbed: dict[int, Any],
) -> None:
    """Rank 1 gives layer 3 to rank 2, which is lost: it takes that from its own model again."""
    trial = LostForGood("step of 1", 0, 1, then=("batch of 1", 2, 2))
    check_same(trial.run(), undisturbed, 1)


@pytest.mark.parametrize("moment", ["deal", "hand over"])
def test_a_further_rank_may_be_lost_for_good_while_layers_are_dealt_anew(
    undisturbed: dict[int, Any], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    trial = LostForGood("step of 0", 1, 3, then=(moment, 1, 3), ranks=5)

    def deal(*given: Any, **options: Any) -> tuple[int, ...]:  # noqa: ANN401 - as they are
        trial.comes("deal")
        return deal_anew(*given, **options)

    def plan(*given: Any) -> Any:  # noqa: ANN401 - as they are
        trial.comes("hand over")
        return plan_parcels(*given)

    monkeypatch.setattr("pmesh.mlx.pipeline.elastic.deal_anew", deal)
    monkeypatch.setattr("pmesh.mlx.pipeline.elastic.plan_parcels", plan)
    check_same(trial.run(), undisturbed, 3)
    # Dealt among three at once, or once more: the loss may be heard of when four have their layers.
    assert trial.counts in ([3, 1, 2], [4, 1, 1])


def test_an_optimizer_whose_state_is_not_by_layer_is_refused_with_fewer_after_s() -> None:
    def refused(mesh: pmesh.Mesh) -> None:
        both = optimizers.MultiOptimizer([optimizers.Adam(0.1), optimizers.SGD(0.1)], [_is_bias])
        layers = [nn.Linear(WIDTH, WIDTH)]
        with pytest.raises(pmesh.UsageError, match="and MultiOptimizer has 'states', too"):
            ElasticPipeline(layers, mesh, loss_of, both, fewer_after_s=1.0)

    SimulatedMesh(1).run(refused)


def _is_bias(path: str, _: mx.array) -> bool:
    return path.endswith("bias")


def test_a_stage_that_is_lost_with_its_copy_ends_the_training_with_its_name() -> None:
    with pytest.raises(pmesh.errors.RosterChanged, match=r"stage \d of the pipeline is lost, as"):
        LossTrial("step of 0", (1, 2), 3).run()


def gives_up(trial: LossTrial) -> str:
    """What the ranks say that wait in vain; the last of them may have lost the others by then."""
    with pytest.raises((pmesh.errors.NotEnoughRanks, ExceptionGroup)) as caught:
        trial.run()
    errors = getattr(caught.value, "exceptions", (caught.value,))
    assert all(isinstance(each, pmesh.errors.NotEnoughRanks) for each in errors)
    said = "; ".join(map(str, errors))
    assert "nobody has come within" in said
    return said


def test_ranks_do_not_wait_for_ever() -> None:
    class Alone(LossTrial):
        def _replace(self) -> Any:  # noqa: ANN401
            return None

    assert "2 of the 3 ranks" in gives_up(Alone("step of 0", (1,), 2, wait_s=0.5))


def test_a_rank_with_another_model_is_refused_in_place_of_a_lost_one() -> None:
    class Wider(LossTrial):
        def _replace(self) -> Any:  # noqa: ANN401
            with self.simulated.connect() as mesh:
                layers = [nn.Linear(WIDTH + 1, WIDTH + 1) for _ in range(LAYERS)]
                return ElasticPipeline(layers, mesh, loss_of, optimizers.Adam(0.01), by=[2, 2, 2])

    trial = Wider("step of 0", (1,), 2, wait_s=5.0)
    gives_up(trial)
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
