"""One lane over several connections, its subflows (the word of MPTCP, RFC 8684).

    sender to receiver    │ number, 8 bytes │ record │ number │ record │ ...
    receiver to sender    │ acknowledgement, sealed as a record │ ...

The sender numbers and seals the records in one order, as on any lane, and keeps each until the
receiver has acknowledged it. So the same sealed bytes can go over another subflow again: no nonce
ever seals two bodies. The receiver opens in that order. It keeps what comes early, within the
window, and drops what it has already.

Which subflow takes a record is decided when it is sealed: the one over which it will have arrived
first, after all that goes there before it (ECF: Lim et al., "ECF: An MPTCP Path Scheduler to Manage
Heterogeneous Paths", CoNEXT 2017). A slow path thus gets the record that the fast one would bring
only later, and the records arrive nearly in order.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pmesh.core.wire.records import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    OVERHEAD_BYTES,
    read_header_untrusted,
)
from pmesh.errors import ProtocolError

WINDOW_BYTES: Final = 16 * 1024 * 1024  # 1 Gbit/s for as long as 100 Mbit/s take for a record
WINDOW_RECORDS: Final = 256
ACK_BYTES: Final = 512 * 1024
ACK_RECORDS: Final = 32
ACK_EARLY_BYTES: Final = 64 * 1024  # if there is nothing more to read: 5 ms at 100 Mbit/s
MEASURE_S: Final = 0.01
LATE_S: Final = 0.0025  # who looks for acknowledgements less often does not know when they came
STALE_S: Final = 1.0  # in so long a pause the system's buffers may have been full
BUSY_BYTES: Final = 64 * 1024  # on their way all the time: then the network was the limit
SILENT_S: Final = 0.3
SPARE_S: Final = 0.01  # a copy must arrive that much earlier, in half the time
_GAIN: Final = 0.25

_NUMBER = struct.Struct(">Q")
NUMBER_BYTES: Final = _NUMBER.size
FRAME_HEADER_BYTES: Final = NUMBER_BYTES + HEADER_BYTES
MAX_FRAME_BYTES: Final = NUMBER_BYTES + OVERHEAD_BYTES + MAX_BODY_BYTES
_ACK = struct.Struct(">QQ?")
ACK_BODY_BYTES: Final = _ACK.size


class Ack(NamedTuple):
    """What the receiver says on a subflow."""

    received: int
    """Bytes of this subflow that it has read."""
    wanted: int
    """The lowest record that it lacks."""
    waiting: bool
    """It had read all that was there."""


def encode_ack(ack: Ack) -> bytes:
    """Return the body of the record that carries it."""
    return _ACK.pack(*ack)


def decode_ack(body: bytes | bytearray) -> Ack:
    """Return what `encode_ack` was given; the body has been authenticated."""
    return Ack._make(_ACK.unpack(body))


def put_number(number: int, frame: memoryview) -> None:
    """Write the record's number in front of it."""
    _NUMBER.pack_into(frame, 0, number)


def read_frame_untrusted(header: memoryview) -> int:
    """Return how long the frame with this header is; ProtocolError for an impossible one."""
    return frame_bytes(read_header_untrusted(header[NUMBER_BYTES:]).body_bytes)


def number_of_untrusted(frame: memoryview) -> int:
    """Return the number in front of a record. It is right if the record can be opened."""
    (number,) = _NUMBER.unpack_from(frame)
    return int(number)


# --- the sender's side


class Load(NamedTuple):
    """A subflow as the sender knows it."""

    bytes_per_s: float
    """Measured, or as given as long as nothing is."""
    is_measured: bool
    bytes_in_flight: int
    """Handed to the system and not acknowledged."""


@dataclass(slots=True, eq=False)
class _Sealed:
    """A record from its sealing until it is acknowledged."""

    number: int
    frame: memoryview
    subflow: int = -1
    end: int = -1
    """Where in its subflow's bytes it ends; -1 before it begins."""
    copied: bool = False
    is_copy: bool = False


