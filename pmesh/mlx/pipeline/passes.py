"""The forward and backward passes of a stage on one micro-batch."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from pmesh.client.trees.mlx import evaluate
from pmesh.mlx.flat import as_arrays, utils
from pmesh.mlx.pipeline.stages import Stage
from pmesh.mlx.randomness import drawn_again, random_place

Name: TypeAlias = tuple[int, str]
"""Which of a stage's `layers`, and the path of an array in it."""
Loss: TypeAlias = Callable[[mx.array], mx.array]
_Form: TypeAlias = tuple[tuple[int, ...], mx.Dtype]
"""An array's shape and dtype."""

_vjp: Any = vars(mx)["vjp"]  # its stub has a generic type without arguments


class Passes:
    """What one stage of a rank computes. `Pipeline` calls this in the order of its schedule."""

    def __init__(self, stage: Stage, number: int, *, recompute: bool) -> None:
        self._layers = [(i, stage.layers[i]) for i in stage.indices_of(number)]
        self._blocks = stage.layout.chunks[number]
        self._recompute = recompute
        self._is_first = number == 0
        self._kept: dict[int, _Kept] = {}
        self._outputs: dict[_Form, _Form] = {}
        """What comes out of which input; a step may have a short micro-batch too."""

    def forward(self, micro_batch: int, x: mx.array, loss: Loss | None, share: float) -> mx.array:
        """Return the output, evaluated; with a loss, nothing is computed before the backward pass.

        Args:
            micro_batch: its number.
            x: the input.
            loss: the last stage's: takes the output, and returns the mean over the rows.
            share: the part of the batch's rows that the micro-batch has.
        """
        kept = _Kept(x, loss, share)
        self._kept[micro_batch] = kept
        if loss is not None:
            if not self._recompute:
                kept.pulled = self._pull_back(kept, mx.array(share))
                evaluate([kept.pulled.output])
            return x
        if self._recompute:
            kept.place = random_place()
            output = self._run(x)
        else:
            # The gradients are built from a cotangent whose values come later, in its memory.
            kept.cotangent = mx.zeros(*self._output_of(x))
            evaluate([kept.cotangent])
            kept.pulled = self._pull_back(kept, kept.cotangent)
            output = kept.pulled.output
        evaluate([output])
        kept.dtype = output.dtype
        return output

    def backward(self, micro_batch: int, cotangent: mx.array | None) -> tuple[mx.array, float]:
        """Return the gradient of the input, evaluated, and a share of the loss (or 0)."""
        kept = self._kept[micro_batch]
        if cotangent is not None:
            cotangent = cotangent.astype(kept.dtype)
            evaluate([cotangent])
        if kept.pulled is None:
            seed = mx.array(kept.share) if cotangent is None else cotangent
            with nullcontext() if kept.place is None else drawn_again(kept.place):
                kept.pulled = self._pull_back(kept, seed)
        elif cotangent is not None:
            _write(kept.cotangent, cotangent)
        pulled = kept.pulled
        evaluate([pulled.before, pulled.output if kept.loss is not None else pulled.before])
        return pulled.before, kept.share * _number(pulled.output) if kept.loss is not None else 0.0

    def gradients(self, micro_batch: int) -> dict[Name, mx.array]:
        """Return the weights' gradients, not yet evaluated, and forget the micro-batch."""
        pulled = self._kept.pop(micro_batch).pulled
        return {} if pulled is None else pulled.gradients

    def clear(self) -> None:
        """Forget all micro-batches."""
        self._kept.clear()
        self._outputs.clear()  # the user may cast the weights between steps

    def _output_of(self, x: mx.array) -> "_Form":
        form = x.shape, x.dtype
        if form not in self._outputs:
            held = self._held()
            output = self._run(x)  # never evaluated
            self._put(held)
            self._outputs[form] = output.shape, output.dtype
        return self._outputs[form]

    def _run(self, x: mx.array) -> mx.array:
        for block in self._blocks:
            x = block.call(x)
        return x

    def _pull_back(self, kept: "_Kept", cotangent: mx.array) -> "_Pulled":
        """Return the output and all gradients, not yet evaluated."""
        held = self._held()
        names = [(i, p) for i, m in self._layers for p in as_arrays(m.trainable_parameters())]
        if self._is_first and not names:  # nothing to differentiate by
            if kept.place is not None:  # the forward pass has computed it
                return _Pulled(kept.x, kept.x, {})
            output = self._run(kept.x)
            return _Pulled(output if kept.loss is None else kept.loss(output), kept.x, {})

        def run(*given: mx.array) -> mx.array:
            self._put(dict(zip(names, given, strict=False)))
            output = self._run(kept.x if self._is_first else given[-1])
            return output if kept.loss is None else kept.loss(output).astype(mx.float32)

        primals = [held[name] for name in names] + [kept.x] * (not self._is_first)
        try:
            (output,), found = _vjp(run, primals, [cotangent])
        finally:
            # What is not trained, such as running statistics, has changed in the forward pass.
            self._put({name: held[name] for name in (names if kept.place is None else held)})
        before = kept.x if self._is_first else found.pop()
        return _Pulled(output, before, dict(zip(names, found, strict=True)))

    def _held(self) -> dict[Name, mx.array]:
        return {(i, p): a for i, m in self._layers for p, a in as_arrays(m.parameters()).items()}

    def _put(self, arrays: dict[Name, mx.array]) -> None:
        for i, module in self._layers:
            own = [(path, x) for (index, path), x in arrays.items() if index == i]
            if own:
                module.update(utils.tree_unflatten(own))


@dataclass(slots=True)
class _Pulled:
    output: mx.array
    """With a loss, its value."""
    before: mx.array
    """The gradient of the input; the first stage has none, so this is its input."""
    gradients: dict[Name, mx.array]


@dataclass(slots=True)
class _Kept:
    """What the backward pass of a micro-batch needs."""

    x: mx.array
    loss: Loss | None
    share: float
    dtype: mx.Dtype = mx.float32
    place: int | None = None
    """Of the random numbers of its forward pass, such as dropout's, if that is computed again."""
    cotangent: mx.array | None = None
    pulled: _Pulled | None = None


def _number(x: mx.array) -> float:
    found: Any = x.item()
    return float(found)


def _write(into: mx.array | None, values: mx.array) -> None:
    """Write to the memory of an evaluated array: the graphs that read it are evaluated later."""
    assert into is not None  # noqa: S101 - a pass that is kept has one
    same: Any = mx.uint16 if into.dtype == mx.bfloat16 else into.dtype
    views = [x.view(same) for x in (into, values)]
    evaluate(views)
    np.array(views[0], copy=False)[...] = np.array(views[1], copy=False)
