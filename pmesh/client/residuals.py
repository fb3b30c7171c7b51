"""What a compressed all-reduce has rounded away here, to be added to the next one's values."""

from typing import NamedTuple

from pmesh.compression.arrays import Float32s


class Kept(NamedTuple):
    """Values that outlive an op, in memory that the agent can reach."""

    arena: int
    """-1 where there is no agent, or there are no values."""
    values: Float32s


class Residuals:
    """The residual of one bucket, committed, and room for that of the op under way (O9).

    An op reads the one and writes the other, in each attempt anew. They change places once it is
    done: so an op that runs again without a rank that was lost, or one that fails, begins with the
    residual that was there before.
    """

    __slots__ = ("_attempt", "_committed")

    def __init__(self, committed: Kept, attempt: Kept) -> None:
        """Both of one length, or a ValueError; `committed` is as a first op is to find it."""
        if committed.values.shape != attempt.values.shape:
            raise ValueError(f"{attempt.values.size} values beside {committed.values.size}")
        self._committed = committed
        self._attempt = attempt

    @property
    def values(self) -> Float32s:
        """float32[count]: the committed residual, to be read or written between ops.

        Another array after each op. It can still be read when its session has ended.
        """
        return self._committed.values

    @property
    def committed(self) -> Kept:
        """What the next op reads."""
        return self._committed

    @property
    def attempt(self) -> Kept:
        """What the next op writes."""
        return self._attempt

    def swap(self) -> None:
        """An op is done, to which this rank has contributed."""
        self._committed, self._attempt = self._attempt, self._committed
