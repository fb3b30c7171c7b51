"""A rank's part of a model that is trained in stages."""

import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import mlx.core as mx
import psutil

from pmesh.client.group import Collectives
from pmesh.client.trees.mlx import evaluate
from pmesh.errors import UsageError
from pmesh.mlx.families import language_model_blocks
from pmesh.mlx.flat import as_arrays
from pmesh.mlx.fully_sharded import Block, parts_of_several, within_several
from pmesh.mlx.pipeline.rules.checks import check_by, check_whole
from pmesh.mlx.pipeline.rules.splitting import check_counts, plan_split

nn: Any = importlib.import_module("mlx.nn")  # it has no types

Layers: TypeAlias = list[list[Block]]
"""The blocks of each layer of a model."""

_TRAINED = 4  # a trained value has a gradient and two moments beside it
_MEMORY_USED = 0.8  # the rest is for activations


@dataclass(frozen=True, slots=True)
class Layout:
    """The blocks of a rank, and which of its modules others have too."""

    stages: int
    """Of the whole model."""
    chunks: dict[int, tuple[Block, ...]]
    """The blocks of each stage of this rank, by the stage's number."""
    counts: tuple[int, ...]
    """The number of blocks of each stage of the model."""
    holders: tuple[tuple[int, ...], ...]
    """The ranks that have each module of this rank: more than one if a module is tied."""


class Stage(nn.Module):  # type: ignore[misc] # MLX's modules have no types
    """A rank's part of a model, a module of `mlx.nn`. `split_layers` returns one.

    `layers` has its modules, each once. They are those of the model, not copies.
    """

    def __init__(self, layout: Layout, modules: Sequence[Any]) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.layout = layout
        self.layers = list(modules)

    def indices_of(self, stage: int) -> list[int]:
        """Return which of `layers` a stage of this rank has."""
        order = [id(module) for module in self.layers]
        blocks = self.layout.chunks[stage]
        return list(dict.fromkeys(order.index(id(m)) for b in blocks for m in b.modules))


def split_layers(
    model: Any,  # noqa: ANN401 - MLX's modules have no types
    mesh: Collectives,
    *,
    by: Sequence[int] | None = None,
    stages_per_rank: int = 1,
) -> Stage:
    """Return this rank's part of a model. Every rank of the mesh must call this.

    By default the ranks measure how fast they multiply matrices, and the slowest stage then takes
    as little time as it can, within 80 % of each rank's memory. A trained weight counts four times,
    as it has a gradient and two moments of its optimizer.

    Load a large model with `lazy=True` of `mlx_lm.load`, and drop it afterwards: a rank then reads
    its own layers alone.

    Args:
        model: one of mlx-lm's language models that `language_model_blocks` takes, also with
            adapters; or a list of `mlx.nn` modules and `Block` objects, each of which takes one
            array and returns one; or an `mlx.nn.Sequential`. All ranks pass the same model.
        mesh: the mesh, or a group: with P ranks, rank r has the stages r, r + P and so on.
        by: how many layers each stage has, in the order of the model. A language model's embedding
            belongs to its first layer, its norm and head to its last one.
        stages_per_rank: several stages on each rank are for the schedules interleaved and
            zero_bubble.

    Raises:
        UsageError: there are too few layers, they do not fit, `by` is not for them, or layers of
            two ranks share a module that neither names.
        PmeshError: as for `all_gather`.
    """
    check_whole("stages_per_rank", stages_per_rank)
    counts = None if by is None else check_by(by)
    layers = layers_of(model)
    stages = mesh.size * stages_per_rank
    if counts is None:
        counts = tuple(_measured(layers, mesh, stages_per_rank))
    check_counts(counts, len(layers), stages)
    return cut_stage(layers, counts, int(mesh.rank), mesh.size)


def cut_stage(layers: Layers, counts: Sequence[int], rank: int, size: int) -> Stage:
    """Return the part of a rank, one of `size`; `counts` has the number of layers of each stage.

    Raises:
        UsageError: layers of two ranks share a module that neither names.
    """
    stages = len(counts)
    chunks, at = list[tuple[Block, ...]](), 0
    for count in counts:
        chunks.append(tuple(b for layer in layers[at : at + count] for b in layer))
        at += count
    ranks_of: dict[int, set[int]] = {}
    for stage, chunk in enumerate(chunks):
        for module in (m for block in chunk for m in block.modules):
            ranks_of.setdefault(id(module), set()).add(stage % size)
    tops = {id(m): m for chunk in chunks for block in chunk for m in block.modules}
    for part, owners in parts_of_several(tops.values()):
        ranks = set[int]().union(*(ranks_of[id(owner)] for owner in owners))
        if len(ranks) > 1 and as_arrays(part.trainable_parameters()):
            raise UsageError(within_several(part))
    own = {stage: chunks[stage] for stage in range(rank, stages, size)}
    modules = {id(m): m for chunk in own.values() for block in chunk for m in block.modules}
    order = [each for each in ranks_of if each in modules]  # of the model, as on all ranks
    holders = tuple(tuple(sorted(ranks_of[each])) for each in order)
    return Stage(Layout(stages, own, tuple(counts), holders), [modules[each] for each in order])


