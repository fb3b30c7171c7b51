"""One `sync`: all ranks offer their states, and the ranks that lack the best one receive it.

All ranks decide from the same offers, so they make the same plan. From the same plan and the same
living trainers they find the same root. So no rank waits for an op that another does not call.

A thread faults in the memory for the state ahead of the data, which is hashed as it arrives. The
first touch of fresh memory can cost more than the network, most of all in a virtual machine.
"""

import logging
import mmap
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import xxhash

from pmesh.client.session.rows import exchange_rows
from pmesh.client.session.session import Done, TrainerSession
from pmesh.client.trees.state import Packed, digest_of
from pmesh.core.jobs.comparing import digest_text, naming
from pmesh.core.jobs.shares import Standing
from pmesh.core.ops.reductions import Values
from pmesh.core.values import Comparison
from pmesh.core.wire.calls import Call
from pmesh.core.wire.trainer import SYNC_VALUES, World
from pmesh.errors import RankLost, RunError
from pmesh.ids import Rank, TrainerId


class Offer(NamedTuple):
    """One rank's state, described in the int64 values that it gives to the `sync` op."""

    digest: tuple[int, int]
    """The hash of all bytes of the state."""
    nbytes: int
    step: int
    """How many times the rank has synced."""
    veteran: bool
    """True if the rank has done an op of the job since it entered: its state is the job's."""
    raises_on_loss: bool
    """True if the rank wants `RankLost` for every loss, also in the middle of a transfer."""
    arriving: int = 0
    """The first half of the digest of a state that has begun to arrive."""
    arrived: int = 0
    """How many of its bytes have arrived. If the source is lost, the transfer continues there."""
    standing: Standing = Standing()
    """How fast the rank is."""

    def to_values(self) -> list[int]:
        """Return the offer as `SYNC_VALUES` int64."""
        return [*self.digest, *self[1:-1], *self.standing]

    @classmethod
    def from_values(cls, values: Sequence[int]) -> "Offer":
        """Return the offer that `to_values` has described."""
        first, second, nbytes, step, veteran, raises_on_loss, arriving, arrived, *standing = values
        return cls(
            (first, second),
            *(nbytes, step, veteran != 0, raises_on_loss != 0, arriving, arrived),
            Standing(*standing),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The state that is sent, and the ranks that receive it."""

    best: Offer
    holders: tuple[TrainerId, ...]
    """The trainers that have the best state; never empty."""
    receivers: tuple[TrainerId, ...]
    """The trainers that have another state."""
    corrected: tuple[TrainerId, ...]
    """Receivers that should have had the best state: they had synced and stayed in the job."""
    raises_on_loss: bool
    start: int
    """The first byte that has not arrived at all receivers."""

    def root(self, living: Sequence[TrainerId]) -> TrainerId | None:
        """Return the holder that reaches all receivers over the fewest edges; None if none is left.

        Args:
            living: all ranks, in the order in which each sends to the next.
        """
        receivers = self.receivers_among(living)

        def reach(holder: TrainerId) -> int:
            rank = living.index(holder)
            return max(((receiver - rank) % len(living) for receiver in receivers), default=0)

        return min((h for h in self.holders if h in living), key=reach, default=None)

    def receivers_among(self, living: Sequence[TrainerId]) -> tuple[Rank, ...]:
        """Return the ranks that lack the best state."""
        return tuple(rank_of(r, living) for r in self.receivers if r in living)

    def is_settled(self, living: Sequence[TrainerId]) -> bool:
        """Return True if every living rank has the best state."""
        return not self.receivers_among(living)


def elect(trainers: Sequence[TrainerId], offers: Sequence[Offer]) -> Plan:
    """Elect the state of a veteran, if any; of these the highest step; of these the lowest rank.

    Args:
        trainers: all ranks, in order.
        offers: their offers, in the same order; at least one.
    """

    def merit(rank: int) -> tuple[bool, int, int]:
        return offers[rank].veteran, offers[rank].step, -rank

    winner = max(range(len(offers)), key=merit)
    best = offers[winner]
    equal = [offer.digest == best.digest for offer in offers]
    receivers = [rank for rank in range(len(offers)) if not equal[rank]]
    return Plan(
        best=best,
        holders=tuple(trainers[rank] for rank in range(len(offers)) if equal[rank]),
        receivers=tuple(trainers[rank] for rank in receivers),
        corrected=tuple(
            trainers[rank] for rank in receivers if offers[rank].veteran and offers[rank].step > 0
        ),
        raises_on_loss=any(offer.raises_on_loss for offer in offers),
        start=min((_arrived_of(best, offers[rank]) for rank in receivers), default=0),
    )


def _arrived_of(best: Offer, offer: Offer) -> int:
    return offer.arrived if offer.arriving == best.digest[0] else 0


def rank_of(trainer: TrainerId, trainers: Sequence[TrainerId]) -> Rank:
    """Return the index of the trainer among `trainers`."""
    return Rank(trainers.index(trainer))


AHEAD_CHUNKS = 4  # more would not hide more time, and would slow down the first chunks


class Arrival:
    """The bytes of one state, received in chunks of one size; the last may be shorter.

    Use it in a `with` statement, which ends its thread.
    """

    def __init__(self, nbytes: int, *, chunk_bytes: int) -> None:
        self.arrived = 0
        """How many bytes have arrived."""
        self.values: Values = np.empty(nbytes, np.uint8)
        """The bytes, flat; those that have not arrived are arbitrary."""
        self.hasher = xxhash.xxh3_128()
        """The hash of what has arrived."""
        starts = range(0, nbytes, chunk_bytes)
        self._untouched = deque(self.values[start : start + chunk_bytes] for start in starts)
        self._ahead: deque[tuple[Values, Future[None]]] = deque()
        self._thread = ThreadPoolExecutor(1, "pmesh-sync")

    def __enter__(self) -> Self:
        for _ in range(AHEAD_CHUNKS):
            self._touch_next()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._thread.shutdown(cancel_futures=True)

    def take(self, chunk: Values) -> None:
        """Copy the next chunk (flat uint8) to where it belongs."""
        into, touched = self._ahead.popleft()
        if not touched.cancel():
            touched.result()  # a touch writes zeros, so it must end before the bytes are copied
        self._touch_next()
        np.copyto(into, chunk)
        self.hasher.update(into.data)
        self.arrived += chunk.size

    def _touch_next(self) -> None:
        if self._untouched:
            memory = self._untouched.popleft()
            self._ahead.append((memory, self._thread.submit(_touch, memory)))


def _touch(memory: Values) -> None:
    memory[:: mmap.PAGESIZE] = 0  # numpy releases the GIL for this


CHUNK_BYTES = 4 * 1024 * 1024
"""Small, so that the sockets' buffers keep the link busy between two chunks; each costs an op."""
_WIRE_BYTES = 4  # chunks travel as int32

_logger = logging.getLogger("pmesh")


@dataclass(frozen=True, slots=True, kw_only=True)
class Synced:
    """The result of a `sync`: all ranks have the same state now."""

    step: int
    """The step of the rank whose state it is."""
    received: "Values | None"
    """The bytes of the state; None if this rank had it already."""
    source: str
    """A rank that had it, as in "rank 0 (mac-1)"."""
    last: Done
    """The last op of the call."""
    nbytes: int
    """The bytes of the values in shared memory, over all ops."""
    standings: dict[TrainerId, Standing]
    """How fast each rank is."""
    found: Comparison
    """The state that all have now, and who had stayed in the job and yet had another one."""


def run_sync(session: TrainerSession, packed: Packed, offer: Offer, *, timeout_s: float) -> Synced:
    """Agree on the best state, and receive it if this rank has another one.

    Every decision follows from the offers and from the trainers that were left after each op. So
    all ranks decide the same and call the same ops.

    Raises:
        RunError: the state that arrived is not the one that was offered.
        PmeshError: an op failed, on all ranks.
    """
    with ExitStack() as until_it_ends:
        arrival: _Arriving | None = None
        while True:
            values = _with_progress(offer, arrival).to_values()
            call = Call("sync", "int64", (SYNC_VALUES,))
            rows, done = exchange_rows(session, values, call, timeout_s=timeout_s)
            offers = [Offer.from_values(row) for row in rows]
            plan = elect(done.world.trainers, offers)
            _warn_of_corrections(plan, done.world)
            if done.world.trainers[done.world.rank] not in plan.receivers:
                arrival = None  # a rank that has the state only passes it on
            elif arrival is None or arrival.best.digest != plan.best.digest:
                arriving = Arrival(plan.best.nbytes, chunk_bytes=CHUNK_BYTES)
                arrival = _Arriving(plan.best, until_it_ends.enter_context(arriving))
            memory = None if arrival is None else arrival.memory
            transfer = _Transfer(session, packed, plan, done, memory)
            if transfer.run(timeout_s=timeout_s):
                break
            if not {*plan.holders} & {*session.world.trainers}:
                _logger.warning(
                    "all ranks with the newest state are lost; the newest one left is taken"
                )
    return Synced(
        step=plan.best.step,
        received=None if arrival is None else arrival.checked(),
        source=_shown(plan.holders[0], done.world),
        last=transfer.last,
        nbytes=transfer.nbytes,
        standings=dict(zip(done.world.trainers, (o.standing for o in offers), strict=True)),
        found=naming(
            plan.corrected,
            Comparison(
                done.op,
                plan.best.step + 1,
                digest_text(plan.best.digest),
                len(done.world.trainers),
                mended=bool(plan.corrected),
            ),
        ),
    )


@dataclass(frozen=True, slots=True)
class _Arriving:
    """The best state on a rank that lacks it, as far as it has arrived."""

    best: Offer
    memory: Arrival

    def checked(self) -> Values:
        """Return all its bytes; raise RunError if they are not those that were offered."""
        if digest_of(self.memory.hasher) != self.best.digest:
            raise RunError(
                "the state that has arrived is not the one that was offered: its hash differs; "
                "a program on the sending machine has changed it meanwhile, or its memory is faulty"
            )
        return self.memory.values


def _with_progress(offer: Offer, arriving: _Arriving | None) -> Offer:
    if arriving is None:
        return offer
    return offer._replace(arriving=arriving.best.digest[0], arrived=arriving.memory.arrived)


class _Transfer:
    """Sends the best state chunk by chunk to the ranks that lack it; all ranks pass it on."""

    def __init__(
        self,
        session: TrainerSession,
        packed: Packed,
        plan: Plan,
        last: Done,
        arrival: Arrival | None,
    ) -> None:
        self._session = session
        self._packed = packed
        self._plan = plan
        self._arrival = arrival
        self.last = last
        self.nbytes = last.values.nbytes

    def run(self, *, timeout_s: float) -> bool:
        """Send all chunks, as long as a rank lacks them; return False if their source is lost.

        The ranks may then have reached different chunks, since a rank may receive the failure of a
        chunk after it has called the next (I5). So all ranks exchange offers again.
        """
        start = self._plan.start
        root = self._plan.root(self._living)
        while start < self._plan.best.nbytes and not self._plan.is_settled(self._living):
            if root is None or root not in self._living:
                return False
            size = min(CHUNK_BYTES, self._plan.best.nbytes - start)
            try:
                self._send_chunk(root, start, size, timeout_s)
            except RankLost:
                if self._plan.raises_on_loss or root in self._living:
                    raise
                return False
            start += size
        return True

    @property
    def _living(self) -> tuple[TrainerId, ...]:
        return self._session.world.trainers

    def _send_chunk(self, root: TrainerId, start: int, size: int, timeout_s: float) -> None:
        session = self._session
        rank, count = rank_of(root, self._living), -(-size // _WIRE_BYTES)
        if rank == session.world.rank:
            region = session.input_values("int32", count, room_bytes=0, retained=True)
            self._packed.copy_to(region.view(np.uint8)[:size], start)
        receivers = self._plan.receivers_among(self._living)
        tree = f"sync {start}"
        call = Call("broadcast", "int32", (count,), root=rank, tree=tree, receivers=receivers)
        self.last = session.run_op(call, "int32", count, timeout_s=timeout_s)
        self.nbytes += self.last.values.nbytes
        if self._arrival is not None and self._arrival.arrived == start:
            self._arrival.take(self.last.values.view(np.uint8)[:size])


def _warn_of_corrections(plan: Plan, world: World) -> None:
    for trainer in plan.corrected:
        _logger.warning(
            "%s had another state than %s, and gets that one: what it computes differs",
            _shown(trainer, world),
            _shown(plan.holders[0], world),
        )


def _shown(trainer: TrainerId, world: World) -> str:
    rank = rank_of(trainer, world.trainers)
    return f"rank {rank} ({world.names[rank]})"