@dataclass(slots=True)
class _Measured:
    bytes_per_s: float
    round_trip_s: float
    busy_at: float
    """When bytes went out, or were acknowledged, after a time without either."""
    heard_at: float = float("-inf")
    """When the receiver last said that it has read more."""
    queue: dict[int, _Sealed] = field(default_factory=dict[int, "_Sealed"])
    """By number; none of them has begun. The lowest goes first."""
    queued: int = 0
    current: _Sealed | None = None
    rest: memoryview = field(default_factory=lambda: memoryview(b""))
    sent: int = 0
    received: int = 0
    is_measured: bool = False
    is_silent: bool = False
    since: float | None = None
    """When a measurement began, with `mark` bytes received and never less than `least` to do."""
    mark: int = 0
    least: int = 0

    @property
    def to_do(self) -> int:
        return self.sent - self.received + len(self.rest) + self.queued

    def arrival_s(self, nbytes: int) -> float:
        """How long until so many bytes more would have arrived."""
        return self.round_trip_s + (self.to_do + nbytes) / self.bytes_per_s

    def enqueue(self, record: _Sealed) -> None:
        """Put a record into the queue; once, if a copy of it is there, too."""
        if record.number not in self.queue:
            self.queued += len(record.frame)
        elif record.is_copy:
            return
        self.queue[record.number] = record

    def unqueue(self, number: int) -> None:
        """Take a record out of the queue, if it is there."""
        record = self.queue.pop(number, None)
        if record is not None:
            self.queued -= len(record.frame)

    def measure(self, ack: Ack, now: float, *, is_late: bool) -> None:
        """From one moment at which the receiver had read all to a later one."""
        self.least = min(self.least, self.to_do)
        if is_late:
            self.since = None
        if is_late or not ack.waiting:
            return
        if self.since is not None:
            elapsed = now - self.since
            if elapsed < MEASURE_S:
                return
            if elapsed < STALE_S:
                self._take((self.received - self.mark) / elapsed)
        self.since, self.mark, self.least = now, self.received, self.to_do

    def _take(self, sample: float) -> None:
        if self.least < BUSY_BYTES and sample <= self.bytes_per_s:
            return  # nothing to send was the limit
        if not self.is_measured:
            self.is_measured, self.bytes_per_s = True, max(sample, 1.0)
        self.bytes_per_s += _GAIN * (max(sample, 1.0) - self.bytes_per_s)