def changing_arrays(module: Any) -> dict[str, Any]:  # noqa: ANN401 - MLX's modules
    """Return what a training changes in a module: trained weights, and running statistics."""

    def changes(owner: Any, key: str, value: object) -> bool:  # noqa: ANN401 - as above
        is_trained: bool = nn.Module.trainable_parameter_filter(owner, key, value)
        return is_trained or (isinstance(owner, nn.BatchNorm) and isinstance(value, mx.array))

    return cast("dict[str, Any]", module.filter_and_map(changes))


def layers_of(model: Any) -> Layers:  # noqa: ANN401 - as above
    """Return the blocks of each layer of a model, which `split_layers` takes."""
    if isinstance(model, nn.Sequential):
        model = model.layers
    if isinstance(model, Sequence):
        blocks = list[Any](model)  # pyright: ignore[reportUnknownArgumentType]
        for i, block in enumerate(blocks):
            if not isinstance(block, Block | nn.Module):
                kind = type(block).__name__
                raise UsageError(
                    f"layer {i} of the model is of the type {kind}: pass modules of mlx.nn, or "
                    "pmesh.mlx.Block objects"
                )
        return [[b if isinstance(b, Block) else Block((b,), b)] for b in blocks]
    first, *middle, last = language_model_blocks(model)
    layers = [[block] for block in middle]
    layers[0].insert(0, first)
    layers[-1].append(last)
    return layers


def deal_anew(
    layers: Layers, mesh: Collectives, own: range, before: Sequence[int], *, keeps_shares: bool
) -> tuple[int, ...]:
    """Return how many layers each rank gets in a training that is under way.

    Args:
        layers: of the model.
        mesh: the ranks that are left.
        own: the layers that this rank has now, whose memory it may have again.
        before: how many layers each of these ranks has had.
        keeps_shares: whether to deal in these proportions, as far as the memory allows, instead of
            by speed; it counts if any rank passes it.

    Raises:
        UsageError: the layers do not fit.
        PmeshError: as for `all_gather`.
    """
    work, needed = _costs_of(layers)
    room = _memory() if mx.metal.is_available() else _memory() + sum(needed[i] for i in own)
    facts = mesh.all_gather_object([_speed(), room, keeps_shares])
    speeds = [float(speed) for speed, _, _ in facts]
    if any(keeps for _, _, keeps in facts):
        work, speeds = [1.0] * len(layers), [float(share) for share in before]
    return tuple(plan_split(work, needed, speeds, [_MEMORY_USED * room for _, room, _ in facts]))


def _measured(layers: Layers, mesh: Collectives, stages_per_rank: int) -> list[int]:
    work, needed = _costs_of(layers)
    facts = mesh.all_gather_object([_speed(), _memory()])
    speeds = [float(speed) for speed, _ in facts] * stages_per_rank
    memory = [_MEMORY_USED * room / stages_per_rank for _, room in facts] * stages_per_rank
    return plan_split(work, needed, speeds, memory)


def _costs_of(layers: Layers) -> tuple[list[float], list[int]]:
    """Return the work of each layer, and the bytes that its training needs."""
    work, needed = list[float](), list[int]()
    for layer in layers:
        modules = {id(m): m for block in layer for m in block.modules}.values()
        whole = sum(x.nbytes for m in modules for x in as_arrays(m.parameters()).values())
        trained = sum(
            x.nbytes for m in modules for x in as_arrays(m.trainable_parameters()).values()
        )
        work.append(float(whole))
        needed.append(whole + (_TRAINED - 1) * trained)
    return work, needed


def _speed() -> float:
    """Return the products of numbers a second in the best of five multiplications of matrices."""
    size, best = 512, 0.0
    a = mx.ones((size, size))
    evaluate([a])
    for _ in range(5):
        began = time.perf_counter()
        evaluate([a @ a])
        best = max(best, size**3 / (time.perf_counter() - began))
    return best


def _memory() -> int:
    """Return the bytes that a training may take here: the GPU's limit on a Mac."""
    if not mx.metal.is_available():
        return psutil.virtual_memory().available
    return int(mx.device_info()["max_recommended_working_set_size"])
