"""Measures what the edges between a job's ranks cost, and gives all ranks the same table.

The ranks make the table in the first all-reduce of a roster with more than two ranks that leaves
the strategy to pmesh, and again in some later ones. After a loss they keep it for some ops. Each
rank notes how fast the edge to the next rank is, if that one has reported it in its heartbeat; else
it sends a probe, from which the next rank guesses it. Then the tables of all ranks are added up. A
guess is for this table only: a busy machine makes it 10 times too slow, or 8 times too fast if what
was sent has come before the clock is read. All this takes two turns of the ring and 256 KiB for
each edge, so 20 ms at 100 Mbit/s, and no op runs meanwhile.

An edge over which another machine forwards (V5) is not probed. With nothing else under way it would
seem as fast as the edges of which it consists, and whose bandwidth it shares. An edge between two
ranks of one machine is not probed either, as that would only show what else their agent does. Its
cost is fixed, so the ranks of a machine form a ring, whose sums have the same bits in each run.
"""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import trio

from pmesh.core.ops.cost import EdgeCost, Edges
from pmesh.core.ops.reductions import Values
from pmesh.core.topology.ranks import edges_among, join_ranks
from pmesh.core.values import Roster
from pmesh.core.views.outcomes import outcome_of
from pmesh.core.wire.records import RecordHeader
from pmesh.errors import LaneBroken
from pmesh.ids import Member, OpNumber
from pmesh.net.lanes.lane import CallsDiffer
from pmesh.net.lanes.ring import RingPosition, all_reduce

PROBE_BYTES = 256 * 1024  # 2 ms at 1 Gbit/s: several times the delay of a busy machine
PS_OF_MBIT_S = 8_000_000  # picoseconds for a byte at 1 Mbit/s
RELAYED_PS = 1000 * PS_OF_MBIT_S  # so slow that a strategy uses a forwarded edge only if it must
LOCAL_PS = 500  # 16 Gbit/s: as the faster ones of such probes, which took 300 to 3,000
AGAIN_AFTER = 8  # ops; then about three times as many
_WORD_BYTES = 8


class Bandwidths(Protocol):
    """What an agent knows of its edges (`pmesh.agent.mesh.membership`)."""

    def reported_mbit_s(self, member: Member) -> int:
        """Return the bandwidth to a member; 0 while it is unknown."""
        ...

    def is_relayed(self, member: Member) -> bool:
        """Return True if another member forwards to this one."""
        ...


class RingCosts:
    """The table that all ranks of a roster share; before they have one, they use the ring.

    The first table is made in a busy time, so nothing counts as known, and edges that are neither
    forwarded nor local are alike. Else the ranks might do without an edge that only seemed slow,
    and so never find out how fast it is. They make the table again, ever more rarely, from what
    their ops have moved: after 8 ops, 32, 104 and so on. If the roster only loses ranks, the others
    keep the table, so that the op that runs again need not wait for it.
    """

    def __init__(self, edges: Edges | None = None, *, made_in: int = -1) -> None:
        """Begin with a table that was made in an op before a loss, or without one."""
        self.edges = edges
        self._made_in = made_in
        self._before: tuple[Edges | None, int] = None, -1
        """The table before this one, and in which op it was made."""
        self._first: int | None = None
        self._due: int | None = 0 if edges is None else None

    def is_due(self, op: int) -> bool:
        """Return whether the ranks make the table in this op; all ranks decide alike.

        Ask for each op that runs: a kept table is made again some ops after the first one.
        """
        if self._due is None:
            self._due = op + AGAIN_AFTER
        return op >= self._due

    @property
    def due(self) -> int | None:
        """The next op in which they make the table; None until `is_due` was asked for one."""
        return self._due

    def agreed(self, edges: Edges, op: int) -> None:
        """Take the table that all ranks have made in this op."""
        if self._first is None:
            self._first = op
        self._before = self.edges, self._made_in
        self.edges, self._made_in = edges, op
        self._due = op + AGAIN_AFTER + 2 * (op - self._first)

    def follow(self, before: Roster, after: Roster, *, ended: int) -> "RingCosts":
        """Return the costs for the next roster, which are alike at all of its ranks.

        A table is kept only if all ranks have it. They have it if the op in which it was made has
        completed anywhere, since each rank has taken part; in an op that runs again, some may have
        it and others not. An open lane shows that both ranks come from the same roster, and a
        roster names such lanes only if it has lost ranks and has no new ones (V4).

        Args:
            before: this rank's roster until now.
            after: the next one.
            ended: every op up to this one has ended at this rank.
        """
        linked = {trainer for lane in after.lanes for trainer in lane}.intersection(before.ids)
        if len(after.ids) <= 2 or not linked.issuperset(after.ids):  # noqa: PLR2004 - two have one edge
            return RingCosts()
        for edges, op in ((self.edges, self._made_in), self._before):
            if edges is not None and _has_completed(OpNumber(op), after, ended):
                return RingCosts(
                    edges_among(edges, [*map(before.ids.index, after.ids)]), made_in=op
                )
        return RingCosts()


