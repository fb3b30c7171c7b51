# ruff: noqa: ANN401 - values of any kind, and libraries that may be absent
"""Calls as a script makes them, among ranks in threads."""

import contextlib
import functools
import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import pmesh
from pmesh.errors import (
    HistorySuperseded,
    MeshClosed,
    OpTimedOut,
    RankLost,
    RemoteCallFailed,
    TooManyCalls,
    UnsupportedArray,
    UsageError,
)
from pmesh.net.sessions.arena_pools import MAX_LENT
from pmesh.rpc.client.calls import RemoteObject
from pmesh.rpc.client.carrier import BORROWED_BYTES
from pmesh.testing import SimulatedMesh
from tests.rpc.ranks import LARGE, Gate, echoing, endpoint_of, pair
from tests.worlds.scripted_agent import PATIENCE_S
from tests.worlds.watched_agent import WatchedAgent, run_ranks


def call_echo(*args: Any, **named: Any) -> Any:
    return pair(lambda mesh: mesh.rpc.call(1, "echo", *args, **named), echoing)[0]


# --- values


def test_plain_values_and_arrays_come_as_they_were_sent() -> None:
    plain = [None, True, -(2**70), 1.5, "é", b"\0", (1, [2]), {"a": 1, 2: ()}]
    (got, x, large), named = call_echo(
        plain, np.array([[1], [2]], np.float32), LARGE, seed=LARGE[:0]
    )
    assert got == plain
    assert (x.dtype, x.tolist()) == (np.float32, [[1], [2]])
    assert np.array_equal(large, LARGE)
    assert (named["seed"].dtype, named["seed"].shape) == (np.int64, (0,))
    x += 1  # whoever gets an array may change it
    large += 1


def test_a_rank_that_copies_nothing_gets_large_arrays_read_only_and_may_keep_some() -> None:
    size, many = BORROWED_BYTES // 8, MAX_LENT + 2
    kept = list[Any]()

    def keep(i: int, x: Any) -> Any:
        kept.append(x)
        return x if i % 2 else x[:-1]

    def callee(mesh: pmesh.Mesh) -> None:
        mesh.rpc.serve(threads=1, copy=False)
        mesh.rpc.register(keep)
        mesh.barrier()

    def caller(mesh: pmesh.Mesh) -> Any:
        mesh.barrier()
        results = [mesh.rpc.call(1, "keep", i, np.full(size, float(i))) for i in range(many)]
        mesh.rpc.serve(copy=False)
        return results, mesh.rpc.call(1, "keep", 1, np.ones(size))

    (results, borrowed), _ = pair(caller, callee)
    assert [x.flags.writeable for x in kept] == [False] * MAX_LENT + [True] * 3
    assert all(np.all(x == i) for i, x in enumerate(kept[:-1]))  # nothing was written over them
    assert all(x.flags.writeable and np.all(x == i) for i, x in enumerate(results))
    assert not borrowed.flags.writeable
    assert np.all(borrowed == 1)


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("library", ["mlx", "torch"])
def test_arrays_keep_their_library(library: str, *, copy: bool) -> None:
    module = pytest.importorskip("mlx.core" if library == "mlx" else library)

    def one(mesh: pmesh.Mesh) -> Any:
        mesh.rpc.serve(copy=copy)
        (small, large), _ = mesh.rpc.call(1, "echo", *map(module.ones, (3, BORROWED_BYTES)))
        large += 1
        return type(small), small.tolist(), large.shape

    found, _ = pair(one, echoing)
    assert found[0] is type(module.ones(3))
    assert found[1:] == ([1, 1, 1], (BORROWED_BYTES,))


def test_a_rank_calls_itself_and_gets_copies() -> None:
    def program(mesh: pmesh.Mesh) -> None:
        echoing(mesh)
        x, large = np.zeros(3), LARGE.copy()
        (got, other), _ = mesh.rpc.call(0, "echo", x, large)
        got += 1
        other += 1
        assert not x.any()
        assert np.array_equal(large, LARGE)
        with pytest.raises(RemoteCallFailed, match="TypeError"):
            mesh.rpc.call(0, "int", 1, 2, 3)

    def register(mesh: pmesh.Mesh) -> None:
        mesh.rpc.register(int, name="int")
        program(mesh)

    SimulatedMesh(1).run(register)


# --- errors


