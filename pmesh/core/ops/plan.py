"""What one rank sends and receives in a collective, over lanes to any ranks, and when.

A plan is a value: `pmesh.net.lanes.executor.run_plan` runs any of them, and the tests run those of
all ranks in memory. Who makes them:

    reducing        all_reduce by each strategy
    reduce_scatter  reduce and reduce_scatter
    moving          broadcast, all_gather, gather, scatter and all_to_all, which reduce nothing
    coded           all_reduce along the ring with a codec at every hop

For each lane a plan has the records in the order in which they travel: the n-th send to a rank is
the n-th receive there, with as many bytes. Nothing orders one lane against another but `Need`s.
Values lie in three regions, to which offsets refer:

    SOURCE    what the caller gives; only read (I8)
    RESULT    what the caller gets; parts of it hold partial sums meanwhile
    SCRATCH   `scratch_bytes` of the executor's own, for records that only pass through or that
              are added to partial sums

Every rank gets the same bits: each element is reduced at one rank, in one order, and a mean is
divided there, once (`finishes`). That order doesn't depend on which record arrives first, either.
"""

import enum
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, ParamSpec, cast

from pmesh.core.wire.records import MAX_BODY_BYTES

SEGMENT_BYTES = 512 * 1024
SHORT_SEGMENT_BYTES = 64 * 1024  # for a ring over long edges: 5 ms at 100 Mbit/s
LARGE_SEGMENT_BYTES = MAX_BODY_BYTES  # fewer records, which take longer to fill the ring
LARGE_CHUNK_BYTES = 12 * LARGE_SEGMENT_BYTES  # from this size on, the longer filling counts little
FILLING_SHARE = 32  # to fill a chain takes 3 %; shorter records cost more CPU than they save
SMALL_BYTES = 32 * 1024  # fits the socket buffers of every system: no task is needed to send it
IN_LINE_BYTES = SEGMENT_BYTES  # fits the buffers within one machine, and often those of others


class Region(enum.IntEnum):
    """Where values lie."""

    SOURCE = 0
    RESULT = 1
    SCRATCH = 2


class Then(enum.IntEnum):
    """What becomes of a record that has landed."""

    KEEP = 0
    """It is where it belongs, or is sent on from there."""
    ADD_SOURCE = 1
    """The source's values at `other` are added to it where it has landed."""
    ADD_TO_RESULT = 2
    """It is added to the result's values at `other`."""


class PlanEvent(enum.IntEnum):
    """What a transfer or a computation may wait for."""

    LANDED = 0
    """Records from a rank have landed."""
    SENT = 1
    """Records to a rank have been sent: their places may be written again."""
    COMPUTED = 2
    """Works of a queue are done."""


class Need(NamedTuple):
    """What a transfer or a work waits for: the first `number` events of one kind."""

    peer: int
    """The rank, or the queue."""
    number: int
    event: PlanEvent = PlanEvent.LANDED


class SendRecord(NamedTuple):
    """One record to a rank."""

    step: int
    """Higher than the steps of all received records that it waits for."""
    region: Region
    offset: int
    """In bytes from the region's beginning."""
    nbytes: int
    needs: tuple[Need, ...] = ()


class Receive(NamedTuple):
    """One record from a rank."""

    step: int
    """The step in which it is sent."""
    region: Region
    """RESULT or SCRATCH."""
    offset: int
    """In bytes from the region's beginning."""
    nbytes: int
    needs: tuple[Need, ...] = ()
    then: Then = Then.KEEP
    other: int = 0
    """The offset in bytes that `then` uses."""
    finishes: bool = False
    """This record completes the sum, which lies in the result: a mean is divided now."""


class Copy(NamedTuple):
    """A copy of a rank's own part from its source to its result. Nothing waits for it."""

    source: int
    result: int
    nbytes: int


class CodecWork(NamedTuple):
    """A hop of a codec (`pmesh.compression.codecs`), or a decoding, for one part of the tensor."""

    begin: int
    """The first value, counted from the tensor's beginning."""
    length: int
    region: Region
    """Where a hop writes the encoded bytes, or a decoding reads them."""
    offset: int
    nbytes: int
    needs: tuple[Need, ...]
    decodes: bool = False
    arrived: int = -1
    """For a hop: the place in the scratch of what has arrived; -1 for the first hop."""
    divides: bool = False
    """For a hop: whether it is the last one, which makes the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One rank's part of a collective."""

    size: int
    """The number of ranks that take part, by which a mean is divided."""
    sends: Mapping[int, tuple[SendRecord, ...]]
    """The records to each rank that gets any."""
    receives: Mapping[int, tuple[Receive, ...]]
    """The records from each rank that sends any."""
    copies: tuple[Copy, ...]
    works: tuple[tuple[CodecWork, ...], ...]
    """Queues of works. One stage does the first queue, another all others, each in its order."""
    scratch_bytes: int
    in_line: tuple[int, ...]
    """The ranks from which a small plan receives, in this order; empty for other plans.

    If every rank follows this order, and sends all that it may before each receive, no two ranks
    wait for each other."""
    small: bool
    """No record, and no copy, exceeds SMALL_BYTES; or no chunk of a ring exceeds IN_LINE_BYTES."""
    added_twice: bool
    """Each rank adds all values for itself, so NaN must be made equal (I3)."""

    @property
    def steps(self) -> int:
        """How many times this rank waits for the network in a row: the alpha of its cost."""
        steps = [send.step for sends in self.sends.values() for send in sends]
        steps += [receive.step for receives in self.receives.values() for receive in receives]
        return 1 + max(steps, default=-1)

    @property
    def bytes_sent(self) -> int:
        """The bytes of values that this rank sends: the beta of its cost."""
        return sum(send.nbytes for sends in self.sends.values() for send in sends)

    @property
    def largest(self) -> int:
        """The bytes of the largest record that this rank sends."""
        return max((send.nbytes for sends in self.sends.values() for send in sends), default=0)

    @property
    def moving_bytes(self) -> int:
        """The bytes of values that this rank sends or receives."""
        received = (receive.nbytes for receives in self.receives.values() for receive in receives)
        return self.bytes_sent + sum(received)


