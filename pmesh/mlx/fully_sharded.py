"""Training with weights, gradients and optimizer state that are sharded across the ranks."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from pmesh.client.calls.queue import Handle, check_timeout
from pmesh.client.calls.reducing import DEFAULT_TIMEOUT_S
from pmesh.client.mesh import Mesh
from pmesh.client.trees.mlx import evaluate
from pmesh.core.ops.shard import Shard
from pmesh.errors import RosterChanged, UsageError
from pmesh.mlx.flat import Flat, NamedArrays, as_arrays, utils
from pmesh.mlx.randomness import drawn_again, random_place
from pmesh.mlx.shards import Span

Parts: TypeAlias = dict[str, mx.array]
"""This rank's part of a module's weights: a flat array for each group."""
Gathering: TypeAlias = list[tuple[int, str, Handle[mx.array]]]
"""Ops that have begun: the index of a module, one of its groups, and the handle of its values."""

_vjp: Any = vars(mx)["vjp"]  # its stub has a generic type without arguments
_FROZEN = " frozen"  # follows the dtype in the name of a group that gets no gradients
_OTHER_WEIGHTS = (
    "load takes the weights of each module of this model, in the order of gather, and these have "
    "other names or shapes, or are of more or fewer modules"
)


@dataclass(frozen=True, slots=True)
class Block:
    """A step of a model's forward pass, which needs the weights of some modules."""

    modules: tuple[Any, ...]
    """Modules of `mlx.nn`. One module may be in several blocks, such as a tied embedding."""
    call: Callable[[mx.array], mx.array]
    """Takes the output of the previous block; the first block takes the input of the model."""


def parts_of_several(modules: Iterable[Any]) -> list[tuple[Any, list[Any]]]:
    """Return each module with weights that is within several of these, and those."""
    found: dict[int, tuple[Any, list[Any]]] = {}
    for module in modules:
        for part in {id(each): each for each in module.modules()}.values():
            found.setdefault(id(part), (part, []))[1].append(module)
    return [each for each in found.values() if len(each[1]) > 1 and as_arrays(each[0].parameters())]


def fully_shard(
    blocks: Sequence[Any], mesh: Mesh, *, timeout_s: float = DEFAULT_TIMEOUT_S
) -> "FullySharded":
    """Shard the weights, the gradients and the optimizer's state of a model across the ranks.

    Each of n ranks keeps an n-th of them. To compute a block, its weights are gathered from all
    ranks, and freed afterwards; meanwhile those of the next block travel. The backward pass gathers
    them again, and computes the block's activations again from its input::

        model = pmesh.mlx.fully_shard([embedding, *layers, head], mesh)
        optimizer = optim.AdamW(1e-3)
        for x, y in batches:
            loss, gradients = model.loss_and_gradients(cross_entropy, x, y)
            optimizer.update(model, gradients)
            mx.eval(model.parameters(), optimizer.state)

    A step sends the weights twice and the gradients once. That is 1.5 times the bytes of
    `average_gradients`, or the same bytes for 16-bit weights, since sums travel as float32.
    No op runs inside a transformation of MLX, so nothing in the GPU's queue waits for the network.
    This is ZeRO-3 (Rajbhandari et al. 2020, arXiv 1910.02054), as PyTorch's `fully_shard` does it.
    The number of ranks need not divide the rows of an array.

    Each rank updates its part of running statistics by its own batch; those of `SyncBatchNorm` are
    of all batches.

    Each part exists only once: when a rank is lost, its part of the weights is lost too. Then every
    call raises `RosterChanged` on all ranks, until the remaining ranks `load` the weights of a
    checkpoint. Save what `gather` returns from time to time.

    Args:
        blocks: the blocks in the order of the forward pass: modules of `mlx.nn` that take one array
            and return one, or `Block` objects. All ranks must pass the same weights; the modules
            are empty afterwards.
        mesh: this rank's mesh.
        timeout_s: the timeout of each op, in seconds.

    Raises:
        UsageError: there are no blocks, or two of their modules share a third one.
    """
    return FullySharded(blocks, mesh, timeout_s=timeout_s)


def within_several(part: object) -> str:
    """Say what to do about a module that `parts_of_several` has found."""
    return (
        f"two modules of the model share a {type(part).__name__}: in place of these, pass Blocks "
        "that name it itself in `modules`"
    )


