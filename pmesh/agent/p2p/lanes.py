"""The lanes that carry messages: one for each pair, on which messages follow one another.

The receiver requests each message, and names the lane and the message's index on it. When a lane
broke, or a message on it was given up half way, the next request names the next lane.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import trio
import xxhash

from pmesh.agent.jobs.ranks import LocalRank
from pmesh.agent.lanes.rendezvous import LaneEnd, LaneKey, LaneRendezvous
from pmesh.core.ops.plan import SEGMENT_BYTES
from pmesh.core.p2p import Transfer
from pmesh.core.wire.link import Envelope, MessageAddress, RequestMessage
from pmesh.core.wire.records import RecordHeader
from pmesh.errors import LaneBroken
from pmesh.ids import TrainerId
from pmesh.net.lanes.lane import CallsDiffer, Lane

ASK_AGAIN_S = 0.2  # a request may have been lost, or have arrived before its view
STALL_S = 5.0  # a lane that is silent this long is broken; Wi-Fi may be silent just as long
_FIRST_EDGE = -2  # used as op number for the pair's first lane, then -3 and so on


@dataclass(slots=True, eq=False)
class _Lane:
    """A lane of a pair under the current roster; it may not be open yet."""

    end: LaneEnd
    number: int
    transfers: int = 0
    """How many messages were requested on it."""
    lane: Lane | None = None
    closed: bool = False
    turn: trio.Lock = field(default_factory=trio.Lock)


class _Lanes:
    """The lanes of one direction."""

    def __init__(self, rank: LocalRank, rendezvous: LaneRendezvous) -> None:
        self._rank = rank
        self._rendezvous = rendezvous
        self._lanes: dict[TrainerId, _Lane] = {}
        self._ended_bytes = 0

    @property
    def bytes(self) -> int:
        """Bytes moved at the sockets, including headers."""
        return self._ended_bytes + sum(map(_moved, self._lanes.values()))

    def close(self) -> None:
        for entry in self._lanes.values():
            self._end(entry)
        self._lanes.clear()

    def _edge(self, sender: TrainerId, receiver: TrainerId, number: int) -> LaneKey:
        return self._rank.lanes.edge(sender, receiver, _FIRST_EDGE - number)

    async def _open(self, entry: _Lane) -> Lane:
        """Return the entry's lane once it is open. Raises LaneBroken if it is closed meanwhile."""
        if entry.lane is None and not entry.closed:
            entry.lane = await self._rendezvous.take(entry.end)
        if entry.closed:
            self._end(entry)
        if entry.lane is None:
            raise LaneBroken("this data connection was given up")
        return entry.lane

    def _end(self, entry: _Lane) -> None:
        entry.closed = True
        if entry.lane is not None:
            self._ended_bytes += _moved(entry)
            entry.lane.close()
            entry.lane = None
        self._rendezvous.give_up(entry.end)


def _moved(entry: _Lane) -> int:
    lane = entry.lane
    return 0 if lane is None else lane.bytes_sent + lane.bytes_received


class LanesOut(_Lanes):
    """The lanes on which a rank sends messages."""

    def is_new(self, to: TrainerId, asked: RequestMessage) -> bool:
        """Return False for a request that is old or belongs to another roster."""
        if asked.number != self._rank.roster.number:
            return False  # the receiver repeats it once both have the same roster
        entry = self._lanes.get(to)
        if entry is not None and asked.lane > entry.number:
            self._end(entry)
            entry = None
        if entry is None:
            edge = self._edge(self._rank.id, to, asked.lane)
            entry = self._lanes[to] = _Lane(LaneEnd(edge, sending=True), asked.lane)
            trainer = self._rank.roster.trainer(to)
            if trainer is not None:
                self._rendezvous.offer(edge, trainer.member)
        elif asked.lane < entry.number or asked.transfer < entry.transfers:
            return False
        entry.transfers = asked.transfer + 1
        return True

    async def transmit(
        self, to: TrainerId, asked: RequestMessage, envelope: Envelope, values: memoryview
    ) -> None:
        """Send the requested values.

        Raises:
            LaneBroken: The connection is lost, or the request is out of date.
        """
        entry = self._lanes.get(to)
        if entry is None or (entry.end.edge.number, entry.number) != (asked.number, asked.lane):
            raise LaneBroken("the request is out of date")
        async with entry.turn:
            try:
                lane = await self._open(entry)
                header = _header(asked, envelope)
                for segment, piece in enumerate(_pieces(values)):
                    sent = header._replace(body_bytes=piece.nbytes, segment=segment)
                    await lane.send(sent, piece)
            except BaseException:  # nothing may follow half a message
                self._end(entry)
                raise


