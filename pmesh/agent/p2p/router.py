"""Passes messages and views to the endpoints of the local ranks (O4)."""

from collections.abc import Callable, Sequence

from pmesh.agent.jobs.ranks import LocalRank
from pmesh.agent.lanes.rendezvous import LaneRendezvous
from pmesh.agent.p2p.endpoint import P2PEndpoint
from pmesh.core.wire.link import AnnounceMessage, MessageWithdrawn, P2PMessage
from pmesh.ids import JobName, Member, TrainerId


class P2PRouter:
    """The endpoints of one agent's ranks, each created on first use."""

    def __init__(
        self,
        me: Member,
        ranks: Sequence[LocalRank],
        rendezvous: LaneRendezvous,
        send: Callable[[Member, P2PMessage], None],
    ) -> None:
        """`ranks` are the local ranks, a list that its owner changes; `send` uses the links."""
        self._me = me
        self._ranks = ranks
        self._rendezvous = rendezvous
        self._send = send
        self._boxes: dict[LocalRank, P2PEndpoint] = {}
        self._ended_traffic = (0, 0)

    def rank_of(self, job: JobName, trainer: TrainerId, *, pid: int) -> LocalRank | None:
        """Return the rank of a local trainer, if the process is the trainer's."""
        for rank in self._ranks:
            if (rank.roster.job, rank.id, rank.pid) == (job, trainer, pid):
                return rank
        return None

    def box_of(self, rank: LocalRank) -> P2PEndpoint:
        if rank not in self._boxes:

            def tell(peer: TrainerId, message: P2PMessage) -> None:
                trainer = rank.roster.trainer(peer)
                if trainer is None:
                    return  # the rank is lost
                if trainer.member == self._me:
                    self.hear(self._me, message)
                else:
                    self._send(trainer.member, message)

            self._boxes[rank] = P2PEndpoint(rank, self._rendezvous, tell)
        return self._boxes[rank]

    def hear(self, member: Member, message: P2PMessage) -> None:
        """Handle a message from another agent, which repeats one that precedes its view."""
        address = message.address
        own, peer = address.sender, address.receiver
        if isinstance(message, AnnounceMessage | MessageWithdrawn):
            own, peer = peer, own
        for rank in self._ranks:
            roster = rank.roster
            if (roster.job, roster.born, rank.id) != (address.job, address.born, own):
                continue
            trainer = roster.trainer(peer)
            if peer in roster.ids and trainer is not None and trainer.member == member:
                self.box_of(rank).hear(peer, message)

    def follow(self) -> None:
        for rank, box in list(self._boxes.items()):
            box.follow()
            if rank not in self._ranks:
                del self._boxes[rank]
                self._ended_traffic = _sum_of(self._ended_traffic, box.traffic)

    def close(self) -> None:
        for box in self._boxes.values():
            box.close()

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of messages sent and received at the sockets since the agent's start."""
        total = self._ended_traffic
        for box in self._boxes.values():
            total = _sum_of(total, box.traffic)
        return total


def _sum_of(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] + other[0], one[1] + other[1]
