"""The state of a run: what `mesh.sync` gives to newcomers, and what is kept on a disk."""

from pathlib import Path
from typing import Any

from pmesh.client.mesh import Mesh
from pmesh.errors import UsageError
from pmesh.mlx_lm.files import load_arrays, save_arrays
from pmesh.mlx_lm.libraries import trees
from pmesh.mlx_lm.terms import Terms, check_resumable

ADAPTERS = "adapters.safetensors"
STATE = "pmesh_state.safetensors"
"""Beside the adapters: what a run needs to go on after all machines have stopped."""

_COUNTS = ("iteration", "validated", "trained_tokens")


class State:
    """Trained weights, the optimizer's state, and how far the run has come."""

    def __init__(self, model: Any, optimizer: Any, terms: Terms) -> None:
        self.model = model
        self.optimizer = optimizer
        self.terms = terms
        self.iteration = 0
        """How many iterations are done, which is also the position in the data."""
        self.validated = 0
        """The last iteration for which there was a validation."""
        self.trained_tokens = 0
        optimizer.init(model.trainable_parameters())

    def tree(self) -> dict[str, Any]:
        """Return all that the next step depends on; its arrays are those in use."""
        return {"terms": self.terms, **self._counts(), **self._arrays()}

    def take(self, tree: dict[str, Any]) -> None:
        """Go on with what `tree` of another rank has returned."""
        for name in _COUNTS:
            setattr(self, name, tree[name])
        self.model.update(tree["parameters"])
        self.optimizer.state = tree["optimizer"]

    def receive(self, mesh: Mesh, root: int) -> None:
        """Take the state of one rank; all ranks call this.

        Raises:
            RankLost: That rank is gone.
        """
        counts = mesh.broadcast_object(self._counts(), root)
        self.take({**mesh.broadcast(self._arrays(), root), **counts})

    def adapters(self) -> dict[str, Any]:
        """Return the trained weights by name, as mlx-lm loads them."""
        return dict(trees.tree_flatten(self.model.trainable_parameters()))

    def save(self, folder: Path, *, numbered: bool) -> None:
        """Write the adapters, and the state of the run.

        Args:
            folder: Of the adapters.
            numbered: Keep a copy of the adapters under the number of the iteration, as mlx-lm does.
        """
        adapters = self.adapters()
        if numbered:
            save_arrays(folder / f"{self.iteration:07d}_{ADAPTERS}", adapters)
        save_arrays(folder / ADAPTERS, adapters)
        arrays = dict(trees.tree_flatten(self._arrays()))
        save_arrays(folder / STATE, arrays, {"terms": self.terms, **self._counts()})

    def load(self, folder: Path) -> bool:
        """Go on where a run in this folder has ended; returns whether there was one.

        Raises:
            UsageError: It was of another model, or with options that make other arrays.
        """
        path = folder / STATE
        loaded = load_arrays(path)
        if loaded is None:
            return False
        arrays, values = loaded
        check_resumable(path, values.get("terms", {}), self.terms)
        wanted = dict(trees.tree_flatten(self._arrays()))
        for name in sorted({*wanted, *arrays}):
            one, other = wanted.get(name), arrays.get(name)
            if one is None or other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
                raise UsageError(
                    f"{path} is the state of another run: its {name} is {_described(other)}, and "
                    f"this run's {_described(one)}; give another --adapter-path, or --no-resume to "
                    "begin anew and replace it"
                )

        def loaded_array(name: str, _: object) -> object:
            return arrays[name]

        tree = trees.tree_map_with_path(loaded_array, self._arrays())
        self.take({**tree, **{name: values[name] for name in _COUNTS}})
        return True

    def _counts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _COUNTS}

    def _arrays(self) -> dict[str, Any]:
        parameters = self.model.trainable_parameters()
        return {"parameters": parameters, "optimizer": self.optimizer.state}


def _described(array: Any) -> str:
    return "not there" if array is None else f"{array.shape} of {array.dtype}"
