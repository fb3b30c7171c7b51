"""One local rank: the events that its op waits for, its lanes, the memory of its results."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Protocol

import msgspec
import trio

from pmesh.agent.jobs.requests import Shapes
from pmesh.agent.lanes.edge_costs import RingCosts
from pmesh.agent.lanes.rendezvous import LaneEnd, LaneKey, LaneRendezvous
from pmesh.core.jobs.jobs import LEFT
from pmesh.core.jobs.op_times import RankTimes
from pmesh.core.jobs.rank import Fence, RankState
from pmesh.core.jobs.speed import OwnTime
from pmesh.core.ops.machines import Machines, machines_of
from pmesh.core.values import Roster, Trainer, Verdict
from pmesh.core.wire.calls import Call
from pmesh.core.wire.views import KnownPrimary
from pmesh.ids import Member, OpNumber, TrainerId
from pmesh.net.lanes.lane import Lane, Throughput
from pmesh.net.lanes.native import LibraryThreads, Patience
from pmesh.net.lanes.ring import RingPosition
from pmesh.net.sessions.arena_pools import SessionArenas
from pmesh.net.sessions.arenas import Arena

MEASURED_BYTES = 1024 * 1024  # that a lane must bring to be measured: 8 ms at 1 Gbit/s
MAX_LOSSES = 64  # that are kept until a trainer's next call, which may be hours away


class KeptResult(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """An op's result in shared memory, which the agent keeps until the op is stable (O2)."""

    arena: Arena | None
    """None when there are no values."""
    nbytes: int
    is_input: bool = False
    """Whether it is the trainer's own input, as at a broadcast's root."""
    offset: int = 0
    """Where in the arena it begins."""

    @property
    def memory(self) -> memoryview:
        """The bytes of the result."""
        if self.arena is None:
            return memoryview(b"")
        return self.arena.memory[self.offset : self.offset + self.nbytes]


class Repeats(Protocol):
    """The calls of a rank that the library answers by itself (`pmesh.agent.jobs.repeats`)."""

    def catch_up(self) -> None:
        """Note in the rank which ops have ended since the last time."""
        ...

    def recall(self) -> None:
        """Make the library answer none from now on, and catch up."""
        ...

    def take_begun(self, op: OpNumber) -> LibraryThreads | None:
        """Return what goes on with an op that the library has begun; None if there is none."""
        ...

    def abandon(self) -> None:
        """Stop the op that has begun and whose request has not been read, if there is one."""
        ...

    def vouch(self) -> None:
        """V8: note that this machine has not slept until now."""
        ...


