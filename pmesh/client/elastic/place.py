"""A trainer's place in its job: in it, about to enter it, or cut off from it until a sync."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import msgspec
import numpy as np

from pmesh.client.elastic.shares import Shares
from pmesh.client.elastic.sync import Offer, Synced, run_sync
from pmesh.client.session.connection import AgentConnection, mesh_ended
from pmesh.client.session.in_step import in_step
from pmesh.client.session.session import TrainerSession
from pmesh.client.trees.state import Packed
from pmesh.core.jobs.rank import COME_BACK
from pmesh.core.jobs.reports import merge_reports
from pmesh.core.ops.reductions import Values
from pmesh.core.wire.trainer import TRAINER_REPLIES, Connect, GroupOf, World
from pmesh.errors import (
    AgentNotRunning,
    AgentStopped,
    HistorySuperseded,
    OpMismatch,
    UsageError,
)
from pmesh.home_paths import CONNECTS_VARIABLE
from pmesh.ids import JobName, TrainerId


class Overlap:
    """How long a rank has computed beside its ops, where its session takes it to wait.

    While ops are in flight, the rank computes until it calls the last of them; then it waits until
    none is left. Any thread may call.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """In all; it grows when no op is left in flight."""
        self._lock = threading.Lock()
        self._in_flight = 0
        self._first = self._last = (0.0, 0.0)

    def begin(self, now: float, own_s: float) -> None:
        """Note that the rank calls an op.

        Args:
            now: seconds of any clock.
            own_s: how long the rank has computed by then, as its session knows.
        """
        with self._lock:
            self._last = now, own_s
            if not self._in_flight:
                self._first = self._last
            self._in_flight += 1

    def end(self) -> None:
        """Note that an op has ended."""
        with self._lock:
            self._in_flight -= 1
            if not self._in_flight:
                (began, own_before), (called, own_then) = self._first, self._last
                self.seconds += (called - began) - (own_then - own_before)


class OtherSession(Protocol):
    """A session of the trainer beside the one for its ops."""

    def close(self, reason: str) -> None:
        """End it; threads that wait get MeshClosed, with this reason."""
        ...


R = TypeVar("R")
SessionT = TypeVar("SessionT", bound=OtherSession)

OnSuperseded = Literal["raise", "sync"]

SYNCS_OF_A_LOOP = 2  # a script without a loop may sync once, to begin with the same weights
_TRY_AGAIN_S = 0.1  # an agent starts within a second: this wastes little time and few attempts

_logger = logging.getLogger("pmesh")


