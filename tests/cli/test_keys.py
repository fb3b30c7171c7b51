"""`pmesh key`."""

import contextlib
import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from pmesh.agent.home import load_mesh_key
from pmesh.cli.app import run
from pmesh.core.identity.keys import MeshKey, mesh_key_text
from tests.cli.homes import store_rotation
from tests.worlds.system import type_in

KEY = MeshKey(bytes(range(32)))
NEW = MeshKey(bytes(range(50, 82)))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PMESH_HOME", str(tmp_path))
    monkeypatch.delenv("PMESH_KEY", raising=False)
    return tmp_path


def give(text: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """`pmesh key set` at the end of a pipe."""
    type_in(monkeypatch, text)
    return run(["key", "set"])


def at_a_terminal(typed: bytes) -> tuple[int, str]:
    """`pmesh key set` at a terminal of its own: its exit code, and all that the terminal shows."""
    ours, its = pty.openpty()
    program = "import os; os.login_tty(0); from pmesh.cli import main; main()"
    command = [sys.executable, "-c", program, "key", "set"]
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its)
    os.close(its)
    shown = b""
    with process, contextlib.suppress(OSError):  # Linux: an error says that the other end is closed
        while data := os.read(ours, 1024):
            shown += data
            if typed and shown.endswith(b"Return: "):
                os.write(ours, typed)
                typed = b""
    os.close(ours)
    return process.returncode, shown.decode()


def test_a_new_key_is_printed_as_the_line_to_paste_elsewhere(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["key", "new"]) == 0
    key = load_mesh_key(home)
    assert key is not None
    out = capsys.readouterr().out
    assert f"\n    {mesh_key_text(key)}\n" in out
    assert "run 'pmesh key set', and paste this line" in out


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


def test_show_prints_what_set_takes_from_a_pipe(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["key", "new"]) == 0
    capsys.readouterr()
    assert run(["key", "show"]) == 0
    shown = capsys.readouterr()
    key = load_mesh_key(home)
    assert key is not None
    assert shown.out == f"{mesh_key_text(key)}\n"
    assert shown.err.startswith("Every machine with this key is a member")
    monkeypatch.setenv("PMESH_HOME", str(home / "other"))
    assert give(shown.out, monkeypatch) == 0
    assert load_mesh_key(home / "other") == key


def test_show_prints_the_key_that_up_would_use(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMESH_KEY", mesh_key_text(KEY))
    assert run(["key", "show"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == mesh_key_text(KEY)


def test_show_prints_the_latest_key_whatever_up_was_started_with(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store_rotation(home, KEY, NEW)
    for given in ("", mesh_key_text(KEY), mesh_key_text(NEW)):
        monkeypatch.setenv("PMESH_KEY", given)
        assert run(["key", "show"]) == 0
        assert capsys.readouterr().out == f"{mesh_key_text(NEW)}\n"


def test_a_key_that_is_set_by_hand_counts_also_if_it_was_replaced_before(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store_rotation(home, KEY, NEW)
    assert give(mesh_key_text(KEY), monkeypatch) == 0
    assert run(["key", "show"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == mesh_key_text(KEY)


@pytest.mark.parametrize("content", [b"no JSON", b'{"rotation": 7}', b"[]"])
def test_a_file_that_no_agent_has_written_is_named_with_what_to_type(
    home: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    run(["key", "new"])
    (home / "mesh_keys").write_bytes(content)
    (home / "mesh_keys").chmod(0o600)
    assert run(["key", "show"]) != 0
    assert f"mv {home / 'mesh_keys'} {home / 'mesh_keys'}.bad" in capsys.readouterr().err
    (home / "mesh_keys").chmod(0o644)
    assert run(["key", "show"]) != 0
    assert "other users can read" in capsys.readouterr().err


def test_show_without_a_key_says_how_to_make_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["key", "show"]) == 1
    assert "'pmesh key new' makes one" in capsys.readouterr().err


def test_a_key_from_a_pipe_may_be_broken_into_lines(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = mesh_key_text(KEY)
    assert give(f"{text[:20]}\n {text[20:40].upper()}\n{text[40:]}\n", monkeypatch) == 0
    assert load_mesh_key(home) == KEY


def test_at_a_terminal_the_key_is_asked_for_and_not_shown(home: Path) -> None:
    code, shown = at_a_terminal(f"  {mesh_key_text(KEY)} \n".encode())
    assert code == 0, shown
    assert load_mesh_key(home) == KEY
    assert shown.startswith("Paste the mesh key")
    assert f"The mesh key is in {home / 'mesh_key'}" in shown
    assert mesh_key_text(KEY)[6:12] not in shown


@pytest.mark.parametrize("typed", [b"\x04", b"\n", b"pmesh-\xff\n", b"correct horse\n"])
def test_what_is_pasted_and_is_no_key_is_refused_and_not_shown(home: Path, typed: bytes) -> None:
    code, shown = at_a_terminal(typed)
    assert code == 2
    assert "ConfigError: what was pasted is not a mesh key" in shown
    assert "Traceback" not in shown
    assert "horse" not in shown
    assert load_mesh_key(home) is None


@pytest.mark.parametrize(
    "words",
    [
        [mesh_key_text(KEY)],
        [mesh_key_text(KEY)[:20], mesh_key_text(KEY)[20:]],
        [f"--key={mesh_key_text(KEY)}"],
        [f"-{mesh_key_text(KEY)}"],
        ["--", mesh_key_text(KEY)],
    ],
)
def test_a_key_on_the_command_line_is_refused_and_not_repeated(
    home: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["key", "set", *words]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("ConfigError: 'pmesh key set' takes no key on the command line")
    assert shown.err.endswith("'pmesh key rotate' on a machine that has it\n")
    assert shown.err.count("\n") == 1
    assert mesh_key_text(KEY)[6:12] not in shown.err + shown.out
    assert load_mesh_key(home) is None


def test_the_help_of_set_names_no_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["key", "set", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--home" in out
    assert "words" not in out.lower()


def test_a_mistyped_key_is_refused_and_changes_nothing(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = mesh_key_text(KEY)
    assert give(text[:-1] + ("a" if text[-1] != "a" else "b"), monkeypatch) == 2
    error = capsys.readouterr().err
    assert error.startswith("ConfigError: standard input is not a mesh key")
    assert error.count("\n") == 1
    assert not list(home.iterdir())


def test_a_home_whose_earlier_keys_cant_be_removed_is_named_and_keeps_its_key(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give(mesh_key_text(KEY), monkeypatch)
    (home / "mesh_keys").mkdir()
    assert give(mesh_key_text(NEW), monkeypatch) == 1
    assert capsys.readouterr().err.startswith(f"KeyFileError: can't remove {home / 'mesh_keys'}: ")
    assert load_mesh_key(home) == KEY


def test_a_film_in_place_of_a_key_is_refused(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    film = io.TextIOWrapper(io.BytesIO(b"\x1a\x45\xdf\xa3" * 5000), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", film)
    assert run(["key", "set"]) == 2
    assert capsys.readouterr().err.startswith("ConfigError: standard input is not a mesh key")
    assert load_mesh_key(home) is None
