import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest

import pmesh
from pmesh.core.ops.reductions import Values
from pmesh.core.wire.trainer import SYNC_VALUES
from pmesh.testing import SimulatedMesh
from tests.worlds.watched_agent import WatchedAgent, run_ranks

Weights = dict[str, Any]

START = {"a": np.zeros(3, np.float32), "b": np.ones((2, 2), np.float32)}


def moved(weights: Weights, by: float) -> Weights:
    return {path: x + x.dtype.type(by) for path, x in weights.items()}


def same_bits(results: Sequence[Weights]) -> bool:
    return len({tuple(x.tobytes() for x in each.values()) for each in results}) == 1


def test_a_round_ends_with_the_mean_by_samples() -> None:
    def train(mesh: pmesh.Mesh) -> Weights:
        local = pmesh.LocalUpdates(mesh, inner_steps=1)
        weights, _ = local.begin(START)
        return local.end(moved(weights, mesh.rank), samples=[1, 2, 5][mesh.rank])

    results = SimulatedMesh(3).run(train)
    assert same_bits(results)
    np.testing.assert_allclose(results[0]["a"], 12 / 8, rtol=1e-6)
    np.testing.assert_allclose(results[0]["b"], 1 + 12 / 8, rtol=1e-6)


def test_rounds_of_one_step_are_synchronous_training() -> None:
    def train(mesh: pmesh.Mesh, *, apart: bool) -> Values:
        local = pmesh.LocalUpdates(mesh, inner_steps=1)
        w = np.ones(4)
        for step in range(5):
            x = np.random.default_rng([step, mesh.rank]).normal(size=(8, 4))
            if apart:
                w, _ = local.begin(w)
                w = local.end(w - 0.1 * x.T @ (x @ w) / 8)
            else:
                w = w - 0.1 * mesh.average_gradients(x.T @ (x @ w) / 8)
        return w

    synchronous = SimulatedMesh(2).run(lambda mesh: train(mesh, apart=False))[0]
    for w in SimulatedMesh(2).run(lambda mesh: train(mesh, apart=True)):
        np.testing.assert_allclose(w, synchronous, rtol=1e-12)


def test_ranks_that_draw_different_initial_weights_begin_with_rank_0s() -> None:
    def train(mesh: pmesh.Mesh) -> tuple[Weights, int]:
        local = pmesh.LocalUpdates(mesh, inner_steps=1)
        return local.begin(moved(START, mesh.rank), 7 + mesh.rank)

    for weights, shared in SimulatedMesh(2).run(train):
        assert same_bits([weights, START])
        assert shared == 7


def test_nesterov_is_that_of_torch() -> None:
    def train(mesh: pmesh.Mesh) -> list[float]:
        local = pmesh.LocalUpdates(mesh, inner_steps=1, outer=pmesh.Nesterov(0.5, 0.75))
        w, found = np.zeros(1, np.float32), list[float]()
        for _ in range(3):
            w, _ = local.begin(w)
            w = local.end(w + np.float32(2 * mesh.rank))  # the mean change is 1
            found.append(float(w[0]))
        return found

    # torch.optim.SGD(lr=0.5, momentum=0.75, nesterov=True) with the gradient -1, by hand.
    momentum, w, expected = 0.0, 0.0, list[float]()
    for _ in range(3):
        momentum = 0.75 * momentum + 1
        w += 0.5 * (1 + 0.75 * momentum)
        expected.append(w)
    assert SimulatedMesh(2).run(train) == [expected] * 2


def test_a_delayed_average_comes_under_what_was_done_meanwhile() -> None:
    def train(mesh: pmesh.Mesh) -> tuple[list[float], float]:
        local = pmesh.LocalUpdates(mesh, inner_steps=1, delayed=True)
        w, found = np.zeros(1, np.float32), list[float]()
        for step in (1.0, 10.0, 100.0):
            w, _ = local.begin(w)
            w = local.end(w + np.float32(step * 2 * mesh.rank))
            found.append(float(w[0]))
        return found, float(local.finish(w)[0])

    (still, last), (moving, other) = SimulatedMesh(2).run(train)
    assert moving == [2, 1 + 20, 1 + 10 + 200]  # the mean so far, and what is still its own
    assert still == [0, 1, 11]
    assert last == other == 111