class LocalRank(RankState[KeptResult]):
    """A trainer of a job that is connected to this agent."""

    def __init__(
        self, roster: Roster, trainer: Trainer, arenas: SessionArenas, program: str
    ) -> None:
        super().__init__(roster, trainer)
        self.arenas = arenas
        self.program = program
        self.compression: str | None = None
        """How its values are compressed, as its trainer says."""
        self.pid = -1
        """The id of the trainer's process, once its session knows this rank."""
        self.busy_since: float | None = None
        """When the running op began; None while none runs."""
        self.idle_since = trio.current_time()
        """When the last op ended, or the rank began."""
        self.halted_since: float | None = None
        """Since when the running op has stood still, if a view change has interrupted it."""
        self.released = trio.Event()
        """Set once the job is over for this trainer: no rank will ask for its results."""
        self.lanes = RankLanes(trainer.id, roster)
        self.costs = RingCosts()
        self.serving: set[trio.CancelScope] = set()
        """The tasks that send results, which must end before the results' memory is reused."""
        self.own_time = OwnTime()
        self.times = RankTimes(roster.job, roster.born.counter, trainer.id)
        self.losses: list[str] = []
        """What the trainer must still be told about ranks that are gone."""
        self.patience = Patience()
        self.shapes = Shapes()
        self.repeats: Repeats | None = None
        """Set by the session if the library may answer its calls."""
        self.only_member = _only_member_of(roster)
        """The member at which all ranks of the job are, if it is one."""
        self.machines = _machines_of(roster)
        self.mates = _mates_of(self)
        """The ranks at this agent, this one among them; none if the job has left it out."""
        self.may_repeat = _may_repeat(self)
        """Whether the library may answer calls that it makes among these ranks."""
        self._changed: trio.Event | None = None
        """For the tasks that wait for a change, if there are any."""
        self._attempt: trio.CancelScope | None = None

    @property
    def is_stable(self) -> bool:
        """Whether every rank is known to have ended all ops that this one has started (O2)."""
        return self.ledger.stable >= self.ledger.started

    @property
    def has_all_here(self) -> bool:
        """Whether all of several ranks are at this agent."""
        return self.size > 1 and self.only_member is not None

    @property
    def place_here(self) -> int:
        """Its place among the ranks at this agent; 0 if the job has left it out."""
        return 0 if self.rank is None else self.mates.index(self.rank)

    @property
    def retained_bytes(self) -> int:
        """The bytes of the results that are not yet stable."""
        count = 0
        for result in self.results.values():
            count += result.nbytes
        return count

    # --- what the library does by itself

    def catch_up(self) -> None:
        """Note the ops that the library has answered by itself."""
        if self.repeats is not None:
            self.repeats.catch_up()

    def recall(self) -> None:
        """Also make the library answer none from now on."""
        if self.repeats is not None:
            self.repeats.recall()

    # --- what the views decide, and the op task waits for

    def fence(self, why: Fence) -> None:
        """Also note since when the running op stands still."""
        super().fence(why)
        if self.running is not None and self.halted_since is None:
            self.halted_since = max(self.lanes.moved_at, self.busy_since or 0.0)

    def lift(self, fence: Fence) -> None:
        """Also wake the tasks that wait for it."""
        super().lift(fence)
        self._wake()

    def learn(self, known: Collection[KnownPrimary]) -> None:
        """Also wake the tasks that wait for a quorum."""
        before = self.may_run
        super().learn(known)
        if self.may_run and not before:
            self._wake()

    def follow(self, roster: Roster) -> bool:
        """Also end the attempt if the number has changed; `lanes.begin` opens the next lanes."""
        before = self.roster
        renumbered = super().follow(roster)
        self.only_member = _only_member_of(roster)
        self.machines = _machines_of(roster)
        self.mates = _mates_of(self)
        self.may_repeat = _may_repeat(self)
        if renumbered:
            self.costs = self.costs.follow(before, roster, ended=self.ledger.ended)
            self._stop_attempt()
            self.lanes.follow(roster)
        else:
            self.halted_since = None
        return renumbered

    def note_losses(self) -> None:
        """Keep for the trainer what its new roster says of ranks that are lost or have left.

        If the job raises on a loss, the error of the next op says it.
        """
        if self.roster.terms.on_loss == "raise":
            return
        left = len(self.roster.trainers)
        op = self.ledger.started + 1 if self.running is None else self.running
        on = f"job {self.roster.job!r} continues with {left} rank{'s' * (left > 1)}, from op {op}"
        for loss in self.roster.losses:
            who, has_left, _ = loss.message.partition(LEFT)
            self.losses.append(f"{who}has finished; {on}" if has_left else f"{loss.message}; {on}")
        del self.losses[:-MAX_LOSSES]

    def open_lanes(self) -> tuple[tuple[TrainerId, ...], tuple[TrainerId, ...]]:
        """Return the ranks to which, and from which, a lane is open."""
        return self.lanes.peers()

    def end(self, verdict: Verdict) -> tuple[KeptResult, ...]:
        """Also end the attempt, and free the memory of results."""
        self.recall()
        self._stop_attempt()
        self.lanes.close()
        released = super().end(verdict)
        self._release(released)
        self.released.set()
        return released

    def start(self, op: OpNumber, call: Call) -> None:
        """Also note that nothing has interrupted the op yet."""
        super().start(op, call)
        self.halted_since = None

    def stabilize(self, mark: int) -> tuple[KeptResult, ...]:
        """Also free the memory of the results, and wake the task that waits for room."""
        before = self.ledger.stable
        released = super().stabilize(mark)
        self._release(released)
        if self.ledger.stable > before:
            self._wake()
        return released

    def attempt(self, deadline: float = math.inf) -> trio.CancelScope:
        """Return the scope of one attempt; the next view change that resolves ops cancels it."""
        self._attempt = trio.CancelScope(deadline=deadline)
        return self._attempt

    @property
    def was_interrupted(self) -> bool:
        """Whether a view change has ended the last attempt, not its deadline."""
        return self._attempt is None

    async def changed(self) -> None:
        """Wait until a fence is lifted, ops become stable, or the roster comes into force.

        The view that does so may cancel the attempt that waits here, which then must not go on.
        """
        if self._changed is None:
            self._changed = trio.Event()
        await self._changed.wait()
        await trio.lowlevel.checkpoint_if_cancelled()

    async def quorum(self) -> None:
        """V10: wait until this side has a majority that is known to have installed the roster.

        Returns at once if the job needs none.
        """
        while not self.may_run:
            await self.changed()

    async def unfenced(self) -> None:
        """Wait until a completion may be delivered. Returns at once while there is no fence.

        An attempt that a view has cancelled does not go on, even if it was about to run.
        """
        while self.fences:
            await self.changed()
        await trio.lowlevel.checkpoint_if_cancelled()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def _stop_attempt(self) -> None:
        if self.repeats is not None:
            self.repeats.abandon()
        if self._attempt is not None:
            self._attempt.cancel()
            self._attempt = None
        for scope in self.serving:
            scope.cancel()

    # --- the memory of results

    def let_go(self, result: KeptResult) -> None:
        """Release the result's arena."""
        if result.arena is not None and result.is_input:
            self.arenas.inputs.release(result.arena)
        elif result.arena is not None:
            self.arenas.outputs.release(result.arena)

    def give_up_results(self) -> None:
        """Forget the results, as the session's memory goes."""
        self.results.clear()

    def _release(self, results: Iterable[KeptResult]) -> None:
        for result in results:
            self.let_go(result)

    # --- lanes

    async def ring(self, rendezvous: LaneRendezvous) -> RingPosition:
        """Return this rank's place in the ring, as soon as both its lanes are open."""
        roster, rank = self.roster, self.rank
        if rank is None:  # V2: the view without us is about to end the attempt
            await trio.sleep_forever()
            raise AssertionError("nobody wakes it")
        if self.size == 1:
            return RingPosition(rank=rank, size=1, roster=roster.number)
        following, previous = (rank + 1) % self.size, (rank - 1) % self.size
        to, from_ = await self.lanes.open([following], [previous], rendezvous)
        return RingPosition(
            rank=rank,
            size=self.size,
            roster=roster.number,
            to_next=to[following],
            from_previous=from_[previous],
        )