class SendWindow:
    """The sender's side: records that are not acknowledged, and which subflow takes them.

    Subflows have numbers that are never used again. Times are of any clock that only goes on.
    """

    def __init__(
        self, *, window_bytes: int = WINDOW_BYTES, window_records: int = WINDOW_RECORDS
    ) -> None:
        self._window_bytes = window_bytes
        self._window_records = window_records
        self._subflows: dict[int, _Measured] = {}
        self._kept: dict[int, _Sealed] = {}
        self._kept_bytes = 0
        self._homeless: list[_Sealed] = []  # while there is no subflow; by number
        self._wanted = 0
        self._next = 0
        self._relieved_at = float("-inf")

    @property
    def next_number(self) -> int:
        """Of the record that is put next."""
        return self._next

    @property
    def has_room(self) -> bool:
        """Whether one more record may be put."""
        room = self._kept_bytes + MAX_FRAME_BYTES <= self._window_bytes
        return not self._kept or (room and len(self._kept) < self._window_records)

    @property
    def has_unsent(self) -> bool:
        """Whether anything that the receiver lacks has yet to be written.

        The rest of a record that has arrived over another subflow is not: the receiver reads no
        more once it has all, so who waited for that might wait for ever.
        """
        return bool(self._homeless) or any(map(self._lacks_part_of, self._subflows.values()))

    def _lacks_part_of(self, subflow: _Measured) -> bool:
        current = subflow.current
        return bool(subflow.queue) or (current is not None and current.number >= self._wanted)

    @property
    def is_empty(self) -> bool:
        """Whether all has been acknowledged."""
        return not self._kept

    @property
    def subflows(self) -> dict[int, Load]:
        """All of them."""
        return {
            index: Load(s.bytes_per_s, s.is_measured, s.sent - s.received)
            for index, s in self._subflows.items()
        }

    def add(self, index: int, *, bytes_per_s: float, round_trip_s: float, now: float) -> None:
        """A subflow more; the rate is taken for true until it has been measured."""
        self._subflows[index] = _Measured(max(bytes_per_s, 1.0), round_trip_s, now)
        homeless, self._homeless = self._homeless, []
        for record in homeless:
            self._assign(record)

    def drop(self, index: int) -> None:
        """The subflow is lost: others take what is not acknowledged of it."""
        if self._subflows.pop(index, None) is not None:
            for record in self._kept.values():
                record.copied = False
                if record.subflow == index:
                    self._assign(record)

    def put(self, frame: memoryview) -> None:
        """Send a sealed record, with its number in front, which stays as it is until freed."""
        record = _Sealed(self._next, frame)
        self._next += 1
        self._kept[record.number] = record
        self._kept_bytes += len(frame)
        self._assign(record)

    def _assign(self, record: _Sealed) -> None:
        record.subflow, record.end = self._best(len(record.frame)), -1
        if record.subflow < 0:
            self._homeless.append(record)
        else:
            self._subflows[record.subflow].enqueue(record)

    def _best(self, nbytes: int) -> int:
        """The subflow over which so many bytes have arrived first; -1 if there is none."""
        usable = [index for index, s in self._subflows.items() if not s.is_silent]
        return min(
            usable or self._subflows,
            key=lambda index: self._subflows[index].arrival_s(nbytes),
            default=-1,
        )

    def has_to_write(self, index: int) -> bool:
        """Whether this subflow has something to write."""
        subflow = self._subflows[index]
        return bool(subflow.rest or subflow.queue)

    def next_part(self, index: int) -> memoryview:
        """What this subflow is to write next; empty if nothing."""
        subflow = self._subflows[index]
        if not subflow.rest and subflow.queue:
            record = subflow.current = subflow.queue[min(subflow.queue)]
            subflow.unqueue(record.number)
            subflow.rest = record.frame
            record.end = subflow.sent + len(record.frame)
        return subflow.rest

    def wrote(self, index: int, count: int, *, now: float) -> None:
        """The system has taken so many bytes of `next_part`."""
        subflow = self._subflows[index]
        if subflow.sent == subflow.received:
            subflow.busy_at, subflow.since = now, None
        subflow.sent += count
        subflow.rest = subflow.rest[count:]
        if not subflow.rest:
            subflow.current = None

    def acknowledge_untrusted(
        self, index: int, ack: Ack, *, now: float, is_late: bool = False
    ) -> list[memoryview]:
        """Take what the receiver says on this subflow; returns the frames that nobody needs.

        Args:
            index: The subflow's.
            ack: As it was received.
            now: When it was read.
            is_late: Whether it may have come more than LATE_S before. It is no measurement then.

        Raises:
            ProtocolError: It claims what has not been sent.
        """
        subflow = self._subflows[index]
        if not (subflow.received <= ack.received <= subflow.sent and ack.wanted <= self._next):
            raise ProtocolError("an acknowledgement of what has not been sent")
        if ack.received > subflow.received:
            subflow.received, subflow.is_silent = ack.received, False
            subflow.heard_at = subflow.busy_at = now
        subflow.measure(ack, now, is_late=is_late)
        return list(self._free(ack.wanted))

    def _free(self, wanted: int) -> Iterator[memoryview]:
        for number in range(self._wanted, wanted):
            record = self._kept.pop(number)
            self._kept_bytes -= len(record.frame)
            in_use = False
            for subflow in self._subflows.values():
                in_use |= subflow.current is not None and subflow.current.frame is record.frame
                subflow.unqueue(number)
            if not in_use:
                yield record.frame
        self._wanted = max(wanted, self._wanted)

    def relieve(self, *, now: float) -> None:
        """Move, or send once more, what another subflow would bring much earlier. Idempotent."""
        if len(self._subflows) < 2 or now - self._relieved_at < MEASURE_S:  # noqa: PLR2004 - as it says
            return
        self._relieved_at = now
        self._find_silent(now)
        if all(map(self.has_to_write, self._subflows)):
            return  # nobody has time for more
        queues = [subflow.queue for subflow in self._subflows.values()]
        for subflow in self._subflows.values():
            subflow.queue, subflow.queued = {}, 0
        waiting = [record for queue in queues for record in queue.values()]
        for record in sorted(waiting, key=lambda record: record.number):
            self._assign(record)
        for record in list(self._kept.values()):
            if record.end >= 0 and not record.copied:
                self._copy_if_late(record)

    def _find_silent(self, now: float) -> None:
        """Only beside one that has got further, or has nothing more to do.

        Else the receiver may just not read.
        """
        latest = max(subflow.heard_at for subflow in self._subflows.values())
        if any(subflow.sent == subflow.received for subflow in self._subflows.values()):
            latest = now
        for subflow in self._subflows.values():
            busy = subflow.sent > subflow.received
            if busy and latest - subflow.busy_at > SILENT_S and not subflow.is_silent:
                subflow.is_silent = True
                for record in self._kept.values():
                    record.copied = False  # perhaps to this one

    def _copy_if_late(self, record: _Sealed) -> None:
        here, nbytes = self._subflows[record.subflow], len(record.frame)
        there = self._subflows[best := self._best(nbytes)]
        if there is here or record.end <= here.received:
            return
        late_s = (record.end - here.received) / here.bytes_per_s
        if here.is_silent or late_s > 2 * there.arrival_s(nbytes) + SPARE_S:
            record.copied = True
            there.enqueue(_Sealed(record.number, record.frame, best, is_copy=True))


