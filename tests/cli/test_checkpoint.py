"""`pmesh checkpoint`: looks into the folders of two ranks."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import pmesh
from pmesh.cli.app import run
from pmesh.testing import SimulatedMesh


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Each has one part of two."""

    def train(mesh: pmesh.Mesh) -> None:
        with pmesh.Checkpoints(tmp_path / str(mesh.rank), mesh, replicas=1) as checkpoints:
            for step in (10, 20):
                checkpoints.save({"w": np.full((2, 3), step), "b": [np.ones(5)]}, step)

    SimulatedMesh(2).run(train)
    return [str(tmp_path / "0"), str(tmp_path / "1")]


def test_list_shows_each_step_and_how_much_of_it_is_here(
    folders: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["checkpoint", "list", folders[0]]) == 0
    assert capsys.readouterr().out.count("1 of 2") == 2
    assert run(["checkpoint", "list", *folders]) == 0
    assert capsys.readouterr().out.count("2 of 2") == 2


def test_show_lists_the_arrays_and_where_they_are(
    folders: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["checkpoint", "show", folders[0], "--step", "10"]) == 0
    out = capsys.readouterr().out
    assert "step 10, saved by simulated" in out
    assert "2 x 3" in out
    assert "elsewhere" in out


def test_export_writes_the_latest_step_as_one_file(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "whole.safetensors"
    assert run(["checkpoint", "export", *folders, "--to", str(to)]) == 0
    assert f"step 20 is in {to}: 2 arrays\n" in capsys.readouterr().out
    arrays = load_file(to)
    np.testing.assert_array_equal(arrays["w"], np.full((2, 3), 20))
    np.testing.assert_array_equal(arrays["b.0"], np.ones(5))


def test_export_of_one_array_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def train(mesh: pmesh.Mesh) -> None:
        with pmesh.Checkpoints(tmp_path / "one", mesh) as checkpoints:
            checkpoints.save({"w": np.ones(3)}, 1)

    SimulatedMesh(1).run(train)
    assert run(["checkpoint", "export", str(tmp_path / "one"), "--to", str(tmp_path / "x")]) == 0
    assert capsys.readouterr().out.endswith(": 1 array\n")


def test_export_names_the_machines_that_have_what_is_missing(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["checkpoint", "export", folders[0], "--to", str(tmp_path / "x")]) == 1
    assert "step 20 lacks part 2 of 2, saved by simulated" in capsys.readouterr().err


def test_a_damaged_part_can_not_be_exported(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in tmp_path.glob("0/save-*/part-*"):
        part.write_bytes(part.read_bytes()[:-1])
    assert run(["checkpoint", "export", *folders, "--to", str(tmp_path / "x")]) == 1
    assert "is damaged" in capsys.readouterr().err


def test_a_folder_whose_manifests_are_damaged_asks_for_that_of_another_machine(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for manifest in tmp_path.glob("0/save-*/rank-*.json"):
        manifest.write_bytes(manifest.read_bytes()[:100])
    assert run(["checkpoint", "list", folders[0]]) == 1
    said = capsys.readouterr().err
    assert "json is damaged" in said
    assert "can be used; copy the folder of another machine" in said
    assert run(["checkpoint", "list", *folders]) == 0


def test_a_folder_or_step_without_a_save_is_named(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["checkpoint", "list"]) == 1
    assert "name a folder: what the script gives to pmesh.Checkpoints" in capsys.readouterr().err
    assert run(["checkpoint", "list", str(tmp_path / "none")]) == 1
    said = capsys.readouterr().err
    assert f"no checkpoint in {tmp_path / 'none'} can be used; there is no such folder; " in said
    assert run(["checkpoint", "list", "~no-one/run"]) == 2
    assert "~no-one/run: the system knows no home directory of ~no-one" in capsys.readouterr().err
    assert run(["checkpoint", "show", *folders, "--step", "5"]) == 1
    assert "there is no step 5; there are 20, 10" in capsys.readouterr().err
