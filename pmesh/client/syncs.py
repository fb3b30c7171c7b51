"""One `sync`: all ranks say what they have, and who has something else gets the best."""

import logging
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from pmesh.client.arrivals import Arrival
from pmesh.client.elections import Offer, Plan, elect, offers_of, rank_of
from pmesh.client.op_session import OpSession
from pmesh.client.session import Done
from pmesh.client.states import Packed, digest_of
from pmesh.core.messages import Call
from pmesh.core.reductions import Values
from pmesh.core.session import SYNC_VALUES, World
from pmesh.errors import RankLost, RunError
from pmesh.ids import TrainerId

CHUNK_BYTES = 4 * 1024 * 1024
"""Small, so that between two of them the sockets' buffers keep the line busy; each costs an op."""
_WIRE_BYTES = 4  # chunks travel as int32

_logger = logging.getLogger("pmesh")


@dataclass(frozen=True, slots=True, kw_only=True)
class Synced:
    """All ranks have the same state now."""

    step: int
    """That of the rank whose state it is."""
    received: "Values | None"
    """The bytes of the state, if this rank had another one."""
    last: Done
    """The last op that it took."""
    nbytes: int
    """What the values took in shared memory, over all ops."""


def run_sync(session: OpSession, packed: Packed, offer: Offer, *, timeout_s: float) -> Synced:
    """Agree on the best state, and take it if this rank has another one.

    Every decision follows from the offers and from who was left after each op, so all ranks decide
    alike and call the same ops.

    Raises:
        RunError: what has arrived is not what was offered.
        PmeshError: an op failed, on all ranks.
    """
    while True:
        values = session.input_values("int64", SYNC_VALUES, room_bytes=0)
        values[:] = offer.to_values()
        call = Call("sync", "int64", (SYNC_VALUES,))
        done = session.run_op(call, "int64", SYNC_VALUES, timeout_s=timeout_s)
        plan = elect(done.world.trainers, offers_of(done.values.tolist()))
        _tell_of_corrections(plan, done.world)
        transfer = _Transfer(session, packed, plan, done)
        if transfer.run(timeout_s=timeout_s):
            return Synced(
                step=plan.best.step,
                received=transfer.received(),
                last=transfer.last,
                nbytes=transfer.nbytes,
            )
        _logger.warning("all who had the newest state are lost; the best of what is left is taken")


class _Transfer:
    """The best state on its way to those who lack it, chunk by chunk; all ranks pass it on."""

    def __init__(self, session: OpSession, packed: Packed, plan: Plan, last: Done) -> None:
        self._session = session
        self._packed = packed
        self._plan = plan
        self.last = last
        self.nbytes = last.values.nbytes
        me = last.world.trainers[last.world.rank]
        self._arrival: Arrival | None = None
        if me in plan.receivers:  # who has it already only passes it on
            self._arrival = Arrival(plan.best.nbytes, chunk_bytes=CHUNK_BYTES)

    def run(self, *, timeout_s: float) -> bool:
        """Send all chunks, from another holder if one is lost; False if none is left."""
        with self._arrival or nullcontext():
            return self._send_chunks(timeout_s)

    def _send_chunks(self, timeout_s: float) -> bool:
        start = 0
        while start < self._plan.best.nbytes and not self._plan.is_settled(self._living):
            root = self._plan.root(self._living)
            if root is None:
                return False
            size = min(CHUNK_BYTES, self._plan.best.nbytes - start)
            try:
                self._send_chunk(root, start, size, timeout_s)
            except RankLost:
                if self._plan.raises_on_loss or root in self._living:
                    raise
            else:
                start += size
        return True

    def received(self) -> "Values | None":
        """The bytes that this rank has lacked; RunError if they are not what was offered."""
        if self._arrival is None:
            return None
        if digest_of(self._arrival.hasher) != self._plan.best.digest:
            raise RunError(
                "the state that has arrived is not the one that was offered: its hash differs; "
                "a program on the sending machine has changed it meanwhile, or its memory is faulty"
            )
        return self._arrival.values

    @property
    def _living(self) -> tuple[TrainerId, ...]:
        return self._session.world.trainers

    def _send_chunk(self, root: TrainerId, start: int, size: int, timeout_s: float) -> None:
        session = self._session
        rank, count = rank_of(root, self._living), -(-size // _WIRE_BYTES)
        if rank == session.world.rank:
            # A fresh region for each chunk: what a root has sent, others may still fetch (O2).
            region = session.input_values("int32", count, room_bytes=0)
            self._packed.copy_to(region.view(np.uint8)[:size], start)
        receivers = self._plan.receivers_among(self._living)
        tree = f"sync {start}"
        call = Call("broadcast", "int32", (count,), root=rank, tree=tree, receivers=receivers)
        self.last = session.run_op(call, "int32", count, timeout_s=timeout_s)
        self.nbytes += self.last.values.nbytes
        if self._arrival is not None:
            self._arrival.take(self.last.values.view(np.uint8)[:size])


def _tell_of_corrections(plan: Plan, world: World) -> None:
    def name(trainer: TrainerId) -> str:
        rank = rank_of(trainer, world.trainers)
        return f"rank {rank} ({world.names[rank]})"

    for trainer in plan.corrected:
        _logger.warning(
            "%s had another state than %s, and gets that one: what it computes differs",
            name(trainer),
            name(plan.holders[0]),
        )
