"""The native library: it compiles without a warning, and pmesh says why it goes without."""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from native import build
from pmesh import native
from tests.worlds.system import have_library_at

compiled_here = pytest.mark.skipif(not build.find_compiler(), reason="needs a C compiler")


@pytest.fixture(autouse=True)
def _loaded_anew() -> Iterator[None]:
    native.forget()
    yield
    native.forget()


@pytest.mark.slow  # the library that all tests use was compiled with these warnings, too
@compiled_here
@pytest.mark.parametrize("compiler", ["cc", "clang"])
def test_the_sources_compile_without_a_warning(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    monkeypatch.setenv("CC", compiler)
    loaded = ctypes.CDLL(str(build.build(tmp_path, ["-Werror"])))
    assert loaded.pmesh_abi() == native.ABI


@compiled_here
def test_the_library_that_the_tests_load_is_compiled_from_these_sources() -> None:
    """`make test` sees to it; else each test of C would say something about other sources."""
    sources = (build.SOURCES.glob(pattern) for pattern in ("*.c", "*.h", "build.py"))
    newest = max(path.stat().st_mtime for paths in sources for path in paths)
    assert native.PATH.exists(), "run: python native/build.py"
    assert native.PATH.stat().st_mtime >= newest, "run: python native/build.py"


@compiled_here
def test_only_what_begins_with_pmesh_is_exported() -> None:
    command = ["nm", "-g", "--defined-only", str(native.PATH)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    names = [line.split()[-1].removeprefix("_") for line in listed.stdout.splitlines()]
    assert [name for name in names if not name.startswith("pmesh_")] == []
    assert "pmesh_abi" in names


@compiled_here
def test_a_library_that_does_not_fit_the_sources_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / build.NAME).write_text("an earlier one")
    with pytest.raises(build.NotBuiltError, match="no-such-file"):
        build.build(tmp_path, ["no-such-file", "-fsyntax-only"])
    assert list(tmp_path.iterdir()) == []

    (tmp_path / build.NAME).write_text("an earlier one")
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(build.NotBuiltError, match=r"no C compiler was found.* install one"):
        build.build(tmp_path)
    assert list(tmp_path.iterdir()) == []


@compiled_here
def test_a_library_that_fits_is_loaded_once() -> None:
    loaded = native.library()
    assert loaded is not None
    assert native.library() is loaded
    assert native.why_missing() == ""


def test_a_variable_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMESH_NATIVE", "0")
    assert native.library() is None
    assert native.why_missing() == "PMESH_NATIVE=0 is set; unset it"


def test_a_missing_library_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have_library_at(monkeypatch, tmp_path / "none.so")
    assert native.library() is None
    assert re.match("no C compiler was found .*; install one", native.why_missing())


def test_a_file_that_is_no_library_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.so").write_text("not a library")
    have_library_at(monkeypatch, tmp_path / "broken.so")
    assert native.library() is None
    assert re.match(r"it can't be loaded \(.*\); install pmesh again", native.why_missing())


@compiled_here
def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "ABI", native.ABI + 1)
    assert native.library() is None
    assert native.why_missing().startswith("it was built for another version")
