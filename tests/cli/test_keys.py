"""`pmesh key`."""

import io
from pathlib import Path

import pytest

from pmesh.agent.key_files import load_mesh_key
from pmesh.cli.app import run
from pmesh.core.identity import MeshKey, mesh_key_from_text, mesh_key_text

KEY = MeshKey(bytes(range(32)))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PMESH_HOME", str(tmp_path))
    monkeypatch.delenv("PMESH_KEY", raising=False)
    return tmp_path


def test_a_new_key_is_printed_as_the_command_for_the_others(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["key", "new"]) == 0
    key = load_mesh_key(home)
    assert key is not None
    assert f"\n    pmesh key set {mesh_key_text(key)}\n" in capsys.readouterr().out


def test_two_new_keys_differ(tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert run(["key", "new", "--home", str(tmp_path / name)]) == 0
    assert load_mesh_key(tmp_path / "a") != load_mesh_key(tmp_path / "b")


def test_a_second_new_key_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["key", "new"])
    before = load_mesh_key(home)
    assert run(["key", "new"]) == 1
    assert load_mesh_key(home) == before
    assert capsys.readouterr().err.startswith("KeyFileError: ")


def test_show_prints_the_key_alone_on_its_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    run(["key", "set", mesh_key_text(KEY)])
    assert run(["key", "show"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == mesh_key_text(KEY)
    assert mesh_key_from_text(last) == KEY


def test_show_prints_the_key_that_up_would_use(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMESH_KEY", mesh_key_text(KEY))
    assert run(["key", "show"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == mesh_key_text(KEY)


def test_show_without_a_key_says_how_to_make_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["key", "show"]) == 1
    assert "'pmesh key new' makes one" in capsys.readouterr().err


def test_a_pasted_key_may_be_broken_into_words(home: Path) -> None:
    text = mesh_key_text(KEY)
    assert run(["key", "set", text[:20], text[20:40], text[40:]]) == 0
    assert load_mesh_key(home) == KEY


def test_a_key_may_come_by_standard_input(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(mesh_key_text(KEY) + "\n"))
    assert run(["key", "set"]) == 0
    assert load_mesh_key(home) == KEY


def test_at_a_terminal_the_user_is_told_to_paste(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin = io.StringIO(mesh_key_text(KEY))
    monkeypatch.setattr(stdin, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", stdin)
    assert run(["key", "set"]) == 0
    assert load_mesh_key(home) == KEY
    assert capsys.readouterr().out.startswith("Paste")


def test_a_mistyped_key_is_refused_and_changes_nothing(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = mesh_key_text(KEY)
    assert run(["key", "set", text[:-1] + ("a" if text[-1] != "a" else "b")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ConfigError: TEXT is not a mesh key")
    assert error.count("\n") == 1
    assert load_mesh_key(home) is None
