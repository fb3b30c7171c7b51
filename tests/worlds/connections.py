"""The connections of the trainers of this process with their agents, for what breaks one."""

from collections import defaultdict

from pmesh.client.elastic import place
from pmesh.client.session.connection import AgentConnection
from pmesh.client.session.session import TrainerSession
from pmesh.core.wire.trainer import Connect, Joined, TrainerReply
from pmesh.ids import TrainerId
from tests.worlds.faults import Faults, Real


class Connections:
    """Those that are opened from now on, of a trainer's job and of its groups."""

    def __init__(self, faults: Faults) -> None:
        self._of = defaultdict[TrainerId, list[AgentConnection[TrainerReply]]](list)
        faults.around(place, "TrainerSession", self._open)

    def _open(self, real: Real, connection: AgentConnection[TrainerReply]) -> TrainerSession:
        session: TrainerSession = real(connection)
        join = session.join

        def note_join(request: Connect) -> Joined:
            joined, group = join(request), request.group_of
            if group is not None:
                self._of[group.trainer].append(connection)
            elif joined.world.rank >= 0:
                self._of[joined.world.trainers[joined.world.rank]].append(connection)
            return joined

        session.join = note_join  # type: ignore[method-assign]
        return session

    def interrupt(self, trainer: TrainerId) -> None:
        """End those of a trainer, as the agent's death does."""
        for connection in self._of[trainer]:
            connection.interrupt()
