"""Transformers' Trainer over pmesh: the ranks compare what they go on from, and report their loss.

Each rank looks for a checkpoint on its own disk, and no function of Transformers compares what they
have found: ranks with different ones would train on with one another's gradients. So `extend` adds
a callback to `DEFAULT_CALLBACKS` of `transformers.trainer`, which each Trainer has.
"""

from collections.abc import Mapping
from typing import Any

from pmesh.errors import UsageError
from pmesh.torch.library import dist

_REPORTED = "loss", "eval_loss", "grad_norm", "learning_rate"


def extend(trainer: Any) -> None:  # noqa: ANN401 - of Transformers
    """Let each Trainer compare, when it begins; the module is `transformers.trainer`."""
    callbacks: list[Any] = trainer.DEFAULT_CALLBACKS
    if not any(issubclass(each, _OverPmesh) for each in callbacks):
        callbacks.append(type("OverPmesh", (_OverPmesh, trainer.TrainerCallback), {}))


class _OverPmesh:
    def on_train_begin(self, args: object, state: Any, control: object, **_: object) -> None:  # noqa: ANN401 - of Transformers
        """Compare the step from which each rank goes on.

        Raises:
            UsageError: on all ranks, if they differ; or this Trainer would train alone.
        """
        del control
        from pmesh.torch.ranks import WORLDS  # noqa: PLC0415 - after torch

        if WORLDS.elastic is not None and not hasattr(args, "is_elastic"):
            raise UsageError(
                "this program is elastic, and this Trainer would train alone: make it a "
                "pmesh.torch.ElasticTrainer"
            )
        if not dist.is_initialized() or "pmesh" not in dist.get_backend():
            return
        from pmesh.torch.objects import all_gather_object  # noqa: PLC0415 - after torch

        check_same([f"step {step}" for step in all_gather_object(state.global_step)])

    def on_log(
        self,
        args: object,
        state: object,
        control: object,
        logs: Mapping[str, object] | None = None,
        **_: object,
    ) -> None:
        """Report what `pmesh status` can show of what Transformers logs, every `logging_steps`."""
        del args, state, control
        from pmesh.torch.reports import report  # noqa: PLC0415 - after torch

        report(**{name: x for name in _REPORTED if isinstance(x := (logs or {}).get(name), float)})


def check_same(found: list[str]) -> None:
    """Raise UsageError if the ranks, in order, go on from different checkpoints."""
    if len(set(found)) > 1:
        ranks = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(found))
        raise UsageError(
            f"the ranks would go on from different checkpoints ({ranks}): each reads its own disk, "
            "and only rank 0 writes a whole one; use a folder that all machines share, or copy the "
            "checkpoint to the others"
        )