class _Module:
    """A module whose weights are sharded; it holds all of them only while it is computed."""

    def __init__(self, module: Any) -> None:  # noqa: ANN401 - MLX's modules have no types
        self._module = module
        trainable = as_arrays(module.trainable_parameters())
        named: dict[str, NamedArrays] = {}
        for path, x in self.arrays.items():
            dtype = str(x.dtype).removeprefix("mlx.core.")
            named.setdefault(dtype if path in trainable else dtype + _FROZEN, {})[path] = x
        self.groups = {group: Flat.of(own) for group, own in named.items()}

    @property
    def arrays(self) -> NamedArrays:
        """The weights that the module holds now."""
        return as_arrays(self._module.parameters())

    def takes(self, arrays: NamedArrays) -> bool:
        """Return True if these have the names and shapes of the module's weights."""
        return all(
            path in arrays and arrays[path].shape == shape
            for flat in self.groups.values()
            for path, shape in zip(flat.paths, flat.shapes, strict=True)
        )

    def cut(self, arrays: NamedArrays, rank: int, size: int) -> Parts:
        """Return a copy of a rank's part of the weights."""
        parts = {
            group: mx.contiguous(flat.cut(arrays, Shard.of(rank, size, flat.count)))
            for group, flat in self.groups.items()
        }
        evaluate([parts])
        return parts

    def keep(self, parts: Parts, before: NamedArrays, rank: int, size: int) -> None:
        """Take what a forward pass has changed, such as running statistics, into a rank's part."""
        arrays = self.arrays
        for group, flat in self.groups.items():
            paths = flat.paths if group.endswith(_FROZEN) else ()
            if any(arrays[path] is not before[path] for path in paths):
                cut = flat.cut(arrays, Shard.of(rank, size, flat.count))
                parts[group] = mx.contiguous(cut.astype(flat.dtype))
                evaluate([parts[group]])

    def put(self, arrays: NamedArrays) -> None:
        """Set the module's weights."""
        self._module.update(utils.tree_unflatten(list(arrays.items())))

    def free(self) -> None:
        self.put({path: mx.zeros(0) for flat in self.groups.values() for path in flat.paths})