class LanesIn(_Lanes):
    """The lanes on which a rank receives messages. `tell` sends a request to the sender."""

    def __init__(
        self,
        rank: LocalRank,
        rendezvous: LaneRendezvous,
        tell: Callable[[TrainerId, RequestMessage], None],
    ) -> None:
        super().__init__(rank, rendezvous)
        self._tell = tell

    async def bring(self, transfer: Transfer, address: MessageAddress, target: memoryview) -> None:
        """Request a message and receive its values.

        Raises:
            LaneBroken: The connection is lost or silent.
        """
        sender, number = transfer.sender, self._rank.roster.number
        entry = self._lanes.get(sender)
        if entry is None or entry.closed:
            lane = 0 if entry is None else entry.number + 1
            end = LaneEnd(self._edge(sender, self._rank.id, lane), sending=False)
            entry = self._lanes[sender] = _Lane(end, lane)
        asked = RequestMessage(address, number, entry.number, entry.transfers)
        entry.transfers += 1
        header = _header(asked, transfer.envelope)
        try:
            self._tell(sender, asked)
            await self._await_lane(entry, asked)
            for segment, piece in enumerate(_pieces(target)):
                expected = header._replace(body_bytes=piece.nbytes, segment=segment)
                await self._receive(entry, asked, expected, piece)
        except CallsDiffer as e:
            self._end(entry)
            raise LaneBroken(str(e)) from e
        except BaseException:  # the rest of the message may still arrive, and nobody reads it
            self._end(entry)
            raise

    async def _await_lane(self, entry: _Lane, asked: RequestMessage) -> None:
        deadline = trio.current_time() + STALL_S
        while trio.current_time() < deadline:
            with trio.move_on_after(ASK_AGAIN_S):
                await self._open(entry)
                return
            self._tell(asked.address.sender, asked)
        raise LaneBroken(f"no data connection was opened within {STALL_S:g} s")

    async def _receive(
        self, entry: _Lane, asked: RequestMessage, expected: RecordHeader, into: memoryview
    ) -> None:
        lane = await self._open(entry)
        moved, since = lane.bytes_received, trio.current_time()
        while True:
            with trio.move_on_after(ASK_AGAIN_S):
                await lane.receive(expected, into)
                return
            now = trio.current_time()
            if lane.bytes_received != moved:
                moved, since = lane.bytes_received, now
            elif now - since >= STALL_S:
                raise LaneBroken(f"the data connection from {lane.peer} is silent")
            self._tell(asked.address.sender, asked)


def _pieces(values: memoryview) -> list[memoryview]:
    """Cut values into the bodies of records; a message without values has one empty record."""
    begins = range(0, max(values.nbytes, 1), SEGMENT_BYTES)
    return [values[begin : begin + SEGMENT_BYTES] for begin in begins]


def _header(asked: RequestMessage, envelope: Envelope) -> RecordHeader:
    """Return the header that all records of a message share, except for the segment."""
    digest = xxhash.xxh3_64_intdigest(msgspec.msgpack.encode((asked.address, envelope)))
    return RecordHeader(0, asked.number, asked.transfer, 0, digest, -1)
