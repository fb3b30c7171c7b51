"""What the measuring program and its workers say to each other: a line of JSON each way."""

from typing import Literal

import msgspec

What = Literal["all_reduce", "all_reduce_shared", "average_gradients", "compressed", "train", "end"]
"""all_reduce_shared: of arrays in the memory that pmesh's trainers share with their agents."""
Layout = Literal["matrix", "resnet18"]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Make this call so often, or so many steps; each rank gets the same order."""

    what: What
    count: int = 0
    """How many float32 values, over all arrays."""
    arrays: int = 1
    """Over how many arrays of a tree they are dealt."""
    times: int = 1
    together: int | None = None
    """How many calls follow each other before their results are checked; None: as many as fit."""
    scheme: str = "none"
    """Of a compressed call: a name of `tools.bench.schemes`."""
    layout: Layout = "matrix"
    side: int = 0
    """Of the matrix: so many rows, and so many columns."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What it came to at one rank."""

    seconds: tuple[float, ...] = ()
    """Of each call or step, until its result can be read."""
    cpu_s: float = 0.0
    """Of this process, and its agent if it has one, over all calls, the checks not counted."""
    wrong: int = 0
    """How many of the results were not what they had to be."""
    digest: str = ""
    """Of the last result, or of the model's weights: the same on all ranks."""
    error: float = 0.0
    """Relative L2 error of the last result."""
    picked: str = ""
    """What was sent in the last call, and why, as `mesh.last_op` says it."""
    settled: bool = True
    """Whether Auto has picked; false while it tries."""
    loss: float = 0.0
    """Over all samples, after the last step."""
