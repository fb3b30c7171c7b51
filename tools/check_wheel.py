"""Tells what is in a wheel that must not be, or is missing: `python tools/check_wheel.py WHEEL…`.

It needs nothing but Python: the release runs it where nothing has been installed.
"""

import sys
import zipfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
LIBRARIES: Final = {"pmesh/native/libpmesh.so", "pmesh/native/libpmesh.dylib"}


def faults_of(wheel: Path) -> list[str]:
    """What is wrong with this wheel, a line each."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    package = {name for name in names if name.startswith("pmesh/")}
    files = [*ROOT.glob("pmesh/**/*.py"), *ROOT.glob("pmesh/cli/dashboard/page.*")]
    ours = {file.relative_to(ROOT).as_posix() for file in files}
    ours |= {f"pmesh/cli/examples/{file.name}" for file in ROOT.glob("examples/train_*.py")}
    ours.add("pmesh/py.typed")
    metadata = {name for name in names if name.partition("/")[0].endswith(".dist-info")}
    platform = wheel.stem.rpartition("-")[2]
    libraries = package & LIBRARIES
    faults = [f"{name} is missing" for name in sorted(ours - package)]
    faults += [f"{name} is none of pmesh's" for name in sorted(package - ours - LIBRARIES)]
    faults += [f"{name} does not belong into it" for name in sorted(names - package - metadata)]
    if not any(name.endswith("/LICENSE") for name in metadata):
        faults.append("the license is missing")
    if (platform == "any") != (not libraries):
        faults.append(f"for the platform {platform} it has the libraries {sorted(libraries)}")
    return faults


def main(paths: list[str]) -> int:
    """Print all faults; 0 if there is none."""
    faults = [f"{path}: {fault}" for path in paths for fault in faults_of(Path(path))]
    for fault in faults:
        print(fault)
    return bool(faults or not paths)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
