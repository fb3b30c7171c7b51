"""The windows of a lane over several connections in C, and Python's beside which they are asked."""

import ctypes
import subprocess
import weakref
from pathlib import Path

from native import build
from pmesh.core.wire.subflows import (
    WINDOW_BYTES,
    WINDOW_RECORDS,
    Ack,
    ReceiveWindow,
    SendWindow,
    number_of_untrusted,
)
from pmesh.errors import ProtocolError

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


def load_windows(into: Path) -> ctypes.CDLL:
    """Compile and load them."""
    made = into / "windows.so"
    source = build.SOURCES / "tests" / "windows.c"
    flags = ("-std=c11", "-O1", "-fPIC", "-shared", "-pthread", "-ffp-contract=off")
    command = [*build.find_compiler(), *flags, str(source), "-o", str(made)]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(made))
    for name, (result, *arguments) in PROTOTYPES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


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
