"""What the measuring program and its workers say to each other: a line of JSON each way."""

from typing import Literal

import msgspec

What = Literal["all_reduce", "train", "end"]
Layout = Literal["matrix", "resnet18"]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Make this call so often, or so many steps; each rank gets the same order."""

    what: What
    scheme: str = "none"
    """A name of `tools.bench_compression.schemes`."""
    layout: Layout = "matrix"
    side: int = 0
    """Of the matrix: so many rows, and so many columns."""
    times: int = 1


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What it came to at one rank."""

    seconds: tuple[float, ...] = ()
    """Of each call or step, until its result can be read."""
    cpu_s: float = 0.0
    """Of this process with all its threads, in these calls; its agent is not counted."""
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
