"""The state of a run, which `mesh.sync` gives to newcomers and checkpoints save.

Files are replaced atomically: after a crash, mlx-lm reads the old file or the new one.
"""

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from pmesh.client.collective.differences import state_differences
from pmesh.errors import UsageError
from pmesh.mlx_lm.libraries import mx, trees
from pmesh.mlx_lm.terms import RunTerms, check_resumable

ADAPTERS = "adapters.safetensors"

_COUNTS = ("iteration", "validated", "trained_tokens")


class State:
    """The trained weights, the optimizer's state, and the progress of the run."""

    def __init__(self, model: Any, optimizer: Any, terms: RunTerms) -> None:
        self.model = model
        self.optimizer = optimizer
        self.terms = terms
        self.iteration = 0
        """The number of iterations that are done, which is also the position in the data."""
        self.validated = 0
        """The last iteration of the step for which a validation has run."""
        self.trained_tokens = 0
        optimizer.init(model.trainable_parameters())

    def tree(self) -> dict[str, Any]:
        """Return everything that the next step depends on. The arrays are not copied."""
        return {"terms": self.terms, **self._counts(), **self._arrays()}

    def take(self, tree: dict[str, Any]) -> None:
        """Continue from a tree that `tree` returned on another rank."""
        for name in _COUNTS:
            setattr(self, name, tree[name])
        self.model.update(tree["parameters"])
        self.optimizer.state = tree["optimizer"]

    def adapters(self) -> dict[str, Any]:
        """Return the trained weights by name, as mlx-lm loads them."""
        return dict(trees.tree_flatten(self.model.trainable_parameters()))

    def save_adapters(self, folder: Path, *, numbered: bool) -> None:
        """Write the trained weights where mlx-lm looks for them.

        Args:
            folder: The folder of the adapters.
            numbered: Also keep a copy whose name has the iteration, as mlx-lm does.

        Raises:
            UsageError: The files can't be written there.
        """
        adapters = self.adapters()

        def write(new: Path) -> None:
            mx.save_safetensors(str(new), adapters, {"format": "mlx"})

        if numbered:
            replace(folder / f"{self.iteration:07d}_{ADAPTERS}", write)
        replace(folder / ADAPTERS, write)

    def resume(self, saved: Any, folder: Path) -> None:
        """Continue from a tree of an earlier run, with this run's learning rate.

        Args:
            saved: What was loaded from the checkpoint.
            folder: The folder of the checkpoint.

        Raises:
            UsageError: It is from another model, or from options that give other arrays.
        """
        if not isinstance(saved, dict) or not {"terms", *_COUNTS, *self._arrays()} <= saved.keys():
            raise UsageError(
                f"{folder} has checkpoints of another program: give another --adapter-path, or "
                "--no-resume to begin anew and replace them"
            )
        tree = cast("dict[str, Any]", saved)
        check_resumable(folder, tree["terms"], self.terms)
        arrays = {name: tree[name] for name in self._arrays()}
        if differences := state_differences(self._arrays(), arrays, source="disk"):
            raise UsageError(
                f"{folder} has the state of another run: {differences}; give another "
                "--adapter-path, or --no-resume to begin anew and replace it"
            )
        rate = self.optimizer.learning_rate
        self.take(tree)
        self.optimizer.learning_rate = rate

    def _counts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _COUNTS}

    def _arrays(self) -> dict[str, Any]:
        parameters = self.model.trainable_parameters()
        return {"parameters": parameters, "optimizer": self.optimizer.state}


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
