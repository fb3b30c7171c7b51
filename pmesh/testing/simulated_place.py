"""A rank's place among simulated ranks: what `pmesh.client.elastic.membership` is to an agent."""

import threading
import time
from collections.abc import Callable
from typing import NoReturn, TypeVar

import numpy as np

from pmesh.client.elastic.membership import P2PSession
from pmesh.client.elastic.source import Offer
from pmesh.client.elastic.sync import Synced, run_sync
from pmesh.client.link.arenas import Kept, Region, Residuals
from pmesh.client.link.p2p_session import Arrived
from pmesh.client.link.session import Done, OpSession
from pmesh.client.trees.state import Packed
from pmesh.core.ops.kinds import extent_of
from pmesh.core.ops.reductions import WIRE_DTYPES, Values
from pmesh.core.values import View
from pmesh.core.wire.link import Call, Envelope
from pmesh.core.wire.local import StartOp, WireDtype, World
from pmesh.errors import MeshClosed, NotEnoughRanks, OpTimedOut, PmeshError, RankLost
from pmesh.ids import Epoch, Incarnation, JobName, Member, NodeId, OpNumber, TrainerId
from pmesh.testing.simulated_hub import Given, Hub, Transit


class SimulatedP2P:
    """One rank's sends and receives; see `P2PSession`."""

    def __init__(self, hub: Hub, me: TrainerId) -> None:
        self._hub = hub
        self._me = me
        self._calls: dict[int, Transit] = {}
        self._begun = 0
        self._closed = ""

    @property
    def has_ended(self) -> bool:
        """Whether further calls are in vain."""
        return bool(self._closed)

    def begin_send(self, to: TrainerId, envelope: Envelope, data: Values, timeout_s: float) -> int:
        """Leave a copy of an array's bytes for another rank; returns the call's number."""
        deadline = time.monotonic() + timeout_s
        return self._begin(Transit((to,), envelope.tag, deadline, envelope, data.copy()))

    def begin_receive(self, sources: tuple[TrainerId, ...], tag: int, timeout_s: float) -> int:
        """Ask for a message of one of these; returns the call's number."""
        return self._begin(Transit(sources, tag, time.monotonic() + timeout_s))

    def done(self, call: int) -> bool:
        """Whether a call has ended, well or badly."""
        with self._hub.changed:
            return call not in self._calls or self._look(self._calls[call])

    def end(self, call: int, timeout_s: float | None) -> Arrived | None:
        """Wait for a call; what it has received, if it is a receive.

        Raises:
            TimeoutError: it is still under way.
            OpTimedOut: nobody met it in its time.
            RankLost: those whom it could have met are gone.
        """
        transit = self._calls[call]
        until = transit.deadline
        if timeout_s is not None:
            until = min(until, time.monotonic() + timeout_s)
        with self._hub.changed:
            while not self._look(transit):
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"a message was not through within {timeout_s:g} s")
                self._hub.changed.wait(left_s)
            del self._calls[call]
        if transit.failed is not None:
            raise transit.failed
        return None if transit.envelope is not None else transit.met

    def close(self, reason: str) -> None:
        """End it; whoever waits gets MeshClosed, with this reason."""
        with self._hub.changed:
            self._closed = self._closed or reason
            for transit in self._calls.values():
                self._fail(transit, MeshClosed(f"this mesh has ended: {self._closed}"))
            self._hub.changed.notify_all()

    # --- inside, with the hub's lock held

    def _begin(self, transit: Transit) -> int:
        with self._hub.changed:
            call, self._begun = self._begun, self._begun + 1
            self._calls[call] = transit
            self._hub.transits.append((self._me, transit))
            self._meet(transit)
            self._hub.changed.notify_all()
        return call

    def _meet(self, mine: Transit) -> None:
        """The first of the other kind that fits: those of a pair and tag keep their order."""
        for owner, theirs in self._hub.transits:
            fits = owner in mine.wanted and self._me in theirs.wanted and mine.tag == theirs.tag
            if fits and (mine.envelope is None) != (theirs.envelope is None):
                source, sent = (owner, theirs) if mine.envelope is None else (self._me, mine)
                assert sent.envelope is not None  # noqa: S101 - one of the two is a send
                assert sent.data is not None  # noqa: S101 - likewise
                mine.met = theirs.met = Arrived(source, sent.envelope, sent.data)
                self._hub.transits.remove((owner, theirs))
                self._hub.transits.remove((self._me, mine))
                return

    def _look(self, transit: Transit) -> bool:
        if not transit.is_over and time.monotonic() >= transit.deadline:
            self._fail(transit, OpTimedOut("nobody took, or sent, a message in time"))
        if not transit.is_over and not {*transit.wanted} & {*self._hub.ranks}:
            lost = ", ".join(f"rank {rank}" for rank in transit.wanted)
            self._fail(transit, RankLost(f"{lost} is lost: {self._hub.lost}"))
        return transit.is_over

    def _fail(self, transit: Transit, error: PmeshError) -> None:
        transit.failed = error
        if (self._me, transit) in self._hub.transits:
            self._hub.transits.remove((self._me, transit))


