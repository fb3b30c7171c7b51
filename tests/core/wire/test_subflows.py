"""The sender's window of a lane over several connections, and both, without any connection."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.wire.aead import TAG_BYTES
from pmesh.core.wire.records import RecordHeader, Sealer
from pmesh.core.wire.subflows import (
    ACK_BODY_BYTES,
    FRAME_HEADER_BYTES,
    MAX_FRAME_BYTES,
    NUMBER_BYTES,
    SILENT_S,
    Ack,
    ReceiveWindow,
    SendWindow,
    decode_ack,
    encode_ack,
    frame_bytes,
    number_of_untrusted,
    read_frame_untrusted,
)
from pmesh.errors import ProtocolError
from tests.core.wire.frames import frame
from tests.worlds.examples import examples

pytestmark = pytest.mark.usefixtures("windows")

MBIT = 1e6 / 8


def window(*rates: float, **limits: int) -> SendWindow:
    made = SendWindow(**limits)
    for index, rate in enumerate(rates):
        made.add(index, bytes_per_s=rate, round_trip_s=0.0, now=0.0)
    return made


def put(sending: SendWindow, body_bytes: int = 0) -> memoryview:
    made = frame(sending.next_number, body_bytes)
    sending.put(made)
    return made


def write(sending: SendWindow, index: int, *, now: float = 0.0, most: int = 2**62) -> bytes:
    """Let the system take so much of one subflow; returns it."""
    taken = b""
    while len(taken) < most and (part := sending.next_part(index)):
        count = min(len(part), most - len(taken))
        taken += part[:count]
        sending.wrote(index, count, now=now)
    return taken


def numbers(data: bytes, body_bytes: int = 0) -> list[int]:
    """Of the records that begin in these bytes, all of one length."""
    step = frame_bytes(body_bytes)
    return [number_of_untrusted(memoryview(data)[i:]) for i in range(0, len(data), step)]


@given(st.builds(Ack, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.booleans()))
def test_an_acknowledgement_is_read_as_it_was_written(ack: Ack) -> None:
    assert decode_ack(encode_ack(ack)) == ack
    assert len(encode_ack(ack)) == ACK_BODY_BYTES


# --- which subflow takes a record


def test_the_header_of_a_frame_tells_its_length() -> None:
    view = frame(7, body_bytes=100)
    Sealer(bytes(32)).seal(RecordHeader(100, 3, 7, 0, 99, -1), bytes(100), view[NUMBER_BYTES:])
    assert read_frame_untrusted(view) == len(view)


def test_equal_subflows_take_turns() -> None:
    sending = window(100 * MBIT, 100 * MBIT)
    for _ in range(6):
        put(sending, 1000)
    assert [len(numbers(write(sending, index), 1000)) for index in (0, 1)] == [3, 3]


def test_a_slow_subflow_takes_the_record_that_the_fast_one_would_bring_later() -> None:
    sending = window(10 * MBIT, 100 * MBIT)
    for _ in range(22):
        put(sending, 1000)
    assert numbers(write(sending, 0), 1000) == [9, 20]  # each when the fast one brings its tenth


def test_a_record_goes_where_the_way_is_shortest_if_there_is_little_to_send() -> None:
    sending = SendWindow()
    sending.add(0, bytes_per_s=100 * MBIT, round_trip_s=0.05, now=0.0)
    sending.add(1, bytes_per_s=10 * MBIT, round_trip_s=0.001, now=0.0)
    put(sending)
    assert not sending.has_to_write(0)
    assert sending.has_to_write(1)


def test_a_window_ends_what_may_be_put() -> None:
    sending = window(MBIT, window_records=3)
    assert sending.has_room
    for _ in range(3):
        assert sending.has_room
        put(sending)
    assert not sending.has_room
    write(sending, 0)
    assert not sending.has_unsent
    sending.acknowledge_untrusted(0, Ack(3 * frame_bytes(0), 3, waiting=True), now=1.0)
    assert sending.has_room
    assert sending.is_empty

    sending = window(MBIT, window_bytes=2 * MAX_FRAME_BYTES)
    put(sending, 10)
    assert sending.has_room
    put(sending, MAX_FRAME_BYTES)
    assert not sending.has_room


# --- rates


def acknowledge_at(sending: SendWindow, index: int, rate: float, *, steps: int) -> None:
    """The receiver reads all that comes, at this rate, and says so ten times in 0.1 s."""
    in_flight = sending.subflows[index].bytes_in_flight
    for step in range(1, steps + 1):
        ack = Ack(min(in_flight, round(rate * 0.01 * step)), 0, waiting=True)
        assert sending.acknowledge_untrusted(index, ack, now=0.01001 * step) == []


def test_a_rate_is_measured_while_there_is_enough_to_send() -> None:
    sending = window(1000 * MBIT)
    for _ in range(10):
        put(sending, 1_000_000)
    write(sending, 0)
    assert not sending.subflows[0].is_measured
    acknowledge_at(sending, 0, 200 * MBIT, steps=10)
    load = sending.subflows[0]
    assert load.is_measured
    assert load.bytes_per_s == pytest.approx(200 * MBIT, rel=0.01)
    assert load.bytes_in_flight == 10 * frame_bytes(1_000_000) - round(200 * MBIT * 0.1)


def test_a_subflow_with_little_to_send_does_not_look_slow_but_may_look_fast() -> None:
    for nominal, expected in ((1000 * MBIT, 1000 * MBIT), (MBIT, 20 * MBIT)):
        sending = window(nominal)
        put(sending, 60_000)
        write(sending, 0)
        acknowledge_at(sending, 0, 20 * MBIT, steps=2)
        assert sending.subflows[0].bytes_per_s == pytest.approx(expected, rel=0.01)


def test_acknowledgements_that_are_read_long_after_they_came_measure_nothing() -> None:
    sending = window(1000 * MBIT)
    for _ in range(10):
        put(sending, 1_000_000)
    write(sending, 0)
    for ack, now, is_late in (
        (Ack(100_000, 0, waiting=True), 0.1, False),
        (Ack(300_000, 0, waiting=True), 0.2, True),
        (Ack(500_000, 0, waiting=True), 0.3, False),
    ):
        sending.acknowledge_untrusted(0, ack, now=now, is_late=is_late)
        assert not sending.subflows[0].is_measured
    sending.acknowledge_untrusted(0, Ack(700_000, 0, waiting=True), now=0.32)
    assert sending.subflows[0].bytes_per_s == pytest.approx(200_000 / 0.02)


def test_a_receiver_that_does_not_read_does_not_make_a_subflow_look_slow() -> None:
    sending = window(1000 * MBIT)
    for _ in range(10):
        put(sending, 1_000_000)
    write(sending, 0)
    for ack, now in (
        (Ack(100_000, 0, waiting=True), 0.1),
        (Ack(200_000, 0, waiting=True), 0.101),  # too soon to say
        (Ack(300_000, 0, waiting=False), 0.15),  # more may have been there
        (Ack(400_000, 0, waiting=True), 9.0),
    ):
        sending.acknowledge_untrusted(0, ack, now=now)
    assert not sending.subflows[0].is_measured


@pytest.mark.parametrize("ack", [Ack(1001, 0, waiting=True), Ack(0, 2, waiting=True)])
def test_what_has_not_been_sent_cannot_be_acknowledged(ack: Ack) -> None:
    sending = window(MBIT)
    put(sending, 1000)
    write(sending, 0, most=1000)
    with pytest.raises(ProtocolError, match="not been sent"):
        sending.acknowledge_untrusted(0, ack, now=1.0)


def test_an_acknowledgement_cannot_take_back_another() -> None:
    sending = window(MBIT)
    put(sending)
    write(sending, 0)
    sending.acknowledge_untrusted(0, Ack(50, 1, waiting=True), now=1.0)
    with pytest.raises(ProtocolError, match="not been sent"):
        sending.acknowledge_untrusted(0, Ack(49, 1, waiting=True), now=1.0)
    assert sending.acknowledge_untrusted(0, Ack(50, 0, waiting=True), now=1.0) == []


# --- lost, silent and slow subflows


def test_what_a_lost_subflow_has_not_brought_goes_to_the_others_in_order() -> None:
    sending = window(MBIT, MBIT)
    for _ in range(6):
        put(sending)
    assert numbers(write(sending, 0, most=2 * frame_bytes(0))) == [0, 2]
    sending.acknowledge_untrusted(0, Ack(frame_bytes(0), 1, waiting=True), now=1.0)
    sending.drop(0)
    sending.drop(0)
    assert numbers(write(sending, 1)) == [1, 2, 3, 4, 5]


def test_without_a_subflow_records_wait_for_one() -> None:
    sending = window(MBIT)
    put(sending)
    write(sending, 0, most=3)
    sending.drop(0)
    put(sending)
    assert sending.has_unsent
    sending.add(1, bytes_per_s=MBIT, round_trip_s=0, now=2.0)
    assert numbers(write(sending, 1)) == [0, 1]


def test_what_has_arrived_over_one_subflow_is_not_sent_over_another() -> None:
    sending = window(MBIT)
    frames = [put(sending) for _ in range(3)]
    write(sending, 0)
    sending.add(1, bytes_per_s=MBIT, round_trip_s=0, now=0.0)
    sending.drop(0)  # its acknowledgements are read by then, but for the last
    sending.add(2, bytes_per_s=1e9, round_trip_s=0, now=0.0)
    assert numbers(write(sending, 1, most=10)) == [0]
    freed = sending.acknowledge_untrusted(1, Ack(10, 2, waiting=True), now=1.0)
    assert freed == [frames[1]]  # the first is still being written
    assert write(sending, 1)[frame_bytes(0) - 10 :] == frames[2]
    assert not sending.has_unsent


def test_the_rest_of_a_record_that_has_arrived_over_another_subflow_waits_for_nobody() -> None:
    sending = window(MBIT)
    put(sending, 100_000)
    write(sending, 0, most=10)
    sending.add(1, bytes_per_s=1e9, round_trip_s=0, now=0.0)
    sending.relieve(now=9.0)
    assert numbers(write(sending, 1), 100_000) == [0]
    assert sending.has_unsent  # it may yet come first
    sending.acknowledge_untrusted(1, Ack(frame_bytes(100_000), 1, waiting=True), now=9.0)
    assert not sending.has_unsent
    put(sending, 100_000)
    assert sending.has_unsent
    assert numbers(write(sending, 1), 100_000) == [1]
    assert not sending.has_unsent
    assert len(write(sending, 0)) == frame_bytes(100_000) - 10  # what has begun is finished


def test_while_there_is_no_subflow_nothing_is_kept_twice() -> None:
    sending = window(MBIT, MBIT)
    put(sending)
    put(sending)
    write(sending, 0)
    sending.drop(1)
    assert numbers(write(sending, 0)) == [1]
    sending.drop(0)
    sending.add(1, bytes_per_s=MBIT, round_trip_s=0, now=0.0)
    sending.drop(1)
    sending.add(2, bytes_per_s=MBIT, round_trip_s=0, now=0.0)
    assert numbers(write(sending, 2)) == [0, 1]


def test_a_subflow_that_is_silent_while_another_is_not_counts_as_lost_until_it_is_heard() -> None:
    sending = window(MBIT, MBIT)
    for _ in range(4):
        put(sending)
    assert numbers(write(sending, 0)) == [0, 2]
    assert numbers(write(sending, 1)) == [1, 3]
    nbytes = frame_bytes(0)
    sending.acknowledge_untrusted(1, Ack(nbytes, 0, waiting=True), now=SILENT_S)
    sending.relieve(now=SILENT_S)
    assert not sending.has_unsent  # it may be slow
    sending.acknowledge_untrusted(1, Ack(2 * nbytes, 0, waiting=True), now=SILENT_S + 0.1)
    sending.relieve(now=SILENT_S + 0.1)
    assert numbers(write(sending, 1, now=SILENT_S + 0.1)) == [0, 2]
    sending.relieve(now=SILENT_S + 1)
    assert not sending.has_unsent  # once is enough
    put(sending)
    assert sending.has_to_write(1)
    sending.acknowledge_untrusted(0, Ack(2 * nbytes, 4, waiting=True), now=SILENT_S + 2)
    put(sending)
    assert sending.has_to_write(0)


def test_what_was_copied_to_a_subflow_that_falls_silent_is_copied_to_another() -> None:
    sending = window(MBIT, MBIT)
    put(sending)
    put(sending)
    assert numbers(write(sending, 0)) == [0]
    assert numbers(write(sending, 1, now=0.2)) == [1]
    sending.add(2, bytes_per_s=1000 * MBIT, round_trip_s=0, now=0.2)
    first, second = put(sending, 10), put(sending, 200_000)
    assert write(sending, 2) == bytes(first) + bytes(second)
    sending.acknowledge_untrusted(2, Ack(len(first), 0, waiting=False), now=SILENT_S + 0.1)
    sending.relieve(now=SILENT_S + 0.1)
    assert numbers(write(sending, 1, now=SILENT_S + 0.1)) == [0]  # the other one has much to do
    sent = len(first) + len(second)
    sending.acknowledge_untrusted(2, Ack(sent, 0, waiting=True), now=SILENT_S + 0.3)
    sending.relieve(now=SILENT_S + 0.3)
    assert numbers(write(sending, 2)) == [0, 1]


def test_a_receiver_that_does_not_read_makes_nobody_silent() -> None:
    sending = window(MBIT, MBIT)
    put(sending)
    put(sending)
    write(sending, 0)
    write(sending, 1, now=9.0)
    sending.relieve(now=99.0)
    assert not sending.has_unsent


def test_what_stalls_is_sent_again_though_the_others_have_long_had_nothing_to_do() -> None:
    sending = window(MBIT, MBIT)
    put(sending)
    put(sending)
    assert numbers(write(sending, 0)) == [0]
    assert numbers(write(sending, 1)) == [1]
    sending.acknowledge_untrusted(0, Ack(frame_bytes(0), 1, waiting=True), now=0.001)
    sending.relieve(now=SILENT_S)
    assert not sending.has_unsent
    sending.relieve(now=SILENT_S + 0.1)
    assert numbers(write(sending, 0)) == [1]
    put(sending)
    assert sending.has_to_write(0)  # and no longer over the other one


def test_if_all_are_silent_they_are_used_nevertheless() -> None:
    sending = window(MBIT, MBIT)
    for _ in range(2):
        put(sending)
    write(sending, 0)
    write(sending, 1, now=1.0)
    sending.acknowledge_untrusted(1, Ack(10, 0, waiting=True), now=2.0)
    sending.relieve(now=2.0)
    assert numbers(write(sending, 1, now=2.0)) == [0]
    sending.drop(1)
    assert numbers(write(sending, 0, now=3.0)) == [1]


def test_an_idle_subflow_takes_what_waits_for_a_slow_one() -> None:
    sending = window(10 * MBIT, 10 * MBIT)
    for _ in range(8):
        put(sending, 1000)
    sending.relieve(now=0.0)  # nobody is idle
    assert numbers(write(sending, 0), 1000) == [0, 2, 4, 6]
    sent = 4 * frame_bytes(1000)
    sending.acknowledge_untrusted(0, Ack(sent, 1, waiting=True), now=0.1)
    assert numbers(write(sending, 1, most=500), 1000) == [1]
    sending.relieve(now=0.1)
    assert numbers(write(sending, 0), 1000) == [3, 5]
    sending.relieve(now=0.1)  # no oftener than it is measured
    assert numbers(write(sending, 1)[frame_bytes(1000) - 500 :], 1000) == [7]


def test_what_a_slow_subflow_would_bring_late_is_sent_again_over_an_idle_one() -> None:
    sending = window(1 * MBIT, 1 * MBIT)
    for _ in range(2):
        put(sending, 100_000)
    write(sending, 0, most=50_000)
    write(sending, 1)
    sending.relieve(now=0.1)
    assert not sending.has_to_write(1)  # it is no faster
    sending.acknowledge_untrusted(1, Ack(100_072 - 8, 0, waiting=True), now=0.2)
    sending.relieve(now=0.2)
    assert not sending.has_to_write(1)
    fast = window(1 * MBIT, 1000 * MBIT)
    fast.drop(1)
    put(fast, 100_000)
    write(fast, 0, most=50_000)
    fast.add(1, bytes_per_s=1000 * MBIT, round_trip_s=0.0, now=0.0)
    fast.relieve(now=0.1)
    assert not fast.has_to_write(1) or numbers(write(fast, 1), 100_000) == [0]
    assert len(write(fast, 0)) == frame_bytes(100_000) - 50_000  # what has begun is finished
    fast.drop(1)  # and with it the copy
    put(fast, 10)
    assert not sending.is_empty


def test_what_an_idle_subflow_took_and_lost_goes_back() -> None:
    sending = window(10 * MBIT, 10 * MBIT)
    for _ in range(4):
        put(sending, 1000)
    assert numbers(write(sending, 0), 1000) == [0, 2]
    sending.acknowledge_untrusted(0, Ack(2 * frame_bytes(1000), 1, waiting=True), now=0.1)
    assert numbers(write(sending, 1, most=500), 1000) == [1]
    sending.relieve(now=0.1)
    assert sending.has_to_write(0)
    sending.drop(0)
    assert numbers(write(sending, 1)[frame_bytes(1000) - 500 :], 1000) == [2, 3]


def test_a_copy_must_arrive_in_less_than_half_the_time() -> None:
    """And 10 ms earlier: else both arrive at about the same time, and one is for nothing."""
    nbytes = frame_bytes(100_000)
    for late_s, is_copied in ((0.22, True), (0.2, False)):
        sending = window(nbytes / late_s)
        put(sending, 100_000)
        write(sending, 0)
        sending.add(1, bytes_per_s=nbytes / 0.1, round_trip_s=0.0, now=0.0)
        sending.relieve(now=0.1)
        assert sending.has_to_write(1) is is_copied


def test_what_was_copied_to_a_subflow_that_is_lost_is_copied_to_another() -> None:
    sending = window(MBIT)
    put(sending, 100_000)
    write(sending, 0, most=10)
    for index in (1, 2):
        sending.add(index, bytes_per_s=1e9, round_trip_s=0, now=0.0)
        sending.relieve(now=index)
        assert numbers(write(sending, index), 100_000) == [0]
        sending.relieve(now=index + 0.1)
        assert not sending.has_to_write(index)  # once is enough
        sending.drop(index)


def test_a_copy_that_waits_already_is_not_counted_twice() -> None:
    sending = window(MBIT)
    put(sending, 100_000)
    write(sending, 0, most=10)
    for index, rate in ((1, 100 * MBIT), (2, 40 * MBIT), (3, MBIT)):
        sending.add(index, bytes_per_s=rate, round_trip_s=0, now=0.0)
    sending.relieve(now=0.1)
    sending.drop(3)  # which might have been the one with the copy
    sending.relieve(now=0.2)
    assert numbers(write(sending, 1), 100_000) == [0]
    sending.acknowledge_untrusted(1, Ack(frame_bytes(100_000), 1, waiting=True), now=0.2)
    put(sending)
    assert numbers(write(sending, 1)) == [1]  # it is the fastest, and has nothing else to do


def test_a_record_that_waits_where_its_copy_comes_may_be_copied_again() -> None:
    sending = window(MBIT)
    put(sending, 100_000)
    write(sending, 0, most=10)
    sending.add(1, bytes_per_s=100 * MBIT, round_trip_s=0, now=0.0)
    put(sending, 300_000)
    assert numbers(write(sending, 1), 300_000) == [1]
    for index, rate in ((2, 40 * MBIT), (3, MBIT)):
        sending.add(index, bytes_per_s=rate, round_trip_s=0, now=0.0)
    sending.relieve(now=0.1)  # 2 has the copy, as 1 is busy
    sending.drop(0)  # and 1 has the record, as 2 is
    sending.acknowledge_untrusted(1, Ack(frame_bytes(300_000), 0, waiting=True), now=0.1)
    sending.relieve(now=0.2)  # 1 has nothing else to do now, and has both
    assert not sending.has_to_write(2)
    assert numbers(write(sending, 1), 100_000) == [0]
    sending.relieve(now=0.2 + 2 * SILENT_S)
    assert numbers(write(sending, 2), 100_000) == [0]


def test_a_record_that_comes_where_its_copy_waits_may_be_copied_again() -> None:
    sending = window(MBIT)
    put(sending, 100_000)
    write(sending, 0, most=10)
    sending.add(1, bytes_per_s=100 * MBIT, round_trip_s=0, now=0.0)
    sending.relieve(now=0.1)
    sending.drop(0)
    assert numbers(write(sending, 1), 100_000) == [0]
    sending.add(2, bytes_per_s=MBIT, round_trip_s=0, now=0.1)
    sending.relieve(now=0.1 + 2 * SILENT_S)
    assert numbers(write(sending, 2), 100_000) == [0]


# --- both, in any order of events


@dataclass
class SubflowWire:
    """A subflow: bytes under way, and what the receiver has half of."""

    data: bytearray = field(default_factory=bytearray)
    acks: list[Ack] = field(default_factory=list)
    half: bytearray = field(default_factory=bytearray)


class Net:
    """Both ends, and the subflows between them."""

    def __init__(self) -> None:
        limits = {"window_bytes": 2 * MAX_FRAME_BYTES, "window_records": 5}
        self.sending, self.receiving = SendWindow(**limits), ReceiveWindow(**limits)
        self.pipes: dict[int, SubflowWire] = {}
        self.made = 0
        self.put: list[memoryview] = []
        self.freed: list[memoryview] = []
        self.got: list[bytes] = []
        self.now = 0.0

    def act(self, what: int, which: int, amount: int) -> None:
        indices = sorted(self.pipes)
        self.now += amount / 1000
        if what == 0 and len(self.pipes) < 3:
            self.pipes[self.made] = SubflowWire()
            self.sending.add(
                self.made, bytes_per_s=amount + 1.0, round_trip_s=which / 10, now=self.now
            )
            self.receiving.add(self.made)
            self.made += 1
        elif what == 1 and self.sending.has_room:
            self.put.append(put(self.sending, amount))
        elif what == 2:
            self.sending.relieve(now=self.now)
        elif indices:
            index = indices[which % len(indices)]
            (self.write, self.read, self.acknowledge, self.lose)[what % 4](index, amount)

    def write(self, index: int, amount: int) -> None:
        self.pipes[index].data += write(self.sending, index, now=self.now, most=amount)

    def read(self, index: int, amount: int) -> None:
        pipe = self.pipes[index]
        while self.receiving.first is None and amount and pipe.data:
            need = FRAME_HEADER_BYTES
            if len(pipe.half) >= need:
                body = len(self.put[number_of_untrusted(memoryview(pipe.half))])
                need = body
            count = min(amount, need - len(pipe.half), len(pipe.data))
            pipe.half += pipe.data[:count]
            del pipe.data[:count]
            amount -= count
            self.receiving.read(index, count)
            if len(pipe.half) >= FRAME_HEADER_BYTES + TAG_BYTES:
                whole = len(self.put[number_of_untrusted(memoryview(pipe.half))])
                if len(pipe.half) == whole:
                    self.receiving.arrived_untrusted(index, memoryview(bytes(pipe.half)))
                    pipe.half.clear()
        while self.receiving.first is not None:
            self.got.append(bytes(self.receiving.opened()))
        if self.receiving.is_due(index, waiting=not pipe.data):
            pipe.acks.append(self.receiving.acknowledge(index, waiting=not pipe.data))

    def acknowledge(self, index: int, amount: int) -> None:
        pipe = self.pipes[index]
        if amount % 3 == 0 and index in self.receiving.owing:
            pipe.acks.append(self.receiving.acknowledge(index, waiting=not pipe.data))
        while pipe.acks:
            ack = pipe.acks.pop(0)
            self.freed += self.sending.acknowledge_untrusted(index, ack, now=self.now)

    def lose(self, index: int, _: int) -> None:
        """With whatever is under way, either way."""
        del self.pipes[index]
        self.sending.drop(index)
        self.receiving.drop(index)

    def finish(self) -> None:
        """From here on nothing is lost: all must arrive."""
        if not self.pipes:
            self.act(0, 0, 9)
        for _ in range(100):
            for index in self.pipes:
                self.write(index, 2**40)
                self.read(index, 2**40)
                self.acknowledge(index, 3)


@examples(300)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, 1, 1, 2, 4, 4, 4, 5, 5, 5, 6, 6, 7]),
            st.integers(0, 2),
            st.integers(0, 3000) | st.integers(0, 200_000),
        ),
        max_size=80,
    )
)
def test_whatever_is_lost_and_in_whatever_order_all_arrives_once_and_in_order(
    events: list[tuple[int, int, int]],
) -> None:
    net = Net()
    for event in events:
        net.act(*event)
        assert len(net.freed) == len(set(map(id, net.freed)))
    net.finish()
    assert net.got == [bytes(each) for each in net.put]
    assert net.sending.is_empty
    assert not net.sending.has_unsent
    assert net.sending.has_room
    assert net.receiving.owing == []
    for each in net.freed:  # may be written over: nobody has them
        each[:] = bytes(len(each))
