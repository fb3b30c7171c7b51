"""Which of `total` values a rank owns, and what that saves."""

from types import MappingProxyType
from typing import Any, NamedTuple, cast

from pmesh.core.ops.plan import chunk_bounds
from pmesh.errors import UsageError

_STATES = MappingProxyType(
    {
        "sgd": 1,
        "rmsprop": 1,
        "adagrad": 1,
        "lion": 1,
        "adadelta": 2,
        "adam": 2,
        "adamw": 2,
        "adamax": 2,
        "nadam": 2,
        "radam": 2,
    }
)
"""The values of state that an optimizer keeps for each parameter: moments, momentum."""


class Shard(NamedTuple):
    """The contiguous part of `total` values that one rank owns: from `begin` to before `end`.

    All parts of pmesh that cut values into one part for each rank cut them so: the parts follow
    each other, and their sizes differ by at most one. The first `total % world_size` ranks have
    one value more, as by `numpy.array_split`.

    >>> [Shard.of(rank, 3, 7) for rank in range(3)]
    [Shard(begin=0, end=3, total=7), Shard(begin=3, end=5, total=7), Shard(begin=5, end=7, total=7)]
    """

    begin: int
    end: int
    total: int

    @classmethod
    def of(cls, rank: int, world_size: int, total: int) -> "Shard":
        """Return the part of a rank.

        Args:
            rank: from 0 to `world_size` - 1.
            world_size: the number of ranks, at least 1.
            total: the number of values, at least 0; with fewer values than ranks, the last ranks
                have none.

        Raises:
            UsageError: a number is out of range.
        """
        if world_size < 1:
            raise UsageError(f"world_size is at least 1, not {world_size}")
        if not 0 <= rank < world_size:
            raise UsageError(f"a rank of {world_size} is from 0 to {world_size - 1}, not {rank}")
        if total < 0:
            raise UsageError(f"total is at least 0, not {total}")
        bounds = chunk_bounds(total, world_size)
        return cls(bounds[rank], bounds[rank + 1], total)

    @property
    def size(self) -> int:
        """The number of values."""
        return self.end - self.begin

    @property
    def saving(self) -> float:
        """The part of the memory for all values that this rank does not need, from 0 to 1.

        >>> Shard.of(0, 4, 100).saving
        0.75
        """
        return 1 - self.size / self.total if self.total else 0.0

    def owns(self, index: int) -> bool:
        """Return True if the value with this index, from 0, is in this part."""
        return self.begin <= index < self.end

    def bytes(self, optimizer: object, itemsize: int = 4) -> int:
        """Return the bytes of an optimizer's state for these values.

        Args:
            optimizer: an optimizer of MLX or of torch, whose options count; or a name, such as
                "adamw". The state of other optimizers, such as Adafactor and Muon, depends on the
                shapes of the arrays.
            itemsize: the bytes of one value of the state; 4 for float32.

        Raises:
            UsageError: the optimizer is not one of those that keep the same state for each value.

        >>> Shard.of(0, 4, 1000).bytes("adamw")
        2000
        """
        return self.size * _states_of(optimizer) * itemsize


def kept_parts(rank: int, size: int, replicas: int) -> list[int]:
    """Return the parts that a rank keeps: its own, and those of the ranks after it.

    >>> kept_parts(2, 3, 2)
    [2, 0]
    """
    return [(rank + i) % size for i in range(min(replicas, size))]


def _states_of(optimizer: object) -> int:
    name = (optimizer if isinstance(optimizer, str) else type(optimizer).__name__).lower()
    if name not in _STATES:
        known = ", ".join(sorted(_STATES))
        raise UsageError(
            f"the state of {name!r} is not known to be the same for each value; known are {known}"
        )
    options = cast("dict[str, Any] | None", getattr(optimizer, "defaults", None))
    if options is None:  # a name, or an optimizer of MLX
        return _STATES[name]
    if name == "sgd":  # torch keeps no momentum that is 0; MLX keeps it always
        return int(bool(options["momentum"]))
    more = ("amsgrad", "centered", "momentum")
    return _STATES[name] + sum(bool(options.get(option)) for option in more)
