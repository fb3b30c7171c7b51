"""`pmesh init`. That the examples train is shown by tests/client/test_examples.py."""

import sys
from pathlib import Path

import pytest

from pmesh.cli import init
from pmesh.cli.app import run
from tests.worlds.system import be_on

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


@pytest.mark.parametrize(("platform", "package"), [("darwin", "mlx"), ("linux", "'mlx[cpu]'")])
def test_what_is_named_has_mlx_s_own_library_on_each_system(
    platform: str,
    package: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    installed(monkeypatch, "sklearn")
    be_on(monkeypatch, platform)
    assert run(["init", "--with", "mlx"]) == 0
    assert capsys.readouterr().err.endswith(f": pip install {package}\n")


@pytest.mark.skipif(sys.platform != "linux", reason="macOS refuses such names")
def test_a_script_may_have_a_name_that_is_not_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "numpy", "sklearn")
    assert run(["init", "a\udcffb.py"]) == 0
    assert "a�b.py" in Path("a\udcffb.py").read_text(encoding="utf-8")


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
