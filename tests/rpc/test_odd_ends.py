# ruff: noqa: ANN401 - values of any kind
"""What does not happen between honest ranks that have memory."""

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

import pmesh
from pmesh.errors import (
    MeshClosed,
    ProtocolError,
    RankLost,
    RemoteCallFailed,
    UsageError,
)
from pmesh.ids import TrainerId
from pmesh.rpc.client.carrier import Carrier
from pmesh.rpc.client.serving import Serving
from pmesh.rpc.client.values import Arriving, pack, unpack_arguments_untrusted
from pmesh.rpc.wire import AnyFrame, Apart, Failure, Kept, Release, Request, Result, Value
from pmesh.testing import SimulatedMesh
from tests.rpc.ranks import LARGE, Gate, echoing, endpoint_of, pair
from tests.worlds.faults import Faults, Real
from tests.worlds.kept import kept
from tests.worlds.system import forked


def test_answers_to_other_questions_or_of_other_ranks_are_not_taken() -> None:
    gate = Gate()

    def caller(mesh: pmesh.Mesh) -> None:
        endpoint, peer = endpoint_of(mesh), mesh.trainers[1]
        calls = [mesh.rpc.call_async(1, "wait", i) for i in range(2)]
        endpoint.received(TrainerId(10**6), Result(0, pack("a lie", None).value))
        endpoint.received(peer, Kept(0, 5))
        with pytest.raises(ProtocolError, match="without a value"):
            calls[0].wait()
        endpoint.received(peer, Kept(0, 6))  # late: it is released
        endpoint.received(peer, Failure(0, "ValueError", "late"))
        endpoint.received(peer, Release(5))
        made = endpoint.begin(peer, "wait", (), {}, 60.0, keeps=True)
        endpoint.received(peer, Result(made.number, pack(1, None).value))
        with pytest.raises(ProtocolError, match="without a reference"):
            made.reference()
        assert endpoint.describe(TrainerId(10**6)) == "a lost rank"
        gate.may_go.set()
        assert calls[1].wait() == 1
        with pytest.raises(RankLost, match=r"make another one by mesh.rpc.remote"):
            endpoint.begin(peer, "add", (), {}, 60.0, reference=77).result()
        with pytest.raises(ProtocolError, match="arguments that are no dict"):
            unpack_arguments_untrusted(Arriving(pack([1], None).value))

    pair(caller, gate.register)


def test_an_unknown_function_is_named_before_the_arguments_have_come() -> None:
    posted = list[AnyFrame]()

    def post(to: TrainerId, frame: AnyFrame, arrays: list[Any], timeout_s: float) -> None:
        assert (to, arrays, timeout_s) == (TrainerId(1), [], 60.0)
        posted.append(frame)

    serving = Serving(lambda: TrainerId(0), post, iter(range(9)).__next__)
    serving.register("evaluate", len)
    value = Value(b"", (Apart(2**32, 9),))
    (take,) = serving.request(TrainerId(1), Request(0, "evalaute", value, 60.0))
    (failure,) = posted
    assert isinstance(failure, Failure)
    assert "no such function (registered are: evaluate)" in failure.message
    take(np.zeros(9, np.uint8))
    assert len(posted) == 1


class Untold(Exception):  # noqa: N818 - of a user
    """An exception whose text can't be made."""

    def __str__(self) -> str:
        raise AttributeError("reason")


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (ValueError("no file b\udcff"), r"ValueError: no file b\\udcff"),
        (Untold(), r"Untold: its text can't be told, as its __str__ has raised an exception"),
    ],
)
def test_an_exception_with_an_odd_text_comes_back_and_its_rank_serves_on(
    error: Exception, match: str
) -> None:
    def callee(mesh: pmesh.Mesh) -> None:
        mesh.rpc.serve(threads=1)

        @mesh.rpc.register
        def fail() -> None:
            raise error

        echoing(mesh)
        mesh.barrier()

    def caller(mesh: pmesh.Mesh) -> None:
        mesh.barrier()
        for _ in range(2):
            with pytest.raises(RemoteCallFailed, match=match) as caught:
                mesh.rpc.call(1, "fail")
            assert "raise error" in caught.value.remote_traceback
        assert mesh.rpc.call(1, "echo", 1) == ((1,), {})

    pair(caller, callee)


