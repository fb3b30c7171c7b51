"""The two compiled halves of a step, gradients and update, and the loss for an evaluation."""

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from pmesh.mlx_lm.batches import LocalBatch
from pmesh.mlx_lm.libraries import mx, nn, trees

Nested: TypeAlias = Any
"""Nested dicts and lists of MLX's arrays."""

GROUP_BYTES = 64 << 20  # bytes of parameters: many adapters, or a few whole layers

Loss: TypeAlias = Callable[..., Any]
"""Takes a model, tokens and spans; returns the mean loss over the targets, and their number."""


class Gradients:
    """Computes the gradients of the mean loss over all targets of this rank's rows."""

    def __init__(self, model: Any, loss: Loss) -> None:
        self._model = model
        of_one = nn.value_and_grad(model, loss)
        state = [model.state, mx.random.state]

        @partial(mx.compile, inputs=state, outputs=state)
        def compiled(tokens: Any, spans: Any, part: Any, before: Nested) -> tuple[Any, Nested]:
            (mean, _), grads = of_one(model, tokens, spans)
            if part is not None:
                grads = trees.tree_map(partial(_times, part), grads)
            if before is not None:
                grads = trees.tree_map(operator.add, grads, before)
            return mean, grads

        self._compiled = compiled

    def of(self, shares: Sequence[LocalBatch | None], seeds: Sequence[int]) -> tuple[float, Nested]:
        """Return the loss and the gradients of several iterations, weighted by their targets.

        Args:
            shares: This rank's rows in each iteration.
            seeds: The seed of the random numbers (dropout) of each iteration.

        Returns:
            The sum of the losses over all targets, and the gradients of their mean. The gradients
            are not evaluated, so that computing them overlaps with averaging them. Without rows,
            both are zero.
        """
        targets = sum(share.targets for share in shares if share is not None)
        loss: Any = 0.0
        grads: Nested = None
        for share, seed in zip(shares, seeds, strict=True):
            if share is None:
                continue
            if grads is not None:
                mx.eval(loss, grads)  # so that only one iteration's activations are in memory
            mx.random.seed(seed)
            part = (
                None if share.targets == targets else mx.array(share.targets / targets, mx.float32)
            )
            tokens, spans = mx.array(share.tokens), mx.array(share.spans)
            mean, grads = self._compiled(tokens, spans, part, grads)
            loss += mean * share.targets
        if grads is None:
            return 0.0, trees.tree_map(mx.zeros_like, self._model.trainable_parameters())
        # The loss is evaluated first: its graph would keep the activations while the gradients are
        # evaluated and sent.
        return float(loss.item()), grads


def _times(part: Any, x: Any) -> Any:
    return (x * part).astype(x.dtype)


def compile_update(optimizer: Any) -> Callable[[Nested, Nested, Nested], tuple[Nested, Nested]]:
    """Return a compiled function: parameters, state, gradients → new parameters, new state."""

    def update(parameters: Nested, state: Nested, grads: Nested) -> tuple[Nested, Nested]:
        optimizer.state = state
        parameters = optimizer.apply_gradients(grads, parameters)
        return parameters, optimizer.state

    compiled: Callable[[Nested, Nested, Nested], tuple[Nested, Nested]] = mx.compile(update)
    return compiled


def evaluate_in_groups(parameters: Nested, state: Nested) -> None:
    """Evaluate updated parameters and their optimizer state, some at a time.

    If all were evaluated at once, no old array could be freed before all new ones exist. With Adam
    that takes seven times the bytes of the parameters instead of four, counting the gradients.
    """
    pairs: list[tuple[Any, Nested]] = []

    def take(parameter: Any, its_state: Nested) -> None:
        pairs.append((parameter, its_state))

    trees.tree_map(take, parameters, state)
    group: list[Any] = []
    group_bytes = 0
    while pairs:
        group.append(pairs.pop())
        group_bytes += group[-1][0].nbytes
        if group_bytes >= GROUP_BYTES:
            mx.eval(group)
            group, group_bytes = [], 0
    mx.eval(group, state)


def loss_of(model: Any, loss: Loss, share: LocalBatch | None) -> float:
    """Return the sum of the losses over the targets of a share."""
    if share is None:
        return 0.0
    mean, _ = loss(model, mx.array(share.tokens), mx.array(share.spans))
    return float(mean.item()) * share.targets


def clear_cache(above_bytes: int) -> None:
    """Return MLX's cached memory to the system if it exceeds a limit, as mlx-lm does."""
    if mx.get_cache_memory() > above_bytes:
        mx.clear_cache()