def test_fragments_take_turns_and_all_are_averaged_at_the_end() -> None:
    def train(mesh: pmesh.Mesh) -> tuple[list[Weights], Weights, list[int]]:
        local = pmesh.LocalUpdates(mesh, inner_steps=5, fragments=2)
        weights, found, steps = START, list[Weights](), list[int]()
        for _ in range(2):
            weights, _ = local.begin(weights)
            steps.append(len(list(local.steps())))
            weights = local.end(moved(weights, 2 * mesh.rank))
            found.append(weights)
        return found, local.finish(weights), steps

    first, second = SimulatedMesh(2).run(train)
    assert first[2] == [2, 3]
    assert [float(each["a"][0]) for each in first[0]] == [1, 1]  # the first fragment in round 0
    assert [float(each["a"][0]) for each in second[0]] == [1, 3]
    assert [float(each["b"][0, 0]) for each in first[0]] == [1, 3]  # the second in round 1
    assert [float(each["b"][0, 0]) for each in second[0]] == [3, 3]
    assert same_bits([first[1], second[1]])
    assert float(first[1]["a"][0]) == 2
    assert float(first[1]["b"][0, 0]) == 3


@pytest.mark.parametrize("delayed", [False, True])
def test_a_newcomer_enters_with_the_state_of_the_others(delayed: bool) -> None:  # noqa: FBT001
    simulated = SimulatedMesh(2, on_loss="continue")
    ends: list[Weights] = []

    def train(mesh: pmesh.Mesh) -> Weights:
        local = pmesh.LocalUpdates(
            mesh, inner_steps=2, outer=pmesh.Nesterov(), delayed=delayed, fragments=2
        )
        weights, shared = START, {"seen": 0}
        while local.round < 6 or mesh.size < 3:
            weights, shared = local.begin(weights, shared)
            if local.round == 2 and mesh.rank == 0 and not newcomer.is_alive():
                newcomer.start()
            shared = {"seen": shared["seen"] + 1}
            for _ in local.steps():
                weights = moved(weights, mesh.rank + 1)
            weights = local.end(weights, samples=1)
        assert shared["seen"] == local.round
        return local.finish(weights)

    newcomer = threading.Thread(target=lambda: ends.append(train(simulated.connect())))
    ends += simulated.run(train)
    newcomer.join()
    assert len(ends) == 3
    assert same_bits(ends)


def test_a_rank_that_is_lost_in_a_round_costs_what_it_did_in_that_round() -> None:
    simulated = SimulatedMesh(3, on_loss="continue")

    def train(mesh: pmesh.Mesh) -> Weights:
        local, own = pmesh.LocalUpdates(mesh, inner_steps=1), mesh.rank
        weights = START
        for round_ in range(2):
            weights, _ = local.begin(weights)
            if round_ == 1 and own == 2:
                simulated.lose(2)
            weights = local.end(moved(weights, own))
        return weights

    results = simulated.run(train)
    assert len(results) == 2
    assert same_bits(results)
    assert float(results[0]["a"][0]) == 1 + 0.5


