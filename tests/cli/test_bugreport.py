"""`pmesh bugreport`: what is in it, and that no key ever is."""

import base64
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.cli.app import run
from pmesh.cli.bugreport import HIDDEN, LOG_BYTES, without_secrets
from pmesh.core.identity.keys import MeshKey, mesh_key_text
from tests.cli.homes import store_rotation, use_home
from tests.worlds.faults import Faults

KEY = MeshKey(bytes(range(32)))
OTHER = MeshKey(bytes(range(100, 132)))
NODE_KEY = bytes(range(200, 232))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "home"
    place.mkdir(mode=0o700)
    (place / "mesh_key").write_text(mesh_key_text(KEY))
    (place / "mesh_key").chmod(0o600)
    (place / "node_key").write_bytes(NODE_KEY)
    (place / "node_key").chmod(0o600)
    (place / "config.toml").write_text('name = "mac-1"\n')
    use_home(place, monkeypatch)
    return place


def reported(tmp_path: Path) -> str:
    file = tmp_path / "report.txt"
    assert run(["bugreport", "--to", str(file)]) == 0
    return file.read_text()


def test_without_an_agent_it_has_all_else(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "agent.log").write_text("link to mac-2 failed\n")
    text = reported(tmp_path)
    assert "protocol" in text
    assert "pmesh-agent 0.1.0" in text
    assert 'name = "mac-1"' in text
    assert "→ pmesh up" in text  # as pmesh doctor says
    assert "not there: AgentNotRunning: " in text
    assert "link to mac-2 failed" in text
    assert "pmesh is not installed" in text  # Particle Mesh
    assert "read it before you send it" in capsys.readouterr().out


@pytest.mark.usefixtures("home")
def test_a_fault_in_one_section_leaves_the_others(tmp_path: Path, faults: Faults) -> None:
    faults.fail(psutil, "virtual_memory", RuntimeError("no /proc/meminfo"))
    text = reported(tmp_path)
    assert "not there: RuntimeError: no /proc/meminfo" in text
    assert 'name = "mac-1"' in text


def test_a_file_of_ones_own_name_is_made_here(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["bugreport", "--home", str(home)]) == 0
    assert list(tmp_path.glob("pmesh-bugreport-*.txt"))


@pytest.mark.usefixtures("home")
def test_a_file_that_can_not_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path, tmp_path / "none" / "report.txt"):
        assert run(["bugreport", "--to", str(path)]) == 1
        said = capsys.readouterr().err
        assert said.startswith(f"UsageError: can't write {path}: ")
        assert said.endswith("; choose another file with --to\n")


def test_no_form_of_any_key_is_in_it(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMESH_KEY", mesh_key_text(OTHER).replace("-", " "))
    forms = [
        *(mesh_key_text(key) for key in (KEY, OTHER)),
        mesh_key_text(OTHER).replace("-", ""),
        mesh_key_text(KEY).upper(),
        *(key.hex() for key in (KEY, NODE_KEY)),
        *(base64.b64encode(key).decode() for key in (KEY, NODE_KEY)),
        *(repr(key) for key in (KEY, NODE_KEY)),
    ]
    (home / "agent.log").write_text("\n".join(f"a line with {form} in it" for form in forms))
    text = reported(tmp_path)
    assert text.count(f"a line with {HIDDEN} in it") + text.count(f"b'{HIDDEN}'") == len(forms)
    assert "PMESH_KEY=" + HIDDEN in text
    for form in forms:
        assert form not in text


def test_no_key_that_a_rotation_has_brought_or_replaced_is_in_it(
    home: Path, tmp_path: Path
) -> None:
    store_rotation(home, KEY, OTHER)
    forms = [key.hex() for key in (KEY, OTHER)]
    (home / "agent.log").write_text("\n".join(forms))
    text = reported(tmp_path)
    assert [form for form in forms if form in text] == []


def test_of_a_long_log_it_has_the_end(home: Path, tmp_path: Path) -> None:
    (home / "agent.log").write_text("the beginning" + "x" * LOG_BYTES + "\nthe end\n")
    text = reported(tmp_path)
    assert "the beginning" not in text
    assert text.rstrip().endswith("the end")


def test_what_a_log_holds_cant_control_a_terminal(home: Path, tmp_path: Path) -> None:
    (home / "agent.log").write_text("\x1b[2J\x07bad\n")
    assert "\x1b" not in reported(tmp_path)


@given(st.binary(min_size=32, max_size=32), st.text(), st.text())
def test_any_mesh_key_in_any_text_is_found(key: bytes, before: str, after: str) -> None:
    text = mesh_key_text(MeshKey(key))
    assert text not in without_secrets(f"{before}{text}{after}", [])


def test_a_sentence_is_no_key() -> None:
    text = "pmesh turns the Macs and Linux boxes at home into one cluster that trains one model"
    assert without_secrets(text, []) == text
