"""What a rank of an `ElasticTrainer` knows of the steps of a training."""

import math


class Steps:
    """How this rank's rows of a step are computed, and the losses of all steps."""

    def __init__(self, training: int = 0) -> None:
        self.training = training
        """How many this program has begun."""
        self.has_begun = False
        """Whether this rank has synced in this training."""
        self.counts = True
        """Whether this rank has rows of the step; others may have them all."""
        self.sizes: list[int] = []
        """How many rows this rank computes at once, one part of its share after the other."""
        self.losses: dict[str, list[float]] = {"logged": [0.0, 0], "all": [0.0, 0]}
        """The sum and number of losses since the last log, and since the beginning."""

    def share(self, rows: list[int], at_once: int) -> list[list[int]]:
        """Return the parts of this rank's share of a step.

        Without rows it computes the first of the data, which does not count: it takes part in ops.

        >>> Steps().share([7, 3, 5], at_once=2)
        [[7, 3], [5]]
        """
        self.counts = bool(rows)
        taken = rows or [0]
        parts = [taken[start : start + at_once] for start in range(0, len(taken), at_once)]
        self.sizes = [len(part) for part in parts]
        return parts

    def note(self, loss: float | None) -> None:
        """Count the mean loss of a step over all ranks; None if it is not to be shown."""
        if loss is not None:
            self.losses = {name: [x + loss, n + 1] for name, (x, n) in self.losses.items()}

    def correct(self, logs: dict[str, float]) -> None:
        """Put the mean losses of all ranks into what is logged."""
        if "loss" in logs:
            logs["loss"] = _mean(*self.losses["logged"])
            self.losses["logged"] = [0.0, 0]
        if "train_loss" in logs:
            logs["train_loss"] = _mean(*self.losses["all"])


def _mean(total: float, count: float) -> float:
    return total / count if count else math.nan
