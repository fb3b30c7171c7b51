"""What a user types wrong: one sentence that names what, where, and what to do."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pmesh
from pmesh.launches.client.launched import MLXLaunch
from pmesh.mlx_lm import session, train
from pmesh.mlx_lm.libraries import lora, mx
from pmesh.mlx_lm.session import parse
from pmesh.mlx_lm.training import digest
from tests.worlds.faults import Faults
from tests.worlds.watched_agent import watched_agent
from tools.lora import make_data, make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with watched_agent(tmp_path / "home") as agent:
        monkeypatch.setenv("PMESH_HOME", str(agent.home))
        yield


def words(model: Path, data: Path, *more: str) -> list[str]:
    return [
        *("--train", "--model", str(model), "--data", str(data), "--iters", "2"),
        *("--num-layers", "2", "--batch-size", "2", "--val-batches", "1", *more),
    ]


def test_it_trains_and_tests_as_mlx_lm_does_and_goes_on_where_it_was(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stands = lora.train, lora.run, sys.argv[:]

    assert train(words(model, data, "--test", "--test-batches", "1")) == 0

    said = capsys.readouterr().out
    assert "Iter 0: 1 rank, " in said
    assert "Iter 2: Val loss " in said
    assert "Test loss " in said
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert config["num_layers"] == 2
    lora.load(str(model), adapter_path=str(tmp_path / "adapters"))
    first = digest(mx.load(str(tmp_path / "adapters" / "adapters.safetensors")))
    assert f"weights {first}" in said
    assert (lora.train, lora.run, sys.argv) == stands

    assert train([*words(model, data), "--iters", "3"]) == 0
    said = capsys.readouterr().out
    assert "Resuming after iteration 2 of 3, from adapters/pmesh_checkpoints;" in said
    assert "Iter 1:" not in said

    assert train([*words(model, data), "--no-resume"]) == 0
    said = capsys.readouterr().out
    assert "Resuming" not in said
    assert f"weights {first}" in said


def refused(arguments: list[str]) -> str:
    with pytest.raises(pmesh.UsageError) as e:
        train(arguments)
    assert "\n" not in str(e.value)
    return str(e.value)


def test_without_an_agent_nothing_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path, data: Path
) -> None:
    monkeypatch.setenv("PMESH_HOME", str(tmp_path / "nobody"))

    with pytest.raises(pmesh.AgentNotRunning, match="pmesh up"):
        train(words(model, data))


def test_without_mlx_lm_the_error_says_how_to_install_it(
    faults: Faults, model: Path, data: Path
) -> None:
    faults.instead(importlib.util, "find_spec", lambda _: None)
    assert "pip install 'mlx-lm>=0.32'" in refused(words(model, data))


def test_a_compression_that_does_not_exist_is_refused_first(
    monkeypatch: pytest.MonkeyPatch, model: Path, data: Path
) -> None:
    launch = MLXLaunch(job="j", wait_for=1, compression="zip")
    for name, value in launch.variables().items():
        monkeypatch.setenv(name, value)

    with pytest.raises(pmesh.UnsupportedCompression, match="no compression 'zip'"):
        train(words(model, data))


def test_a_folder_without_a_model_is_named(tmp_path: Path, data: Path) -> None:
    said = refused(words(tmp_path / "nothing", data))
    assert said.startswith(f"can't load the model '{tmp_path / 'nothing'}': ")
    assert "--model takes a folder with config.json" in said


def test_defaults_of_mlx_lm_that_can_not_be_loaded_are_said_to_be_its_defaults(
    model: Path,
) -> None:
    assert "mlx-lm's default as there is no --model" in refused(["--train"])
    said = refused(["--train", "--model", str(model)])
    assert "can't load the data 'mlx-community/WikiSQL', mlx-lm's default as there is no" in said
    assert "train.jsonl" in said


def test_a_folder_without_training_data_is_named(tmp_path: Path, model: Path) -> None:
    (tmp_path / "empty").mkdir()
    said = refused(words(model, tmp_path / "empty"))
    assert f"can't load the data '{tmp_path / 'empty'}'" in said
    assert "Training set not found or empty" in said


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--iters", "0"], "--iters is at least 1, not 0"),
        (["--steps-per-eval", "0"], "--steps-per-eval is at least 1, not 0"),
        (["--grad-accumulation-steps", "3"], "ends before the first update"),
        (["--batch-size", "481"], "the training set has 480 rows, and --batch-size 481 asks"),
        (["--batch-size", "49"], "the validation set has 48 rows, and --batch-size 49 asks"),
        (["--num-layers", "9"], "Requested to train 9 layers but the model only has 4"),
        (["--adapter-path", "file"], "--adapter-path file is a file: name a folder"),
        (["--config", "nothing.yaml"], "can't read the options: FileNotFoundError"),
        (["--report-to", "fax"], "can't report to 'fax', from --report-to: ValueError: fax"),
    ],
)
def test_options_that_can_not_be_are_named(
    model: Path, data: Path, tmp_path: Path, more: list[str], says: str
) -> None:
    (tmp_path / "file").touch()
    assert says in refused([*words(model, data), *more])


def test_adapters_in_the_copy_of_one_launch_are_refused(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMESH_COPY", str(tmp_path))
    assert "--adapter-path adapters lies in this launch's own copy" in refused(words(model, data))
    monkeypatch.setenv("PMESH_COPY", str(tmp_path / "copy"))
    monkeypatch.setenv("HOME", str(tmp_path / "anna"))
    assert parse([*words(model, data), "--adapter-path", "~/x"]).adapter_path.endswith("/anna/x")
    with pytest.raises(pmesh.UsageError, match="no home directory of ~no-one"):
        parse([*words(model, data), "--adapter-path", "~no-one/x"])


def test_without_train_there_is_nothing_to_do(model: Path, data: Path) -> None:
    assert "give --train" in refused(words(model, data)[1:])


def test_a_folder_with_the_state_of_another_model_is_refused(
    model: Path, data: Path, tmp_path: Path
) -> None:
    assert train(words(model, data)) == 0
    other = make_model(tmp_path / "other", seed=99)

    said = refused(words(other, data))

    assert said.startswith("adapters/pmesh_checkpoints has the state of another run: base model")
    assert "--adapter-path, or --no-resume" in said


def test_the_job_is_what_pmesh_mlx_has_named(
    monkeypatch: pytest.MonkeyPatch, faults: Faults, model: Path, data: Path
) -> None:
    joined: list[tuple[object, ...]] = []

    class HasJoined(Exception):  # noqa: N818 - a state
        pass

    def connect(*arguments: object, **_: object) -> None:
        joined.append(arguments)
        raise HasJoined

    faults.instead(session, "connect", connect)
    for launch in (None, MLXLaunch(job="mine", wait_for=3)):
        if launch is not None:
            for name, value in launch.variables().items():
                monkeypatch.setenv(name, value)
        with pytest.raises(HasJoined):
            train(words(model, data))
    assert [arguments[:2] for arguments in joined] == [("mlx_lm.lora", 1), ("mine", 3)]
