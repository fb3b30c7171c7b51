# ruff: noqa: ANN401 - modules and arrays of libraries that may be absent
"""Messages between two ranks, as a script sends and receives them."""

import threading
from typing import Any

import numpy as np
import pytest

import pmesh
from pmesh.p2p.client import sends as sends_module
from pmesh.p2p.client import session as session_module
from pmesh.p2p.client.calls import ANY, PointToPoint
from tests.worlds.faults import Faults
from tests.worlds.scripted_agent import PATIENCE_S
from tests.worlds.watched_agent import WatchedAgent, pair, run, run_ranks

# --- arrays


@pytest.mark.parametrize(
    "name",
    ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool",
     "complex64"],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 2)])
def test_an_array_comes_as_it_was_sent(
    agent: WatchedAgent, name: str, shape: tuple[int, ...]
) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    x = np.arange(6)[: int(np.prod(shape))].reshape(shape).astype(dtype)

    _, got = pair(agent, lambda m: m.send(x, 1), lambda m: m.recv(0))

    assert (got.dtype, got.shape, got.tobytes()) == (dtype, shape, x.tobytes())


def test_an_array_that_does_not_lie_in_one_piece_comes_in_order(agent: WatchedAgent) -> None:
    x = np.arange(24.0).reshape(4, 6)[::-2, 1::2]

    _, got = pair(agent, lambda m: m.send(x, 1), lambda m: m.recv(0))

    np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize("library", ["mlx", "torch"])
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int64", "bool"])
def test_libraries_may_differ(agent: WatchedAgent, library: str, name: str) -> None:
    module = pytest.importorskip("mlx.core" if library == "mlx" else library)
    dtype = getattr(module, "bool_" if library == "mlx" and name == "bool" else name)

    def array_of(values: list[int]) -> Any:
        return (
            module.array(values).astype(dtype)
            if library == "mlx"
            else module.tensor(values, dtype=dtype)
        )

    def there_and_back(m: PointToPoint) -> Any:
        x = array_of([0, 1, 3])
        m.send(x, 1)
        return x.tolist(), m.recv_like(x, 1).tolist(), m.recv(1, like=x).dtype == dtype

    def as_numpy(m: PointToPoint) -> str:
        got = m.recv(0)
        m.send(got, 0)
        m.send(got, 0)
        return got.dtype.name

    (sent, got, same), dtype_there = pair(agent, there_and_back, as_numpy)
    assert got == sent
    assert same
    assert dtype_there == name


def test_what_is_received_is_the_receiver_s_own(agent: WatchedAgent) -> None:
    def receive(m: PointToPoint) -> list[float]:
        arrays = [m.recv(0) for _ in range(5)]
        for array in arrays:
            np.add(array, 1, out=array)
        return [float(array[0]) for array in arrays]

    def send(m: PointToPoint) -> None:
        for number in range(5):
            x = np.full(1000, float(number))
            m.send(x, 1)
            assert x[0] == number

    _, got = pair(agent, send, receive)
    assert got == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_an_array_that_was_sent_async_may_be_changed_at_once(agent: WatchedAgent) -> None:
    sent = threading.Event()

    def send(m: PointToPoint) -> None:
        x = np.zeros(10)
        handle = m.send(x, 1, async_op=True)
        x[:] = 7
        sent.set()
        assert handle.wait() is None

    def receive(m: PointToPoint) -> float:
        sent.wait(PATIENCE_S)
        return float(m.recv(0).max())

    assert pair(agent, send, receive)[1] == 0.0


# --- who and in which order


def test_sendrecv_goes_round_a_ring(agent: WatchedAgent) -> None:
    def shift(m: PointToPoint) -> int:
        return int(m.sendrecv(np.array([m.rank]), (m.rank + 1) % 3, (m.rank - 1) % 3)[0])

    assert run(agent, 3, shift) == [2, 0, 1]


def test_any_takes_from_all_others_and_says_from_whom(agent: WatchedAgent) -> None:
    def receive(m: PointToPoint) -> dict[int, Any]:
        assert m.last_source is None
        got: dict[int, Any] = {}
        for _ in range(2):
            array = m.recv(ANY)
            assert m.last_source is not None
            got[int(m.last_source)] = int(array[0])
        return got

    def program(m: PointToPoint) -> Any:
        return receive(m) if m.rank == 0 else m.send(np.array([10 * m.rank]), 0)

    assert run(agent, 3, program)[0] == {1: 10, 2: 20}


def test_many_calls_are_under_way_at_once_and_waited_for_in_any_order(agent: WatchedAgent) -> None:
    def send(m: PointToPoint) -> None:
        handles = [m.send(np.array([k]), 1, tag=k % 3, async_op=True) for k in range(12)]
        for handle in reversed(handles):
            handle.wait()
            assert handle.done()

    def receive(m: PointToPoint) -> list[int]:
        handles = [m.recv(0, tag=k % 3, async_op=True) for k in range(12)]
        last = [int(handle.wait()[0]) for handle in reversed(handles)]
        assert [int(handle.result()[0]) for handle in handles] == last[::-1]
        return last[::-1]

    assert pair(agent, send, receive)[1] == list(range(12))


