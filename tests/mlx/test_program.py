"""What `pmesh mlx` becomes runs a program as Python would, and leaves its job as it ended."""

import sys
from pathlib import Path

import pytest

from pmesh.mlx import program
from tests.worlds.faults import Faults
from tests.worlds.system import be_called

SOURCE = "import sys, json; print(json.dumps([__name__, sys.argv, sys.path[0]]))\n"


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch, faults: Faults) -> list[BaseException | None]:
    """How the job was left."""
    found: list[BaseException | None] = []
    faults.pretend(program, "apply_patches", lambda: None)
    faults.pretend(program, "leave", lambda crashed=None: found.append(crashed))
    be_called(monkeypatch, *sys.argv)
    monkeypatch.setattr(sys, "path", ["here", *sys.path])
    return found


def test_a_script_finds_its_neighbours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], left: list[BaseException | None]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SOURCE)
    program.run("script", str(script), ["--lr", "1"])
    folder = tmp_path.resolve()
    assert capsys.readouterr().out == f'["__main__", ["{script}", "--lr", "1"], "{folder}"]\n'
    assert left == [None]


def test_a_module_is_found_from_where_the_user_is(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    left: list[BaseException | None],
) -> None:
    (tmp_path / "a_program_of_mine.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    program.run("module", "a_program_of_mine", ["x"])
    said = capsys.readouterr().out
    assert said.startswith('["__main__", ["')
    assert 'a_program_of_mine.py", "x"], ' in said
    assert left == [None]


def test_code_is_run_as_it_stands(
    capsys: pytest.CaptureFixture[str], left: list[BaseException | None]
) -> None:
    program.run("code", SOURCE, ["x"])
    assert capsys.readouterr().out == '["__main__", ["-c", "x"], ""]\n'
    assert left == [None]


@pytest.mark.parametrize("code", ["0", "None", ""])
def test_an_exit_without_an_error_is_no_crash(code: str, left: list[BaseException | None]) -> None:
    with pytest.raises(SystemExit):
        program.run("code", f"import sys; sys.exit({code})", [])
    assert left == [None]


@pytest.mark.parametrize("how", ["import sys; sys.exit(3)", "1 / 0", "raise KeyboardInterrupt"])
def test_any_other_end_is_a_crash(how: str, left: list[BaseException | None]) -> None:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - any
        program.run("code", how, [])
    assert left == [caught.value]
