"""The lanes of one rank under its present roster, and what all its lanes have moved."""

from collections.abc import Iterable

import trio

from pmesh.agent.lanes.rendezvous import LaneEnd, LaneKey, LaneRendezvous
from pmesh.core.values import Roster
from pmesh.ids import TrainerId
from pmesh.net.lanes.lane import Lane


class RankLanes:
    """A lane for each direction and each other rank that this one exchanges tensors with.

    Those of the ring are opened as soon as a view is installed, the others when an op needs them.
    All live as long as the roster's number.
    """

    def __init__(self, me: TrainerId, roster: Roster) -> None:
        self._me = me
        self._roster = roster
        self._offered: set[TrainerId] = set()
        self._open: dict[LaneEnd, Lane] = {}
        self._carrying: set[Lane] = set()
        """Lanes that bring or take results."""
        self.ended_traffic = (0, 0)
        self._moved = (0, 0), 0.0

    def begin(self, roster: Roster, rendezvous: LaneRendezvous) -> None:
        """A roster is in force: the lane to the next rank is opened, the previous offers ours."""
        self._roster = roster
        rendezvous.forget(roster.job, below=roster.number)
        rank = roster.rank_of(self._me)
        if rank is not None and len(roster.trainers) > 1:
            self._offer(roster.ids[(rank + 1) % len(roster.ids)], rendezvous)

    def edge(self, sender: TrainerId, receiver: TrainerId, op: int = -1) -> LaneKey:
        """The name of a lane under the current number."""
        roster, trainer = self._roster, self._roster.trainer(sender)
        host = None if trainer is None else trainer.member
        return LaneKey(roster.job, roster.born, roster.number, host, sender, receiver, op)

    async def open(
        self, to: Iterable[TrainerId], from_: Iterable[TrainerId], rendezvous: LaneRendezvous
    ) -> tuple[dict[TrainerId, Lane], dict[TrainerId, Lane]]:
        """The lanes to and from these ranks, as soon as all are there.

        Raises:
            LaneBroken: one can't be opened, or the roster is over.
        """
        ends_to = {peer: LaneEnd(self.edge(self._me, peer), sending=True) for peer in to}
        ends_from = {peer: LaneEnd(self.edge(peer, self._me), sending=False) for peer in from_}
        for peer in ends_to:  # all at once: each may take a few round trips
            self._offer(peer, rendezvous)
        for end in (*ends_to.values(), *ends_from.values()):
            if end not in self._open:
                self._open[end] = await rendezvous.take(end)
        return (
            {peer: self._open[end] for peer, end in ends_to.items()},
            {peer: self._open[end] for peer, end in ends_from.items()},
        )

    def all_open(self) -> tuple[Lane, ...]:
        """The lanes of the present roster, those that send first."""
        ends = sorted(self._open, key=lambda end: not end.sending)
        return tuple(self._open[end] for end in ends)

    def close(self) -> None:
        """Their roster is over, or one of them broke."""
        for lane in self.all_open():
            self.count(lane)
            lane.close()
        self._open.clear()
        self._offered.clear()

    def carry(self, lane: Lane) -> None:
        """A result travels on this lane: what it moves is progress, until `count`."""
        self._carrying.add(lane)

    def count(self, lane: Lane) -> None:
        """Add a lane that ends to this rank's traffic."""
        self._carrying.discard(lane)
        self.ended_traffic = sum_of(self.ended_traffic, (lane.bytes_sent, lane.bytes_received))

    def look(self) -> None:
        """Note when something was last seen to move: since then the ring has stood still."""
        if self.traffic != self._moved[0]:
            self._moved = self.traffic, trio.current_time()

    @property
    def moved_at(self) -> float:
        """When something was last seen to have moved."""
        return self._moved[1]

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of tensor data sent and received at the sockets, headers in."""
        sent, received = self.ended_traffic
        lanes = [*self._carrying, *self.all_open()]
        return (
            sent + sum(lane.bytes_sent for lane in lanes),
            received + sum(lane.bytes_received for lane in lanes),
        )

    def _offer(self, peer: TrainerId, rendezvous: LaneRendezvous) -> None:
        trainer = self._roster.trainer(peer)
        if trainer is not None and peer not in self._offered:
            self._offered.add(peer)
            rendezvous.offer(self.edge(self._me, peer), trainer.member)


def sum_of(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """Traffic, sent and received, of both."""
    return one[0] + other[0], one[1] + other[1]