class Place:
    """Runs calls in the job, or alone: one at a time, but `interrupt` may come at any time.

    A trainer is cut off from its job when its agent has stopped, or when the job has continued
    without it (HistorySuperseded). Its next `sync` brings it back.
    """

    def __init__(
        self,
        home: Path,
        request: Connect,
        *,
        on_superseded: OnSuperseded | None,
        shares: Shares | None = None,
    ) -> None:
        """Join the job; if that fails, raise the error that the agent names.

        With `on_superseded=None` all calls raise if the agent has stopped. If the job has continued
        elsewhere, a `sync` comes back. Other calls then run alone if the job syncs repeatedly;
        otherwise they raise, since a trainer that never syncs would stay alone forever.
        """
        self._home = home
        self._request = request
        self._on_superseded = on_superseded
        self._closing = threading.Event()
        self._other: OtherSession | None = None
        tell_that_it_connects()
        self._session = TrainerSession(AgentConnection(home, TRAINER_REPLIES))
        try:
            joined = self._session.join(request)
        except BaseException:
            self._session.end("the job did not begin")
            raise
        self.view = joined.view
        self.compression = joined.compression
        self.world = joined.world
        """The ranks after the last call; they change only when a call returns (O5)."""
        self.step = 0
        self.shares = Shares() if shares is None else shares
        """The ranks' shares of a batch, on which they agree in each sync."""
        self._overlap = Overlap()
        self._must_sync = joined.world.rank < 0
        self._cut_off: HistorySuperseded | AgentStopped | None = None
        self._lost_agent = False
        self._veteran = False

    @property
    def is_alone(self) -> bool:
        """True if calls return as if this rank were alone."""
        return self._cut_off is not None and self._goes_on_alone and not self._must_sync

    @property
    def _goes_on_alone(self) -> bool:
        if self._on_superseded is None:
            return self.step >= SYNCS_OF_A_LOOP and not self._lost_agent
        return self._on_superseded == "sync"

    @property
    def has_begun(self) -> bool:
        """True if ops were sent ahead that no call has ended yet."""
        return self._session.has_begun

    def check_open(self) -> None:
        """Raise MeshClosed, with the reason, if the mesh has ended."""
        if self._closing.is_set():
            raise mesh_ended("it was closed")
        if self._session.ended is not None and not self._lost_agent:
            raise mesh_ended(self._session.ended)

    def check_synced(self) -> None:
        """Raise an error if this rank must `sync` before other calls."""
        if self._cut_off is not None and not self._goes_on_alone:
            raise type(self._cut_off)(f"{self._cut_off}; mesh.sync(state) comes back to the job")
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
        """Run `ops` in the job, or `alone` if this rank is alone for now.

        `timeout_s` is for the op in which ranks compare their calls after an error (O10).
        """
        takes_part = self._cut_off is None and not self._must_sync
        if not takes_part:
            self.check_synced()
        if takes_part or not self.is_alone:
            try:
                result = in_step(self._session, ops, timeout_s=timeout_s)
            except (HistorySuperseded, AgentStopped) as e:
                self._note_cut_off(e)
                if not self.is_alone:
                    raise
            else:
                self._veteran = True
                return result
            finally:
                self._update_world()
        return alone(self.world)

    def count_in(self, order: tuple[TrainerId, ...]) -> None:
        """Number the ranks in this order from now on, not in the order of the ring."""
        self._session.order = order
        self._update_world()

    def empty(self, dtype: str, count: int) -> Values:
        """Return flat values in memory that the agent shares; in ordinary memory without an agent.

        Raises:
            UsageError: the agent has no room for them.
            AgentStopped: the agent has just stopped.
        """
        if not self._lost_agent:
            try:
                return self._session.empty(dtype, count)
            except AgentStopped as e:
                self._note_cut_off(e)
                if not self._goes_on_alone:
                    raise
        return np.empty(count, dtype)

    @property
    def own_s(self) -> float:
        """How long this rank has computed since its session began, also beside its ops."""
        return self._session.own_s + self._overlap.seconds

    def begin_beside(self) -> None:
        """Note that the rank calls an op, and may compute on; each has an `end_beside`."""
        self._overlap.begin(time.monotonic(), self._session.own_s)

    def end_beside(self) -> None:
        """Note that such an op has ended."""
        self._overlap.end()

    def show_step(self, step: int, share_percent: int) -> None:
        """Show in `pmesh status`, from the next op on, what a job without `sync` counts itself."""
        self._session.step, self._session.share_percent = step, share_percent

    def report(self, values: Mapping[str, object]) -> None:
        """Show these numbers in `pmesh status`, from the next request on; see `Mesh.report`."""
        self._session.reports = merge_reports(self._session.reports, values)

    def sync(self, packed: Packed, *, timeout_s: float) -> Synced:
        """Agree with all ranks on a state; a trainer outside the job enters it, or comes back.

        Raises:
            HistorySuperseded: with `on_superseded="raise"`; otherwise it comes back in this call.
            AgentStopped: unless `on_superseded="sync"`; with it, if no agent has started in time.
            PmeshError: as for `run_sync`.
        """
        deadline = time.monotonic() + timeout_s
        self.shares.end_step(self.own_s)
        while True:
            enters = self._session.enters
            try:
                if self._lost_agent:
                    self._reconnect(deadline)
                self._session.step = self.step + 1
                self._session.share_percent = self.shares.percent(self.world)
                ops = partial(self._sync_once, packed, timeout_s)
                synced = in_step(self._session, ops, timeout_s=timeout_s, syncs=True)
            except (HistorySuperseded, AgentStopped) as e:
                is_default = self._on_superseded is None and isinstance(e, HistorySuperseded)
                comes_back = is_default or self._on_superseded == "sync"
                self._note_cut_off(e, syncs=comes_back)
                if not comes_back or self._pause(deadline):
                    raise
            except OpMismatch:
                # O10: an error that came after it was let in has made the others compare their
                # calls in that op. It compares its own, too, and syncs again.
                if not enters or self._session.enters:
                    raise
            else:
                self._cut_off, self._must_sync, self._veteran = None, False, True
                self.step = synced.step + 1
                self.shares.agree(synced.standings)
                self.shares.begin_step(self.own_s)
                self._session.show_comparison(synced.found)
                return synced
            finally:
                self._update_world()

    def _sync_once(self, packed: Packed, timeout_s: float, session: TrainerSession) -> Synced:
        return run_sync(session, packed, self._offer(packed), timeout_s=timeout_s)

    def open(self, job: JobName, members: tuple[TrainerId, ...], timeout_s: float) -> "Place":
        """Join a job of these trainers, on the same terms, except that any loss ends it."""
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

    def attach(self, attach: Callable[[Path, JobName, TrainerId], SessionT]) -> SessionT:
        """Open another session of this trainer by `attach`, and return it; the caller closes it."""
        me = self.world.trainers[self.world.rank]
        self._other = session = attach(self._home, self._request.job, me)
        return session

    def leave(self) -> None:
        """End on purpose: the others see that this rank has left."""
        self._closing.set()
        self._session.leave()

    def leave_at_once(self) -> None:
        """End as `leave` does, and close the other session; no thread can call any more."""
        if self._other is not None:
            self._other.close("nobody holds its group any more")
        self._session.leave()

    def end(self, reason: str) -> None:
        """End as after a crash."""
        self._closing.set()
        self._session.end(reason)

    def interrupt(self) -> None:
        """Make a call in another thread raise MeshClosed."""
        self._closing.set()
        self._session.interrupt("it was closed")

    def end_if_interrupted(self) -> None:
        """Close, after a call, what `interrupt` had to leave open."""
        if self._session.ended is not None:
            self._session.end(self._session.ended)

    def _offer(self, packed: Packed) -> Offer:
        return Offer(
            digest=packed.digest,
            nbytes=packed.nbytes,
            step=self.step,
            veteran=self._veteran,
            raises_on_loss=self._request.terms.on_loss == "raise",
            standing=self.shares.standing(self.world),
        )

    def _note_cut_off(self, why: HistorySuperseded | AgentStopped, *, syncs: bool = False) -> None:
        was_cut_off = self._cut_off is not None
        # A copy: with the traceback of the original, arenas would stay mapped.
        self._cut_off, self._veteran = type(why)(str(why)), False
        self._lost_agent = self._lost_agent or isinstance(why, AgentStopped)
        self._update_world()
        if syncs and not was_cut_off:
            then = "waits for one" if isinstance(why, AgentStopped) else "brings it back"
            what = str(why).removesuffix(f"; {COME_BACK}")
            _logger.warning("%s; this call of mesh.sync %s", what, then)
        elif self.is_alone and not was_cut_off:
            _logger.warning("%s; until then this rank trains alone", why)

    def _update_world(self) -> None:
        world = self.world
        if self._cut_off is None or not self.is_alone:
            self.world = self._session.ranks
        elif len(world.trainers) > 1:
            rank = world.rank
            self.world = World(0, (world.trainers[rank],), (world.names[rank],))

    def _reconnect(self, deadline: float) -> None:
        """Join the job in a new session, as soon as an agent runs.

        Raises:
            AgentNotRunning: no agent has started in time.
            AgentStopped: agents started and stopped until the time was over.
            PmeshError: the agent refuses.
        """
        while True:
            try:
                session = self._session = TrainerSession(
                    AgentConnection(self._home, TRAINER_REPLIES)
                )
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
        """Wait a moment before another attempt; return True if the time is over."""
        if self._closing.wait(max(0.0, min(_TRY_AGAIN_S, deadline - time.monotonic()))):
            raise mesh_ended("it was closed")
        return time.monotonic() >= deadline


def tell_that_it_connects() -> None:
    """Tell `pmesh run`, if it runs this program, that it has come so far: it may be run again."""
    if mark := os.environ.get(CONNECTS_VARIABLE):
        with contextlib.suppress(OSError):  # its directory ends with `pmesh run`
            Path(mark).touch()