def _has_completed(op: OpNumber, roster: Roster, ended: int) -> bool:
    """Return whether an op has completed at any rank; alike at all ranks of the roster."""
    outcome = outcome_of(roster, op)
    return op <= ended if outcome is None else bool(outcome.holders)


async def agree_on_costs(
    ring: RingPosition,
    header: RecordHeader,
    members: tuple[Member, ...],
    round_trips_s: Mapping[Member, float],
    known: Bandwidths,
    *,
    is_first: bool,
) -> Edges:
    """Return what each edge costs, the same at every rank: all ranks call this in the same op.

    Args:
        ring: this rank's place in the ring, which has at least two ranks.
        header: the header of the op's records.
        members: the member of each rank, in ring order.
        round_trips_s: the least round trip to each other member that has been measured.
        known: what is known of bandwidths.
        is_first: the roster has no table yet; all ranks say the same.

    Raises:
        CallsDiffer: a neighbour called something else.
        LaneBroken: the edge to or from a neighbour is gone.
    """
    size, me = ring.size, ring.rank
    before, after = (me - 1) % size, (me + 1) % size
    table = np.zeros((size, size, 3), np.int64)
    for rank, member in enumerate(members):
        table[me, rank, 0] = round(round_trips_s.get(member, 0.0) / 2 * 1e9)
        table[me, rank, 1] = RELAYED_PS if known.is_relayed(member) else 0
        if member == members[me]:
            table[me, rank, 1] = LOCAL_PS
    mbit_s = known.reported_mbit_s(members[after])
    if mbit_s and not table[me, after, 1]:
        table[me, after, 2 if is_first else 1] = max(1, PS_OF_MBIT_S // mbit_s)
    measured_ps = await _probe(ring, header, sends=not table[me, after, 1:].any())
    table[before, me, 2] += measured_ps
    result = np.empty_like(table)
    await all_reduce(
        ring,
        op=header.op,
        fingerprint=header.fingerprint,
        completed=header.completed,
        source=table.reshape(-1).data.cast("B"),
        result=result.reshape(-1).data.cast("B"),
        dtype="int64",
        reduction="sum",
    )
    return _edges_of(result)


def _edges_of(table: Values) -> Edges:
    """Return the costs from a table; an edge is known one way, and counts as fast the other way.

    The other edges, as those across the ring, count as slow as the slowest direct one that is
    known. While none is, they count as fast as the fastest guess: most guesses are too slow.
    """
    alphas_ns, betas_ps, guesses_ps = table[:, :, 0], table[:, :, 1], table[:, :, 2]
    betas_ps = np.where(betas_ps, betas_ps, betas_ps.T)
    direct_ps = betas_ps[(betas_ps > 0) & (betas_ps != LOCAL_PS) & (betas_ps < RELAYED_PS)]
    others_ps = direct_ps.max(initial=0) or guesses_ps[guesses_ps > 0].min(initial=RELAYED_PS)
    betas_ps = np.where(betas_ps, betas_ps, others_ps)
    rows = zip(alphas_ns.tolist(), betas_ps.tolist(), strict=True)
    return join_ranks(tuple(tuple(map(EdgeCost, alphas, betas)) for alphas, betas in rows))


async def _probe(ring: RingPosition, header: RecordHeader, *, sends: bool) -> int:
    """Return how many picoseconds a byte from the previous rank takes; 0 if that rank knows it."""
    to_next, from_previous = ring.to_next, ring.from_previous
    assert to_next is not None  # noqa: S101 - there are at least two ranks
    assert from_previous is not None  # noqa: S101 - as above
    failures: list[LaneBroken | CallsDiffer] = []

    async def send() -> None:
        nbytes = PROBE_BYTES if sends else 0
        announced = header._replace(body_bytes=_WORD_BYTES, segment=0)
        try:
            await to_next.send(announced, nbytes.to_bytes(_WORD_BYTES, "big"))
            if sends:
                await to_next.send(header._replace(body_bytes=nbytes, segment=1), bytes(nbytes))
        except (LaneBroken, CallsDiffer) as e:  # a plain error; a nursery would raise a group
            failures.append(e)

    async def receive() -> int:
        word = bytearray(_WORD_BYTES)
        announced = header._replace(body_bytes=_WORD_BYTES, segment=0)
        await from_previous.receive(announced, memoryview(word))
        nbytes = int.from_bytes(word, "big")
        if not nbytes:
            return 0
        if nbytes != PROBE_BYTES:
            raise LaneBroken(f"{from_previous.peer} announced a probe of {nbytes} bytes")
        began = trio.current_time()
        await from_previous.receive(
            header._replace(body_bytes=nbytes, segment=1), memoryview(bytearray(nbytes))
        )
        return max(1, round((trio.current_time() - began) / nbytes * 1e12))

    measured_ps = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        try:
            measured_ps = await receive()
        except (LaneBroken, CallsDiffer) as e:
            failures.append(e)
            nursery.cancel_scope.cancel()
    if failures:
        raise failures[0]
    return measured_ps
