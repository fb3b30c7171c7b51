"""What a step consists of, what a worker may send of it, and what comes of all that was sent.

A step has parts, which all average one after the other: the blocks from the last to the first, then
head, final norm and embedding. Or it has one part, the whole gradient. The ranks of the job say
how many values each part has, before each step; a worker that sends something else is dropped.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias, assert_never

import msgspec
import numpy as np
from msgspec import Meta

from pmesh.bridge.wire import (
    MAX_SIZES,
    AveragedBlockGradient,
    AveragedGradient,
    AveragedNonBlockGradient,
    BlockGradientPayload,
    Floats,
    GradientPayload,
    Message,
    NonBlockGradientPayload,
)
from pmesh.errors import ProtocolError, UsageError

COMPONENTS: Final = ("head", "final norm", "embedding")
_MOST_BLOCKS: Final = 4096
_AT_ONCE: Final = 1 << 20  # values that are added in float64 at a time: 8 MiB

Count = Annotated[int, Meta(ge=0, lt=2**32)]
Sizes = Annotated[tuple[Count, ...], Meta(max_length=MAX_SIZES)]


class BlockLayout(msgspec.Struct, frozen=True, tag="blocks"):
    """How many values a gradient has that is averaged by blocks: one number for each array."""

    blocks: Annotated[tuple[Sizes, ...], Meta(max_length=_MOST_BLOCKS)]
    """The arrays of each block, from the first block to the last."""
    others: tuple[Count, Count, Count]
    """Head, final norm and embedding."""


class WholeLayout(msgspec.Struct, frozen=True, tag="whole"):
    """How many values a gradient has that is averaged as a whole."""

    size: Count


Layout: TypeAlias = BlockLayout | WholeLayout


class Announcement(msgspec.Struct, frozen=True):
    """What each member of a job tells all others before a step."""

    layout: Layout | None
    """None: this is the bridge, which takes the layout of the ranks."""


def read_announcements(untrusted: Sequence[object]) -> Layout | None:
    """Return the layout of all ranks; None if there is none, as only the bridge is left.

    Args:
        untrusted: The announcements in the order of ranks, as MessagePack has decoded them.

    Raises:
        UsageError: The layouts of two ranks differ, or a rank has made another call.
    """
    try:
        found = [msgspec.convert(each, Announcement).layout for each in untrusted]
    except msgspec.ValidationError as e:
        raise UsageError(f"a rank has announced no gradient of a step with entrenar: {e}") from e
    ranks = [(rank, layout) for rank, layout in enumerate(found) if layout is not None]
    if not ranks:
        return None
    first, layout = ranks[0]
    for rank, other in ranks[1:]:
        if other != layout:
            raise UsageError(
                f"rank {rank} averages {_shown(other)}, and rank {first} {_shown(layout)}"
            )
    return layout


def _shown(layout: Layout) -> str:
    if isinstance(layout, WholeLayout):
        return f"a whole gradient of {layout.size} values"
    sizes = ", ".join(str(sum(block)) for block in layout.blocks[:8])
    more = ", …" if len(layout.blocks) > 8 else ""  # noqa: PLR2004 - as above
    others = ", ".join(map(str, layout.others))
    return f"{len(layout.blocks)} blocks ({sizes}{more} values) and {others} values"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPart:
    """A part of a step: one block of a transformer."""

    index: int
    num_blocks: int
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def __str__(self) -> str:
        return f"block {self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A part of a step: what is in no block."""

    index: int
    size: int

    def __str__(self) -> str:
        return f"component {self.index} ({COMPONENTS[self.index]})"


@dataclass(frozen=True, slots=True, kw_only=True)
class WholePart:
    """The only part of a step without blocks."""

    size: int

    def __str__(self) -> str:
        return "the gradient"


Part: TypeAlias = BlockPart | Component | WholePart


def parts_of(layout: Layout) -> list[Part]:
    """Return the parts of a step in the order in which they are averaged."""
    if isinstance(layout, WholeLayout):
        return [WholePart(size=layout.size)]
    count = len(layout.blocks)
    blocks = [
        BlockPart(index=index, num_blocks=count, sizes=layout.blocks[index])
        for index in reversed(range(count))
    ]
    others = [Component(index=index, size=size) for index, size in enumerate(layout.others)]
    return [*blocks, *others]


