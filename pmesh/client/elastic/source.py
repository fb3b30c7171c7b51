"""Whose state all ranks take in a `sync`, decided alike by all from what each has offered.

Pure: the same offers give the same plan, and the same plan with the same living trainers the same
root, so that no rank waits for an op that another does not call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pmesh.core.wire.local import SYNC_VALUES
from pmesh.ids import Rank, TrainerId


class Offer(NamedTuple):
    """What one rank says of its state: the int64 values that it gives to the `sync` op."""

    digest: tuple[int, int]
    """Of all bytes of the state."""
    nbytes: int
    step: int
    """How many times it has synced."""
    veteran: bool
    """It has done an op of the job since it entered, so its state is the job's."""
    raises_on_loss: bool
    """It wants `RankLost` for every loss, also in the middle of a transfer."""
    arriving: int = 0
    """Of a state that has begun to arrive, the first half of its digest."""
    arrived: int = 0
    """How many of its bytes have: from there the transfer goes on if its source is lost."""

    def to_values(self) -> list[int]:
        """As `SYNC_VALUES` int64."""
        return [*self.digest, *self[1:]]

    @classmethod
    def from_values(cls, values: Sequence[int]) -> "Offer":
        """The reverse of `to_values`."""
        first, second, nbytes, step, veteran, raises_on_loss, *arrival = values
        return cls((first, second), nbytes, step, veteran != 0, raises_on_loss != 0, *arrival)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be sent, and to whom."""

    best: Offer
    holders: tuple[TrainerId, ...]
    """Who has the best state; never empty."""
    receivers: tuple[TrainerId, ...]
    """Who has another one."""
    corrected: tuple[TrainerId, ...]
    """Those receivers who should have had it: they have synced before, and stayed in the job."""
    raises_on_loss: bool
    start: int
    """In bytes: what is before has arrived at all receivers."""

    def root(self, living: Sequence[TrainerId]) -> TrainerId | None:
        """Who sends the chunks, over the fewest edges of the ring; None if no holder is left.

        Args:
            living: all ranks, in order: each sends to the next.
        """
        receivers = self.receivers_among(living)

        def reach(holder: TrainerId) -> int:
            rank = living.index(holder)
            return max(((receiver - rank) % len(living) for receiver in receivers), default=0)

        return min((h for h in self.holders if h in living), key=reach, default=None)

    def receivers_among(self, living: Sequence[TrainerId]) -> tuple[Rank, ...]:
        """The ranks that lack the best state."""
        return tuple(rank_of(r, living) for r in self.receivers if r in living)

    def is_settled(self, living: Sequence[TrainerId]) -> bool:
        """Whether nobody who is still there lacks the best state."""
        return not self.receivers_among(living)


def elect(trainers: Sequence[TrainerId], offers: Sequence[Offer]) -> Plan:
    """The best state is a veteran's; of those the furthest; of those the lowest rank's.

    Args:
        trainers: all ranks, in order.
        offers: theirs, in the same order; at least one.
    """

    def merit(rank: int) -> tuple[bool, int, int]:
        return offers[rank].veteran, offers[rank].step, -rank

    winner = max(range(len(offers)), key=merit)
    best = offers[winner]
    equal = [offer.digest == best.digest for offer in offers]
    receivers = [rank for rank in range(len(offers)) if not equal[rank]]
    return Plan(
        best=best,
        holders=tuple(trainers[rank] for rank in range(len(offers)) if equal[rank]),
        receivers=tuple(trainers[rank] for rank in receivers),
        corrected=tuple(
            trainers[rank] for rank in receivers if offers[rank].veteran and offers[rank].step > 0
        ),
        raises_on_loss=any(offer.raises_on_loss for offer in offers),
        start=min((_arrived_of(best, offers[rank]) for rank in receivers), default=0),
    )


def _arrived_of(best: Offer, offer: Offer) -> int:
    return offer.arrived if offer.arriving == best.digest[0] else 0


def offers_of(values: Sequence[int]) -> list[Offer]:
    """All ranks' offers from the result of a `sync` op."""
    starts = range(0, len(values), SYNC_VALUES)
    return [Offer.from_values(values[start : start + SYNC_VALUES]) for start in starts]


def rank_of(trainer: TrainerId, trainers: Sequence[TrainerId]) -> Rank:
    """The trainer's place among them."""
    return Rank(trainers.index(trainer))