class PlanMaker:
    """Collects one rank's plan; sends and receives are added in the order of their steps."""

    def __init__(self, *, size: int) -> None:
        self._size = size
        self._sends: dict[int, list[SendRecord]] = {}
        self._receives: dict[int, list[Receive]] = {}
        self._arrivals: list[int] = []
        self._copies: list[Copy] = []
        self._works: dict[int, list[CodecWork]] = {}
        self._scratch_bytes = 0

    def send(self, to: int, send: SendRecord) -> Need:
        """Add a record to `to`; return what to wait for before its place may be written again."""
        sends = self._sends.setdefault(to, [])
        sends.append(send)
        self._use(send.region, send.offset + send.nbytes)
        return Need(to, len(sends), PlanEvent.SENT)

    def receive(self, from_: int, receive: Receive) -> Need:
        """Add a record from `from_`; return what to wait for until it has landed."""
        receives = self._receives.setdefault(from_, [])
        receives.append(receive)
        self._arrivals.append(from_)
        self._use(receive.region, receive.offset + receive.nbytes)
        return Need(from_, len(receives))

    def copy(self, *, source: int, result: int, nbytes: int) -> None:
        """Add a copy of this rank's own part."""
        if nbytes:
            self._copies.append(Copy(source, result, nbytes))

    def work(self, queue: int, work: CodecWork) -> Need:
        """Add a work to a queue, counted from 0; return what to wait for until it is done."""
        works = self._works.setdefault(queue, [])
        works.append(work)
        self._use(work.region, work.offset + work.nbytes)
        return Need(queue, len(works), PlanEvent.COMPUTED)

    def landed(self) -> tuple[Need, ...]:
        """Return what to wait for until all receives so far have landed."""
        return tuple(Need(peer, len(receives)) for peer, receives in self._receives.items())

    def plan(self, *, small: bool | None = None, added_twice: bool = False) -> RankPlan:
        """Return the plan; for the arguments see `RankPlan`."""
        sizes = [send.nbytes for sends in self._sends.values() for send in sends]
        sizes += [receive.nbytes for receives in self._receives.values() for receive in receives]
        sizes += [copy.nbytes for copy in self._copies]
        if small is None:
            small = max(sizes, default=0) <= SMALL_BYTES
        return RankPlan(
            size=self._size,
            sends={peer: tuple(sends) for peer, sends in self._sends.items()},
            receives={peer: tuple(receives) for peer, receives in self._receives.items()},
            copies=tuple(self._copies),
            works=tuple(tuple(works) for _, works in sorted(self._works.items())),
            scratch_bytes=self._scratch_bytes,
            in_line=tuple(self._arrivals) if small else (),
            small=small,
            added_twice=added_twice,
        )

    def _use(self, region: Region, end: int) -> None:
        if region is Region.SCRATCH:
            self._scratch_bytes = max(self._scratch_bytes, end)


_P = ParamSpec("_P")


def remembered(make: Callable[_P, RankPlan]) -> Callable[_P, RankPlan]:
    """Keep a few plans: training repeats a few shapes, and a plan of 1 GiB has 4,000 records."""
    return cast("Callable[_P, RankPlan]", functools.lru_cache(maxsize=16)(make))


# --- how a tensor is cut into chunks and records


def chunk_bounds(count: int, chunks: int) -> tuple[int, ...]:
    """Return where the chunks of `count` values begin, and the end, as `numpy.array_split` cuts.

    >>> chunk_bounds(7, 3)
    (0, 3, 5, 7)
    """
    size, larger = divmod(count, chunks)
    return tuple(i * size + min(i, larger) for i in range(chunks + 1))


def segments(
    begin: int, end: int, *, segment_bytes: int = SEGMENT_BYTES
) -> tuple[tuple[int, int], ...]:
    """Return the offset and length of each record that carries the bytes from `begin` to `end`.

    There is at least one record, which may be empty.

    >>> segments(0, 10, segment_bytes=4), segments(7, 7)
    (((0, 4), (4, 4), (8, 2)), ((7, 0),))
    """
    offsets = range(begin, end, segment_bytes) or (begin,)
    return tuple((offset, min(segment_bytes, end - offset)) for offset in offsets)


def chain_segment_bytes(size: int, nbytes: int) -> int:
    """Return the most bytes in a record of a chain of `size` ranks.

    When the last record leaves the end of the line, it still has to travel to the first rank and
    back. That is to take at most 1/FILLING_SHARE of the time of all records.

    >>> [chain_segment_bytes(size, 16 << 20) // 1024 for size in (2, 3, 8)]
    [512, 128, 64]
    """
    hops = 2 * size - 3  # after its first one
    wanted = nbytes // (FILLING_SHARE * max(1, hops))
    return min(SEGMENT_BYTES, max(1, wanted // SHORT_SEGMENT_BYTES) * SHORT_SEGMENT_BYTES)


def halvings(size: int) -> Iterator[tuple[int, int]]:
    """Yield each halving from `size` blocks to one: how many blocks stay, of how many.

    There are as many as the logarithm of `size` to base 2, rounded up.

    >>> list(halvings(8)), list(halvings(5))
    ([(4, 8), (2, 4), (1, 2)], [(3, 5), (2, 3), (1, 2)])
    """
    while size > 1:
        half = (size + 1) // 2
        yield half, size
        size = half
