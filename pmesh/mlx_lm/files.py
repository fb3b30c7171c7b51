"""Replaces files atomically: after a crash, mlx-lm reads the old file or the new one."""

import os
import secrets
from collections.abc import Callable
from pathlib import Path

from pmesh.errors import UsageError


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a new file, and rename it to `path` once it is on the disk.

    Raises:
        UsageError: The file can't be written there.
    """
    # The suffix stays last: MLX appends one to names without it.
    new = path.with_name(f".{path.stem}.{secrets.token_hex(4)}{path.suffix}")
    try:
        write(new)
        with new.open("rb+") as file:
            os.fsync(file.fileno())
        new.replace(path)
    except (OSError, RuntimeError) as e:  # MLX raises RuntimeError where a file can't be opened
        new.unlink(missing_ok=True)
        raise UsageError(
            f"can't write {path}: {e}; make room, or give --adapter-path another folder"
        ) from e
