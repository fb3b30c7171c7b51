"""What the measuring program and its workers say to each other: a line of JSON each way."""

from typing import Literal

import msgspec

What = Literal["all_reduce", "all_reduce_shared", "average_gradients", "end"]
"""all_reduce_shared: of arrays in the memory that pmesh's trainers share with their agents."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Make this call so often; each rank gets the same order."""

    what: What
    count: int = 0
    """How many float32 values, over all arrays."""
    arrays: int = 1
    """Over how many arrays of a tree they are dealt."""
    times: int = 1
    together: int | None = None
    """How many calls follow each other before their results are checked; None: as many as fit."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What it came to at one rank."""

    seconds: tuple[float, ...] = ()
    """Of each call, from the call to the result."""
    cpu_s: float = 0.0
    """Of this process, and its agent if it has one, over all calls, the checks not counted."""
    wrong: int = 0
    """How many of the results were not what they had to be."""
