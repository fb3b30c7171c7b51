"""What the arguments of a pipeline must be, apart from those that name a schedule or a dtype."""

from typing import cast

from pmesh.errors import UsageError

NOTHING, DIFFERENT, NO_ARRAYS = -1, -2, -3
"""In place of a number of rows."""


def check_whole(name: str, value: object, least: int = 1) -> int:
    """Return the number; raise UsageError unless it is an int of at least `least`.

    >>> check_whole("micro_batch_size", 4)
    4
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{name} is a whole number, not {value!r}")
    if value < least:
        raise UsageError(f"{name} is at least {least}, not {value}")
    return value


def check_by(by: object) -> tuple[int, ...]:
    """Return how many layers each stage has; raise UsageError unless these are whole numbers."""
    if not isinstance(by, list | tuple):
        raise UsageError(f"by is a list with the number of layers of each stage, not {by!r}")
    return tuple(
        check_whole(f"each number in by={by}", count) for count in cast("list[object]", by)
    )


def check_communication(communication: object) -> None:
    """Raise UsageError unless messages go from stage to stage."""
    if communication == "store":
        raise UsageError(
            "communication='store' does not exist: to keep the activations of every step costs "
            "more than to compute one step again after a loss; leave it out, and use "
            "ElasticPipeline to survive losses"
        )
    if communication != "direct":
        raise UsageError(f"communication is 'direct', not {communication!r}")


def check_rows(of_x: int, of_y: int, last: int) -> int:
    """Return the rows of a batch; raise UsageError unless x and y have as many.

    Args:
        of_x: the rows of x on rank 0, or why there is no such number.
        of_y: those of y on the last rank.
        last: that rank.
    """
    sides = (("x", 0, "first", of_x), ("y", last, "last", of_y))
    for name, rank, which, rows in sides:
        if rows == NOTHING:
            raise UsageError(f"rank {rank} has passed no {name}: it has the {which} stage")
        if rows == NO_ARRAYS:
            raise UsageError(
                f"{name} on rank {rank} is no array of MLX with rows: convert it by mx.array"
            )
    if of_x != of_y or of_x < 1:
        found = "arrays of different numbers of" if of_y == DIFFERENT else str(of_y)
        raise UsageError(
            f"x on rank 0 has {of_x} rows and y on rank {last} has {found} rows: they must have "
            "the same number, at least 1"
        )
    return of_x
