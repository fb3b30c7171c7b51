"""The windows of a lane over several connections: those in C do what those in Python do."""

import ctypes
import itertools
import subprocess
import weakref
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from native import build
from pmesh.core.wire.subflows import (
    MAX_FRAME_BYTES,
    WINDOW_BYTES,
    WINDOW_RECORDS,
    Ack,
    ReceiveWindow,
    SendWindow,
    frame_bytes,
    number_of_untrusted,
    put_number,
)
from pmesh.errors import ProtocolError
from tests.core.wire import test_receive_window, test_subflows
from tests.worlds.examples import examples

pytestmark = pytest.mark.skipif(not build.find_compiler(), reason="needs a C compiler")

RECORDS = 5
RATES = (1e4, 1e6, 1e9, 0.5)
LIMITS = {"window_bytes": 2 * MAX_FRAME_BYTES, "window_records": RECORDS}
POINTER = ctypes.c_void_p
PROTOTYPES = {
    "new_windows": (POINTER, ctypes.c_uint64, ctypes.c_uint64),
    "free_windows": (None, POINTER),
    "sends_of": (POINTER, POINTER),
    "receives_of": (POINTER, POINTER),
    "put_frame": (None, POINTER, ctypes.c_uint64),
    "bring_frame": (ctypes.c_bool, POINTER, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64),
    "next_number": (ctypes.c_int64, POINTER, ctypes.c_uint32, POINTER),
    "acknowledge": (
        *(ctypes.c_bool, POINTER, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64),
        *(ctypes.c_bool, ctypes.c_double, ctypes.c_bool),
    ),
    "rate_of": (ctypes.c_double, POINTER, ctypes.c_uint32),
    "first_number": (ctypes.c_int64, POINTER),
    "take_ack": (None, POINTER, ctypes.c_uint32, ctypes.c_bool, POINTER),
    "pmesh_sends_add": (
        *(None, POINTER, ctypes.c_uint32),
        *(ctypes.c_double, ctypes.c_double, ctypes.c_double),
    ),
    "pmesh_sends_drop": (None, POINTER, ctypes.c_uint32),
    "pmesh_sends_wrote": (None, POINTER, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_double),
    "pmesh_sends_relieve": (None, POINTER, ctypes.c_double),
    "pmesh_sends_has_room": (ctypes.c_bool, POINTER),
    "pmesh_sends_has_unsent": (ctypes.c_bool, POINTER),
    "pmesh_sends_is_empty": (ctypes.c_bool, POINTER),
    "pmesh_sends_has_to_write": (ctypes.c_bool, POINTER, ctypes.c_uint32),
    "pmesh_receives_add": (None, POINTER),
    "pmesh_receives_drop": (None, POINTER, ctypes.c_uint32),
    "pmesh_receives_opened": (None, POINTER),
    "pmesh_receives_read": (None, POINTER, ctypes.c_uint32, ctypes.c_uint64),
    "pmesh_receives_owes": (ctypes.c_bool, POINTER, ctypes.c_uint32),
    "pmesh_receives_is_due": (ctypes.c_bool, POINTER, ctypes.c_uint32, ctypes.c_bool),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    made = tmp_path_factory.mktemp("windows") / "windows.so"
    source = build.SOURCES / "tests" / "windows.c"
    flags = ("-std=c11", "-O1", "-fPIC", "-shared", "-pthread", "-ffp-contract=off")
    command = [*build.find_compiler(), *flags, str(source), "-o", str(made), "-lm"]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(made))
    for name, (result, *arguments) in PROTOTYPES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


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


# --- what Python's own tests make of them