class RankLanes:
    """One rank's lanes: one for each direction and each rank with which it exchanges tensors.

    The lanes of the ring are opened as soon as a view is installed, others when an op needs them.
    All live as long as the roster's number, and longer if the next roster keeps them (V4).
    """

    def __init__(self, me: TrainerId, roster: Roster) -> None:
        self._me = me
        self._roster = roster
        self._offered: set[TrainerId] = set()
        self._to: dict[TrainerId, Lane] = {}
        self._from: dict[TrainerId, Lane] = {}
        self._paces: dict[TrainerId, dict[tuple[str, str], Throughput]] = {}
        """`Lane.paces` as they were at the last measurement of each connection."""
        self._asked: dict[TrainerId, trio.Event] = {}
        """The receivers that have not yet answered whether the lane to them may be closed."""
        self._carrying: set[Lane] = set()
        """The lanes that carry retained results."""
        self.ended_traffic = (0, 0)
        self._moved = (0, 0), 0.0

    def begin(self, roster: Roster, rendezvous: LaneRendezvous) -> None:
        """Offer the lane to the next rank of a roster in force; the previous rank offers ours."""
        self._roster = roster
        rendezvous.forget(roster.job, below=roster.number)
        rank = roster.rank_of(self._me)
        if rank is not None and len(roster.trainers) > 1:
            self._offer(roster.ids[(rank + 1) % len(roster.ids)], rendezvous)

    def edge(self, sender: TrainerId, receiver: TrainerId, op: int = -1) -> LaneKey:
        """Return the key of a lane under the current roster number."""
        roster, trainer = self._roster, self._roster.trainer(sender)
        host = None if trainer is None else trainer.member
        return LaneKey(roster.job, roster.born, roster.number, host, sender, receiver, op)

    async def open(
        self, to: Iterable[int], from_: Iterable[int], rendezvous: LaneRendezvous
    ) -> tuple[Mapping[int, Lane], Mapping[int, Lane]]:
        """Return the lanes to and from these ranks of the roster, as soon as all are open.

        Raises:
            LaneBroken: one can't be opened, or the roster is over.
        """
        ids, lanes_to, lanes_from = self._roster.ids, dict[int, Lane](), dict[int, Lane]()
        for rank in to:
            if ids[rank] in self._asked:
                await self._asked[ids[rank]].wait()
        for rank in to:  # all at once: each may take a few round trips
            if ids[rank] not in self._offered:
                self._offer(ids[rank], rendezvous)
        for rank in to:
            if ids[rank] not in self._to:
                self._to[ids[rank]] = await rendezvous.take(self._end_to(ids[rank]))
            lanes_to[rank] = self._to[ids[rank]]
        for rank in from_:
            if ids[rank] not in self._from:
                self._from[ids[rank]] = await rendezvous.take(self._end_from(ids[rank]))
            lanes_from[rank] = self._from[ids[rank]]
        return lanes_to, lanes_from

    def if_open(self, from_: Iterable[int], to: Iterable[int]) -> list[Lane] | None:
        """Return the lanes from and to these ranks of the roster; None if one is not open."""
        ids, lanes = self._roster.ids, list[Lane]()
        for rank in from_:
            lane = self._from.get(ids[rank])
            if lane is None or lane.is_closed:
                return None
            lanes.append(lane)
        for rank in to:
            lane = self._to.get(ids[rank])
            if lane is None or lane.is_closed or ids[rank] in self._asked:
                return None
            lanes.append(lane)
        return lanes

    def all_open(self) -> tuple[Lane, ...]:
        """Return the lanes of the current roster, first those that send."""
        return *self._to.values(), *self._from.values()

    def peers(self) -> tuple[tuple[TrainerId, ...], tuple[TrainerId, ...]]:
        """Return the ranks to which, and from which, a lane is open and not about to be closed."""
        to = _whole(self._to).keys() - self._asked.keys()
        return tuple(sorted(to)), tuple(sorted(_whole(self._from)))

    @property
    def receiving_s(self) -> float:
        """How long the open lanes have waited in all in the middle of records."""
        lanes = self._from.values()
        return sum(pace.took_s for lane in lanes for pace in tuple(lane.paces.values()))

    def measure_mbit_s(self) -> Iterator[tuple[TrainerId, tuple[str, str], float]]:
        """Yield how fast data have come since the last call, if they were enough to measure.

        Each item is the sender, the two addresses of the connection (ours first), and Mbit/s.
        """
        for sender, lane in self._from.items():
            earlier = self._paces.setdefault(sender, {})
            for hosts, pace in tuple(lane.paces.items()):  # a thread may add to them
                before = earlier.get(hosts, Throughput())
                count, waited_s = pace.nbytes - before.nbytes, pace.took_s - before.took_s
                if count >= MEASURED_BYTES and waited_s > 0:
                    earlier[hosts] = pace
                    yield sender, hosts, 8 * count / waited_s / 1e6

    def follow(self, roster: Roster) -> None:
        """Another roster is in force: close the lanes, except those that it keeps (V4).

        A late record on these has a lower roster number, and is dropped. These lanes stay as fast
        as they were, and no rank waits for new ones.
        """
        to = {p: lane for p, lane in _whole(self._to).items() if (self._me, p) in roster.lanes}
        from_ = {p: lane for p, lane in _whole(self._from).items() if (p, self._me) in roster.lanes}
        paces = {sender: pace for sender, pace in self._paces.items() if sender in from_}
        for peer in to:
            del self._to[peer]
        for peer in from_:
            del self._from[peer]
        self.close()
        self._roster = roster
        self._to, self._from, self._paces, self._offered = to, from_, paces, set(to)

    def close(self) -> None:
        """Close all lanes: their roster is over, or one of them broke."""
        for lane in self.all_open():
            self._close(lane)
        self._to.clear()
        self._from.clear()
        self._paces = {}
        self._offered.clear()
        for asked in self._asked.values():
            asked.set()
        self._asked.clear()

    def ask_to_rest(self, rendezvous: LaneRendezvous) -> tuple[TrainerId, ...]:
        """Return the receivers to ask whether the lanes to them may be closed.

        Only the sender knows that no record is under way, and only the receiver whether it already
        waits for the next op. Until `answered` no op uses these lanes.
        """
        ends = {peer: self._end_to(peer) for peer in self._offered - self._asked.keys()}
        is_open = [p for p, end in ends.items() if p in self._to or rendezvous.holds(end)]
        self._asked.update((peer, trio.Event()) for peer in is_open)
        return tuple(is_open)

    def answered(self, receiver: TrainerId, *, agreed: bool, rendezvous: LaneRendezvous) -> None:
        """Close the lane to a receiver if it agreed: then it has closed its end of the lane."""
        asked = self._asked.pop(receiver, None)
        if asked is None:
            return
        if agreed:
            self._close(self._to.pop(receiver, None) or rendezvous.withdraw(self._end_to(receiver)))
            self._offered.discard(receiver)
        asked.set()

    def agree_to_rest(self, sender: TrainerId, rendezvous: LaneRendezvous) -> bool:
        """Close the lane from a sender until it is needed again; return False if it isn't open."""
        lane = self._from.pop(sender, None) or rendezvous.withdraw(self._end_from(sender))
        self._close(lane)
        return lane is not None

    def _close(self, lane: Lane | None) -> None:
        if lane is not None:
            self.count(lane)
            lane.close()

    def _end_to(self, receiver: TrainerId) -> LaneEnd:
        return LaneEnd(self.edge(self._me, receiver), sending=True)

    def _end_from(self, sender: TrainerId) -> LaneEnd:
        return LaneEnd(self.edge(sender, self._me), sending=False)

    def carry(self, lane: Lane) -> None:
        """Count what a lane with a result moves as progress, until `count` ends it."""
        self._carrying.add(lane)

    def count(self, lane: Lane) -> None:
        """Add the bytes of a lane that ends to this rank's traffic."""
        self._carrying.discard(lane)
        self.ended_traffic = sum_of(self.ended_traffic, (lane.bytes_sent, lane.bytes_received))

    def note_traffic(self) -> None:
        """Note the time if bytes have moved: since then the ring has stood still."""
        if self.traffic != self._moved[0]:
            self._moved = self.traffic, trio.current_time()

    @property
    def moved_at(self) -> float:
        """When bytes were last seen to have moved."""
        return self._moved[1]

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of tensor data sent and received at the sockets, with headers."""
        sent, received = self.ended_traffic
        lanes = [*self._carrying, *self.all_open()]
        return (
            sent + sum(lane.bytes_sent for lane in lanes),
            received + sum(lane.bytes_received for lane in lanes),
        )

    def _offer(self, peer: TrainerId, rendezvous: LaneRendezvous) -> None:
        trainer = self._roster.trainer(peer)
        if trainer is not None and peer not in self._offered:
            self._offered.add(peer)
            rendezvous.offer(self.edge(self._me, peer), trainer.member)


def _only_member_of(roster: Roster) -> Member | None:
    """Return the member at which all ranks of a roster are; None if they are at several."""
    members = {trainer.member for trainer in roster.trainers}
    return members.pop() if len(members) == 1 else None


def _machines_of(roster: Roster) -> Machines:
    return machines_of([trainer.member for trainer in roster.trainers])


def _mates_of(rank: LocalRank) -> tuple[int, ...]:
    here, trainers = rank.trainer.member, rank.roster.trainers
    ranks = tuple(at for at, trainer in enumerate(trainers) if trainer.member == here)
    return () if rank.rank is None else ranks


def _may_repeat(rank: LocalRank) -> bool:
    return bool(rank.mates) and (len(rank.mates) < rank.size or rank.has_all_here)


def _whole(lanes: Mapping[TrainerId, Lane]) -> dict[TrainerId, Lane]:
    return {peer: lane for peer, lane in lanes.items() if not lane.is_closed}


def sum_of(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """Add up two counts of bytes sent and received."""
    return one[0] + other[0], one[1] + other[1]
