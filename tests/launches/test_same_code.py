"""The files of a command that are compared on all machines."""

import os
import sys
from pathlib import Path

import pytest

from pmesh.errors import ConfigError, UsageError
from pmesh.launches.agent.checks import check_command
from pmesh.launches.cli import same_code
from pmesh.launches.cli.launch import RunOptions, launch_of
from pmesh.launches.cli.same_code import digests_of
from pmesh.launches.wire.messages import Command
from tests.worlds.faults import Faults

HERE = {"PATH": os.environ["PATH"]}


def write(root: Path, **texts: str) -> None:
    for name, text in texts.items():
        path = root / f"{name.replace('__in', '/').replace('_slash_', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def files_of(root: Path, *words: str) -> list[str]:
    return [digest.path for digest in digests_of(words, root)]


def difference(here: Path, there: Path, *words: str) -> str:
    """What a machine says whose directory is `there`."""
    command = Command(("true",), str(there), digests=digests_of(words, here))
    with pytest.raises(UsageError) as error:
        check_command(command, HERE)
    return str(error.value)


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """A project with a script and a package in which is another one, on two machines."""
    for name in ("here", "there"):
        root = tmp_path / name
        for path, text in {
            "train.py": "import model, os\nfrom pkg.inner import deep\n",
            "model.py": "import layers\n",
            "layers.py": "",
            "unused.py": "",
            "pkg/__init__.py": "",
            "pkg/train.py": "",
            "pkg/inner/__init__.py": "",
            "pkg/inner/deep.py": "",
        }.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
    return tmp_path / "here", tmp_path / "there"


def test_of_a_script_what_it_imports_from_its_directory_counts(two: tuple[Path, Path]) -> None:
    here, _ = two
    assert sorted(files_of(here, "train.py")) == [
        "layers.py", "model.py", "pkg/__init__.py", "pkg/inner/__init__.py", "pkg/inner/deep.py",
        "train.py",
    ]  # fmt: skip
    (here / "train.py").write_text("import model, (\n")
    assert files_of(here, "train.py") == ["train.py"]  # it fails everywhere


def test_what_editors_and_macs_leave_and_directories_are_no_python_files(
    two: tuple[Path, Path],
) -> None:
    here, there = two
    before = files_of(here, "-m", "pkg.train")
    (here / "pkg" / ".#train.py").symlink_to("ana@mac-1.local.1234")  # as Emacs makes one
    (here / "pkg" / "._train.py").write_bytes(b"\0")  # as macOS on a disk without attributes
    (here / "pkg" / "data.py").mkdir()
    assert files_of(here, "-m", "pkg.train") == before
    command = Command(("true",), str(there), digests=digests_of(["pkg"], here))
    assert check_command(command, HERE).cwd == there


@pytest.mark.skipif(sys.platform != "linux", reason="macOS refuses such names")
def test_a_python_file_whose_name_is_not_utf8_is_named(two: tuple[Path, Path]) -> None:
    here, there = two
    (there / "pkg" / "b\udcff.py").touch()
    assert "pkg has other Python files than the starter's" in difference(here, there, "pkg")
    with pytest.raises(ConfigError, match=r"the name 'pkg/b.udcff.py' is not valid UTF-8, which"):
        digests_of(["pkg"], there)


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (("train.py",), "train.py"),
        (("train.py",), "layers.py"),
        (("train.py",), "pkg/inner/deep.py"),
        (("-m", "pkg.train"), "pkg/train.py"),
        (("-m", "pkg.train"), "pkg/inner/deep.py"),
        (("-m", "pkg.inner.deep"), "pkg/train.py"),
        (("-m", "model"), "model.py"),
        (("pkg",), "pkg/inner/deep.py"),
    ],
)
def test_a_difference_is_named_by_its_file_with_both_cures(
    two: tuple[Path, Path], words: tuple[str, ...], changed: str
) -> None:
    here, there = two
    (there / changed).write_text("changed = 1\n")
    cures = "copy it there, or give --sync"
    assert difference(here, there, *words) == f"{changed} differs from the starter's; {cures}"
    (there / changed).unlink()
    missing = f"{changed} can't be read: No such file or directory; {cures}"
    assert difference(here, there, *words) == missing


def test_a_module_more_in_a_package_is_a_difference(two: tuple[Path, Path]) -> None:
    here, there = two
    (there / "pkg" / "extra.py").touch()
    assert difference(here, there, "-m", "pkg") == (
        "pkg has other Python files than the starter's; copy it there, or give --sync"
    )


def test_a_script_that_lies_elsewhere_is_compared_where_it_lies(
    two: tuple[Path, Path], tmp_path: Path
) -> None:
    here, there = two
    script = str(here / "train.py")
    assert sorted(files_of(tmp_path, script)) == sorted(
        str(here / name) for name in files_of(here, "train.py")
    )
    assert "layers.py" in files_of(here / "pkg", "../train.py")[-1] or (
        "../layers.py" in files_of(here / "pkg", "../train.py")
    )
    (there / "pkg").mkdir(exist_ok=True)
    assert f"{here}/train.py" in files_of(there, script)


def test_a_directory_with_a_main_module_is_a_package(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").touch()
    assert files_of(tmp_path, "app") == ["app/__main__.py", "app"]


def test_modules_from_elsewhere_and_long_arguments_are_not_compared(tmp_path: Path) -> None:
    assert files_of(tmp_path, "-m", "json.tool", "x" * 5000, "data.csv", "") == []


def test_of_a_large_package_only_the_whole_is_compared(
    two: tuple[Path, Path], faults: Faults
) -> None:
    here, _ = two
    faults.limit(same_code, "MAX_FILES", 3)
    assert files_of(here, "-m", "pkg") == ["pkg"]


def test_what_can_not_be_read_is_named(two: tuple[Path, Path]) -> None:
    here, _ = two
    (here / "pkg" / "loop.py").symlink_to("loop.py")
    with pytest.raises(ConfigError, match=r"can't read .*loop\.py"):
        files_of(here, "pkg")


# --- with --sync


def synced(cwd: Path, *words: str, module: str = "") -> Command:
    return launch_of(words, RunOptions(cwd=cwd, sync=True, module=module), HERE).command


def test_what_is_sent_needs_no_comparison_but_what_lies_elsewhere_does(
    two: tuple[Path, Path],
) -> None:
    here, there = two
    assert synced(here, "train.py", "pkg").digests == ()
    assert synced(here, module="pkg.train").digests == ()
    elsewhere = synced(there, "python3", str(here / "model.py"))
    assert [digest.path for digest in elsewhere.digests] == [
        str(here / name) for name in ("model.py", "layers.py")
    ]


def test_a_script_must_be_named_as_it_is_in_the_copy(two: tuple[Path, Path]) -> None:
    here, _ = two
    with pytest.raises(ConfigError, match=r"runs a copy of it; name it 'train\.py'"):
        synced(here, str(here / "train.py"))
    with pytest.raises(ConfigError, match="lies outside of the directory that --sync sends"):
        synced(here / "pkg", "../train.py")


def test_a_program_of_the_directory_runs_from_the_copy(two: tuple[Path, Path]) -> None:
    here, _ = two
    (here / "run.sh").write_text("#!/bin/sh\n")
    (here / "run.sh").chmod(0o755)
    assert synced(here, "./run.sh", "a").words == ("./run.sh", "a")
    assert synced(here, str(here / "run.sh"), "a").words == ("./run.sh", "a")
    assert synced(here / "pkg", "sh", "a").words == ("sh", "a")