class Dying:
    """A mesh whose rank is lost when it begins its n-th average."""

    def __init__(self, mesh: pmesh.Mesh, lose: Callable[[], None], averages: int) -> None:
        self._mesh, self._lose, self._left = mesh, lose, averages

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - all that a mesh has
        return getattr(self._mesh, name)

    def average_gradients(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - as above
        self._left -= 1
        if not self._left:
            self._lose()
        return self._mesh.average_gradients(*arguments, **options)


@pytest.mark.parametrize(("delayed", "expected"), [(False, 1 + 4 / 3 + 0.5), (True, 15 / 8 + 0.5)])
def test_what_an_end_that_raises_did_not_average_goes_with_the_next(
    delayed: bool,  # noqa: FBT001
    expected: float,
) -> None:
    simulated = SimulatedMesh(3, on_loss="raise")

    def train(mesh: pmesh.Mesh) -> tuple[float, int]:
        own, losses, dying = mesh.rank, 0, mesh
        if own == 2:  # the first average is in round 0, or under way in round 1
            dying = cast("Any", Dying(mesh, lambda: simulated.lose(2), 1 if delayed else 2))
        local = pmesh.LocalUpdates(dying, inner_steps=1, delayed=delayed)
        w = np.zeros(1)
        while local.round < 3:
            samples = 3 if own == 1 and local.round == 1 and not losses else 1
            try:
                w, _ = local.begin(w)
                w = local.end(w + own, samples=samples)
            except pmesh.RankLost:
                w, losses = w + own, losses + 1
        return float(local.finish(w)[0]), losses

    for found, losses in simulated.run(train):
        assert losses == 1
        assert found == pytest.approx(expected, rel=1e-12)


def test_an_end_that_raises_may_be_repeated() -> None:
    simulated = SimulatedMesh(3, on_loss="raise")

    def train(mesh: pmesh.Mesh) -> float:
        own, dying = mesh.rank, mesh
        if own == 2:
            dying = cast("Any", Dying(mesh, lambda: simulated.lose(2), 2))
        local = pmesh.LocalUpdates(dying, inner_steps=2, fragments=2)
        weights = {name: np.zeros(1) for name in "ab"}
        weights, _ = local.begin(weights)
        weights = local.end(moved(weights, own), samples=[1, 3, 1][own])
        weights, _ = local.begin(weights)
        with pytest.raises(pmesh.RankLost):
            local.end(weights, samples=[3, 1, 1][own])
        return float(local.end(weights, samples=[3, 1, 1][own])["b"][0])

    assert simulated.run(train) == pytest.approx([0.5] * 2)


def test_a_finish_that_raises_has_averaged_nothing_and_may_be_repeated() -> None:
    simulated = SimulatedMesh(3, on_loss="raise")

    def train(mesh: pmesh.Mesh) -> Weights:
        own, dying = mesh.rank, mesh
        if own == 2:  # it is lost when two fragments of three are on their way
            dying = cast("Any", Dying(mesh, lambda: simulated.lose(2), 4))
        local = pmesh.LocalUpdates(dying, inner_steps=3, fragments=3)
        weights = {name: np.zeros(1) for name in "abc"}
        weights, _ = local.begin(weights)
        weights = local.end(moved(weights, own), samples=[1, 3, 4][own])
        with pytest.raises(pmesh.RankLost):
            local.finish(weights)
        return local.finish(weights)

    for found in simulated.run(train):
        assert found["b"] == pytest.approx(0.75)
        assert found["c"] == pytest.approx(0.75)


@pytest.mark.parametrize("delayed", [False, True])
def test_finish_leaves_alone_what_is_averaged_already(delayed: bool) -> None:  # noqa: FBT001
    def train(mesh: pmesh.Mesh) -> tuple[Weights, Weights, Weights]:
        local = pmesh.LocalUpdates(
            mesh, inner_steps=2, fragments=2, delayed=delayed, outer=pmesh.Nesterov()
        )
        weights = START
        for _ in range(2):
            weights, _ = local.begin(weights)
            weights = local.end(moved(weights, mesh.rank))
        finished = local.finish(weights)
        return weights, finished, local.finish(finished)

    weights, first, second = SimulatedMesh(2).run(train)[0]
    assert same_bits([first, second])
    if not delayed:  # the second fragment was averaged by the last `end`
        assert same_bits([{"b": weights["b"]}, {"b": first["b"]}])


def test_progress_that_no_begin_has_sent_keeps_its_samples() -> None:
    def train(mesh: pmesh.Mesh) -> float:
        local = pmesh.LocalUpdates(mesh, inner_steps=1, delayed=True)
        w, _ = local.begin(np.zeros(1))
        w = local.end(w + mesh.rank, samples=[1, 3][mesh.rank])
        w = local.end(w, samples=0)
        return float(local.finish(w)[0])

    assert SimulatedMesh(2).run(train) == pytest.approx([0.75] * 2)


def test_what_int8_leaves_out_of_a_round_is_added_in_a_later_one() -> None:
    steps = np.linspace(-1, 1, 300, dtype=np.float32)

    def train(mesh: pmesh.Mesh) -> Values:
        local = pmesh.LocalUpdates(mesh, inner_steps=1, compression="int8")
        w = np.zeros(300, np.float32)
        for _ in range(40):
            w, _ = local.begin(w)
            w = local.end(w + steps * (1 + mesh.rank))
        assert mesh.last_op is not None
        return w

    first, second = SimulatedMesh(2).run(train)
    assert first.tobytes() == second.tobytes()
    off = np.abs(first - 40 * 1.5 * steps).max()
    assert 0 < off < 2 * 2 / 127  # that of one round or two, not of forty


def test_bfloat16_weights_of_mlx_are_averaged_in_float32() -> None:
    mx = pytest.importorskip("mlx.core")

    def train(mesh: pmesh.Mesh) -> tuple[Any, Values]:
        local = pmesh.LocalUpdates(mesh, inner_steps=1)
        weights: Any = {"w": mx.ones(3, dtype=mx.bfloat16)}
        for _ in range(4):
            weights, _ = local.begin(weights)
            step = mx.array(2.0**-7 * mesh.rank, dtype=mx.bfloat16)  # the least above 1
            weights = local.end({"w": weights["w"] + step})
        assert weights["w"].dtype == mx.bfloat16
        return None, np.array(weights["w"].astype(mx.float32))

    (_, first), (_, second) = SimulatedMesh(2).run(train)
    assert first.tobytes() == second.tobytes()
    assert first[0] > 1


def test_a_round_sends_what_a_step_does_and_one_small_op(agent: WatchedAgent) -> None:
    def train(mesh: pmesh.Mesh) -> None:
        local = pmesh.LocalUpdates(mesh, inner_steps=50)
        weights = np.zeros(1000, np.float32)
        for _ in range(2):
            weights, _ = local.begin(weights)
            weights = local.end(weights + np.float32(mesh.rank))

    run_ranks(agent.home, 2, train)
    calls = [(call.kind, call.shape) for call in agent.calls]
    assert calls == [("sync", (SYNC_VALUES,)), ("all_reduce", (1001,))] * 2


def test_a_round_by_the_clock_has_at_least_one_step() -> None:
    def train(mesh: pmesh.Mesh) -> list[int]:
        by_clock = pmesh.LocalUpdates(mesh, round_s=1e-9)
        by_both = pmesh.LocalUpdates(mesh, round_s=1e9, inner_steps=3)
        return [len(list(local.steps())) for local in (by_clock, by_both)]

    assert SimulatedMesh(1).run(train) == [[1, 3]]


def test_the_weights_in_common_stay_until_the_next_average() -> None:
    def train(mesh: pmesh.Mesh) -> bool:
        local = pmesh.LocalUpdates(mesh, inner_steps=1, delayed=True)
        weights, _ = local.begin(START)
        weights = local.end(moved(weights, mesh.rank))
        return same_bits([local.common(weights), START])

    assert SimulatedMesh(2).run(train) == [True, True]


def test_options_that_mean_nothing_are_refused() -> None:
    def train(mesh: pmesh.Mesh) -> None:
        wrong: list[dict[str, Any]] = [
            {},
            {"inner_steps": 0},
            {"inner_steps": 4, "fragments": 0},
            {"inner_steps": 4, "fragments": 5},
            {"inner_steps": 4, "outer": "adam"},
            {"round_s": 0},
            {"inner_steps": 1, "timeout_s": 0},
        ]
        for options in wrong:
            with pytest.raises(pmesh.UsageError):
                pmesh.LocalUpdates(mesh, **options)
        with pytest.raises(pmesh.UsageError, match="2 arrays can't be cut into 3 fragments"):
            pmesh.LocalUpdates(mesh, inner_steps=3, fragments=3).begin(START)

    SimulatedMesh(1).run(train)
    for rate, momentum in [(0, 0.9), (float("nan"), 0.9), (0.7, 1), (0.7, -0.1)]:
        with pytest.raises(pmesh.UsageError):
            pmesh.Nesterov(rate, momentum)


def test_calls_out_of_order_and_other_weights_are_refused() -> None:
    def train(mesh: pmesh.Mesh) -> str:
        local = pmesh.LocalUpdates(mesh, inner_steps=1)
        for call in (local.end, local.finish, local.common):
            with pytest.raises(pmesh.UsageError, match="begin"):
                call(START)
        local.begin(START)
        for other in ({"a": START["a"]}, {**START, "a": np.zeros(4, np.float32)}):
            with pytest.raises(pmesh.UsageError, match="other paths or shapes"):
                local.end(other)
        with pytest.raises(pmesh.UsageError, match="samples"):
            local.end(START, samples=-1)
        return repr(local)

    assert SimulatedMesh(1).run(train) == ["<LocalUpdates, round 0>"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"outer": pmesh.Nesterov()}, r"not outer=Nesterov\(learning_rate=0.7, momentum=0.9\)"),
        ({"outer": pmesh.Nesterov(0.5, momentum=0.0)}, "not outer=Nesterov"),
        ({"fragments": 2}, "not outer='average', fragments=2, delayed=False"),
        ({"delayed": True}, "not outer='average', fragments=1, delayed=True"),
    ],
)
def test_a_job_whose_ranks_average_otherwise_is_not_entered(
    options: dict[str, Any], match: str
) -> None:
    def train(mesh: pmesh.Mesh) -> str:
        chosen = options if mesh.rank else {}
        local = pmesh.LocalUpdates(mesh, inner_steps=2, **chosen)
        if mesh.rank == 0:
            local.begin(START)
            return "began"
        with pytest.raises(pmesh.UsageError, match=match) as caught:
            local.begin(START)
        return str(caught.value)

    began, refused = SimulatedMesh(2).run(train)
    assert began == "began"
    assert refused.startswith("the job's ranks have outer='average', fragments=1, delayed=False")


def test_a_job_with_other_weights_is_not_entered() -> None:
    def train(mesh: pmesh.Mesh) -> bool:
        local = pmesh.LocalUpdates(mesh, inner_steps=1)
        try:
            local.begin(START if mesh.rank == 0 else {"a": START["a"]})
        except pmesh.UsageError as e:
            return "other weights" in str(e)
        return False

    assert SimulatedMesh(2).run(train) == [False, True]
