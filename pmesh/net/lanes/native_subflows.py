"""The connections of one end of a lane over several, in the native library (native/subflows.c)."""

import ctypes
import selectors
import weakref
from collections import Counter
from collections.abc import Callable, Mapping

from pmesh.core.wire import aead
from pmesh.native.layout import LaneState, LostSubflow, Pace, SubflowsState
from pmesh.net.lanes.lane import Throughput
from pmesh.net.lanes.subflows import ConnectionFacts, GreetedConnection, Subflow, Subflows


class NativeSubflows(Subflows[Subflow]):
    """Calls the library, and closes the sockets that it has lost.

    The library's threads use it, too. Its memory lives as long as this object, to which the lane
    refers, and whoever runs an op refers to the lane.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        state: LaneState,
        *,
        sending: bool,
        on_lost: Callable[[bool], None],
    ) -> None:
        """`state` is the lane's, of which the library counts the bytes. For the rest see the base.

        Raises OSError if no descriptor or no memory is left.
        """
        made = library.pmesh_subflows_new(
            ctypes.byref(state), sending, aead.LIBRARY, aead.SEAL_ADDRESS, aead.OPEN_ADDRESS
        )
        if not made:
            raise OSError(0, "the system has no pipe or no memory left")
        self.address = made
        self._handle = ctypes.c_void_p(made)
        end = weakref.finalize(self, library.pmesh_subflows_free, self._handle)
        end.atexit = False  # a thread of the library may still be at work then
        self._library = library
        self._state = state
        self._taken: int | None = None
        super().__init__(
            library.pmesh_subflows_wake_fd(self._handle), sending=sending, on_lost=on_lost
        )

    def add(self, connection: GreetedConnection, facts: ConnectionFacts) -> None:
        index, sock = connection.index, connection.sock
        acks = connection.opener if self._sending else connection.sealer
        with self._lock:
            self._selector.register(sock, selectors.EVENT_READ)
            self._subflows[index] = Subflow(index, connection.hosts, sock)
            has_room = self._library.pmesh_subflows_add(
                *(self._handle, index, sock.fileno(), acks.key, acks.records),
                *(facts.bytes_per_s, facts.round_trip_s),
            )
            assert has_room, "the lane has checked it"  # noqa: S101 - it counts them, too

    def _forget(self, subflow: Subflow) -> None:
        self._library.pmesh_subflows_drop(self._handle, subflow.index)

    def _collect(self) -> None:
        """Close the sockets of the connections that the library has lost."""
        lost = LostSubflow()
        with self._lock:
            while self._library.pmesh_subflows_next_lost(self._handle, ctypes.byref(lost)):
                subflow = self._subflows.get(lost.index)
                if subflow is not None:
                    self._lose(subflow, ended=lost.ended)

    def __len__(self) -> int:
        self._collect()
        return super().__len__()

    def pump(self, *, outside: bool = False) -> None:
        self._library.pmesh_subflows_pump(self._handle, outside)
        self._collect()
        if self._sending:
            with self._lock:
                for subflow in self._subflows.values():
                    has = self._library.pmesh_subflows_has_to_write(self._handle, subflow.index)
                    self._watch(subflow, to_write=has)

    def _is(self, state: SubflowsState) -> bool:
        return bool(self._library.pmesh_subflows_state(self._handle) & state)

    @property
    def has_room(self) -> bool:
        return self._is(SubflowsState.HAVE_ROOM)

    @property
    def has_unsent(self) -> bool:
        return self._is(SubflowsState.HAVE_UNSENT)

    @property
    def is_empty(self) -> bool:
        return self._is(SubflowsState.ARE_EMPTY)

    @property
    def owes(self) -> bool:
        return self._is(SubflowsState.OWE)

    @property
    def has_first(self) -> bool:
        return self._is(SubflowsState.HAVE_FIRST)

    def take(self, nbytes: int) -> memoryview:
        self._taken = self._library.pmesh_subflows_take(self._handle, nbytes)
        if self._taken is None:
            raise MemoryError
        return _view(self._taken, nbytes)

    def put(self) -> None:
        self._library.pmesh_subflows_put(self._handle, self._taken)

    def read(self, *, waited: bool) -> memoryview | None:
        nbytes = ctypes.c_uint64()
        record = self._library.pmesh_subflows_read(self._handle, waited, ctypes.byref(nbytes))
        self._collect()
        return None if record is None else _view(record, nbytes.value)

    def opened(self) -> None:
        self._library.pmesh_subflows_opened(self._handle)

    def take_paces(self) -> Mapping[tuple[str, str], Throughput]:
        came, took_s, pace = Counter[tuple[str, str]](), 0.0, Pace()
        while self._library.pmesh_subflows_next_pace(self._handle, ctypes.byref(pace)):
            subflow = self._subflows.get(pace.index)
            if subflow is not None:
                came[subflow.hosts] += pace.nbytes
                took_s = pace.seconds
        return {hosts: Throughput(nbytes, took_s) for hosts, nbytes in came.items()}


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")
