"""The windows of a lane over several connections: those in C do what those in Python do."""

import ctypes
import itertools
from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from native import build
from pmesh.core.wire.subflows import (
    MAX_FRAME_BYTES,
    Ack,
    ReceiveWindow,
    SendWindow,
    frame_bytes,
    number_of_untrusted,
    put_number,
)
from pmesh.errors import ProtocolError
from tests.native.windows import load_windows
from tests.worlds.examples import examples

pytestmark = pytest.mark.skipif(not build.find_compiler(), reason="needs a C compiler")

RECORDS = 5
RATES = (1e4, 1e6, 1e9, 0.5)
LIMITS = {"window_bytes": 2 * MAX_FRAME_BYTES, "window_records": RECORDS}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return load_windows(tmp_path_factory.mktemp("windows"))


class Event(NamedTuple):
    what: str
    which: int
    amount: int
    after_s: float = 0.02


class Windows:
    """The same events for both."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.both = library.new_windows(*LIMITS.values())
        self.sends, self.receives = library.sends_of(self.both), library.receives_of(self.both)
        self.sending, self.receiving = SendWindow(**LIMITS), ReceiveWindow(**LIMITS)
        self.indices: list[int] = []
        """Of the connections, in the order of their places."""
        self.made = 0
        self.sizes: list[int] = []
        """Of the frames that were put."""
        self.written, self.acknowledged = Counter[int](), Counter[int]()
        """Bytes of each connection."""
        self.brought = set[int]()
        """Numbers of the records that have come."""
        self.now = 0.0

    def take(self, event: Event) -> None:
        self.now += event.after_s
        if event.what in {"add", "put", "relieve", "open"}:
            getattr(self, event.what)(event)
        elif self.indices:
            place = event.which % len(self.indices)
            getattr(self, event.what)(place, self.indices[place], event.amount)

    def add(self, event: Event) -> None:
        if len(self.indices) == 4:
            return
        rate, round_trip_s = RATES[event.amount % len(RATES)], event.which / 1000
        self.sending.add(self.made, bytes_per_s=rate, round_trip_s=round_trip_s, now=self.now)
        self.receiving.add(self.made)
        self.library.pmesh_sends_add(self.sends, self.made, rate, round_trip_s, self.now)
        self.library.pmesh_receives_add(self.receives)
        self.indices.append(self.made)
        self.made += 1

    def put(self, event: Event) -> None:
        if self.sending.has_room:
            self.sizes.append(frame_bytes(event.amount))
            self.sending.put(self.frame(self.sending.next_number, self.sizes[-1]))
            self.library.put_frame(self.both, self.sizes[-1])

    def frame(self, number: int, nbytes: int) -> memoryview:
        made = memoryview(bytearray(nbytes))
        put_number(number, made)
        return made

    def relieve(self, _: Event) -> None:
        self.sending.relieve(now=self.now)
        self.library.pmesh_sends_relieve(self.sends, self.now)

    def open(self, _: Event) -> None:
        if self.receiving.first is not None:
            self.receiving.opened()
            self.library.pmesh_receives_opened(self.receives)

    def drop(self, place: int, index: int, _: int) -> None:
        self.sending.drop(index)
        self.receiving.drop(index)
        self.library.pmesh_sends_drop(self.sends, place)
        self.library.pmesh_receives_drop(self.receives, place)
        self.indices.remove(index)

    def write(self, place: int, index: int, amount: int) -> None:
        part, left = self.sending.next_part(index), ctypes.c_uint64()
        number = self.library.next_number(self.both, place, ctypes.byref(left))
        assert left.value == len(part)
        if not part:
            assert number == -1
            return
        if len(part) == self.sizes[number]:
            assert number_of_untrusted(part) == number
        count = min(len(part), amount + 1)
        self.written[index] += count
        self.sending.wrote(index, count, now=self.now)
        self.library.pmesh_sends_wrote(self.sends, place, count, self.now)

    def acknowledge(self, place: int, index: int, amount: int) -> None:
        """Now and then what was not sent, too."""
        sent, received = self.written[index], self.acknowledged[index]
        more = amount % (sent - received + 1) if amount % 7 else amount
        ack = Ack(received + more, amount % (len(self.sizes) + 2), waiting=bool(amount % 5))
        is_late = amount % 11 == 0
        taken = self.library.acknowledge(self.both, place, *ack, self.now, is_late)
        try:
            self.sending.acknowledge_untrusted(index, ack, now=self.now, is_late=is_late)
        except ProtocolError:
            assert not taken
        else:
            assert taken
            self.acknowledged[index] = ack.received

    def bring(self, place: int, index: int, amount: int) -> None:
        """In any order, and beyond the window."""
        lacks = self.lacks
        number, nbytes = max(0, lacks - 3 + amount % 10), frame_bytes(amount)
        self.receiving.read(index, nbytes)
        self.library.pmesh_receives_read(self.receives, place, nbytes)
        fits = self.library.bring_frame(self.both, place, number, nbytes)
        try:
            self.receiving.arrived_untrusted(index, self.frame(number, nbytes))
        except ProtocolError:
            assert not fits
        else:
            assert fits
            self.brought.add(number)

    @property
    def lacks(self) -> int:
        return next(number for number in itertools.count() if number not in self.brought)

    def owe(self, place: int, index: int, amount: int) -> None:
        waiting = bool(amount % 2)
        due = self.library.pmesh_receives_is_due(self.receives, place, waiting)
        assert due == self.receiving.is_due(index, waiting=waiting)
        if due or amount % 3 == 0:
            ack = (ctypes.c_uint64 * 2)()
            self.library.take_ack(self.both, place, waiting, ack)
            assert Ack(ack[0], ack[1], waiting=waiting) == self.receiving.acknowledge(
                index, waiting=waiting
            )

    def compare(self) -> None:
        ours, library = self.sending, self.library
        assert library.pmesh_sends_has_room(self.sends) == ours.has_room
        assert library.pmesh_sends_has_unsent(self.sends) == ours.has_unsent
        assert library.pmesh_sends_is_empty(self.sends) == ours.is_empty
        first = self.receiving.first
        number = -1 if first is None else number_of_untrusted(first)
        assert library.first_number(self.both) == number
        for place, index in enumerate(self.indices):
            has = library.pmesh_sends_has_to_write(self.sends, place)
            assert has == ours.has_to_write(index)
            assert library.rate_of(self.both, place) == ours.subflows[index].bytes_per_s
            owes = library.pmesh_receives_owes(self.receives, place)
            assert owes == (index in self.receiving.owing)


EVENTS = st.builds(
    Event,
    st.sampled_from(
        ["add", "drop", "relieve", "relieve", "open", "open", "owe"]
        + 2 * ["put", "put", "write", "write", "acknowledge", "bring"]
    ),
    st.integers(0, 3),
    st.integers(0, 40) | st.integers(0, 100_000) | st.integers(900_000, 1_000_000),
    st.sampled_from([0, 0.003, 0.02, 0.2, 2.0]),
)


@examples(1000)
@given(st.lists(EVENTS, max_size=80))
def test_both_windows_take_the_same_decisions(library: ctypes.CDLL, events: list[Event]) -> None:
    windows = Windows(library)
    try:
        for event in [Event("add", 0, 0), Event("add", 1, 1), *events]:
            windows.take(event)
            windows.compare()
    finally:
        library.free_windows(windows.both)


def test_both_measure_the_same_rates(library: ctypes.CDLL) -> None:
    """Random events seldom bring two samples of one connection."""
    windows = Windows(library)
    script = [Event("add", 0, 1), *2 * [Event("put", 0, 1_000_000)]]
    script += 2 * [Event("write", 0, 1_048_576)]
    script += [Event("acknowledge", 0, amount) for amount in (100_004, 300_004, 100_004, 200_004)]
    script += [Event("acknowledge", 0, 7), Event("put", 0, 900_000), Event("write", 0, 900_000)]
    script += [Event("acknowledge", 0, 300_004)]
    rates = set[float]()
    for event in script:
        windows.take(event)
        windows.compare()
        rates.add(windows.library.rate_of(windows.both, 0))
    library.free_windows(windows.both)
    assert len(rates) == 5
