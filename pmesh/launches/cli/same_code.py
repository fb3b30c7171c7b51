"""The Python files that a command names, and their hashes: every machine must have the same."""

from collections.abc import Iterator, Sequence
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Final

from pmesh.errors import ConfigError
from pmesh.home_paths import path_below
from pmesh.launches.agent.checks import digest_of, python_files
from pmesh.launches.wire.messages import Digest

MAX_FILES: Final = 300  # that are named one by one: 40 KiB of the 64 of a request


def digests_of(words: Sequence[str], cwd: Path, *, copied: bool = False) -> tuple[Digest, ...]:
    """Hash what the arguments of a command name.

    Of a script these are the modules too that it imports from its own directory; of a package,
    all of its Python files, one by one as far as they are not too many, so that a difference can
    be named, and then the whole.

    Args:
        words: The arguments.
        cwd: The working directory.
        copied: It is sent to each machine: only what lies elsewhere can differ.

    Raises:
        ConfigError: A file can't be read, or is not where the command says on other machines.
    """
    files: list[str] = []
    packages: list[str] = []
    for name in named_code(words, cwd):
        if copied and _is_in_copy(name, cwd):
            continue
        if _is_package(cwd / name):
            packages.append(name)
            inner = (file.relative_to(cwd / name) for file in python_files(cwd / name))
            files += (f"{name}/{file.as_posix()}" for file in inner)
        else:
            files += (name, *_imported_by(name, cwd))
    if len(files) > MAX_FILES:
        files = [file for file in files if not any(file.startswith(f"{p}/") for p in packages)]
    wanted = dict.fromkeys((*files[:MAX_FILES], *packages))
    for name in wanted:
        if name != name.encode(errors="replace").decode():
            raise ConfigError(
                f"the name {name!r} is not valid UTF-8, which some machines need; rename it"
            )
    try:
        return tuple(digest_of(cwd, name) for name in wanted)
    except OSError as e:
        raise ConfigError(f"can't read {e.filename}: {e.strerror}") from e


def named_code(words: Sequence[str], cwd: Path) -> Iterator[str]:
    """Yield the scripts and packages that arguments name, as they name them."""
    for before, word in zip(("", *words), words, strict=False):
        named = _module(word, cwd) if before == "-m" else word
        is_script = named.endswith(".py") and _is_file(cwd / named)
        if named and (is_script or _is_package(cwd / named)):
            yield named


def _is_in_copy(name: str, cwd: Path) -> bool:
    """Return True for a file that is sent. Raises ConfigError if the copy has another path."""
    inner = path_below(cwd, cwd / name)
    if inner is not None and Path(name).is_absolute():
        raise ConfigError(
            f"{name} is in the directory that --sync sends, and each machine runs a copy of it; "
            f"name it {str(inner)!r}"
        )
    if inner is None and not Path(name).is_absolute():
        raise ConfigError(
            f"{name} lies outside of the directory that --sync sends; start from a directory that "
            "has it, or give its whole path and copy it to each machine"
        )
    return inner is not None


def _module(name: str, cwd: Path) -> str:
    """Return the path of the outermost package of a module, or of its file; "" if not in `cwd`."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        if _is_package(cwd.joinpath(*parts[:depth])):
            return "/".join(parts[:depth])
    path = "/".join(parts)
    return f"{path}.py" if _is_file(cwd / f"{path}.py") else ""


def _imported_by(script: str, cwd: Path) -> Iterator[str]:
    """Yield the modules that a script imports from its own directory, and these from there."""
    directory = (cwd / script).parent
    finder = ModuleFinder(path=[str(directory)])
    try:
        finder.run_script(str(cwd / script))
    except (SyntaxError, ValueError, ImportError, AttributeError, OSError, RecursionError):
        return  # it will fail on each machine, or can't be followed
    above = script.rpartition("/")[0]
    for name, module in finder.modules.items():
        file: str | None = getattr(module, "__file__", None)  # None for a package without code
        if file is not None and name != "__main__":
            path = Path(file).relative_to(directory).as_posix()
            yield f"{above}/{path}" if above else path


def _is_package(path: Path) -> bool:
    return _is_file(path / "__init__.py") or _is_file(path / "__main__.py")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a long argument is no path
        return False
