"""What pip calls this package, and the project on PyPI that has its name."""

import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest

import pmesh
from pmesh.installed import DISTRIBUTION, warn_of_namesake

ROOT = Path(__file__).parents[1]


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text())["project"]
    assert (DISTRIBUTION, pmesh.__version__) == (project["name"], project["version"])


def test_a_folder_of_ours_alone_gives_no_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_namesake(str(tmp_path))


def test_modules_of_the_other_project_among_ours_are_named(tmp_path: Path) -> None:
    (tmp_path / "pm.py").touch()
    with pytest.warns(RuntimeWarning, match="Particle Mesh, is called pmesh on PyPI") as caught:
        warn_of_namesake(str(tmp_path))
    assert str(tmp_path) in str(caught[0].message)


def test_the_command_says_so_where_the_other_project_was_installed_last(tmp_path: Path) -> None:
    ours = tmp_path / "pmesh"
    ours.mkdir()
    for file in (*(ROOT / "pmesh").glob("*.py"), ROOT / "pmesh" / "cli"):
        (ours / file.name).symlink_to(file)
    ours.joinpath("__init__.py").unlink()
    ours.joinpath("__init__.py").write_text("class ParticleMesh: pass\n")
    program = [sys.executable, "-c", "from pmesh.cli import main; main()", "version"]
    ran = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert f"installed in the same folder, {ours}: 'pip uninstall" in ran.stderr
