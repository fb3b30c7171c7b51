"""What the simulated ranks need of the agent that they live on."""

from typing import TYPE_CHECKING, Protocol

from pmesh.core.values import Roster, Verdict
from pmesh.core.views.state import MemberState
from pmesh.core.wire.link import AskResult
from pmesh.ids import Member, OpNumber, TrainerId
from simulation.lane_messages import LaneMessage

if TYPE_CHECKING:
    from simulation.ranks import LocalRank, Op


class JobHost(Protocol):
    """What jobs need of their agent."""

    state: MemberState

    @property
    def now(self) -> float:
        """Simulated time."""
        ...

    @property
    def asleep(self) -> bool:
        """Whether the machine sleeps: its trainers do not compute either."""
        ...

    def facts_changed(self) -> None:
        """What is reported, or wanted, is no longer what it was."""
        ...

    def send_on_lane(self, to: Member, message: LaneMessage) -> None:
        """To a rank's agent, which may be this one."""
        ...

    def ask(self, to: Member, message: AskResult) -> None:
        """Ask a holder's agent, which may be this one, for a retained result."""
        ...

    def rank_began(self, rank: "LocalRank") -> None:
        """A trainer has entered its job."""
        ...

    def op_called(self, rank: "LocalRank", op: OpNumber) -> None:
        """A rank's trainer has called an op."""
        ...

    def op_ended(self, rank: "LocalRank", op: OpNumber) -> None:
        """`rank.ends` has a new entry."""
        ...

    def roster_settled(self, rank: "LocalRank", after: Roster) -> None:
        """A rank is about to follow a roster of another number."""
        ...

    def superseded(self, rank: "LocalRank") -> None:
        """A rank is told that the others go on without it."""
        ...


class Siblings(Protocol):
    """What a rank needs of the other ranks."""

    def newcomers(self, rank: "LocalRank") -> int:
        """How many trainers wait to enter the job."""
        ...

    def neighbour(self, rank: "LocalRank", other: TrainerId) -> "LocalRank | None":
        """Another trainer of the same job, if it lives here too."""
        ...

    def timed_out(self, rank: "LocalRank", op: "Op") -> Verdict:
        """Why an op has not ended by its deadline."""
        ...
