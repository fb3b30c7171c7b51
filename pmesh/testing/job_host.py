"""What a simulated job needs of the agent that it runs on."""

from typing import TYPE_CHECKING, Protocol

from pmesh.core.views import Roster
from pmesh.ids import Member, OpNumber, Rank
from pmesh.testing.lane_messages import LaneMessage

if TYPE_CHECKING:
    from pmesh.testing.jobs import LocalJob


class JobHost(Protocol):
    """What a job needs of its agent."""

    @property
    def now(self) -> float:
        """Simulated time."""
        ...

    @property
    def asleep(self) -> bool:
        """Whether the machine sleeps: its trainers do not compute either."""
        ...

    def facts_changed(self) -> None:
        """What the job reports, or wants settled, is no longer what it was."""
        ...

    def send_on_lane(self, to: Member, message: LaneMessage) -> None:
        """To a rank's agent, which may be this one."""
        ...

    def ask_result(self, roster: Roster, op: OpNumber, holder: Rank, to_rank: Rank) -> None:
        """Ask the holder's agent for the op's retained result."""
        ...

    def op_ended(self, job: "LocalJob", rank: Rank, op: OpNumber) -> None:
        """`job.ends` has a new entry."""
        ...