R = TypeVar("R")
_NODE = NodeId(bytes(32))
_VIEW = View.of_one(Member(_NODE, Incarnation(1)), "simulated-0", Epoch(1, _NODE, Incarnation(1)))


class Hubs:
    """The hub of the mesh, and those of its groups, by name."""

    def __init__(self, size: int) -> None:
        self._lock = threading.Lock()
        self._hubs: dict[str, Hub] = {}
        self.mesh = self.named("", size)

    def named(self, name: str, size: int) -> Hub:
        """The hub of that name, made by whoever comes first."""
        with self._lock:
            return self._hubs.setdefault(name, Hub(size))

    def lose(self, rank: TrainerId, why: str) -> None:
        """A rank is gone, from all of them."""
        with self._lock:
            hubs = list(self._hubs.values())
        for hub in hubs:
            hub.lose(rank, why)


class SimulatedSession:
    """One rank's ops, one after the other."""

    def __init__(self, hub: Hub, me: TrainerId, timeout_s: float) -> None:
        self.hub = hub
        self.me = me
        if not hub.join(me, timeout_s):
            raise NotEnoughRanks(f"{len(hub.came) + 1} came within {timeout_s:g} s")
        self.world = self._world_of(tuple(hub.came))
        self._input: Values = np.empty(0, np.uint8)
        self._ahead: Values | None = None
        self._next_op = 0

    def input_values(self, dtype: str, count: int, *, room_bytes: int) -> Values:
        """Memory for an op's values: fresh, as what a root has sent is still to be read."""
        del room_bytes
        self._input = np.empty(count, WIRE_DTYPES[dtype])
        return self._input

    def region_of(self, values: Values, wire: str) -> Region | None:
        """There is no agent to read them where they lie."""
        del values, wire
        return None

    def prepare_ahead(self, nbytes: int) -> None:
        """Memory is taken as it is needed."""

    def values_ahead(self, dtype: str, count: int) -> Values:
        """Memory for the next op's values."""
        self._ahead = np.empty(count, WIRE_DTYPES[dtype])
        return self._ahead

    def residuals(self, count: int) -> Residuals:
        """A residual of so many zeros."""
        return Residuals(*[Kept(-1, np.zeros(count, np.float32)) for _ in range(2)])

    def has(self, residuals: Residuals) -> bool:
        """There is only one session."""
        del residuals
        return True

    def drop(self, residuals: Residuals) -> None:
        """They are ordinary arrays."""

    def show_compression(self, text: str) -> None:
        """Nobody is told."""

    def run_op(
        self,
        call: Call,
        dtype: str,
        count: int,
        *,
        timeout_s: float,
        parts: tuple[int, ...] = (),
        parts_in: tuple[int, ...] = (),
        residuals: Residuals | None = None,
        meanwhile: Callable[[], None] | None = None,
        region: Region | None = None,
        borrows: bool = False,
    ) -> Done:
        """Run one op, on a copy of what lies in the input; see `TrainerSession`."""
        del region  # of nothing
        number = OpNumber(self._next_op)
        self._next_op += 1
        wire: WireDtype = dtype  # type: ignore[assignment] # a key of WIRE_DTYPES
        request = StartOp(number, call, wire, count, -1, timeout_s, parts, parts_in)
        size = len(self.world.trainers)
        gives = extent_of(request, rank=self.world.rank, size=size).gives
        given = Given(request, self._input[:gives].copy())
        if residuals is not None:
            kept = (residuals.values.copy(), residuals.attempt.values)
            given = Given(request, given.values, *kept)
        if meanwhile is not None:
            meanwhile()
        got = self.hub.run(number, self.me, given)
        self._input, self._ahead = self._input if self._ahead is None else self._ahead, None
        if residuals is not None:
            residuals.swap()
        self.world = self._world_of(got.trainers)
        if borrows:
            got.values.flags.writeable = False  # as through an agent
        return Done(number, self.world, got.values, got.clipped, lent=borrows)

    def _world_of(self, trainers: tuple[TrainerId, ...]) -> World:
        names = tuple(f"simulated-{trainer}" for trainer in trainers)
        return World(trainers.index(self.me), trainers, names)


