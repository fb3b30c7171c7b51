"""A trainer's place in its job: in it, about to enter it, or apart from it until the next sync."""

import logging
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import numpy as np

from pmesh.client.elastic.sync import Offer, Synced, run_sync
from pmesh.client.link.connection import AgentConnection, error_of, mesh_ended
from pmesh.client.link.in_step import in_step
from pmesh.client.link.interrupts import interrupts, postponed
from pmesh.client.link.p2p_session import P2PSession
from pmesh.client.link.session import TrainerSession
from pmesh.client.trees.state import Packed
from pmesh.core.ops.reductions import Values
from pmesh.core.wire.local import SESSION_VERSION, Attach, Connect, GroupOf, Refused, World
from pmesh.errors import (
    AgentNotRunning,
    AgentStopped,
    HistorySuperseded,
    UsageError,
)
from pmesh.ids import JobName, TrainerId

R = TypeVar("R")

OnSuperseded = Literal["raise", "sync"]

SYNCS_OF_A_LOOP = 2  # one may be all that a script does, to begin with the same weights
_TRY_AGAIN_S = 0.1  # an agent starts within a second: little is lost, and little is asked for

_logger = logging.getLogger("pmesh")


class Place:
    """Runs calls in the job, or alone; one at a time but for `interrupt`.

    A trainer is apart from its job when its agent has stopped, or belongs to a history of the job
    that has ended (HistorySuperseded). Its next `sync` brings it back.
    """

    def __init__(self, home: Path, request: Connect, *, on_superseded: OnSuperseded | None) -> None:
        """Join the job; raises the error that the agent names if that fails.

        With None it is "raise" where the agent has stopped. Else a `sync` comes back as with
        "sync", and other calls go on alone if the job syncs again and again: else they raise, as
        who never syncs would be alone for ever.
        """
        self._home = home
        self._request = request
        self._on_superseded = on_superseded
        self._closing = threading.Event()
        self._messages: P2PSession | None = None
        self._session = TrainerSession(AgentConnection(home))
        try:
            joined = self._session.join(request)
        except BaseException:
            self._session.end("the job did not begin")
            raise
        self.view = joined.view
        self.compression = joined.compression
        self.world = joined.world
        """The ranks as calls have seen them last: it changes only when one returns (O5)."""
        self.step = 0
        self._must_sync = joined.world.rank < 0
        self._apart: HistorySuperseded | AgentStopped | None = None
        self._lost_agent = False
        self._veteran = False

    @property
    def is_alone(self) -> bool:
        """Whether calls return as if this rank were alone."""
        return self._apart is not None and self._goes_on_alone and not self._must_sync

    @property
    def _goes_on_alone(self) -> bool:
        if self._on_superseded is None:
            return self.step >= SYNCS_OF_A_LOOP and not self._lost_agent
        return self._on_superseded == "sync"

    def check_open(self) -> None:
        """Raises MeshClosed, with the reason, unless a call can do something."""
        if self._closing.is_set():
            raise mesh_ended("it was closed")
        if not self._lost_agent:
            self._session.check_open()

    def check_synced(self) -> None:
        """Raises an error if this rank can only `sync`."""
        if self._apart is not None and not self._goes_on_alone:
            raise type(self._apart)(f"{self._apart}; mesh.sync(state) comes back to the job")
        if self._must_sync:
            raise UsageError(
                "this job runs already, and a trainer enters it in mesh.sync: call "
                "'state = mesh.sync(state)' first, at the top of the training loop"
            )

    def run(
        self,
        ops: Callable[[TrainerSession], R],
        alone: Callable[[World], R],
        *,
        timeout_s: float,
    ) -> R:
        """Run ops in the job; or `alone`, for a rank that is alone for the time being.

        `timeout_s` is for the op in which ranks compare their calls after an error (O10).
        """
        self.check_synced()
        if not self.is_alone:
            try:
                with self._whole_or_ended(), in_step(self._session, timeout_s=timeout_s):
                    result = ops(self._session)
            except (HistorySuperseded, AgentStopped) as e:
                self._fall_apart(e)
                if not self.is_alone:
                    raise
            else:
                self._veteran = True
                return result
            finally:
                self._see_the_world()
        return alone(self.world)

    def count_in(self, order: tuple[TrainerId, ...]) -> None:
        """Number the ranks in this order from now on, not in the order of the ring."""
        self._session.order = order
        self._see_the_world()

    def empty(self, dtype: str, count: int) -> Values:
        """Flat values in memory that the agent shares; without an agent in ordinary memory.

        Raises:
            UsageError: the agent has no room for them.
            AgentStopped: it has just gone.
        """
        if not self._lost_agent:
            try:
                return self._session.empty(dtype, count)
            except AgentStopped as e:
                self._fall_apart(e)
                if not self._goes_on_alone:
                    raise
        return np.empty(count, dtype)

    def sync(self, packed: Packed, *, timeout_s: float) -> Synced:
        """Agree with all ranks on a state; a trainer outside the job enters it, or comes back.

        Raises:
            HistorySuperseded: if it is to raise; else it comes back in this call.
            AgentStopped: as HistorySuperseded; or no agent has come back in time.
            PmeshError: what `run_sync` raises.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if self._lost_agent:
                    self._reconnect(deadline)
                self._session.step = self.step + 1
                with (
                    self._whole_or_ended(),
                    in_step(self._session, timeout_s=timeout_s, syncs=True),
                ):
                    offer = self._offer(packed)
                    synced = run_sync(self._session, packed, offer, timeout_s=timeout_s)
            except (HistorySuperseded, AgentStopped) as e:
                is_default = self._on_superseded is None and isinstance(e, HistorySuperseded)
                comes_back = is_default or self._on_superseded == "sync"
                self._fall_apart(e, syncs=comes_back)
                if not comes_back or self._pause(deadline):
                    raise
            else:
                self._apart, self._must_sync, self._veteran = None, False, True
                self.step = synced.step + 1
                return synced
            finally:
                self._see_the_world()

    def open(self, job: JobName, members: tuple[TrainerId, ...], timeout_s: float) -> "Place":
        """A place in a job of these trainers, on the same terms, but it ends with a loss."""
        terms = msgspec.structs.replace(self._request.terms, on_loss="raise", min_ranks=1)
        request = msgspec.structs.replace(
            self._request,
            job=job,
            wait_for=len(members),
            timeout_s=timeout_s,
            terms=terms,
            group_of=GroupOf(self._request.job, members, self.world.trainers[self.world.rank]),
        )
        return Place(self._home, request, on_superseded="raise")

    def attach(self) -> P2PSession:
        """A session for messages, over another connection to the agent; the caller closes it.

        Raises:
            HistorySuperseded: the agent does not know this trainer any more.
            AgentNotRunning: there is none.
        """
        me = self.world.trainers[self.world.rank]
        connection = AgentConnection(self._home)
        try:
            connection.send(Attach(SESSION_VERSION, self._request.job, me))
            reply = connection.receive()
        except BaseException:
            connection.close()
            raise
        if isinstance(reply, Refused):
            connection.close()
            raise error_of(reply.verdict)
        self._messages = P2PSession(connection)
        return self._messages

    def leave(self) -> None:
        """End on purpose."""
        self._closing.set()
        self._session.leave()

    def leave_at_once(self) -> None:
        """As `leave`, also of messages, when no thread can make a call any more."""
        if self._messages is not None:
            self._messages.close("nobody holds its group any more")
        self._session.leave()

    def end(self, reason: str) -> None:
        """End as a crash."""
        self._closing.set()
        self._session.end(reason)

    def interrupt(self) -> None:
        """Make a call of another thread raise MeshClosed."""
        self._closing.set()
        self._session.interrupt("it was closed")

    def end_if_interrupted(self) -> None:
        """After a call: close what `interrupt` had to leave open."""
        self._session.end_if_interrupted()

    @contextmanager
    def _whole_or_ended(self) -> Generator[None]:
        """A call that a signal has interrupted between its ops is one that others go on with."""
        session = self._session
        ops_before = session.calls.ops
        with postponed():
            try:
                yield
            except BaseException as e:
                if session.calls.ops > ops_before and interrupts(e):
                    session.end(f"{type(e).__name__}: {e}".rstrip(": "))
                raise

    def _offer(self, packed: Packed) -> Offer:
        return Offer(
            digest=packed.digest,
            nbytes=packed.nbytes,
            step=self.step,
            veteran=self._veteran,
            raises_on_loss=self._request.terms.on_loss == "raise",
        )

    def _fall_apart(self, why: HistorySuperseded | AgentStopped, *, syncs: bool = False) -> None:
        was_apart = self._apart is not None
        # A copy: with the traceback of the original, arenas would stay mapped.
        self._apart, self._veteran = type(why)(str(why)), False
        self._lost_agent = self._lost_agent or isinstance(why, AgentStopped)
        if syncs and not was_apart:
            then = "waits for one" if isinstance(why, AgentStopped) else "brings it back"
            _logger.warning("%s; this call of mesh.sync %s", why, then)
        elif self.is_alone and not was_apart:
            _logger.warning("%s; until then this rank trains alone", why)

    def _see_the_world(self) -> None:
        world = self.world
        if not self.is_alone:
            self.world = self._session.ranks
        elif len(world.trainers) > 1:
            rank = world.rank
            self.world = World(0, (world.trainers[rank],), (world.names[rank],))

    def _reconnect(self, deadline: float) -> None:
        """A new session, as soon as an agent runs.

        Raises:
            AgentNotRunning: none has started in time.
            AgentStopped: agents started and stopped until the time was over.
            PmeshError: it refuses.
        """
        while True:
            try:
                session = self._session = TrainerSession(AgentConnection(self._home))
                self._join_again(session, deadline)
            except (AgentNotRunning, AgentStopped):
                if self._pause(deadline):
                    raise
            else:
                self._lost_agent = False
                return

    def _join_again(self, session: TrainerSession, deadline: float) -> None:
        left_s = max(deadline - time.monotonic(), _TRY_AGAIN_S)
        try:
            self.check_open()  # `close` may have come before there was a session to interrupt
            joined = session.join(msgspec.structs.replace(self._request, timeout_s=left_s))
        except BaseException:
            session.end("it could not come back to its job")
            raise
        self.view, self.compression = joined.view, joined.compression

    def _pause(self, deadline: float) -> bool:
        """Wait a moment before another attempt; returns whether the time is over."""
        if self._closing.wait(max(0.0, min(_TRY_AGAIN_S, deadline - time.monotonic()))):
            raise mesh_ended("it was closed")
        return time.monotonic() >= deadline
