"""A rank's place among simulated ranks: what `pmesh.client.place` is to an agent."""

import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

import numpy as np

from pmesh.client.arenas import Region
from pmesh.client.elections import Offer
from pmesh.client.job_place import LetterSession
from pmesh.client.op_session import OpSession
from pmesh.client.residuals import Kept, Residuals
from pmesh.client.session import Done
from pmesh.client.states import Packed
from pmesh.client.syncs import Synced, run_sync
from pmesh.core.extents import extent_of
from pmesh.core.messages import Call
from pmesh.core.reductions import WIRE_DTYPES, Values
from pmesh.core.session import StartOp, WireDtype, World
from pmesh.core.views import View
from pmesh.errors import MeshClosed, NotEnoughRanks, RankLost
from pmesh.ids import Epoch, Incarnation, JobName, Member, NodeId, OpNumber, TrainerId
from pmesh.testing.simulated_hub import Given, Hub
from pmesh.testing.simulated_mail import SimulatedMail

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

    def attach(self) -> LetterSession:
        """Its messages, among the ranks of the hub."""
        return SimulatedMail(self._session.hub, self._session.me)

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
