"""`pmesh init`. That the examples train is shown by tests/client/test_examples.py."""

from pathlib import Path

import pytest

from pmesh.cli import init
from pmesh.cli.app import run

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def installed(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    monkeypatch.setattr(init, "find_spec", lambda module: module if module in modules else None)


@pytest.mark.parametrize("library", ["mlx", "torch", "numpy"])
def test_the_script_is_an_example_that_names_itself_and_calls_next_what_to_type(
    library: init.Library, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(monkeypatch, library, "sklearn")

    assert run(["init", "my digits.py", "--with", library]) == 0

    name = init.EXAMPLES[library]
    example = (EXAMPLES / name).read_text()
    assert Path("my digits.py").read_text() == example.replace(name, "my digits.py")
    said = capsys.readouterr()
    assert "pmesh run --on all --sync -- python 'my digits.py'  " in said.out
    assert said.err == ""


def test_the_first_library_that_is_installed_is_taken_and_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(monkeypatch, "torch", "numpy")

    assert run(["init"]) == 0

    assert "import torch" in Path("train.py").read_text()
    assert capsys.readouterr().err == (
        "it needs what is not installed here: pip install scikit-learn\n"
    )


@pytest.mark.parametrize(
    ("file", "error"),
    [
        ("there.py", "there.py is there already; name another file: pmesh init FILE"),
        ("none/a.py", "can't write none/a.py: No such file or directory; name another file"),
    ],
)
def test_a_file_that_is_there_or_can_not_be_is_an_error(
    file: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("there.py").write_text("mine")
    assert run(["init", file, "--with", "numpy"]) == 1
    assert capsys.readouterr().err == f"UsageError: {error}\n"
    assert Path("there.py").read_text() == "mine"


def test_an_installed_pmesh_has_the_examples_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init, "_PACKAGE", tmp_path)
    (tmp_path / "cli" / "examples").mkdir(parents=True)
    (tmp_path / "cli" / "examples" / "train_numpy.py").write_text("x")
    assert init.example("numpy") == "x"