# --- the receiver's side


@dataclass(slots=True)
class _Read:
    """What has been read of a subflow."""

    nbytes: int = 0
    acknowledged: int = 0
    told: int = 0
    """The lowest record that lacked when this subflow last said so."""
    records: int = 0
    """Since the last acknowledgement."""


class ReceiveWindow:
    """The receiver's side: records that have come early, and what is to be acknowledged.

    Read only while `first` is None: then it holds no more than a window, and a record a subflow.
    """

    def __init__(
        self, *, window_bytes: int = WINDOW_BYTES, window_records: int = WINDOW_RECORDS
    ) -> None:
        self._window_bytes = window_bytes
        self._window_records = window_records
        self._frames: dict[int, memoryview] = {}
        self._early_bytes = 0  # of those after one that lacks
        self._opened = 0
        self._lacks = 0
        self._grown = 0  # bytes that are in order, and no acknowledgement has said so
        self._subflows: dict[int, _Read] = {}

    @property
    def first(self) -> memoryview | None:
        """The record that is opened next, with its number in front, once it is there."""
        return self._frames.get(self._opened)

    def opened(self) -> memoryview:
        """Go on to the next record; returns the frame of the one that has been opened."""
        frame = self._frames.pop(self._opened)
        self._opened += 1
        return frame

    def add(self, index: int) -> None:
        """A subflow more."""
        self._subflows[index] = _Read()

    def drop(self, index: int) -> None:
        """The subflow is lost."""
        self._subflows.pop(index, None)

    def needs_untrusted(self, number: int) -> bool:
        """Whether a record of this number is to be kept; ProtocolError beyond the window."""
        if number >= self._lacks + self._window_records:
            raise ProtocolError("a record beyond the window")
        return number >= self._lacks and number not in self._frames

    def read(self, index: int, nbytes: int) -> None:
        """So many bytes of this subflow have been read."""
        self._subflows[index].nbytes += nbytes

    def arrived_untrusted(self, index: int, frame: memoryview) -> bool:
        """Keep a whole record; False if it is here already. ProtocolError beyond the window."""
        self._subflows[index].records += 1
        number = number_of_untrusted(frame)
        if not self.needs_untrusted(number):
            return False
        if self._early_bytes and self._early_bytes + len(frame) > self._window_bytes:
            raise ProtocolError("more than the window holds")
        self._frames[number] = frame
        self._early_bytes += len(frame)
        while (next_one := self._frames.get(self._lacks)) is not None:
            self._lacks += 1
            self._early_bytes -= len(next_one)
            self._grown += len(next_one)
        return True

    @property
    def owing(self) -> list[int]:
        """The subflows on which not all has been said: another may fail with what it has said."""
        return [
            index
            for index, s in self._subflows.items()
            if s.nbytes > s.acknowledged or s.told < self._lacks
        ]

    def is_due(self, index: int, *, waiting: bool) -> bool:
        """Whether to acknowledge on this subflow; `waiting`: there is nothing more to read."""
        subflow = self._subflows[index]
        owed = subflow.nbytes - subflow.acknowledged
        enough = ACK_EARLY_BYTES if waiting else ACK_BYTES
        return owed > 0 and (max(owed, self._grown) >= enough or subflow.records >= ACK_RECORDS)

    def acknowledge(self, index: int, *, waiting: bool) -> Ack:
        """What to say on this subflow, which is taken as said."""
        subflow = self._subflows[index]
        subflow.acknowledged, subflow.records, self._grown = subflow.nbytes, 0, 0
        subflow.told = self._lacks
        return Ack(subflow.nbytes, self._lacks, waiting)


def frame_bytes(body_bytes: int) -> int:
    """How long a record is on a subflow.

    >>> frame_bytes(100) == 8 + 40 + 100 + 32
    True
    """
    return NUMBER_BYTES + OVERHEAD_BYTES + body_bytes