def test_an_exception_comes_back_with_its_class_message_and_traceback() -> None:
    def callee(mesh: pmesh.Mesh) -> None:
        @mesh.rpc.register(name="fail")
        def function() -> None:
            raise KeyError("no \x1b[2J")

        @mesh.rpc.register
        def leave() -> None:
            raise SystemExit(3)

        @mesh.rpc.register
        def odd() -> object:
            return object()

    def caller(mesh: pmesh.Mesh) -> None:
        with pytest.raises(RemoteCallFailed, match=r"fail on rank 1 \(simulated\)") as caught:
            mesh.rpc.call(1, "fail")
        error = caught.value
        assert (error.kind, error.reason) == ("KeyError", "'no \\x1b[2J'")
        assert "raise KeyError(" in error.remote_traceback
        assert "serving.py" not in error.remote_traceback
        assert error.__notes__ == [error.remote_traceback]
        with pytest.raises(RemoteCallFailed, match="SystemExit: 3"):
            mesh.rpc.call(1, "leave")
        with pytest.raises(
            RemoteCallFailed, match="UnsupportedArray: a value of type object can't be"
        ):
            mesh.rpc.call(1, "odd")

    pair(caller, callee)


def test_what_another_machine_has_written_is_printable() -> None:
    error = RemoteCallFailed("a\x1b", kind="b\n", reason="c\r", remote_traceback="d\x07\ne")
    assert (str(error), error.kind, error.reason) == ("a�", "b ", "c�")
    assert error.remote_traceback == "d�\ne"


def test_bad_calls_are_named_before_anything_is_sent() -> None:
    called = list[object]()

    def callee(mesh: pmesh.Mesh) -> None:
        mesh.rpc.register(called.append, name="note")

    def caller(mesh: pmesh.Mesh) -> None:
        rpc = mesh.rpc
        wrong_rank: Any = "1"
        with pytest.raises(
            UnsupportedArray, match=r"argument seed\.x: a value of type object can't be sent"
        ):
            rpc.call(1, "note", seed={"x": object()})
        with pytest.raises(UnsupportedArray, match="argument 0: a value of type function can't be"):
            rpc.call_async(1, "note", callee)
        with pytest.raises(UsageError, match="there is no rank 2: there are ranks 0 to 1"):
            rpc.call(2, "note", 1)
        with pytest.raises(UsageError, match="a rank is an int, not '1'"):
            rpc.call(wrong_rank, "note", 1)
        by_itself: Any = called.append
        with pytest.raises(UsageError, match=r"call\(1, 'append'\), not by a builtin"):
            rpc.call(1, by_itself, 1)
        with pytest.raises(UnsupportedArray, match=r"item 1: x: a value of type object can't"):
            rpc.map("note", [{"x": 1}, {"x": object()}])
        with pytest.raises(UsageError, match="there is no rank -1"):
            rpc.map("note", [1], ranks=[-1])
        with pytest.raises(UsageError, match="different ranks, at least one"):
            rpc.map("note", [1], ranks=[1, 1])
        with pytest.raises(UsageError, match="timeout_s is more than 0"):
            rpc.call(1, "note", 1, timeout_s=0)
        with pytest.raises(UsageError, match="a function's name has 1 to 4096 characters"):
            rpc.call(1, "")
        with pytest.raises(UsageError, match="at least 1 thread, and at least 0 calls"):
            rpc.serve(threads=0)
        number: Any = 3
        for name in ("", "three"):
            with pytest.raises(UsageError, match="a int can't be called"):
                rpc.register(number, name=name)
        with pytest.raises(UsageError, match="a name is text, not 3: register it as in"):
            rpc.register(len, name=number)
        with pytest.raises(UsageError, match=r"partial\(.*\) has no name of its own"):
            rpc.register(functools.partial(len))
        for register_or_call in (
            lambda: rpc.register(len, name="\udcff"),
            lambda: rpc.call(1, "\udcff"),
        ):
            with pytest.raises(
                UsageError, match=r"a function's name is text in Unicode, not '.udcff'"
            ):
                register_or_call()
        with pytest.raises(UsageError, match="at most 4096 arrays, not 4097"):
            rpc.call(1, "note", [np.zeros(1)] * 4097)
        with pytest.raises(UsageError, match="more than the 67108864 that a call takes"):
            rpc.call(1, "note", "x" * (64 * 1024 * 1024))
        assert rpc.map("note", []) == []

    pair(caller, callee)
    assert called == []


