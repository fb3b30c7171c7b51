"""Files that mlx-lm reads: written beside their place and renamed, so a crash leaves one whole."""

import os
import secrets
from collections.abc import Callable
from pathlib import Path

from pmesh.errors import UsageError


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` make a new file, and rename it to `path` once it is on the disk.

    Raises:
        UsageError: It can't be written there.
    """
    # The suffix stays the last: MLX appends one to names that lack it.
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
