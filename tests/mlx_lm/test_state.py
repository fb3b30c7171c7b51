"""The state of a run: what it resumes from, what is refused, and the file of the adapters."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pmesh.errors import UsageError
from pmesh.mlx_lm.libraries import trees
from pmesh.mlx_lm.state import State, replace
from pmesh.mlx_lm.terms import MODEL
from pmesh.mlx_lm.training import digest
from tests.mlx_lm.lora import prepare
from tests.worlds.faults import Faults


def trained_state(folder: Path) -> State:
    state, _ = prepare(folder, optimizer="adam")
    ones = {"layers": state.model.trainable_parameters()["model"]["layers"]}
    state.optimizer.update(state.model, {"model": ones})
    state.iteration, state.validated, state.trained_tokens = 7, 6, 1234
    return state


def test_a_run_resumes_with_optimizer_and_position_but_its_own_learning_rate(
    tmp_path: Path,
) -> None:
    saved = trained_state(tmp_path)
    other, _ = prepare(tmp_path, optimizer="adam", model_seed=3, rate=0.25)

    one = optimizer_of(saved)
    other.resume(saved.tree(), tmp_path)

    assert digest(other.adapters()) == digest(saved.adapters())
    assert (other.iteration, other.validated, other.trained_tokens) == (7, 6, 1234)
    two = optimizer_of(other)
    assert float(two.pop("learning_rate")) == 0.25
    assert float(one.pop("learning_rate")) == pytest.approx(0.1)
    assert one.keys() == two.keys()
    assert all(np.array_equal(one[name], two[name]) for name in one)


def optimizer_of(state: State) -> dict[str, Any]:
    flat = trees.tree_flatten(state.optimizer.state)
    return {name: np.array(x) for name, x in flat}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rank": 3}, r"another run: .*lora_a\.m: \(32, 3\) float32 here, \(32, 4\) float32 on"),
        ({"terms": {MODEL: "another"}}, r"base model was nothing, and is another here"),
    ],
)
def test_the_state_of_another_run_is_refused_by_name(
    tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    saved = trained_state(tmp_path).tree()
    state, _ = prepare(tmp_path, **{"optimizer": "adam"} | options)

    with pytest.raises(UsageError, match=says) as e:
        state.resume(saved, tmp_path)
    assert str(tmp_path) in str(e.value)
    assert "--no-resume" in str(e.value)


def test_checkpoints_of_another_program_are_refused(tmp_path: Path) -> None:
    state, _ = prepare(tmp_path)

    for saved in ({"weights": np.zeros(3)}, [1, 2]):
        with pytest.raises(UsageError, match=r"checkpoints of another program: .*--no-resume"):
            state.resume(saved, tmp_path)


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "adapters.safetensors"
    path.write_text("the old one")

    def write(new: Path) -> None:
        new.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    with pytest.raises(UsageError, match=r"can't write .*adapters\.safetensors: .*No space left"):
        replace(path, write)
    assert path.read_text() == "the old one"
    assert [other.name for other in tmp_path.iterdir()] == [path.name]


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, faults: Faults) -> None:
    path, synced = tmp_path / "adapters.safetensors", list[bool]()
    faults.instead(os, "fsync", lambda _: synced.append(path.exists()))
    state, _ = prepare(tmp_path)

    state.save_adapters(tmp_path, numbered=False)

    assert synced == [False]
    assert path.exists()