def test_several_threads_wait_on_one_connection(agent: WatchedAgent) -> None:
    def receive(m: PointToPoint) -> dict[int, int]:
        got: dict[int, int] = {}

        def one(tag: int) -> None:
            got[tag] = int(m.recv(0, tag=tag)[0])
            assert m.last_source == 0

        threads = [threading.Thread(target=one, args=(tag,)) for tag in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        return got

    def send(m: PointToPoint) -> None:
        for tag in (7, 1, 0, 6, 3, 4, 2, 5):
            m.send(np.array([100 + tag]), 1, tag=tag)

    assert pair(agent, send, receive)[1] == {tag: 100 + tag for tag in range(8)}
    assert len(agent.attached) == 2


def test_messages_go_while_a_collective_waits(agent: WatchedAgent) -> None:
    def ready(mesh: pmesh.Mesh) -> float:
        if mesh.rank == 0:
            total: list[Any] = []
            thread = threading.Thread(target=lambda: total.append(mesh.all_reduce(np.ones(1))))
            thread.start()
            mesh.send(np.zeros(3), 1)
            thread.join(PATIENCE_S)
            return float(total[0][0])
        mesh.recv(0)  # before the op that rank 0 is in
        return float(mesh.all_reduce(np.ones(1))[0])

    assert run_ranks(agent.home, 2, ready) == [2.0, 2.0]


def test_arenas_for_sends_are_used_again_and_few_are_kept(agent: WatchedAgent) -> None:
    begun = threading.Event()

    def send(m: PointToPoint) -> None:
        for _ in range(10):
            m.send(np.zeros(1000), 1)
        assert agent.inputs_wanted == [8000]
        handles = [m.send(np.zeros(1000 * k), 1, async_op=True) for k in range(1, 8)]
        begun.set()
        for handle in handles:
            handle.wait()
        m.send(np.zeros(7000), 1)
        assert len(agent.inputs_wanted) == 7

    def receive(m: PointToPoint) -> None:
        for i in range(18):
            assert i < 10 or begun.wait(PATIENCE_S)
            m.recv(0)

    pair(agent, send, receive)
    sender = next(c for c in agent.attached if c.inputs)
    assert len(sender.inputs) == 4


@pytest.mark.parametrize("room", [None, 8])
def test_both_ranks_may_send_many_messages_before_they_receive(
    agent: WatchedAgent, faults: Faults, room: int | None
) -> None:
    """More than a session has arenas for what comes; with little room, others wait their turn."""
    if room is not None:
        faults.limit(sends_module, "MAX_SENDS", room)

    def exchange(m: PointToPoint) -> list[float]:
        other = 1 - m.rank
        sends = [m.send(np.full(1, float(i)), other, async_op=True) for i in range(80)]
        receives = [m.recv(other, async_op=True) for _ in range(80)]
        for handle in sends:
            handle.wait(PATIENCE_S)
        return [float(handle.wait(PATIENCE_S)[0]) for handle in receives]

    assert pair(agent, exchange, exchange) == [[float(i) for i in range(80)]] * 2


def test_a_rank_that_receives_nothing_stops_no_message_to_another(
    agent: WatchedAgent, faults: Faults
) -> None:
    faults.limit(sends_module, "MAX_SENDS", 6)
    late = threading.Event()

    def program(m: pmesh.Mesh) -> list[float]:
        if m.rank == 0:
            sends = [
                m.send(np.full(1, float(i)), to, async_op=True) for to in (1, 2) for i in range(20)
            ]
            for handle in reversed(sends):
                handle.wait(PATIENCE_S)
            return []
        assert m.rank == 2 or late.wait(PATIENCE_S)
        got = [float(m.recv(0)[0]) for _ in range(20)]
        late.set()
        return got

    numbers = [float(i) for i in range(20)]
    assert run(agent, 3, program) == [[], numbers, numbers]


def test_beyond_so_many_calls_the_next_one_says_so_and_those_that_nobody_waits_for_do_not_count(
    agent: WatchedAgent, faults: Faults
) -> None:
    faults.limit(session_module, "MAX_MESSAGES", 8)
    refused = threading.Event()

    def send(m: PointToPoint) -> None:
        handles = [m.send(np.zeros(3), 1, async_op=True) for _ in range(8)]
        with pytest.raises(pmesh.UsageError, match="at most 8 sends and receives at a time"):
            m.send(np.zeros(3), 1)
        refused.set()
        for handle in handles:
            handle.wait()
        for _ in range(12):
            m.send(np.zeros(3), 1, async_op=True)  # nobody holds its handle
            m.recv(1)

    def receive(m: PointToPoint) -> None:
        assert refused.wait(PATIENCE_S)
        for i in range(20):
            m.recv(0)
            if i >= 8:
                m.send(np.zeros(1), 0)

    pair(agent, send, receive)
