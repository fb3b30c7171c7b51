"""What was measured, as it lies in a file until the page is written."""

import os
import platform
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")


def write_results(path: Path, results: object) -> None:
    """Write JSON that a person can read and a diff shows: what has no parts stands on one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(results), indent=1).decode()
    text = re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda m: re.sub(r"\n *", " ", m[0]), text)
    path.write_text(f"{text}\n", encoding="utf-8")


def read_results(path: Path, kind: type[T]) -> T:
    """Read what `write_results` wrote; raises msgspec.ValidationError for anything else."""
    return msgspec.json.decode(path.read_bytes(), type=kind)


def replaced(
    old: Sequence[T],
    new: T,
    identity: Callable[[T], object],
    add: Callable[[T, T], T] | None = None,
) -> tuple[T, ...]:
    """The old ones with the new one at the end, in the place of those that measured the same.

    Args:
        old: What a file holds.
        new: What was measured now.
        identity: What is equal for measurements of the same.
        add: Joins the old and the new one; None: the new one replaces the old.
    """
    for before in old:
        if add is not None and identity(before) == identity(new):
            new = add(before, new)
    return (*(each for each in old if identity(each) != identity(new)), new)


def describe_machine() -> str:
    system = f"{platform.system()} {platform.release()}"
    return f"{os.cpu_count()} cores, {system}, Python {platform.python_version()}"


def describe_commit() -> str:
    """What was measured; `+` if the tree had changes that are not committed."""
    command = ["git", "describe", "--always", "--dirty=+"]
    done = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