def test_a_result_for_which_there_is_no_memory_is_an_error_of_the_call(faults: Faults) -> None:
    def lacking(real: Real, carrier: Carrier, to: TrainerId, *what: Any, **options: Any) -> None:
        _, arrays = (*what, ())[:2]
        if arrays:
            raise UsageError("no memory")
        real(carrier, to, *what, **options)

    faults.around(Carrier, "post", lacking)

    def callee(mesh: pmesh.Mesh) -> None:
        mesh.rpc.register(lambda: LARGE, name="large")

    def caller(mesh: pmesh.Mesh) -> None:
        with pytest.raises(RemoteCallFailed, match="UsageError: no memory"):
            mesh.rpc.call(1, "large")
        assert mesh.rpc.map("large", [], ranks=[1]) == []

    pair(caller, callee)


@pytest.mark.parametrize("receiver", ["callee", "caller"])
def test_an_array_for_which_the_receiver_has_no_memory_is_an_error_of_the_call(
    faults: Faults, receiver: str
) -> None:
    in_order = iter(["callee", "caller"])  # first the argument comes, then the result

    def lacking(real: Real, *request: Any) -> None:
        if next(in_order, "") != receiver:
            real(*request)
            return
        for take in request[-1]:
            take(UsageError("no memory"))

    faults.around(Carrier, "receive", lacking)

    def caller(mesh: pmesh.Mesh) -> None:
        with pytest.raises((RemoteCallFailed, UsageError), match="no memory"):
            mesh.rpc.call(1, "echo", LARGE)
        assert mesh.rpc.call(1, "echo", 1) == ((1,), {})

    pair(caller, echoing)


def test_an_argument_that_does_not_come_in_time_is_given_up_by_both_sides(
    faults: Faults,
) -> None:
    called, carriers = list[object](), dict[int, Carrier]()

    def post(real: Real, carrier: Carrier, *what: Any, **options: Any) -> None:
        carriers[threading.get_ident()] = carrier
        real(carrier, *what, **options)

    faults.around(Carrier, "post", post)

    def callee(mesh: pmesh.Mesh) -> None:
        mesh.rpc.register(called.append, name="note")

    def caller(mesh: pmesh.Mesh) -> None:
        endpoint, peer = endpoint_of(mesh), mesh.trainers[1]
        call = endpoint.begin(peer, "note", (), {}, 60.0)
        promised = Value(
            pack({0: LARGE}, lambda: 2**33).value.header, (Apart(2**33, LARGE.nbytes),)
        )
        carrier = carriers[threading.get_ident()]
        carrier.post(peer, Request(call.number + 1, "note", promised, 0.01))
        call.give_up("the test has seen enough")
        serve = endpoint.begin(peer, "note", (1,), {}, 60.0)
        serve.give_up("its number is that of the promise")
        assert mesh.rpc.call(1, "note", 2) is None

    pair(caller, callee)
    assert called == [2]


class HandedOver:
    """A lock that another thread gets once, as soon as it is released."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._then: Callable[[], None] | None = then

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if self._then is not None:
            then, self._then = self._then, None
            then()


@pytest.mark.parametrize("ends", ["lost", "cut off"])
def test_a_call_that_is_given_up_while_its_rank_is_lost_ends_as_the_others_do(ends: str) -> None:
    def caller(mesh: pmesh.Mesh) -> None:
        endpoint, peer = endpoint_of(mesh), mesh.trainers[1]
        calls = [endpoint.begin(peer, "wait", (), {}, 60.0) for _ in range(2)]
        endpoint._lock = HandedOver(calls[0].overdue)  # noqa: SLF001
        why = RankLost("rank 1 is lost")
        endpoint.lost(peer, why) if ends == "lost" else endpoint.cut_off(why)
        for call in calls:
            assert str(call.future.exception(0)) == "rank 1 is lost"

    pair(caller, lambda _: None)


def test_ctrl_c_gives_a_call_up() -> None:
    gate = Gate()

    def caller(mesh: pmesh.Mesh) -> None:
        with (
            mock.patch("concurrent.futures.Future.exception", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            mesh.rpc.call(1, "wait")
        assert not kept(endpoint_of(mesh))["pending"]
        gate.may_go.set()

    pair(caller, gate.register)


def test_a_forked_child_has_no_calls() -> None:
    def program(mesh: pmesh.Mesh) -> None:
        echoing(mesh)
        with forked():
            with pytest.raises(MeshClosed, match="forked"):
                mesh.rpc.call(0, "echo")
            mesh.rpc.close()
        assert mesh.rpc.call(0, "echo", 1) == ((1,), {})

    SimulatedMesh(1).run(program)
