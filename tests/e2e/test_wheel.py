"""The wheel that users get: what is in it, and that it works where nothing of this clone is."""

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from pmesh.installed import installed_version
from tools.check_wheel import faults_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BARE = {"PATH": "/usr/bin:/bin"}
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    build = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
    subprocess.run([*PIP, *build, str(ROOT)], check=True)
    [built] = folder.iterdir()
    return built


def test_it_has_the_package_and_the_library_and_nothing_else(wheel: Path) -> None:
    assert faults_of(wheel) == []
    assert wheel.name.startswith(f"pmesh_agent-{installed_version()}-py3-none-")


def test_what_is_missing_or_too_much_is_told(wheel: Path, tmp_path: Path) -> None:
    broken = tmp_path / "pmesh_agent-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(broken, "w") as archive:
        for name in whole.namelist():
            if name != "pmesh/py.typed" and not name.endswith("/LICENSE"):
                archive.writestr(name, whole.read(name))
        for name in ("pmesh/native/ring.c", "tests/test_ids.py", "pmesh/native/libpmesh.so"):
            if name not in whole.namelist():
                archive.writestr(name, "")
    assert faults_of(broken) == [
        "pmesh/py.typed is missing",
        "pmesh/native/ring.c is none of pmesh's",
        "tests/test_ids.py does not belong into it",
        "the license is missing",
        "for the platform any it has the libraries ['pmesh/native/libpmesh.so']",
    ]


def test_both_commands_work_where_it_was_installed(wheel: Path, tmp_path: Path) -> None:
    """Its dependencies are this environment's: none is fetched."""
    venv.create(tmp_path, symlinks=True)
    python = tmp_path / "bin" / "python"
    install = ("--python", str(python), "install", "--quiet", "--no-deps", str(wheel))
    subprocess.run([*PIP, *install], env=BARE, check=True)
    [site] = tmp_path.glob("lib/python*/site-packages")
    site.joinpath("dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for command in ("pmesh", "pmesh-agent"):
        ran = subprocess.run(
            [tmp_path / "bin" / command, "version"],
            cwd=tmp_path,
            env=BARE,
            capture_output=True,
            text=True,
            check=True,
        )
        assert ran.stdout.startswith(f"pmesh {installed_version()}, protocol ")
    where = subprocess.run(
        [python, "-c", "import pmesh; print(pmesh.__path__[0])"],
        cwd=tmp_path,
        env=BARE,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(where.stdout.strip()) == site / "pmesh"
