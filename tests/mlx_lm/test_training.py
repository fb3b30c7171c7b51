"""The loop on meshes of threads: what ranks compute together, also when they come and go."""

import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmesh
from pmesh.mlx_lm.batches import LocalBatch, pad
from pmesh.mlx_lm.halves import Gradients
from pmesh.mlx_lm.libraries import mx, nn, trainer, trees
from pmesh.mlx_lm.state import State
from pmesh.mlx_lm.training import Training, digest, seed_of
from pmesh.testing import SimulatedMesh
from tests.mlx_lm.lora import LoraRank, make_model, prepare
from tests.worlds.faults import Faults, Real

Adapters = dict[str, Any]


def run(folder: Path, size: int, **options: Any) -> list[LoraRank]:  # noqa: ANN401
    """Train on so many ranks; each keeps what it was told."""
    hashes: list[str] = []

    def train(mesh: pmesh.Mesh) -> LoraRank:
        one = LoraRank(mesh, folder)
        hashes.append(one.train(**options))
        return one

    trainers = SimulatedMesh(size, on_loss="continue").run(train)
    assert len(set(hashes)) == 1
    return trainers


def adapters_in(folder: Path) -> Adapters:
    return {name: np.array(x) for name, x in adapters_in_mlx(folder).items()}


def adapters_in_mlx(folder: Path) -> Adapters:
    loaded: Adapters = mx.load(str(folder / "adapters.safetensors"))
    return loaded