def test_only_what_was_registered_can_be_called() -> None:
    def caller(mesh: pmesh.Mesh) -> None:
        with pytest.raises(UsageError, match=r"no such function \(registered are: echo\)"):
            mesh.rpc.call(1, "exec", "print()")

    pair(caller, echoing)


def test_a_rank_that_serves_many_functions_says_that_one_is_missing() -> None:
    def callee(mesh: pmesh.Mesh) -> None:
        for number in range(200):
            mesh.rpc.register(len, name=f"evaluate_the_policy_of_round_{number:05}")
        mesh.barrier()

    def caller(mesh: pmesh.Mesh) -> None:
        mesh.barrier()
        with pytest.raises(UsageError, match=r"of_round_00000, .*…\); put @mesh.rpc.register"):
            mesh.rpc.call(1, "evaluate")

    pair(caller, callee)


# --- time-outs, cancellation, room


def test_a_rank_says_when_it_is_full_and_takes_calls_again_later() -> None:
    gate = Gate()

    def callee(mesh: pmesh.Mesh) -> None:
        mesh.rpc.serve(threads=1, waiting=1)
        gate.register(mesh)

    def caller(mesh: pmesh.Mesh) -> None:
        runs = mesh.rpc.call_async(1, "wait", 1)
        assert gate.entered.acquire(timeout=PATIENCE_S)
        waits = mesh.rpc.call_async(1, "wait", 2)
        with pytest.raises(TooManyCalls, match=r"rank 1 .*: it runs 1 calls, and 1 wait"):
            mesh.rpc.call(1, "wait", LARGE)
        gate.may_go.set()
        assert (runs.wait(), waits.wait()) == (1, 2)
        assert mesh.rpc.call(1, "wait", 3) == 3

    pair(caller, callee)


@pytest.mark.parametrize("how", ["time-out", "cancel"])
def test_a_call_that_was_given_up_does_not_begin_and_one_that_runs_can_know(how: str) -> None:
    gate = Gate()

    def callee(mesh: pmesh.Mesh) -> None:
        mesh.rpc.serve(threads=1, waiting=1)
        gate.register(mesh)

    def caller(mesh: pmesh.Mesh) -> None:
        rpc = mesh.rpc
        runs = rpc.call_async(1, "wait", "runs")
        assert gate.entered.acquire(timeout=PATIENCE_S)
        if how == "time-out":
            text = r"no result of wait on rank 1 .*: it took more than 0\.01 s"
            with pytest.raises(OpTimedOut, match=text):
                rpc.call(1, "wait", "never", timeout_s=0.01)
        else:
            waits = rpc.call_async(1, "wait", "never")
            waits.cancel()
            waits.cancel()
            with pytest.raises(OpTimedOut, match="it was cancelled"):
                waits.wait()
        with pytest.raises(OpTimedOut, match="still under way"):
            runs.wait(timeout_s=0)
        runs.cancel()
        last = rpc.call_async(1, "wait", "last")
        with pytest.raises(TooManyCalls):  # so the callee has heard of all that came before
            rpc.call(1, "wait", "too many")
        gate.may_go.set()
        assert last.wait() == "last"
        assert not rpc.cancelled()

    pair(caller, callee)
    assert gate.ran == ["runs", "last"]
    assert gate.was_cancelled.is_set()


def test_a_call_ends_when_its_time_is_over_though_its_rank_does_not_serve() -> None:
    def caller(mesh: pmesh.Mesh) -> None:
        with pytest.raises(OpTimedOut, match=r"it took more than 0\.05 s"):
            mesh.rpc.call_async(1, "wait", LARGE, timeout_s=0.05).wait()

    pair(caller, lambda _: None)


def test_closing_the_mesh_ends_its_calls_and_threads() -> None:
    gate = Gate()
    failures = list[str]()

    def callee(mesh: pmesh.Mesh) -> None:
        gate.register(mesh)
        mesh.recv(0)

    def caller(mesh: pmesh.Mesh) -> None:
        call = mesh.rpc.call_async(1, "wait")
        assert gate.entered.acquire(timeout=PATIENCE_S)
        mesh.rpc.close()
        with pytest.raises(MeshClosed) as caught:
            call.wait()
        failures.append(str(caught.value))
        gate.may_go.set()
        with pytest.raises(MeshClosed, match="it was closed"):
            mesh.rpc.call(1, "wait")
        mesh.send(np.zeros(1), 1)

    pair(caller, callee)
    assert len(failures) == 1
    threads = [each for each in threading.enumerate() if each.name.startswith("pmesh-rpc")]
    for each in threads:
        each.join(PATIENCE_S)
        assert not each.is_alive()


