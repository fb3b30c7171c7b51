"""The state of a run on a disk: what is read back, and what is refused."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pmesh.errors import UsageError
from pmesh.mlx_lm.files import load_arrays, replace, save_arrays
from pmesh.mlx_lm.libraries import mx, trees
from pmesh.mlx_lm.state import State
from pmesh.mlx_lm.terms import MODEL
from pmesh.mlx_lm.training import digest
from tests.worlds.lora import prepare


def trained_state(folder: Path) -> State:
    state, _ = prepare(folder, optimizer="adam")
    ones = {"layers": state.model.trainable_parameters()["model"]["layers"]}
    state.optimizer.update(state.model, {"model": ones})
    state.iteration, state.validated, state.trained_tokens = 7, 6, 1234
    return state


def test_a_state_that_was_saved_is_loaded_with_optimizer_and_position(tmp_path: Path) -> None:
    saved = trained_state(tmp_path)
    saved.save(tmp_path, numbered=False)

    loaded, _ = prepare(tmp_path, optimizer="adam", model_seed=3)

    assert loaded.load(tmp_path)
    assert digest(loaded.adapters()) == digest(saved.adapters())
    assert (loaded.iteration, loaded.validated, loaded.trained_tokens) == (7, 6, 1234)
    one, other = (optimizer_of(state) for state in (saved, loaded))
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)


def optimizer_of(state: State) -> dict[str, Any]:
    flat = trees.tree_flatten(state.optimizer.state)
    return {name: np.array(x) for name, x in flat}


def test_a_folder_without_a_state_begins_anew(tmp_path: Path) -> None:
    state, _ = prepare(tmp_path)
    assert not state.load(tmp_path)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rank": 3}, r"its optimizer\..*lora_a.* is \(32, 4\) of .*, and this run's \(32, 3\)"),
        ({"optimizer": "sgd"}, r"its optimizer\.model.* is .*, and this run's not there"),
        ({"terms": {MODEL: "another"}}, r"base model was nothing, and is another here"),
    ],
)
def test_the_state_of_another_run_is_refused_by_name(
    tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    trained_state(tmp_path).save(tmp_path, numbered=False)
    state, _ = prepare(tmp_path, **{"optimizer": "adam"} | options)

    with pytest.raises(UsageError, match=says) as e:
        state.load(tmp_path)
    assert str(tmp_path / "pmesh_state.safetensors") in str(e.value)
    assert "--no-resume" in str(e.value)


def test_a_torn_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    save_arrays(path, {"x": mx.ones(100)})
    path.write_bytes(path.read_bytes()[:50])

    with pytest.raises(UsageError, match=r"state\.safetensors is no state of a run"):
        load_arrays(path)


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "adapters.safetensors"
    save_arrays(path, {"x": mx.ones(3)}, {"iteration": 1})

    def write(new: Path) -> None:
        new.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    with pytest.raises(UsageError, match=r"can't write .*adapters\.safetensors: .*No space left"):
        replace(path, write)
    loaded = load_arrays(path)
    assert loaded is not None
    assert loaded[0]["x"].tolist() == [1, 1, 1]
    assert loaded[1] == {"iteration": 1}
    assert [other.name for other in tmp_path.iterdir()] == [path.name]


def test_a_file_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "adapters.safetensors", list[bool]()
    monkeypatch.setattr(os, "fsync", lambda _: synced.append(path.exists()))

    save_arrays(path, {"x": mx.ones(3)})

    assert synced == [False]
    assert path.exists()
