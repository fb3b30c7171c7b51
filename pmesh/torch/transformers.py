"""Transformers' Trainer over pmesh: the ranks compare what they go on from.

Each rank looks for a checkpoint on its own disk, and no function of Transformers compares what they
have found: ranks with different ones would train on with one another's gradients. So `extend` adds
a callback to `DEFAULT_CALLBACKS` of `transformers.trainer`, which each Trainer has.
"""

from typing import Any

from pmesh.errors import UsageError
from pmesh.torch.library import dist


def extend(trainer: Any) -> None:  # noqa: ANN401 - of Transformers
    """Let each Trainer compare, when it begins; the module is `transformers.trainer`."""
    callbacks: list[Any] = trainer.DEFAULT_CALLBACKS
    if not any(issubclass(each, _ComparesStarts) for each in callbacks):
        bases = _ComparesStarts, trainer.TrainerCallback
        callbacks.append(type("ComparesStarts", bases, {}))


class _ComparesStarts:
    def on_train_begin(self, args: object, state: Any, control: object, **_: object) -> None:  # noqa: ANN401 - of Transformers
        """Compare the step from which each rank goes on.

        Raises:
            UsageError: on all ranks, if they differ.
        """
        del args, control
        if not dist.is_initialized() or "pmesh" not in dist.get_backend():
            return
        from pmesh.torch.objects import all_gather_object  # noqa: PLC0415 - after torch

        check_same([f"step {step}" for step in all_gather_object(state.global_step)])


def check_same(found: list[str]) -> None:
    """Raise UsageError if the ranks, in order, go on from different checkpoints."""
    if len(set(found)) > 1:
        ranks = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(found))
        raise UsageError(
            f"the ranks would go on from different checkpoints ({ranks}): each reads its own disk, "
            "and only rank 0 writes a whole one; use a folder that all machines share, or copy the "
            "checkpoint to the others"
        )
