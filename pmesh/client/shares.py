"""What the ranks tell each other before a compressed call: weights above all.

Weights travel exactly, in a small op of their own: what goes through a compression comes out as
something else, and what a lost rank did not contribute must not count.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pmesh.client.calls import checked_total
from pmesh.client.op_session import OpSession
from pmesh.core.messages import Call
from pmesh.core.session import World
from pmesh.ids import TrainerId


class Told(NamedTuple):
    """What one rank says."""

    weight: float = 1.0
    step: int = 0
    """Of its memory."""
    trials: int = 0
    """See `Trials.hear`."""
    took_ns: int = 0

    def to_row(self) -> list[int]:
        """As integers of 64 bits."""
        (bits,) = struct.unpack("<q", struct.pack("<d", self.weight))
        return [bits, self.step, self.trials, self.took_ns]

    @classmethod
    def of_row(cls, row: Sequence[int]) -> "Told":
        """The reverse of `to_row`."""
        (weight,) = struct.unpack("<d", struct.pack("<q", row[0]))
        return cls(weight, *row[1:])


@dataclass(frozen=True, slots=True)
class Shares:
    """What all ranks have said, in the ring's order."""

    trainers: tuple[TrainerId, ...]
    told: tuple[Told, ...]

    def factor(self, world: World) -> float | None:
        """What this rank's values count in a plain mean; None: as much as everybody's.

        Raises:
            UsageError: the weights add up to 0; on all ranks alike.
        """
        total = checked_total(self._total(self.trainers))
        mine = self.told[self.trainers.index(world.trainers[world.rank])]
        factor = mine.weight * len(self.told) / total
        return None if factor == 1 else factor

    def correction(self, world: World) -> float:
        """What the mean over these ranks is to be multiplied by, as the others were lost since.

        Raises:
            UsageError: the weights of those who are left add up to 0; on all ranks alike.
        """
        if world.trainers == self.trainers:
            return 1.0
        total = checked_total(self._total(world.trainers))
        return self._total(self.trainers) * len(world.trainers) / (len(self.told) * total)

    def _total(self, trainers: Sequence[TrainerId]) -> float:
        pairs = zip(self.trainers, self.told, strict=True)
        return sum(told.weight for trainer, told in pairs if trainer in trainers)


def tell(session: OpSession, told: Told, *, label: str, spec: str, timeout_s: float) -> Shares:
    """Tell all, and hear it of all.

    Args:
        session: runs the op.
        told: by this rank.
        label: of the call, alike on all ranks: who calls something else learns of it here (I5).
        spec: the compression's.
        timeout_s: for the op.
    """
    row = told.to_row()
    session.input_values("int64", len(row), room_bytes=0)[:] = row
    name = spec if "(" in spec else f"{spec}()"  # no ring codec is to touch these
    call = Call("exchange", "int64", (len(row),), tree=label, compression=name)
    done = session.run_op(call, "int64", len(row), timeout_s=timeout_s)
    rows: list[list[int]] = done.values.reshape(-1, len(row)).tolist()
    return Shares(done.world.trainers, tuple(Told.of_row(row) for row in rows))
