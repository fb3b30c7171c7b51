"""What a mesh stands on: a place in a job, through an agent or among simulated ranks."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from pmesh.client.mail_session import Arrived
from pmesh.client.op_session import OpSession
from pmesh.client.states import Packed
from pmesh.client.syncs import Synced
from pmesh.core.messages import Letter
from pmesh.core.reductions import Values
from pmesh.core.session import World
from pmesh.core.views import View
from pmesh.ids import JobName, TrainerId

R = TypeVar("R")


class LetterSession(Protocol):
    """Sends and receives; see `MailSession`."""

    @property
    def has_ended(self) -> bool:
        """Whether another session is needed for further calls."""
        ...

    def begin_send(self, to: TrainerId, letter: Letter, data: Values, timeout_s: float) -> int:
        """Begin to send an array's bytes, which are copied; returns the call's number."""
        ...

    def begin_receive(self, sources: tuple[TrainerId, ...], tag: int, timeout_s: float) -> int:
        """Ask for a letter of one of these; returns the call's number."""
        ...

    def done(self, call: int) -> bool:
        """Whether a call has ended, well or badly."""
        ...

    def end(self, call: int, timeout_s: float | None) -> Arrived | None:
        """Wait for a call; what it has received, if it is a receive. Raises TimeoutError."""
        ...

    def close(self, reason: str) -> None:
        """End it; whoever waits gets MeshClosed, with this reason."""
        ...


class JobPlace(Protocol):
    """A trainer's place in its job; see `Place`."""

    @property
    def world(self) -> World:
        """The ranks, as calls have seen them last (O5)."""
        ...

    @property
    def view(self) -> View:
        """What the agents had agreed on when this trainer joined."""
        ...

    @property
    def compression(self) -> str:
        """The agent's default for gradients; empty: none."""
        ...

    @property
    def step(self) -> int:
        """How many times the job has synced."""
        ...

    @property
    def is_alone(self) -> bool:
        """Whether calls return as if this rank were alone."""
        ...

    def check_open(self) -> None:
        """Raises MeshClosed, with the reason, unless a call can do something."""
        ...

    def check_synced(self) -> None:
        """Raises what is in the way of anything but a `sync`."""
        ...

    def run(self, ops: Callable[[OpSession], R], alone: Callable[[World], R]) -> R:
        """The result of ops in the job, or of what a rank does that is alone."""
        ...

    def empty(self, dtype: str, count: int) -> Values:
        """Flat values for the user to fill, and to reduce where they lie."""
        ...

    def sync(self, packed: Packed, *, timeout_s: float) -> Synced:
        """Agree with all ranks on a state."""
        ...

    def open(self, job: JobName, members: tuple[TrainerId, ...], timeout_s: float) -> "JobPlace":
        """A place in a job of these ranks, on the same terms but that a loss ends it.

        Raises:
            RankLost: one of them was lost before all had come.
        """
        ...

    def attach(self) -> LetterSession:
        """A session for letters, which the caller closes."""
        ...

    def leave(self) -> None:
        """End on purpose."""
        ...

    def end(self, reason: str) -> None:
        """End as a crash."""
        ...

    def interrupt(self) -> None:
        """Make a call of another thread raise MeshClosed."""
        ...

    def end_if_interrupted(self) -> None:
        """After a call: close what `interrupt` had to leave open."""
        ...