class SimulatedPlace:
    """One rank of a hub; see `JobPlace`."""

    def __init__(self, hubs: Hubs, hub: Hub, me: TrainerId, timeout_s: float) -> None:
        self._hubs = hubs
        self._session = SimulatedSession(hub, me, timeout_s)
        self._closed: str | None = None
        self.world = self._session.world
        self.step = 0
        self.view = _VIEW
        self.compression = ""
        self.is_alone = False

    def check_open(self) -> None:
        """Raises MeshClosed, with the reason, if it has ended."""
        if self._closed is not None:
            raise MeshClosed(f"this mesh has ended: {self._closed}")

    def check_synced(self) -> None:
        """Every rank is in the job from its beginning."""

    def run(self, ops: Callable[[OpSession], R], alone: Callable[[World], R]) -> R:
        """The result of ops; MeshClosed if another thread has closed this mesh meanwhile."""
        del alone
        try:
            return ops(self._session)
        except RankLost:
            self.check_open()
            raise
        finally:
            self.world = self._session.world

    def empty(self, dtype: str, count: int) -> Values:
        """Ordinary memory."""
        return np.empty(count, dtype)

    def sync(self, packed: Packed, *, timeout_s: float) -> Synced:
        """Agree with all ranks on a state, as through an agent."""
        offer = Offer(
            digest=packed.digest,
            nbytes=packed.nbytes,
            step=self.step,
            veteran=self.step > 0,
            raises_on_loss=True,
        )
        synced = self.run(
            lambda session: run_sync(session, packed, offer, timeout_s=timeout_s), _never
        )
        self.step = synced.step + 1
        return synced

    def open(
        self, job: JobName, members: tuple[TrainerId, ...], timeout_s: float
    ) -> "SimulatedPlace":
        """A place in the group of that name."""
        hub = self._hubs.named(job, len(members))
        return SimulatedPlace(self._hubs, hub, self._session.me, timeout_s)

    def attach(self) -> P2PSession:
        """Its messages, among the ranks of the hub."""
        return SimulatedP2P(self._session.hub, self._session.me)

    def leave(self) -> None:
        """End on purpose: a call that the others make from now on fails."""
        self.end("it was closed")

    def end(self, reason: str) -> None:
        """End as a crash."""
        self._closed = self._closed or reason
        self._session.hub.lose(self._session.me, reason)

    def interrupt(self) -> None:
        """Make a call of another thread raise MeshClosed."""
        self.end("it was closed")

    def end_if_interrupted(self) -> None:
        """Nothing is left open."""


def _never(world: World) -> NoReturn:
    raise AssertionError(world)
