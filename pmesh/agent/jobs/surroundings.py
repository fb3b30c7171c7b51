"""What an op of one rank needs of the rest of its agent."""

from collections.abc import Iterable
from typing import Protocol

from pmesh.agent.jobs.ranks import LocalRank
from pmesh.agent.lanes.edge_costs import EdgeBook
from pmesh.agent.lanes.rendezvous import LaneDesk
from pmesh.agent.status.events import EventLog
from pmesh.core.jobs.progress import Marks
from pmesh.core.wire.link import AskResult
from pmesh.ids import Member, TrainerId


class Surroundings(Protocol):
    """What an op needs of its agent (`pmesh.agent.jobs.driver`)."""

    desk: LaneDesk
    event_log: EventLog
    marks: Marks

    edge_book: EdgeBook

    def round_trips_s(self, members: Iterable[Member]) -> dict[Member, float]:
        """To those of these that have been measured."""
        ...

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

    def newcomers(self, rank: LocalRank) -> int:
        """How many trainers wait to enter the job."""
        ...
