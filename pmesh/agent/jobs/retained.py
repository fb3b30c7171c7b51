"""O2: a rank that missed the end of an op fetches the result from a rank that retains it."""

import itertools
from typing import TYPE_CHECKING

import trio

from pmesh.agent.containment import Tasks
from pmesh.agent.jobs.ranks import KeptResult, LocalRank
from pmesh.agent.lanes.rendezvous import LaneEnd
from pmesh.core.jobs.attempt import ASK_AGAIN_S
from pmesh.core.values import OpOutcome
from pmesh.core.wire.calls import Call
from pmesh.core.wire.lanes import AskResult
from pmesh.core.wire.records import fingerprint
from pmesh.errors import LaneBroken
from pmesh.ids import Member, OpNumber
from pmesh.net.lanes.lane import CallsDiffer, Lane
from pmesh.net.lanes.ring import RingPosition, broadcast

if TYPE_CHECKING:
    from pmesh.agent.jobs.driver import Jobs

COPIED_BYTES = 1024 * 1024  # at once: some 0.1 ms, so that the event loop stays responsive
MAX_EARLY = 64  # requests of one peer, for a few jobs and ranks; it repeats those beyond


async def fetch_result(
    rank: LocalRank, call: Call, target: memoryview, outcome: OpOutcome, jobs: "Jobs"
) -> None:
    """Fetch the result of an op from one of the ranks that have completed it, here if one has.

    Raises:
        CallsDiffer: what they have completed is another call.
        LaneBroken: the connection is gone.
    """
    nearby = (jobs.neighbour(rank, holder) for holder in outcome.holders)
    near = next(filter(None, nearby), None)
    if near is not None:
        await _copy(near, outcome.op, call, target)
        return
    lane = await _ask_for_lane(rank, outcome, jobs)
    rank.lanes.carry(lane)
    try:
        ring = RingPosition(rank=1, size=2, roster=rank.roster.number, from_previous=lane)
        await broadcast(
            ring,
            op=outcome.op,
            fingerprint=rank.fingerprint,
            completed=rank.ledger.ended,
            root=0,
            buffer=target,
        )
    finally:
        rank.lanes.count(lane)
        lane.close()


async def _ask_for_lane(rank: LocalRank, outcome: OpOutcome, jobs: "Jobs") -> Lane:
    """Ask one holder after the other: one may be gone, or may have released the result."""
    holders = itertools.cycle(outcome.holders)
    while True:
        holder = next(holders)
        edge = rank.lanes.edge(holder, rank.id, outcome.op)
        ask = AskResult(edge.job, edge.born, edge.number, outcome.op, holder, rank.id)
        host = rank.roster.trainer(holder)
        if host is not None:
            jobs.ask(host.member, ask)
        with trio.move_on_after(ASK_AGAIN_S):
            return await jobs.rendezvous.take(LaneEnd(edge, sending=False))


async def _copy(near: LocalRank, op: OpNumber, call: Call, target: memoryview) -> None:
    """Copy the result of a rank on this machine."""
    retained, report = near.results.get(op), near.ledger.ops.get(op)
    if report is not None and report.call != call:
        raise CallsDiffer(op, repr(near))
    if retained is None or retained.nbytes != target.nbytes:
        raise LaneBroken(f"the result of op {op} is gone")
    source = retained.memory
    for begin in range(0, target.nbytes, COPIED_BYTES):
        target[begin : begin + COPIED_BYTES] = source[begin : begin + COPIED_BYTES]
        await trio.lowlevel.checkpoint()


async def serve_result(rank: LocalRank, ask: AskResult, jobs: "Jobs") -> None:
    """O2: send a retained result to a rank that missed the end of its op."""
    retained = rank.results.get(ask.op)
    report = rank.ledger.ops.get(ask.op)
    asker = rank.roster.trainer(ask.receiver)
    if retained is None or report is None or asker is None or ask.number != rank.roster.number:
        return  # a later view has come: the asker will ask again under its number
    edge = rank.lanes.edge(rank.id, ask.receiver, ask.op)
    with trio.CancelScope() as scope:
        rank.serving.add(scope)
        try:
            jobs.rendezvous.offer(edge, asker.member)
            lane = await jobs.rendezvous.take(LaneEnd(edge, sending=True))
            await _send_result(rank, ask.op, report.call, retained, lane)
        finally:
            rank.serving.discard(scope)


async def _send_result(
    rank: LocalRank, op: OpNumber, call: Call, retained: KeptResult, lane: Lane
) -> None:
    rank.lanes.carry(lane)
    try:
        ring = RingPosition(rank=0, size=2, roster=rank.roster.number, to_next=lane)
        await broadcast(
            ring,
            op=op,
            fingerprint=fingerprint(call),
            completed=rank.ledger.ended,
            root=0,
            buffer=retained.memory,
        )
    finally:
        rank.lanes.count(lane)
        lane.close()


class ResultServer:
    """Sends the results that are retained here to the ranks that ask for them."""

    def __init__(self, tasks: Tasks, ranks: list[LocalRank], jobs: "Jobs") -> None:
        """`ranks` is the list of local ranks, which its owner changes."""
        self._tasks = tasks
        self._ranks = ranks
        self._jobs = jobs
        self._serving: set[AskResult] = set()
        self._early: dict[Member, dict[AskResult, None]] = {}

    def answer(self, member: Member, ask: AskResult) -> None:
        """Answer a peer's rank (O2), perhaps only once the view that it names is installed."""
        for rank in self._ranks:
            same_job = (rank.roster.job, rank.roster.born) == (ask.job, ask.born)
            if not same_job or rank.id != ask.holder:
                continue
            asker = rank.roster.trainer(ask.receiver)
            if ask.number > rank.roster.number:  # V4: early is not late
                early = self._early.setdefault(member, {})
                if len(early) < MAX_EARLY:
                    early[ask] = None
            elif asker is None or asker.member != member:
                continue  # only the rank that lacks a result may have it sent
            elif ask not in self._serving:  # a rank asks again if it takes long
                self._serving.add(ask)
                self._tasks.start_soon(self._serve, rank, ask)

    def answer_early(self) -> None:
        """Answer the requests that came before the view that is now installed."""
        early, self._early = self._early, {}
        for member, asks in early.items():
            for ask in asks:
                self.answer(member, ask)

    def forget(self, member: Member) -> None:
        """Drop the early requests of a peer that is gone."""
        self._early.pop(member, None)

    async def _serve(self, rank: LocalRank, ask: AskResult) -> None:
        try:
            await serve_result(rank, ask, self._jobs)
        except (LaneBroken, CallsDiffer):
            return  # the asker notices, and asks for a view in which it may ask again
        finally:
            self._serving.discard(ask)
