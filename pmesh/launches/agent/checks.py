"""Whether this machine can run a command: its directory, its program, its Python, its files."""

import contextlib
import hashlib
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pmesh.errors import UsageError
from pmesh.launches.rules.engines import environment_of
from pmesh.launches.wire.messages import Command, Digest

PYTHON_S = 10.0  # a slow disk; a Python that needs longer does not run here
_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"
_HAS_MODULE = "import sys, importlib.util as u; print(u.find_spec(sys.argv[1]) is not None)"
_OPTIONS_WITH_VALUES = {"-W", "-X"}  # of Python, before what it is to run
_MAX_HASHED_BYTES = 1024**3  # a script that is longer is no script
_HASH_BYTES = 1024 * 1024


class Found(NamedTuple):
    """A command as this machine runs it."""

    words: tuple[str, ...]
    cwd: Path


def check_command(command: Command, inherited: Mapping[str, str]) -> Found:
    """Find all that the command needs; blocks, and runs a Python to learn its version.

    Args:
        command: What another machine asks for.
        inherited: The agent's own environment.

    Raises:
        UsageError: Why it can't run here.
    """
    environment = environment_of(inherited, {}, command.variables)
    try:
        return _find(command, environment, inherited)
    except (
        OSError,
        RuntimeError,
    ) as e:  # a path that the agent may not read; a user that does not exist
        raise UsageError(f"it can't look for the command's files: {e}") from e


def _find(command: Command, environment: Mapping[str, str], inherited: Mapping[str, str]) -> Found:
    cwd = Path(command.cwd).expanduser()
    if not cwd.is_dir():
        raise UsageError(
            f"there is no directory {command.cwd!r}; copy it there, or give --sync or --cwd"
        )
    if not os.access(cwd, os.X_OK):
        raise UsageError(f"the agent's user can't enter {command.cwd!r}")
    program = find_program(command.words[0], cwd, inherited)
    if command.python:
        _check_python(program, command.python)
        _check_module(program, command.words[1:], cwd, environment)
    cure = "copy it there" if command.tree else "copy it there, or give --sync"
    for digest in command.digests:
        _check_digest(cwd, digest, cure)
    return Found((program, *command.words[1:]), cwd)


def find_program(word: str, cwd: Path, environment: Mapping[str, str]) -> str:
    """Return the absolute path of a program. Raises UsageError if there is none."""
    # Not resolved: the python of a virtual environment is a link.
    path = str(cwd / Path(word).expanduser()) if "/" in word else word
    found = shutil.which(path, path=environment.get("PATH", os.defpath))
    if found is None:
        raise UsageError(f"there is no program {word!r}; install it there, or give --python")
    return str(cwd / found)


def python_version(program: str) -> str:
    """Return the version of a Python, such as 3.13; "" if the program is none."""
    return _output_of([program, "-I", "-c", _VERSION])


def _output_of(
    command: Sequence[str], cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> str:
    """Return what a program prints; "" if it fails."""
    try:
        ran = subprocess.run(  # noqa: S603 - a program that is about to be run anyway
            command,
            capture_output=True,
            text=True,
            timeout=PYTHON_S,
            check=False,
            stdin=subprocess.DEVNULL,
            cwd=cwd,
            env=environment,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
    return ran.stdout.strip() if ran.returncode == 0 else ""


def _check_python(program: str, wanted: str) -> None:
    version = python_version(program)
    if version != wanted:
        what = f"is Python {version}" if version else "does not run"
        raise UsageError(
            f"{program} {what}, and the starter's is Python {wanted}; install that one there, or "
            "give --python"
        )


def _check_module(
    program: str, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str]
) -> None:
    """Refuse `-m NAME` without such a module, whose ranks would fail again and again."""
    module = _module_in(arguments)
    if not module:
        return
    outermost = module.partition(".")[0]  # a find of an inner one would run the outer one
    found = _output_of([program, "-c", _HAS_MODULE, outermost], cwd, environment)
    if found == "False":
        raise UsageError(
            f"{program} has no module {outermost!r}; install it there, or give --python or --sync"
        )


def _module_in(arguments: Sequence[str]) -> str:
    """Return the module that Python would run; "" if it would run something else."""
    words = iter(arguments)
    for word in words:
        if word == "-m":
            return next(words, "")
        if word in _OPTIONS_WITH_VALUES:
            next(words, "")
        elif not word.startswith("-") or word in {"-", "-c"}:
            break
    return ""


def _check_digest(cwd: Path, wanted: Digest, cure: str) -> None:
    try:
        found = digest_of(cwd, wanted.path)
    except OSError as e:
        raise UsageError(f"{wanted.path} can't be read: {e.strerror}; {cure}") from e
    if found != wanted:
        what = "has other Python files than" if (cwd / wanted.path).is_dir() else "differs from"
        raise UsageError(f"{wanted.path} {what} the starter's; {cure}")


def digest_of(cwd: Path, path: str) -> Digest:
    """Hash a file, or all Python files of a package with their names. Raises OSError."""
    whole = cwd / Path(path).expanduser()
    hashed = hashlib.sha256()
    for file in python_files(whole) if whole.is_dir() else [whole]:
        name = str(file.relative_to(whole)) if file != whole else ""
        size = file.stat().st_size
        if size > _MAX_HASHED_BYTES:
            raise OSError(0, "it is larger than 1 GiB")
        hashed.update(os.fsencode(f"{name}\0{size}\0"))
        with file.open("rb") as stream:
            while block := stream.read(_HASH_BYTES):
                hashed.update(block)
    return Digest(path, hashed.hexdigest())


def python_files(package: Path) -> Sequence[Path]:
    """Return the Python files of a package and of those within it.

    No program can import a file whose name begins with a dot: editors and Macs leave such.
    """
    found = (path for path in package.rglob("*.py") if not path.name.startswith("."))
    return sorted(path for path in found if not os.path.isdir(path))  # noqa: PTH112 - never raises


def free_ports(count: int) -> tuple[int, ...]:
    """Return TCP ports that nobody uses now; another program may take one before a rank does.

    Raises OSError if the system has none left, or no descriptor.
    """
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        for _ in range(count):
            one = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            one.bind(("", 0))
            ports.append(one.getsockname()[1])
    return tuple(ports)
