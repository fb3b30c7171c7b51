"""`pmesh init`: writes a script to start from, one of the repository's examples."""

import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal, TypeAlias

from pmesh.agent.home import reason
from pmesh.errors import UsageError
from pmesh.installed import mlx_requirement
from pmesh.terminal.lines import complain, say
from pmesh.texts import printable

Library: TypeAlias = Literal["mlx", "torch", "numpy"]

EXAMPLES: Final[dict[Library, str]] = {
    "mlx": "train_mlx.py",
    "torch": "train_torch_elastic.py",
    "numpy": "train_numpy.py",
}
"""By library, in the order in which they are preferred; hatch_build.py puts them into the wheel."""
_PACKAGE: Final = Path(__file__).parents[1]


def example(library: Library) -> str:
    """Return the text of an example, as it stands in the wheel or in a clone of the repository."""
    name = EXAMPLES[library]
    installed = _PACKAGE / "cli" / "examples" / name
    there = installed if installed.is_file() else _PACKAGE.parent / "examples" / name
    return there.read_text(encoding="utf-8")


def write_script(path: Path, library: Library | None) -> int:
    """Write the script, and say what to type next.

    Args:
        path: A file that is not there yet.
        library: Default the first one that is installed.

    Raises:
        UsageError: The file is there, or can't be written.
    """
    chosen = library or _first_installed()
    text = example(chosen).replace(EXAMPLES[chosen], printable(path.name))
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as e:
        raise UsageError(f"{path} is there already; name another file: pmesh init FILE") from e
    except OSError as e:
        raise UsageError(f"can't write {path}: {reason(e)}; name another file") from e
    script = shlex.quote(str(path))
    say(
        f"{path} trains a classifier of handwritten digits with {chosen}. Next:",
        "  pmesh up --detach                                  once on each machine",
        f"  pmesh run python {script}                          on this machine alone",
        f"  pmesh run --on all --sync -- python {script}       on all machines that allow it",
    )
    wanted = mlx_requirement() if chosen == "mlx" else chosen
    packages = {str(chosen): wanted, "sklearn": "scikit-learn"}
    missing = [package for module, package in packages.items() if not _has(module)]
    if missing:
        complain(f"it needs what is not installed here: pip install {' '.join(missing)}")
    return 0


def _first_installed() -> Library:
    for library in EXAMPLES:
        if _has(library):
            return library
    return "numpy"


def _has(module: str) -> bool:
    return find_spec(module) is not None
