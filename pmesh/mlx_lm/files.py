"""Files of a run: written beside their place and renamed, so a crash leaves the old or the new one.

The state of a run is one safetensors file: the arrays by name, and plain values as its metadata.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pmesh.errors import UsageError
from pmesh.mlx_lm.libraries import mx

Arrays = Mapping[str, Any]


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` make a new file, and rename it to `path` once it is on the disk.

    Raises:
        UsageError: It can't be written there.
    """
    # The suffix stays the last: MLX appends one to names that lack it.
    new = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
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


def save_arrays(path: Path, arrays: Arrays, values: Mapping[str, Any] | None = None) -> None:
    """Write arrays by name, and values that JSON can say, as one safetensors file."""
    metadata = {"format": "mlx"} | {name: json.dumps(x) for name, x in (values or {}).items()}
    replace(path, lambda new: mx.save_safetensors(str(new), dict(arrays), metadata))


def load_arrays(path: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return what `save_arrays` has written there; None if there is no file.

    Raises:
        UsageError: It is something else.
    """
    if not path.exists():
        return None
    try:
        loaded: Any = mx.load(str(path), return_metadata=True)
        arrays, metadata = loaded
        return arrays, {k: json.loads(x) for k, x in metadata.items() if k != "format"}
    except (OSError, RuntimeError, ValueError) as e:
        raise UsageError(
            f"{path} is no state of a run ({e}): remove it, or begin anew with --no-resume"
        ) from e
