"""What a script is told when messages can't be sent or received."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import pmesh
from pmesh.client.session.connection import AgentConnection
from pmesh.core.values import Verdict
from pmesh.core.wire.session import Refused
from pmesh.errors import (
    AgentStopped,
    HistorySuperseded,
    MeshClosed,
    OpTimedOut,
    RankLost,
    UnsupportedArray,
    UsageError,
)
from pmesh.ids import JobName, TrainerId
from pmesh.p2p.client import session as session_module
from pmesh.p2p.client.calls import ANY, PointToPoint
from pmesh.p2p.client.session import P2PSession, attach
from pmesh.p2p.wire import MAX_TAG, Attached, MessageSent, ReceiveMessage, SendMessage
from pmesh.store.wire import Get
from tests.worlds.faults import Faults, InjectedFault, Real
from tests.worlds.scripted_agent import PATIENCE_S, ScriptedAgent, replies
from tests.worlds.system import forked
from tests.worlds.watched_agent import LOST, WatchedAgent, pair, run, run_ranks


def test_what_can_t_be_is_said_at_once(agent: WatchedAgent) -> None:
    def wrong(m: PointToPoint) -> None:
        x = np.zeros(3)
        other, word = 1 - m.rank, cast("Any", "1")
        calls: list[tuple[Callable[[], object], str]] = [
            (lambda: m.send(x, 2), "to=2: there is no such rank, there are ranks 0 to 1"),
            (lambda: m.send(x, -1), "to=-1: there is no such rank"),
            (lambda: m.sendrecv(x, 2, other), "to=2: there is no such rank"),  # and takes nothing
            (lambda: m.send(x, word), "to='1': a rank is an int"),
            (lambda: m.recv(-2), "from_=-2: there is no such rank"),
            (lambda: m.send(x, m.rank), "is this rank: nobody sends messages to itself"),
            (lambda: m.recv(m.rank), "is this rank: nobody sends messages to itself"),
            (lambda: m.send(x, other, tag=-1), f"a tag is from 0 to {MAX_TAG}, not -1"),
            (lambda: m.recv(other, tag=2**31), "a tag is from 0 to 2147483647"),
            (lambda: m.recv(other, timeout_s=0), "timeout_s is more than 0, not 0"),
        ]
        for call, message in calls:
            with pytest.raises(UsageError, match=message):
                call()
        for thing in ({"a": x}, 3, np.array(["text"]), np.array([object()])):
            with pytest.raises(UnsupportedArray):
                m.send(thing, other)
        assert not agent.attached

    pair(agent, wrong, wrong)


def test_a_rank_alone_has_nobody_to_talk_to(agent: WatchedAgent) -> None:
    def alone(m: PointToPoint) -> None:
        calls: list[Callable[[], object]] = [
            lambda: m.send(np.zeros(1), 0),
            lambda: m.recv(0),
            lambda: m.recv(ANY),
        ]
        for call in calls:
            with pytest.raises(UsageError, match="there is no other rank"):
                call()

    run(agent, 1, alone)


def test_recv_like_names_both_shapes_and_dtypes(agent: WatchedAgent) -> None:
    def receive(m: PointToPoint) -> str:
        with pytest.raises(UsageError) as wrong:
            m.recv_like(np.zeros((4, 2), np.float32), 0, tag=6)
        return str(wrong.value)

    _, text = pair(agent, lambda m: m.send(np.zeros((2, 4)), 1, tag=6), receive)
    assert text == (
        "rank 0 has sent float64 of shape (2, 4) with tag 6, not float32 of shape (4, 2)"
    )


def test_a_dtype_that_the_library_lacks_is_named(agent: WatchedAgent) -> None:
    mx = pytest.importorskip("mlx.core")

    def receive(m: PointToPoint) -> str:
        with pytest.raises(UsageError) as wrong:
            m.recv(0, like=mx.array([1.0]))
        return str(wrong.value)

    _, text = pair(agent, lambda m: m.send(np.zeros(2, np.complex128), 1), receive)
    assert text.startswith("a message of complex128 of shape (2,) can't be an array of mlx here")


def test_the_agent_s_verdict_is_raised_and_the_next_call_goes_on(
    agent: WatchedAgent, caplog: pytest.LogCaptureFixture
) -> None:
    agent.fails = lambda request: (
        LOST if isinstance(request, SendMessage) and request.envelope.tag == 9 else None
    )

    def send(m: PointToPoint) -> None:
        with pytest.raises(RankLost, match="rank 1"):
            m.send(np.zeros(3), 1, tag=9)
        handle = m.send(np.zeros(3), 1, tag=9, async_op=True)
        for _ in range(2):
            with pytest.raises(RankLost):
                handle.wait()
        assert handle.done()
        m.send(np.zeros(3), 1)

    with caplog.at_level(logging.WARNING, "pmesh"):
        pair(agent, send, lambda m: m.recv(0))
    assert "waiting for a message for 10 s, with rank 1 (mac-1)" in caplog.messages


def test_a_timed_out_receive_is_told_from_a_wait_that_was_too_short(agent: WatchedAgent) -> None:
    late = Verdict("OpTimedOut", "no message came")
    agent.fails = lambda request: (
        late if isinstance(request, ReceiveMessage) and request.tag == 9 else None
    )

    def receive(m: PointToPoint) -> None:
        with pytest.raises(OpTimedOut, match="no message came"):
            m.recv(0, tag=9)
        failing = m.recv(0, tag=9, async_op=True)
        with pytest.raises(OpTimedOut, match="no message came"):
            failing.wait(PATIENCE_S)
        handle = m.recv(0, async_op=True)
        with pytest.raises(OpTimedOut, match="still under way"):
            handle.wait(0.01)
        assert not handle.done()
        with pytest.raises(UsageError, match="still under way"):
            handle.result()
        m.send(np.zeros(1), 0)
        assert handle.wait(PATIENCE_S).size == 3

    def send(m: PointToPoint) -> None:
        m.recv(1)
        m.send(np.zeros(3), 1)

    pair(agent, send, receive)


def test_no_memory_for_a_send_fails_it_alone(agent: WatchedAgent) -> None:
    def send(m: PointToPoint) -> None:
        agent.memory = Verdict("UsageError", "no shared memory")
        with pytest.raises(UsageError, match="no shared memory"):
            m.send(np.zeros(3), 1)
        agent.memory = None
        m.send(np.zeros(3), 1)

    pair(agent, send, lambda m: m.recv(0))


def test_who_is_not_let_in_is_told_why(agent: WatchedAgent) -> None:
    agent.refuses = Verdict("HistorySuperseded", "this trainer is not in job 'job'")

    def send(m: PointToPoint) -> None:
        with pytest.raises(HistorySuperseded, match="not in job"):
            m.send(np.zeros(1), 1 - m.rank)

    pair(agent, send, send)


def test_closing_ends_calls_of_other_threads(agent: WatchedAgent) -> None:
    def wait(m: pmesh.Mesh) -> None:
        failures: list[BaseException] = []

        def receive(tag: int) -> None:
            with pytest.raises(MeshClosed) as closed:
                m.recv(1 - m.rank, tag=tag)
            failures.append(closed.value)

        threads = [threading.Thread(target=receive, args=(tag,)) for tag in range(3)]
        handle = m.recv(1 - m.rank, async_op=True)
        for thread in threads:
            thread.start()
        m.close()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert len(failures) == 3
        assert handle.done()
        with pytest.raises(MeshClosed, match="it was closed"):
            handle.wait()

    agent.ignores = lambda _: True
    run_ranks(agent.home, 2, wait)


def interrupted_here(faults: Faults, where: object, call: str) -> InjectedFault:
    """Ctrl-C meets the calls of this thread, and of no other."""
    here = threading.get_ident()

    def run(real: Real, *given: object, **named: object) -> object:
        if threading.get_ident() == here:
            raise KeyboardInterrupt
        return real(*given, **named)

    return faults.around(where, call, run)


def test_an_interrupted_wait_ends_its_connection_and_the_next_call_opens_another(
    agent: WatchedAgent, faults: Faults
) -> None:
    def receive(m: PointToPoint) -> int:
        handle = m.recv(0, async_op=True)
        with (
            interrupted_here(faults, AgentConnection, "receive_within"),
            pytest.raises(KeyboardInterrupt),
        ):
            handle.wait()
        with pytest.raises(MeshClosed, match="KeyboardInterrupt"):
            handle.wait()
        m.send(np.zeros(1), 0)
        return len(agent.attached)

    assert pair(agent, lambda m: m.recv(1), receive)[1] == 3


def test_who_is_interrupted_while_another_reads_ends_the_connection_too(
    agent: WatchedAgent, faults: Faults
) -> None:
    """Its answer would be taken for that of the next receive, or wait for ever to be taken."""

    def receive(m: PointToPoint) -> int:
        lost, other = m.recv(0, async_op=True), m.recv(0, tag=1, async_op=True)
        reading, failures = threading.Event(), list[BaseException]()

        def read(receive_within: Real, *given: object) -> object:
            if threading.current_thread() is thread:
                reading.set()
            return receive_within(*given)

        def wait() -> None:
            with pytest.raises(MeshClosed, match="KeyboardInterrupt") as closed:
                other.wait()
            failures.append(closed.value)

        thread = threading.Thread(target=wait)
        with faults.around(AgentConnection, "receive_within", read):
            thread.start()
            assert reading.wait(PATIENCE_S)
            with (
                interrupted_here(faults, session_module, "wait"),
                pytest.raises(KeyboardInterrupt),
            ):
                lost.wait()
        thread.join(PATIENCE_S)
        assert len(failures) == 1
        with pytest.raises(MeshClosed, match="KeyboardInterrupt"):
            lost.wait()
        m.send(np.zeros(1), 0)
        return len(agent.attached)

    assert pair(agent, lambda m: m.recv(1), receive)[1] == 3


def test_an_answer_that_comes_as_its_thread_begins_to_wait_is_not_missed(
    agent: WatchedAgent, faults: Faults
) -> None:
    looked, arrived = threading.Event(), threading.Event()

    def late(read_some: Real, session: P2PSession, timeout_s: float | None, call: int) -> object:
        if threading.current_thread().name == "late" and not looked.is_set():
            looked.set()
            assert arrived.wait(PATIENCE_S)
        return read_some(session, timeout_s, call)

    faults.around(P2PSession, "_read_some", late)

    def receive(m: PointToPoint) -> int:
        first, second = m.recv(0, tag=1, async_op=True), m.recv(0, tag=2, async_op=True)
        got = list[int]()
        thread = threading.Thread(target=lambda: got.append(int(first.wait()[0])), name="late")
        thread.start()
        assert looked.wait(PATIENCE_S)
        m.send(np.zeros(1), 0)
        second.wait()  # reads the answer to the first, too
        assert first.done()
        arrived.set()
        thread.join(PATIENCE_S)
        return got[0]

    def send(m: PointToPoint) -> None:
        m.recv(1)
        m.send(np.array([1]), 1, tag=1)
        m.send(np.array([2]), 1, tag=2)

    assert pair(agent, send, receive)[1] == 1


def test_garbage_from_the_agent_is_named(agent: WatchedAgent) -> None:
    def send(m: PointToPoint) -> None:
        handle = m.recv(1 - m.rank, async_op=True)
        mine = next(c for c in agent.attached if int(c.me) == int(m.rank))
        mine.say(b"\x00\x00\x00\x02hi")
        with pytest.raises(pmesh.AgentStopped, match="sent what no agent sends"):
            handle.wait()

    agent.ignores = lambda _: True
    pair(agent, send, send)


def test_an_answer_to_another_kind_of_call_is_named(agent: WatchedAgent) -> None:
    def receive(m: PointToPoint) -> None:
        handle = m.recv(1 - m.rank, async_op=True)
        mine = next(c for c in agent.attached if int(c.me) == int(m.rank))
        mine.say(MessageSent(1))
        with pytest.raises(pmesh.PmeshError):
            handle.wait()

    agent.ignores = lambda _: True
    pair(agent, receive, receive)


def test_a_forked_child_has_no_part_in_it(agent: WatchedAgent) -> None:
    done = threading.Event()

    def send(m: PointToPoint) -> None:
        with forked(), pytest.raises(MeshClosed, match="forked"):
            m.send(np.zeros(1), 1, timeout_s=1.0)
        done.set()

    pair(agent, send, lambda _: done.wait(PATIENCE_S))


@pytest.mark.parametrize("is_asked", [False, True], ids=["before the call", "in the call"])
def test_what_the_agent_said_last_is_the_error_of_all_calls(
    tmp_path: Path, *, is_asked: bool
) -> None:
    why = "it ended with an error inside pmesh; the agent's log has its traceback"
    last_words = Refused(Verdict("AgentStopped", why))
    steps = (
        [replies(Attached()), replies(last_words)]
        if is_asked
        else [replies(Attached(), last_words)]
    )
    with ScriptedAgent(tmp_path, *steps) as scripted:
        session = attach(tmp_path, JobName("job"), TrainerId(0))
        if not is_asked:
            scripted.wait_until_closed()
        for _ in range(2):
            with pytest.raises(AgentStopped, match=f"^{why}$"):
                session.ask_store(Get("key"), 10.0)