def deal(rows: int, workers: int) -> list[tuple[int, int]]:
    """Return the first row of each worker, and the row after its last.

    As entrenar does it, the last worker takes the remainder.

    >>> deal(10, 3)
    [(0, 3), (3, 6), (6, 10)]
    """
    each = rows // workers
    starts = [each * worker for worker in range(workers)]
    return list(zip(starts, [*starts[1:], rows], strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What a worker adds to a part."""

    values: Floats
    loss: float = 0.0
    """The mean of its rows."""
    rows: int = 0


def check(message: Message, part: Part, *, step: int, worker_id: int) -> Contribution:
    """Return what a worker has sent of the part that is due.

    Raises ProtocolError, whose text continues "worker 1 (its name) …", if it is something else, or
    not finite.
    """
    contribution = _fitting(message, part, step, worker_id)
    _check_finite(contribution.values, part, step)
    return contribution


def _fitting(message: Message, part: Part, step: int, worker_id: int) -> Contribution:
    match message, part:
        case BlockGradientPayload(), BlockPart():
            _check_place(message.step, step, message.worker_id, worker_id)
            sent, due = (message.block_idx, message.num_blocks), (part.index, part.num_blocks)
            if sent != due:
                raise ProtocolError(
                    f"sends block {sent[0]} of {sent[1]}, and block {due[0]} of {due[1]} is due"
                )
            if message.component_sizes != part.sizes:
                raise ProtocolError(
                    f"has components of {_listed(message.component_sizes)} values in {part}, and "
                    f"the ranks have {_listed(part.sizes)}"
                )
            found = Contribution(values=message.gradients)
        case NonBlockGradientPayload(), Component():
            _check_place(message.step, step, message.worker_id, worker_id)
            if message.component != part.index:
                raise ProtocolError(f"sends component {message.component}, and {part} is due")
            found = Contribution(values=message.gradients)
        case GradientPayload(), WholePart():
            _check_place(message.step, step, message.worker_id, worker_id)
            if not math.isfinite(message.loss):
                raise ProtocolError(f"has a loss of {message.loss} in step {step}")
            if message.correct > message.total:
                raise ProtocolError(f"says that {message.correct} of {message.total} are correct")
            found = Contribution(values=message.gradients, loss=message.loss, rows=message.total)
        case _:
            raise ProtocolError(f"sends a {type(message).__name__}, and {part} is due")
    if len(found.values) != part.size:
        raise ProtocolError(
            f"has {len(found.values)} values in {part}, and the ranks have {part.size}"
        )
    return found


def _check_place(step: int, due: int, worker_id: int, own: int) -> None:
    if step != due:
        raise ProtocolError(f"is in step {step}, and step {due} is due")
    if worker_id != own:
        raise ProtocolError(f"calls itself worker {worker_id}")


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes[:16])) + (", …" if len(sizes) > 16 else "")  # noqa: PLR2004


def _check_finite(values: Floats, part: Part, step: int) -> None:
    finite = np.isfinite(values)
    if not finite.all():
        at = int(np.argmin(finite))
        what = "NaN" if np.isnan(values[at]) else "infinity"
        raise ProtocolError(f"has {what} in {part} of step {step}, at value {at}")


def mean_of(arrays: Sequence[Floats]) -> Floats:
    """Return the mean of arrays of equal length as float32[n], added in float64."""
    if len(arrays) == 1:
        return np.ascontiguousarray(arrays[0], np.float32)
    mean = np.empty(len(arrays[0]), np.float32)
    for start in range(0, len(mean), _AT_ONCE):
        piece = slice(start, start + _AT_ONCE)
        mean[piece] = sum(array[piece].astype(np.float64) for array in arrays) / len(arrays)
    return mean


def answer_to(part: Part, mean: Floats, *, step: int, loss: float) -> Message:
    """Return what each worker is sent when a part is averaged."""
    match part:
        case BlockPart():
            return AveragedBlockGradient(step, part.index, part.sizes, mean)
        case Component():
            return AveragedNonBlockGradient(step, part.index, mean)
        case WholePart():
            return AveragedGradient(step, mean, loss)
        case _:  # pragma: no cover - the type checker shows that there is no other
            assert_never(part)
