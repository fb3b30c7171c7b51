"""Functions that run one after the other, in threads, and who is called back when they end."""

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial

import pytest

import pmesh
from pmesh.client.calls.queue import Handle, Line
from tests.worlds.faults import Faults
from tests.worlds.system import forked

PATIENCE_S = 20.0


@pytest.fixture
def line() -> Iterator[Line]:
    """One that leaves no thread."""
    before = set(threading.enumerate())
    made = Line()
    yield made
    made.end()
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_they_run_in_order_and_one_at_a_time(line: Line) -> None:
    ran, at_work = list[int](), threading.Lock()

    def run(number: int) -> int:
        assert at_work.acquire(blocking=False)
        ran.append(number)
        at_work.release()
        return number

    futures = [line.submit(partial(run, number)) for number in range(200)]
    for future in futures[::3]:
        future.add_done_callback(lambda _: None)
    assert [future.result(PATIENCE_S) for future in futures] == ran == list(range(200))
    assert line.idle


@pytest.mark.parametrize("when", ["submitted by it", "submitted before it"])
def test_who_is_called_back_may_wait_for_another(line: Line, when: str) -> None:
    may_run, got = threading.Event(), Future[str]()

    def call_back(_: Future[bool]) -> None:
        other = behind if when == "submitted before it" else line.submit(lambda: "ran")
        got.set_result(other.result(PATIENCE_S))

    first = line.submit(lambda: may_run.wait(PATIENCE_S))
    first.add_done_callback(call_back)
    behind = line.submit(lambda: "ran")
    may_run.set()
    assert got.result(PATIENCE_S) == "ran"


def test_who_asks_to_be_called_back_late_is_called_at_once(line: Line) -> None:
    future = line.submit(lambda: 1)
    assert future.result(PATIENCE_S) == 1
    called = list[int]()
    future.add_done_callback(lambda done: called.append(done.result()))
    assert called == [1]


def test_without_a_thread_the_caller_is_told_and_the_next_one_runs(
    line: Line, faults: Faults
) -> None:
    with (
        faults.fail(threading.Thread, "start", RuntimeError("can't start new thread")),
        pytest.raises(RuntimeError, match="can't start new thread"),
    ):
        line.submit(lambda: 1)
    assert line.idle
    assert line.submit(lambda: 2).result(PATIENCE_S) == 2


def test_without_a_second_thread_what_waits_runs_after_the_call_back(
    line: Line, faults: Faults
) -> None:
    may_run, order = threading.Event(), list[str]()
    first = line.submit(lambda: may_run.wait(PATIENCE_S))
    first.add_done_callback(lambda _: order.append("called back"))
    second = line.submit(lambda: order.append("ran"))

    faults.fail(threading.Thread, "start", RuntimeError("can't start new thread"))
    may_run.set()
    second.result(PATIENCE_S)
    assert order == ["called back", "ran"]


def test_a_line_that_has_ended_does_what_waits_and_what_comes_late(line: Line) -> None:
    may_run = threading.Event()
    futures: list[Future[object]] = [line.submit(lambda: may_run.wait(PATIENCE_S))]
    futures[0].add_done_callback(lambda _: None)  # so a second thread comes
    futures += [line.submit(lambda: 1), line.submit(lambda: 2)]
    line.end()
    may_run.set()
    assert [future.result(PATIENCE_S) for future in futures] == [True, 1, 2]
    assert line.submit(threading.current_thread).result(0) is threading.current_thread()


def test_a_forked_child_does_not_wait_for_threads_that_it_has_not(line: Line) -> None:
    may_run = threading.Event()
    future = line.submit(lambda: may_run.wait(PATIENCE_S))
    handle = Handle(future.done, future.result)

    with forked():
        assert handle.done()
        with pytest.raises(pmesh.MeshClosed, match="forked"):
            handle.wait()
        with pytest.raises(pmesh.MeshClosed, match="forked"):
            line.submit(lambda: 1)
    assert not handle.done()
    may_run.set()
    assert handle.wait(PATIENCE_S)


def test_many_threads_may_begin_lines_at_the_same_time() -> None:
    """What an ended line has left is removed by whichever comes first."""
    errors = list[Exception]()

    def begin_some() -> None:
        try:
            for _ in range(1000):
                Line()
        except Exception as e:  # noqa: BLE001 - a thread would only print it
            errors.append(e)

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        beginners = [threading.Thread(target=begin_some) for _ in range(4)]
        for each in beginners:
            each.start()
        for each in beginners:
            each.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert errors == []