def test_any_threads_may_call_at_the_same_time() -> None:
    def program(mesh: pmesh.Mesh) -> None:
        mesh.rpc.register(abs)
        with ThreadPoolExecutor(8) as pool:
            calls = pool.map(lambda n: [mesh.rpc.call(0, "abs", -n) for _ in range(50)], range(8))
            assert list(calls) == [[n] * 50 for n in range(8)]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # s: threads take turns between any two instructions
    try:
        SimulatedMesh(1).run(program)
    finally:
        sys.setswitchinterval(before)


# --- newcomers, and lost ranks


def test_a_newcomer_may_call_every_rank_as_soon_as_it_has_entered() -> None:
    simulated = SimulatedMesh(2, on_loss="continue")
    found = list[object]()

    def enter() -> None:
        with simulated.connect() as mesh:
            mesh.sync(None)
            for rank in (1, 0):  # it had no rank yet when 1 was the last one
                try:
                    found.append(mesh.rpc.call(rank, "echo", rank))
                except RankLost as e:
                    found.append(e)
            mesh.barrier()

    def program(mesh: pmesh.Mesh) -> None:
        echoing(mesh)
        if mesh.rank == 0:
            newcomer.start()
        while mesh.size < 3:
            mesh.sync(None)
        mesh.barrier()

    newcomer = threading.Thread(target=enter)
    simulated.run(program)
    newcomer.join()
    assert found == [((1,), {}), ((0,), {})]


def test_a_lost_rank_fails_its_calls_at_once_and_frees_what_it_held() -> None:
    gate, holds, freed = Gate(), threading.Event(), threading.Event()
    simulated = SimulatedMesh(3, on_loss="continue")

    class TellsWhenFreed:
        remote_methods = ("nothing",)

        def __del__(self) -> None:
            freed.set()

    def program(mesh: pmesh.Mesh) -> None:
        rank = int(mesh.rank)
        gate.register(mesh)
        mesh.rpc.register(TellsWhenFreed)
        mesh.barrier()
        if rank == 0:
            calls = [mesh.rpc.call_async(1, "wait", i, timeout_s=3600) for i in range(2)]
            assert gate.entered.acquire(timeout=PATIENCE_S)
            assert holds.wait(PATIENCE_S)
            simulated.lose(1)
            for call in calls:
                with pytest.raises(RankLost):
                    call.wait(PATIENCE_S)
            with pytest.raises(RankLost):
                mesh.rpc.call(1, "wait")
            gate.may_go.set()
            assert mesh.rpc.call(0, "wait", "here") == "here"
        elif rank == 1:
            held = mesh.rpc.remote(2, "TellsWhenFreed")
            holds.set()
            assert gate.may_go.wait(PATIENCE_S)
            del held
        else:
            assert freed.wait(PATIENCE_S)

    simulated.run(program)


def test_a_rank_that_was_cut_off_serves_again_once_it_is_back(agent: WatchedAgent) -> None:
    gate = Gate()
    freed = threading.Event()

    def program(mesh: pmesh.Mesh) -> Any:
        rank = int(mesh.rank)
        gate.register(mesh)
        mesh.rpc.register(lambda: Counter(threading.Event()), name="make")
        mesh.rpc.register(lambda: Counter(freed), name="own")
        mesh.sync(0)
        assert mesh.last_op is not None
        counter = mesh.rpc.remote(1 - rank, "make")
        left, cut_off = mesh.last_op.op + 1, None
        if rank == 0:
            agent.left_behind = {left: 1}
            call = mesh.rpc.call_async(1, "wait", "before", timeout_s=3600)
            mesh.barrier()
            with pytest.raises(RankLost):
                call.wait(PATIENCE_S)
            gate.may_go.set()
        else:
            assert gate.entered.acquire(timeout=PATIENCE_S)
            call = mesh.rpc.call_async(0, "wait", timeout_s=3600)
            with contextlib.suppress(HistorySuperseded):
                mesh.barrier()
            with pytest.raises(HistorySuperseded) as caught:
                call.wait(PATIENCE_S)
            cut_off = str(caught.value)
            endpoint = endpoint_of(mesh)  # the mesh itself calls nobody now
            endpoint.begin(endpoint.me(), "own", (), {}, 60.0, keeps=True).reference()
        while mesh.sync(0) == 0 and mesh.size < 2:
            pass
        answer = mesh.rpc.call(1 - mesh.rank, "wait", "after")
        with pytest.raises(RankLost):
            counter.call("add")
        assert rank == 0 or freed.wait(PATIENCE_S)  # whom it belonged to is another trainer now
        mesh.barrier()
        return answer, cut_off

    found = run_ranks(agent.home, 2, program)
    assert [answer for answer, _ in found] == ["after", "after"]


