import threading
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pmesh.client.elastic import sync
from pmesh.client.elastic.sync import AHEAD_CHUNKS, Arrival
from pmesh.core.ops.reductions import Values
from tests.worlds.faults import Faults

CHUNK_BYTES = 1000
PATIENCE_S = 20.0


def bytes_of(nbytes: int) -> Values:
    return np.random.default_rng(nbytes).integers(1, 256, nbytes, np.uint8)


def take_all(arrival: Arrival, data: Values, chunk_bytes: int) -> None:
    for start in range(0, data.size, chunk_bytes):
        arrival.take(data[start : start + chunk_bytes])


@given(nbytes=st.integers(0, 60_000), chunk_bytes=st.integers(4000, 9000))
def test_what_arrives_is_kept_and_hashed_in_order(nbytes: int, chunk_bytes: int) -> None:
    data = bytes_of(nbytes)
    with Arrival(nbytes, chunk_bytes=chunk_bytes) as arrival:
        take_all(arrival, data, chunk_bytes)
    assert (arrival.values == data).all()
    assert arrival.hasher.digest() == xxhash.xxh3_128(data.data).digest()


def test_memory_is_touched_a_few_chunks_ahead_and_no_further(faults: Faults) -> None:
    touched, happened = list[int](), threading.Semaphore(0)

    def touch(memory: Values) -> None:
        touched.append(memory.ctypes.data)
        happened.release()

    def await_touches(count: int) -> None:
        for _ in range(count):
            assert happened.acquire(timeout=PATIENCE_S)

    faults.instead(sync, "_touch", touch)
    data = bytes_of(9 * CHUNK_BYTES + 1)
    with Arrival(data.size, chunk_bytes=CHUNK_BYTES) as arrival:
        await_touches(AHEAD_CHUNKS)
        arrival.take(data[:CHUNK_BYTES])
        await_touches(1)
    begin = arrival.values.ctypes.data
    assert touched == [begin + i * CHUNK_BYTES for i in range(AHEAD_CHUNKS + 1)]


def test_a_chunk_is_not_written_while_its_memory_is_touched(faults: Faults) -> None:
    begun, go = threading.Event(), threading.Event()

    def touch(memory: Values) -> None:
        begun.set()
        assert go.wait(PATIENCE_S)
        memory[:] = 0

    faults.instead(sync, "_touch", touch)
    data = bytes_of(3 * CHUNK_BYTES)
    with Arrival(data.size, chunk_bytes=CHUNK_BYTES) as arrival, ThreadPoolExecutor(1) as pool:
        assert begun.wait(PATIENCE_S)
        taking = pool.submit(take_all, arrival, data, CHUNK_BYTES)
        wait([taking], timeout=0.05)  # it would be over by then if it did not wait for the touch
        go.set()
        taking.result(PATIENCE_S)
    assert (arrival.values == data).all()


def test_leaving_ends_the_thread_whatever_has_arrived() -> None:
    with pytest.raises(ZeroDivisionError), Arrival(20 * CHUNK_BYTES, chunk_bytes=CHUNK_BYTES):
        raise ZeroDivisionError
    assert not [t.name for t in threading.enumerate() if t.name.startswith("pmesh-sync")]
