"""What an op of one rank needs of the rest of its agent."""

from typing import Protocol

from pmesh.agent.events import Chronicle
from pmesh.agent.lane_desk import LaneDesk
from pmesh.agent.ranks import LocalRank
from pmesh.core.messages import AskResult
from pmesh.ids import Member, OpNumber, TrainerId


class Surroundings(Protocol):
    """What an op needs of its agent (`pmesh.agent.jobs`)."""

    desk: LaneDesk
    chronicle: Chronicle

    def poke(self) -> None:
        """A concern has arisen."""
        ...

    def beat(self) -> None:
        """Tell the others how far this rank has come."""
        ...

    def ask(self, member: Member, message: AskResult) -> None:
        """Send on the link to the member."""
        ...

    def neighbour(self, rank: LocalRank, other: TrainerId) -> LocalRank | None:
        """Another trainer of the same job, if it lives here too."""
        ...

    def late_ranks(self, rank: LocalRank, op: OpNumber) -> tuple[TrainerId, ...]:
        """The ranks that are not known to have started the op."""
        ...

    def newcomers(self, rank: LocalRank) -> int:
        """How many trainers wait to enter the job."""
        ...
