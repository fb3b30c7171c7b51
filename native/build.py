"""Compiles native/*.c into pmesh/native/, where pmesh loads it. Needs only the standard library.

Run: python native/build.py
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).parent
INTO = SOURCES.parent / "pmesh" / "native"
MAC = sys.platform == "darwin"
NAME = "libpmesh.dylib" if MAC else "libpmesh.so"
FLAGS = (
    *("-std=c11", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    "-ffp-contract=off",  # no fused multiply-add: the same bits on every machine
    *("-fno-math-errno", "-fno-trapping-math"),  # no one reads them; else some loops stay scalar
    *("-Wall", "-Wextra", "-Wconversion"),
)
OLDEST_MACOS = os.environ.get("MACOSX_DEPLOYMENT_TARGET", "11.0")  # the first on Apple silicon


class NotBuiltError(Exception):
    """There is no library now; the text says why, and what to do."""


def find_compiler() -> list[str]:
    """The command that `CC` names, else `cc`; empty if it is not installed."""
    command = shlex.split(os.environ.get("CC", "")) or ["cc"]
    if shutil.which(command[0]) is None:
        return []
    # The cc of a new Mac only asks a person to install the real one.
    if MAC and subprocess.run(["xcode-select", "-p"], capture_output=True, check=False).returncode:
        return []
    return command


def build(into: Path = INTO, extra_flags: Sequence[str] = ()) -> Path:
    """Compile, and return the path of the library.

    A process that has loaded an earlier one keeps that. If it can't be compiled, an earlier one is
    deleted, since it does not fit the sources.

    Raises:
        NotBuiltError: there is no compiler, or it failed.
    """
    library = into / NAME
    try:
        with tempfile.TemporaryDirectory(dir=into) as folder:
            compiled = Path(folder, NAME)
            _compile(compiled, extra_flags)
            compiled.replace(library)
    except NotBuiltError:
        library.unlink(missing_ok=True)
        raise
    return library


def _compile(library: Path, extra_flags: Sequence[str]) -> None:
    compiler = find_compiler()
    if not compiler:
        raise NotBuiltError(
            "no C compiler was found, so pmesh runs in Python alone, which is slower. To change "
            "that, install one (macOS: xcode-select --install; Debian and Ubuntu: apt install gcc "
            "libc6-dev), and then install pmesh again."
        )
    # Nothing but libc: a Mac's linker asks for that without being told.
    linking = [f"-mmacosx-version-min={OLDEST_MACOS}"] if MAC else ["-Wl,-z,defs"]
    sources = map(str, sorted(SOURCES.glob("*.c")))
    command = [*compiler, *FLAGS, *linking, *extra_flags, *sources, "-o", str(library)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise NotBuiltError(f"{shlex.join(command)} failed:\n{ran.stderr}")


def platform_tag() -> str:
    """The platform in the name of a wheel that has the library."""
    if MAC:
        return f"macosx_{OLDEST_MACOS.replace('.', '_')}_{platform.machine()}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def main() -> int:
    """Compile; a missing compiler is no failure, since pmesh works without the library."""
    try:
        build()
    except NotBuiltError as error:
        print(error, file=sys.stderr)
        return 1 if find_compiler() else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