class MirroredSends(SendWindow):
    """Python's window, which asks the one in C, too."""

    library: ctypes.CDLL

    def __init__(
        self, *, window_bytes: int = WINDOW_BYTES, window_records: int = WINDOW_RECORDS
    ) -> None:
        super().__init__(window_bytes=window_bytes, window_records=window_records)
        self._both = self.library.new_windows(window_bytes, window_records)
        self._there = self.library.sends_of(self._both)
        self._places: list[int] = []
        weakref.finalize(self, self.library.free_windows, self._both)

    def add(self, index: int, *, bytes_per_s: float, round_trip_s: float, now: float) -> None:
        super().add(index, bytes_per_s=bytes_per_s, round_trip_s=round_trip_s, now=now)
        self.library.pmesh_sends_add(self._there, index, bytes_per_s, round_trip_s, now)
        self._places.append(index)
        self._compare()

    def drop(self, index: int) -> None:
        super().drop(index)
        if index in self._places:
            self.library.pmesh_sends_drop(self._there, self._places.index(index))
            self._places.remove(index)
        self._compare()

    def put(self, frame: memoryview) -> None:
        super().put(frame)
        self.library.put_frame(self._both, len(frame))
        self._compare()

    def next_part(self, index: int) -> memoryview:
        part, left = super().next_part(index), ctypes.c_uint64()
        place = self._places.index(index)
        self.library.next_number(self._both, place, ctypes.byref(left))
        assert left.value == len(part)
        return part

    def wrote(self, index: int, count: int, *, now: float) -> None:
        super().wrote(index, count, now=now)
        self.library.pmesh_sends_wrote(self._there, self._places.index(index), count, now)
        self._compare()

    def acknowledge_untrusted(
        self, index: int, ack: Ack, *, now: float, is_late: bool = False
    ) -> list[memoryview]:
        place = self._places.index(index)
        taken = self.library.acknowledge(self._both, place, *ack, now, is_late)
        try:
            freed = super().acknowledge_untrusted(index, ack, now=now, is_late=is_late)
        except ProtocolError:
            assert not taken
            raise
        assert taken
        self._compare()
        return freed

    def relieve(self, *, now: float) -> None:
        super().relieve(now=now)
        self.library.pmesh_sends_relieve(self._there, now)
        self._compare()

    def _compare(self) -> None:
        assert self.library.pmesh_sends_has_room(self._there) == self.has_room
        assert self.library.pmesh_sends_has_unsent(self._there) == self.has_unsent
        assert self.library.pmesh_sends_is_empty(self._there) == self.is_empty
        for place, index in enumerate(self._places):
            has = self.library.pmesh_sends_has_to_write(self._there, place)
            assert has == self.has_to_write(index)
            assert self.library.rate_of(self._both, place) == self.subflows[index].bytes_per_s


class MirroredReceives(ReceiveWindow):
    """Likewise."""

    library: ctypes.CDLL

    def __init__(
        self, *, window_bytes: int = WINDOW_BYTES, window_records: int = WINDOW_RECORDS
    ) -> None:
        super().__init__(window_bytes=window_bytes, window_records=window_records)
        self._both = self.library.new_windows(window_bytes, window_records)
        self._there = self.library.receives_of(self._both)
        self._places: list[int] = []
        weakref.finalize(self, self.library.free_windows, self._both)

    def add(self, index: int) -> None:
        super().add(index)
        self.library.pmesh_receives_add(self._there)
        self._places.append(index)

    def drop(self, index: int) -> None:
        super().drop(index)
        self.library.pmesh_receives_drop(self._there, self._places.index(index))
        self._places.remove(index)

    def read(self, index: int, nbytes: int) -> None:
        super().read(index, nbytes)
        self.library.pmesh_receives_read(self._there, self._places.index(index), nbytes)

    def arrived_untrusted(self, index: int, frame: memoryview) -> bool:
        number, place = number_of_untrusted(frame), self._places.index(index)
        fits = self.library.bring_frame(self._both, place, number, len(frame))
        try:
            is_new = super().arrived_untrusted(index, frame)
        except ProtocolError:
            assert not fits
            raise
        assert fits
        first = -1 if self.first is None else number_of_untrusted(self.first)
        assert self.library.first_number(self._both) == first
        return is_new

    def opened(self) -> memoryview:
        self.library.pmesh_receives_opened(self._there)
        return super().opened()

    def is_due(self, index: int, *, waiting: bool) -> bool:
        due, place = super().is_due(index, waiting=waiting), self._places.index(index)
        assert self.library.pmesh_receives_is_due(self._there, place, waiting) == due
        return due

    def acknowledge(self, index: int, *, waiting: bool) -> Ack:
        ack, said = (ctypes.c_uint64 * 2)(), super().acknowledge(index, waiting=waiting)
        self.library.take_ack(self._both, self._places.index(index), waiting, ack)
        assert said == Ack(ack[0], ack[1], waiting=waiting)
        return said


CASES = [
    case
    for module in (test_subflows, test_receive_window)
    for name, case in vars(module).items()
    if name.startswith("test_")
]


@pytest.mark.parametrize("case", [case for case in CASES if not hasattr(case, "pytestmark")])
def test_the_windows_in_c_do_in_every_test_what_those_in_python_do(
    case: Callable[[], None], library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mirrored in (MirroredSends, MirroredReceives):
        monkeypatch.setattr(mirrored, "library", library, raising=False)
    monkeypatch.setattr(test_subflows, "SendWindow", MirroredSends)
    for module in (test_subflows, test_receive_window):
        monkeypatch.setattr(module, "ReceiveWindow", MirroredReceives)
    case()