class FullySharded:
    """A model whose weights are sharded across the ranks. `fully_shard` returns one."""

    def __init__(self, blocks: Sequence[Any], mesh: Mesh, *, timeout_s: float) -> None:
        if not blocks:
            raise UsageError("there is no block to shard")
        self._mesh = mesh
        self._timeout_s = check_timeout(timeout_s)
        self._blocks = [b if isinstance(b, Block) else Block((b,), b) for b in blocks]
        modules = {id(m): m for block in self._blocks for m in block.modules}
        for part, _ in parts_of_several(modules.values()):
            raise UsageError(within_several(part))
        order = list(modules)
        self._of_block = [
            list(dict.fromkeys(order.index(id(m)) for m in block.modules)) for block in self._blocks
        ]
        self._modules = [_Module(module) for module in modules.values()]
        self._layout = mesh.rank, mesh.size
        self._places: list[int] = []
        """Of the random numbers of each block, such as dropout's, which are drawn again."""
        self._parts: list[Parts] = []
        for module in self._modules:
            self._parts.append(module.cut(module.arrays, *self._layout))
            module.free()

    def __getitem__(self, key: str) -> list[Parts]:
        """Return `parameters()[key]`: optimizers of MLX index a module."""
        return self.parameters()[key]

    def parameters(self) -> dict[str, list[Parts]]:
        """Return this rank's part of the weights: for each module a flat array of each dtype."""
        return {"modules": self._parts}

    def trainable_parameters(self) -> dict[str, list[Parts]]:
        """Return this rank's part of those weights that get gradients."""
        return {
            "modules": [
                {group: x for group, x in parts.items() if not group.endswith(_FROZEN)}
                for parts in self._parts
            ]
        }

    def update(self, parameters: dict[str, list[Parts]]) -> None:
        """Replace arrays of this rank's part. Optimizers of MLX call this."""
        for own, fresh in zip(self._parts, parameters["modules"], strict=True):
            own.update(fresh)

    def loss_and_gradients(
        self,
        loss_of: Callable[..., mx.array],
        x: mx.array,
        *targets: mx.array,
        weight: float = 1.0,
    ) -> tuple[mx.array, dict[str, list[Parts]]]:
        """Return the mean loss over all ranks' batches, and this rank's part of its gradients.

        Args:
            loss_of: takes the output of the last block and the targets, and returns the mean loss,
                a scalar.
            x: the input of the first block.
            targets: the other arguments of `loss_of`.
            weight: the weight of this rank's batch in the mean, such as its number of samples; with
                0 its loss does not count, whatever it is.

        Returns:
            The loss, and gradients in the form of `trainable_parameters`, both evaluated. Pass the
            gradients to `optimizer.update(model, …)` of an elementwise optimizer, such as AdamW.

        Raises:
            UsageError: the weights of all ranks add up to 0.
            RosterChanged: a rank is lost, and its part of the weights too: see `load`.
            PmeshError: as for `all_gather`.
        """
        if not (math.isfinite(weight) and weight >= 0):
            raise UsageError(f"a weight is a number of samples, at least 0, not {weight}")
        total = float(self._mesh.all_reduce(np.array(float(weight)), "sum", self._timeout_s))
        self._check()
        if not total:
            raise UsageError("nothing to average: the weights of all ranks add up to 0")

        def share_of(output: mx.array) -> mx.array:
            if not weight:
                return mx.zeros(())  # the mean over no rows is NaN
            return loss_of(output, *targets).astype(mx.float32) * (weight / total)

        try:
            counts = weight > 0
            inputs = self._forward(x, counts=counts)
            loss, parts = self._backward(inputs, share_of, counts=counts)
        finally:
            for module in self._modules:
                module.free()
        return self._mesh.all_reduce(loss, "sum", self._timeout_s), {"modules": parts}

    def __call__(self, x: mx.array) -> mx.array:
        """Return the output of the last block. All ranks must call this, each with its own input.

        Raises:
            RosterChanged: as for `loss_and_gradients`.
            PmeshError: as for `all_gather`.
        """
        self._check()
        try:
            return self._forward(x, until=len(self._blocks))[-1]
        finally:
            for module in self._modules:
                module.free()

    def gather(self) -> Iterator[NamedArrays]:
        """Yield all weights of one module after another, by path; only one module is in memory.

        All ranks must iterate to the end.

        Raises:
            RosterChanged: as for `loss_and_gradients`.
            PmeshError: as for `all_gather`.
        """
        self._check()
        for index in range(len(self._modules)):
            yield self._arrived(self._gather([index]))[index]

    def load(self, weights: Iterable[NamedArrays]) -> None:
        """Take all weights, as `gather` yields them, and shard them across the present ranks.

        All ranks must call this with the same weights. If the number of ranks has changed, the
        state of an optimizer no longer fits: begin with a new optimizer.

        Raises:
            UsageError: they are not the weights of this model; it keeps those that it has.
        """
        layout = self._mesh.rank, self._mesh.size
        parts = list[Parts]()
        for arrays in weights:
            if len(parts) == len(self._modules) or not self._modules[len(parts)].takes(arrays):
                raise UsageError(_OTHER_WEIGHTS)
            parts.append(self._modules[len(parts)].cut(arrays, *layout))
        if len(parts) < len(self._modules):
            raise UsageError(_OTHER_WEIGHTS)
        self._layout, self._parts = layout, parts

    def _check(self) -> None:
        if (self._mesh.rank, self._mesh.size) != self._layout:
            raise RosterChanged(
                "the ranks are others than those that have the weights, and a lost rank's part is "
                "gone: call load() on all ranks, with the weights of a checkpoint"
            )

    def _gather(self, modules: Sequence[int]) -> Gathering:
        return [
            (index, group, self._mesh.all_gather(part, self._timeout_s, async_op=True))
            for index in modules
            for group, part in self._parts[index].items()
        ]

    def _arrived(self, gathering: Gathering) -> dict[int, NamedArrays]:
        """Wait for the weights, and return them by module."""
        found: dict[int, NamedArrays] = {}
        for index, group, handle in gathering:
            values = handle.wait()
            self._check()
            arrays = self._modules[index].groups[group].take_apart(values)
            found.setdefault(index, {}).update(arrays)
        return found

    def _forward(
        self, x: mx.array, *, until: int | None = None, counts: bool = True
    ) -> list[mx.array]:
        """Run the first `until` blocks; return the input of the model and the output of each.

        By default all blocks run except the last one: the result then holds the input of each
        block. While a block is computed, the weights of the next one travel. If the input does not
        count, running statistics stay as they are.
        """
        last = len(self._blocks) - 1 if until is None else until
        outputs = [x]
        self._places = []
        gathering = self._gather(self._of_block[0]) if last else []
        for i in range(last):
            weights = self._arrived(gathering)
            if i + 1 < last:
                gathering = self._gather(self._of_block[i + 1])
            self._put(weights)
            self._places.append(random_place())
            outputs.append(self._blocks[i].call(outputs[-1]))
            evaluate([outputs[-1]])
            if counts:
                self._keep(weights)
            self._free(i)
            del weights
        return outputs

    def _backward(
        self,
        inputs: list[mx.array],
        share_of: Callable[[mx.array], mx.array],
        *,
        counts: bool,
    ) -> tuple[mx.array, list[Parts]]:
        """Return this rank's share of the loss, and its part of the gradients.

        This goes from the last block to the first. While a block is computed, the gradients of the
        block after it are reduced, and the weights of the block before it travel.
        """
        parts: list[Parts] = [{} for _ in self._modules]
        loss, cotangent = mx.zeros(()), mx.array(1.0)
        end: Callable[[mx.array], mx.array] | None = share_of
        gathering = self._gather(self._of_block[len(inputs) - 1])
        adding: Gathering = []
        for i in range(len(inputs) - 1, -1, -1):
            weights = self._arrived(gathering)
            if i:
                gathering = self._gather(self._of_block[i - 1])
            with nullcontext() if end is not None else drawn_again(self._places.pop()):
                output, before, flat = self._pull_back(i, weights, inputs.pop(), cotangent, end)
            if not counts:
                flat = {key: mx.zeros_like(x) for key, x in flat.items()}
            elif end is not None:  # the other blocks are computed for the second time
                self._keep(weights)
            del weights
            self._free(i)
            if end is not None:
                loss, end = output, None
            cotangent = before
            self._add(adding, parts)
            adding = [
                (m, group, self._mesh.reduce_scatter(x, "sum", self._timeout_s, async_op=True))
                for (m, group), x in flat.items()
            ]
        self._add(adding, parts)
        return loss, parts

    def _pull_back(
        self,
        i: int,
        weights: dict[int, NamedArrays],
        x: mx.array,
        cotangent: mx.array,
        end: Callable[[mx.array], mx.array] | None,
    ) -> tuple[mx.array, mx.array, dict[tuple[int, str], mx.array]]:
        """Return a block's output, its input's cotangent, and the flat gradients of its weights.

        The first block's input may be integers, so it gets no cotangent.
        """
        groups = [
            (m, group, flat)
            for m in weights
            for group, flat in self._modules[m].groups.items()
            if not group.endswith(_FROZEN)
        ]
        names = [(m, path) for m, _, flat in groups for path in flat.paths]

        def run(*given: mx.array) -> mx.array:
            fresh = {m: dict(arrays) for m, arrays in weights.items()}
            for (m, path), array in zip(names, given, strict=False):
                fresh[m][path] = array
            self._put(fresh)
            output = self._blocks[i].call(given[-1] if i else x)
            return output if end is None else end(output)

        primals = [weights[m][path] for m, path in names] + [x] * bool(i)
        outputs, found = _vjp(run, primals, [cotangent])
        before = found.pop() if i else cotangent
        by_module: dict[int, NamedArrays] = {m: {} for m in weights}
        for (m, path), gradient in zip(names, found, strict=True):
            by_module[m][path] = gradient
        flat_of = {
            (m, group): flat.cut(by_module[m], Span(0, flat.count)) for m, group, flat in groups
        }
        del found, by_module
        evaluate([outputs, before, list(flat_of.values())])
        return outputs[0], before, flat_of

    def _add(self, adding: Gathering, parts: list[Parts]) -> None:
        """Wait for reduced gradients, and add them up for a module that is in several blocks."""
        for m, group, handle in adding:
            part = handle.wait()
            self._check()
            parts[m][group] = parts[m][group] + part if group in parts[m] else part
            evaluate([parts[m][group]])

    def _keep(self, weights: dict[int, NamedArrays]) -> None:
        for index, arrays in weights.items():
            self._modules[index].keep(self._parts[index], arrays, *self._layout)

    def _put(self, weights: dict[int, NamedArrays]) -> None:
        for index, arrays in weights.items():
            self._modules[index].put(arrays)

    def _free(self, i: int) -> None:
        for index in self._of_block[i]:
            self._modules[index].free()