def assert_close(one: Adapters, other: Adapters, *, within: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for name, x in one.items():
        np.testing.assert_allclose(x, other[name], atol=within, rtol=within)


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_learn_what_one_rank_learns_though_the_batch_does_not_divide(
    tmp_path: Path, kind: str, size: int
) -> None:
    run(tmp_path / "one", 1, kind=kind)
    run(tmp_path / "many", size, kind=kind)

    assert_close(adapters_in(tmp_path / "one"), adapters_in(tmp_path / "many"))


def test_one_rank_learns_what_mlx_lm_would(tmp_path: Path) -> None:
    state, plan = prepare(tmp_path)
    gradients = nn.value_and_grad(state.model, trainer.default_loss)
    for iteration in range(6):
        share = plan.train.share(iteration, range)
        assert share is not None
        _, grads = gradients(state.model, mx.array(share.tokens), mx.array(share.spans))
        state.optimizer.update(state.model, grads)
    expected = {name: np.array(x) for name, x in state.adapters().items()}

    run(tmp_path, 1)

    assert any(np.any(x) for name, x in expected.items() if name.endswith("lora_b"))
    assert_close(expected, adapters_in(tmp_path))


def test_each_step_reports_its_loss(tmp_path: Path, faults: Faults) -> None:
    reported: list[dict[str, float]] = []
    faults.instead(pmesh.Mesh, "report", lambda _, **values: reported.append(values))
    (trainer,) = run(tmp_path, 1)
    losses = [values["loss"] for values in reported if "loss" in values]
    means = [info["train_loss"] for info in trainer.said.losses]
    for *pair, mean in zip(losses[::2], losses[1::2], means, strict=True):
        assert min(pair) < mean < max(pair)
    assert all("val_loss" in values for values in reported if "loss" not in values)


def test_a_rank_may_have_no_row(tmp_path: Path) -> None:
    run(tmp_path / "one", 1, batch_size=2)
    run(tmp_path / "many", 3, batch_size=2)

    assert_close(adapters_in(tmp_path / "one"), adapters_in(tmp_path / "many"))


def test_a_batch_without_a_target_changes_nothing(tmp_path: Path) -> None:
    def train(mesh: pmesh.Mesh) -> tuple[str, str, int]:
        state, plan = prepare(tmp_path, iters=1, valid=False)
        before = digest(state.adapters())
        plan.train.share = lambda *_, **__: None  # type: ignore[method-assign]
        Training(mesh, plan, state).run()
        return before, digest(state.adapters()), state.iteration

    (before, after, iteration), other = SimulatedMesh(2).run(train)
    assert (before, after, iteration) == other
    assert before == after
    assert iteration == 1


def test_accumulated_iterations_are_one_update_of_all_their_rows(tmp_path: Path) -> None:
    state, plan = prepare(tmp_path)
    gradients = nn.value_and_grad(state.model, trainer.default_loss)
    for first in (0, 3):
        shares = [plan.train.share(first + i, range) for i in range(3)]
        rows = [row for share in shares if share is not None for row in rows_of(share)]
        share = pad(rows, max_length=64)
        assert share is not None
        _, grads = gradients(state.model, mx.array(share.tokens), mx.array(share.spans))
        state.optimizer.update(state.model, grads)
    expected = {name: np.array(x) for name, x in state.adapters().items()}

    trainers = run(tmp_path, 2, iters=7, accumulate=3)

    assert_close(expected, adapters_in(tmp_path))
    assert [info["iteration"] for info in trainers[0].said.losses] == [3, 6]
    assert trainers[0].state is not None
    assert int(trainers[0].state.optimizer.step.item()) == 2


def rows_of(share: LocalBatch) -> list[tuple[list[int], int]]:
    pairs = zip(share.tokens.tolist(), share.spans.tolist(), strict=True)
    return [(tokens[:end], start) for tokens, (start, end) in pairs]


def test_reports_and_validations_are_those_of_all_ranks(tmp_path: Path) -> None:
    one = run(tmp_path / "one", 1)[0].said
    many = [trainer.said for trainer in run(tmp_path / "many", 3)]

    for said in many[1:]:
        assert said.validations == [
            {**info, "val_time": said.validations[i]["val_time"]}
            for i, info in enumerate(many[0].validations)
        ]
        assert [x["train_loss"] for x in said.losses] == [x["train_loss"] for x in many[0].losses]
    assert [info["iteration"] for info in one.validations] == [0, 1, 3, 5]  # as mlx-lm counts
    assert [info["iteration"] for info in one.losses] == [2, 4, 6]
    for key, ours, theirs in (
        ("val_loss", many[0].validations, one.validations),
        ("train_loss", many[0].losses, one.losses),
        ("trained_tokens", many[0].losses, one.losses),
    ):
        assert [x[key] for x in ours] == pytest.approx([x[key] for x in theirs], rel=1e-5)
    assert one.losses[-1]["train_loss"] < one.losses[0]["train_loss"]


def test_each_rank_saves_as_mlx_lm_does(tmp_path: Path) -> None:
    end, _ = run_apart(tmp_path, [0, 1, 2], iters=4)

    for machine in range(3):
        folder = tmp_path / f"mac-{machine}"
        assert sorted(path.name for path in folder.iterdir()) == [
            *("0000002_adapters.safetensors", "0000004_adapters.safetensors"),
            *("adapters.safetensors", "pmesh_checkpoints"),
        ]
        assert digest(adapters_in_mlx(folder)) == end


@pytest.mark.parametrize("full", [{0}, {1}, {0, 1}])
def test_a_run_ends_well_if_one_machine_has_room_for_the_adapters(
    tmp_path: Path,
    faults: Faults,
    capsys: pytest.CaptureFixture[str],
    full: set[int],
) -> None:

    def saved(save: Real, state: State, folder: Path, *, numbered: bool) -> None:
        if int(folder.name[-1]) in full:
            raise pmesh.UsageError(f"can't write {folder}: it is full")
        save(state, folder, numbered=numbered)

    faults.around(State, "save_adapters", saved)
    if len(full) == 2:
        with pytest.raises(ExceptionGroup) as e:
            run_apart(tmp_path, [0, 1], iters=4)
        assert [type(error) for error in e.value.exceptions] == [pmesh.UsageError] * 2
    else:
        end, _ = run_apart(tmp_path, [0, 1], iters=4)
        (other,) = {0, 1} - full
        assert digest(adapters_in_mlx(tmp_path / f"mac-{other}")) == end
        said = capsys.readouterr().out
        assert said.count("[WARNING] Iter 4: can't write") == 2
        assert said.count("The adapters are not on this machine") == 1


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_step_in_which_a_rank_is_lost_is_taken_again_with_all_its_rows(
    tmp_path: Path, lost: int, faults: Faults
) -> None:
    run(tmp_path / "undisturbed", 3)
    simulated = SimulatedMesh(3, on_loss="continue")
    ready = threading.Barrier(3)

    def average(averaged: Real, mesh: pmesh.Mesh, grads: Any, **options: Any) -> Any:  # noqa: ANN401
        if mesh.step == 3 and mesh.size == 3:
            ready.wait()
            if mesh.rank == lost:
                simulated.lose(lost)
        return averaged(mesh, grads, **options)

    faults.around(pmesh.Mesh, "average_gradients", average)

    results = simulated.run(lambda mesh: LoraRank(mesh, tmp_path / "disturbed").train())

    assert len(results) == 2
    assert len(set(results)) == 1
    assert_close(adapters_in(tmp_path / "undisturbed"), adapters_in(tmp_path / "disturbed"))


def test_a_validation_in_which_a_rank_is_lost_is_made_again_with_all_its_rows(
    tmp_path: Path, faults: Faults
) -> None:
    undisturbed = run(tmp_path / "undisturbed", 3)[0].said.validations
    simulated = SimulatedMesh(3, on_loss="continue")
    ready = threading.Barrier(3)

    def reduced(all_reduce: Real, mesh: pmesh.Mesh, x: Any, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        if mesh.step == 4 and mesh.size == 3:  # validates before its step
            ready.wait()
            if mesh.rank == 2:
                simulated.lose(2)
        return all_reduce(mesh, x, *arguments, **options)

    faults.around(pmesh.Mesh, "all_reduce", reduced)

    def train(mesh: pmesh.Mesh) -> LoraRank:
        one = LoraRank(mesh, tmp_path / "disturbed")
        one.train()
        return one

    validations = simulated.run(train)[0].said.validations

    assert [v["iteration"] for v in validations] == [v["iteration"] for v in undisturbed]
    assert [v["val_loss"] for v in validations] == pytest.approx(
        [v["val_loss"] for v in undisturbed], rel=1e-5
    )


def join_late(
    simulated: SimulatedMesh, monkeypatch: pytest.MonkeyPatch, train: Callable[[pmesh.Mesh], Any]
) -> Callable[[], Any]:
    """A trainer that comes at the others' fifth step; returns what waits for its result."""
    asks_to_enter = threading.Event()
    sync, average = pmesh.Mesh.sync, pmesh.Mesh.average_gradients
    pool = ThreadPoolExecutor(1)
    calls: list[Future[Any]] = []

    def come() -> Any:  # noqa: ANN401
        with simulated.connect() as mesh:
            return train(mesh)

    def synced(mesh: pmesh.Mesh, *arguments: Any) -> Any:  # noqa: ANN401
        if mesh.rank < 0:
            asks_to_enter.set()
        return sync(mesh, *arguments)

    def averaged(mesh: pmesh.Mesh, grads: Any, **options: Any) -> Any:  # noqa: ANN401
        if mesh.step == 5 and mesh.rank == 0:
            calls.append(pool.submit(come))
            asks_to_enter.wait()
        return average(mesh, grads, **options)

    monkeypatch.setattr(pmesh.Mesh, "sync", synced)
    monkeypatch.setattr(pmesh.Mesh, "average_gradients", averaged)

    def result() -> Any:  # noqa: ANN401
        with pool:
            return calls[0].result()

    return result


LONG: dict[str, Any] = {"iters": 150, "every": 50, "rate": 0.01}
"""A newcomer of the fifth step has entered long before the end."""


@pytest.mark.slow
def test_a_newcomer_goes_on_with_the_state_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated = SimulatedMesh(2, on_loss="continue")
    newcomer = join_late(
        simulated,
        monkeypatch,
        lambda mesh: LoraRank(mesh, tmp_path / "newcomer").train(model_seed=0, **LONG),
    )

    results = simulated.run(lambda mesh: LoraRank(mesh, tmp_path / "first").train(**LONG))

    assert {newcomer()} == set(results) == {digest(adapters_in_mlx(tmp_path / "newcomer"))}


@pytest.mark.slow
def test_a_newcomer_with_other_options_is_told_which_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated = SimulatedMesh(2, on_loss="continue")
    other = {"terms": {"--batch-size": "7"}, "rank": 3}
    newcomer = join_late(
        simulated,
        monkeypatch,
        lambda mesh: LoraRank(mesh, tmp_path / "newcomer").train(**LONG, **other),
    )

    results = simulated.run(lambda mesh: LoraRank(mesh, tmp_path / "first").train(**LONG))

    with pytest.raises(pmesh.UsageError, match=r"--batch-size is 5 on simulated and 7 on"):
        newcomer()
    assert len(set(results)) == 1


def test_those_who_begin_with_other_options_are_told_which(tmp_path: Path) -> None:
    def train(mesh: pmesh.Mesh) -> None:
        LoraRank(mesh, tmp_path).train(terms={"--iters": str(mesh.rank)})

    with pytest.raises(pmesh.UsageError, match=r"--iters is 0 on simulated and 1 on simulated"):
        SimulatedMesh(2).run(train)


ADAM: dict[str, Any] = {"optimizer": "adam", "rate": 0.01}


@pytest.fixture
def even_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where bits are compared: rows by measured speed are added in another order."""
    monkeypatch.setenv("PMESH_SHARES", "even")


def run_apart(base: Path, machines: Sequence[int], **options: Any) -> tuple[str, list[LoraRank]]:  # noqa: ANN401
    """Train on machines with a folder each; the hash of the adapters, and the trainers."""

    def train(mesh: pmesh.Mesh) -> tuple[str, LoraRank]:
        one = LoraRank(mesh, base / f"mac-{machines[mesh.rank]}")
        return one.train(**(ADAM | options)), one

    base.mkdir(exist_ok=True)
    results = SimulatedMesh(len(machines), on_loss="continue").run(train)
    (end,) = {end for end, _ in results}
    return end, [trainer for _, trainer in results]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_after_any_one_machine_is_lost_with_its_disk_the_others_go_on_from_the_last_save(
    tmp_path: Path, lost: int
) -> None:
    run_apart(tmp_path / "whole", [0, 1, 2])
    run_apart(tmp_path / "stopped", [0, 1, 2], iters=4)
    shutil.rmtree(tmp_path / "stopped" / f"mac-{lost}")
    left = [machine for machine in range(3) if machine != lost]

    _, trainers = run_apart(tmp_path / "stopped", left, resumes=True)

    assert [info["iteration"] for info in trainers[0].said.losses] == [6]
    assert_close(
        adapters_in(tmp_path / "whole" / "mac-0"),
        adapters_in(tmp_path / "stopped" / f"mac-{left[0]}"),
    )


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.usefixtures("even_shares")
def test_with_a_new_machine_in_the_place_of_a_lost_one_the_weights_are_the_same_bits(
    tmp_path: Path, lost: int
) -> None:
    """Of two ranks: three may add up in another order in the next run."""
    whole, _ = run_apart(tmp_path / "whole", [0, 1])
    run_apart(tmp_path / "stopped", [0, 1], iters=4)
    shutil.rmtree(tmp_path / "stopped" / f"mac-{lost}")

    end, trainers = run_apart(tmp_path / "stopped", [0, 1], resumes=True)

    assert end == whole
    assert [info["iteration"] for info in trainers[0].said.losses] == [6]


@pytest.mark.slow
@pytest.mark.usefixtures("even_shares")
def test_a_run_goes_on_from_the_newest_state_that_any_machine_has(tmp_path: Path) -> None:
    whole, _ = run_apart(tmp_path, [0, 1])
    run_apart(tmp_path, [2, 3], iters=4)
    run_apart(tmp_path, [4, 3], iters=4, resumes=True)
    run_apart(tmp_path, [4], iters=2)

    end, trainers = run_apart(tmp_path, [4, 3], resumes=True)

    assert end == whole
    assert [info["iteration"] for info in trainers[0].said.losses] == [6]


@pytest.mark.usefixtures("even_shares")
def test_what_compression_has_left_out_is_part_of_what_is_saved(tmp_path: Path) -> None:
    whole, _ = run_apart(tmp_path / "whole", [0, 1], compression="int8")
    run_apart(tmp_path / "stopped", [0, 1], iters=4, compression="int8")

    end, _ = run_apart(tmp_path / "stopped", [0, 1], resumes=True, compression="int8")

    assert end == whole


def test_who_saves_or_resumes_weights_that_are_not_finite_is_told_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_apart(tmp_path, [0, 1], iters=4, rate=1e38)
    assert "Iter 4: the weights are not finite" in capsys.readouterr().out

    run_apart(tmp_path, [0, 1], iters=6, resumes=True)
    assert (
        "are not finite: the training has diverged. Begin anew with --no-resume"
        in (
            capsys.readouterr().out.partition("Resuming after iteration 4")[2].partition("Iter ")[0]
        )
    )


def test_of_no_batches_there_is_no_validation(tmp_path: Path) -> None:
    trainers = run(tmp_path, 2, val_batches=0)

    assert [trainer.said.validations for trainer in trainers] == [[], []]
    assert trainers[0].said.losses


def test_to_begin_anew_on_some_machines_only_is_refused(tmp_path: Path) -> None:
    def train(mesh: pmesh.Mesh) -> None:
        LoraRank(mesh, tmp_path).train(resumes=mesh.rank == 0)

    with pytest.raises(pmesh.UsageError, match=r"--no-resume is not given on .* and given on"):
        SimulatedMesh(2).run(train)


def test_if_rank_0_is_lost_before_it_has_saved_the_next_one_saves(
    tmp_path: Path, faults: Faults
) -> None:
    simulated = SimulatedMesh(2, on_loss="continue")

    def saved(save: Real, state: State, folder: Path, *, numbered: bool) -> None:
        if folder.name == "rank-0" and not numbered:
            simulated.lose(0)
        else:
            save(state, folder, numbered=numbered)

    faults.around(State, "save_adapters", saved)
    results = simulated.run(
        lambda mesh: LoraRank(mesh, tmp_path / f"rank-{mesh.rank}").train(every=100)
    )

    assert results == [digest(adapters_in_mlx(tmp_path / "rank-1"))]
    assert not (tmp_path / "rank-0" / "adapters.safetensors").exists()


def test_random_numbers_begin_anew_with_each_rank_and_iteration() -> None:
    model = make_model(dropout=0.5)
    ones = trees.tree_map(mx.ones_like, model.trainable_parameters())
    model.update(ones)  # a fresh lora_b is zero, and hides what is dropped
    rows = pad([(range(30), 0)], max_length=64)
    gradients = Gradients(model, trainer.default_loss)

    losses = [gradients.of([rows], [seed])[0] for seed in (1, 2, 1)]

    assert losses[0] == losses[2] != losses[1]
    seeds = {seed_of(0, iteration, rank) for iteration in range(9) for rank in range(9)}
    assert len(seeds) == 81


def test_a_run_of_even_shares_with_dropout_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMESH_SHARES", "even")
    for name in ("once", "again"):
        run(tmp_path / name, 2, dropout=0.5)

    assert_close(adapters_in(tmp_path / "once"), adapters_in(tmp_path / "again"), within=0)


@pytest.mark.parametrize("compression", ["int8", "bf16"])
def test_compressed_gradients_give_all_ranks_the_same_bits(
    tmp_path: Path, compression: str
) -> None:
    said = run(tmp_path, 2, compression=compression, iters=20, every=10)[0].said

    assert said.losses[-1]["train_loss"] < said.losses[0]["train_loss"]