# --- objects


class Counter:
    remote_methods = "add"

    def __init__(self, freed: threading.Event) -> None:
        self._freed = freed
        self._count = 0

    def add(self, count: int = 1) -> int:
        self._count += count
        return self._count

    def secret(self) -> None:
        """Not to be called."""

    def __del__(self) -> None:
        self._freed.set()


def test_an_object_stays_and_its_named_methods_can_be_called_until_it_is_let_go() -> None:
    freed = threading.Event()

    def callee(mesh: pmesh.Mesh) -> None:
        mesh.rpc.register(lambda: Counter(freed), name="make")
        mesh.rpc.register(list, name="list")

    def caller(mesh: pmesh.Mesh) -> None:
        with mesh.rpc.remote(1, "make") as counter:
            assert repr(counter) == "<RemoteObject of 'make' on rank 1 (simulated)>"
            assert counter.call("add") == 1
            assert counter.call_async("add", count=4).wait() == 5
            with pytest.raises(UsageError, match=r"Counter.remote_methods has add and not this"):
                counter.call("secret")
            assert not freed.is_set()
        assert freed.wait(PATIENCE_S)
        counter.close()
        with pytest.raises(UsageError, match=r"was let go by close\(\)"):
            counter.call("add")
        freed.clear()
        forgotten = mesh.rpc.remote(1, "make")
        del forgotten
        assert freed.wait(PATIENCE_S)
        with pytest.raises(UsageError, match="its result's class list has no remote_m"):
            mesh.rpc.remote(1, "list")

    pair(caller, callee)


def test_a_failed_call_does_not_keep_the_objects_of_the_function_that_made_it() -> None:
    freed = threading.Event()

    def fail(held: RemoteObject) -> None:
        handle = held.call_async("secret")
        with contextlib.suppress(UsageError):
            handle.wait()
        with contextlib.suppress(UsageError):
            held.call("secret")

    def caller(mesh: pmesh.Mesh) -> None:
        gc.disable()
        try:
            fail(mesh.rpc.remote(1, "make"))
            assert freed.wait(PATIENCE_S)
        finally:
            gc.enable()

    pair(caller, lambda mesh: mesh.rpc.register(lambda: Counter(freed), name="make"))


def test_an_object_that_was_let_go_stays_until_the_calls_that_have_begun_have_ended() -> None:
    freed = threading.Event()
    gate = Gate()

    def callee(mesh: pmesh.Mesh) -> None:
        gate.register(mesh)
        mesh.rpc.register(lambda: Counter(freed), name="make")
        mesh.rpc.serve(threads=1, waiting=1)

    def caller(mesh: pmesh.Mesh) -> None:
        counter = mesh.rpc.remote(1, "make")
        waits = mesh.rpc.call_async(1, "wait")
        added = counter.call_async("add", 3)
        counter.close()
        with pytest.raises(TooManyCalls):  # the release has arrived before this call
            mesh.rpc.call(1, "wait")
        gate.may_go.set()
        assert waits.wait() is None
        assert added.wait() == 3
        assert freed.wait(PATIENCE_S)

    pair(caller, callee)


def test_a_rank_holds_objects_of_its_own_too() -> None:
    freed = threading.Event()

    def program(mesh: pmesh.Mesh) -> None:
        mesh.rpc.register(lambda: Counter(freed), name="make")
        counter = mesh.rpc.remote(0, "make")
        assert counter.call("add", 2) == 2
        counter.close()
        assert freed.is_set()

    SimulatedMesh(1).run(program)
