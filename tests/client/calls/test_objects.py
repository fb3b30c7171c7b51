"""Objects, and the barrier that names who did not come."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pmesh
from pmesh.client.calls import moving
from pmesh.core.values import Verdict
from pmesh.core.wire.trainer import OpFailed
from pmesh.ids import OpNumber
from simulation.wire import AnyRequest
from tests.worlds.faults import Faults
from tests.worlds.scripted_agent import ScriptedAgent, TrainerSocket, joins
from tests.worlds.watched_agent import WatchedAgent, run_ranks

OBJECTS: list[object] = [
    None,
    True,
    -(2**63),
    2**64 - 1,
    0.5,
    "",
    "ü" * 1000,
    b"\0\1",
    [],
    {},
    {"a": [1, {"b": None}], 2: "two", None: []},
    [[["deep"]]],
]


@pytest.mark.parametrize("obj", OBJECTS)
def test_objects_arrive_as_they_are(agent: WatchedAgent, obj: object) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        assert mesh.all_gather_object([obj, mesh.rank]) == [[obj, 0], [obj, 1]]
        for root in range(2):
            mine = [root, obj] if mesh.rank == root else "not looked at"
            assert mesh.broadcast_object(mine, root=root) == [root, obj]

    run_ranks(agent.home, 2, program)


@dataclasses.dataclass
class Coordinate:
    x: int


def test_what_messagepack_has_no_word_for_arrives_as_what_is_nearest(agent: WatchedAgent) -> None:
    with pmesh.connect("job", home=agent.home) as mesh:
        assert mesh.all_gather_object([(1, 2), {3}, Coordinate(4), bytearray(b"5")]) == [
            [[1, 2], [3], {"x": 4}, b"5"]
        ]


class Opaque:
    """Nothing that travels."""


@pytest.mark.parametrize("obj", [Opaque(), np.ones(2), 2**64, "\ud800", [len]])
def test_what_is_no_data_is_refused_before_an_op_starts(agent: WatchedAgent, obj: object) -> None:
    with pmesh.connect("job", home=agent.home) as mesh:
        for call in (mesh.all_gather_object, mesh.broadcast_object):
            with pytest.raises(pmesh.UsageError, match="not data that MessagePack can say: "):
                call(obj)
    assert agent.calls == []


@pytest.mark.parametrize("sent", [b"\xc1", b"\xa1\xff", b"\x81\x91\x80\x01", b"\x91" * 100_000])
def test_what_a_rank_sends_as_an_object_and_is_none_is_an_error_of_the_call(
    agent: WatchedAgent, faults: Faults, sent: bytes
) -> None:
    faults.instead(moving, "_packed", lambda _: np.frombuffer(sent, np.uint8))

    def program(mesh: pmesh.Mesh) -> None:
        with pytest.raises(pmesh.RunError, match="what a rank has sent as an object is none"):
            mesh.all_gather_object(1)
        with pytest.raises(pmesh.RunError, match="what a rank has sent as an object is none"):
            mesh.broadcast_object(1)

    run_ranks(agent.home, 2, program)


def test_an_object_that_is_too_large_is_refused_on_all_ranks(
    agent: WatchedAgent, faults: Faults
) -> None:
    faults.limit(moving, "MAX_OBJECT_BYTES", 100)

    def program(mesh: pmesh.Mesh) -> None:
        with pytest.raises(pmesh.UsageError, match=r"of rank 1 has 103 bytes .* by all_gather"):
            mesh.all_gather_object(bytes(101 * mesh.rank))
        with pytest.raises(pmesh.UsageError, match="of rank 1 has 103 bytes"):
            mesh.broadcast_object(bytes(101), root=1)
        assert mesh.all_gather_object(bytes(98)) == [bytes(98)] * 2

    run_ranks(agent.home, 2, program)


def test_what_holds_itself_is_refused(agent: WatchedAgent) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with (
        pmesh.connect("job", home=agent.home) as mesh,
        pytest.raises(pmesh.UsageError, match="MessagePack"),
    ):
        mesh.all_gather_object(endless)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.broadcast_object(1, root=1), "ranks 0 to 0"),
        (lambda m: m.all_gather_object(1, timeout_s=0), "timeout_s"),
        (lambda m: m.broadcast_object(1, timeout_s=0), "timeout_s"),
        (lambda m: m.monitored_barrier(0), "timeout_s"),
    ],
)
def test_a_call_without_meaning_raises_before_an_op_starts(
    agent: WatchedAgent, call: Callable[[Any], object], message: str
) -> None:
    with (
        pmesh.connect("job", home=agent.home) as mesh,
        pytest.raises(pmesh.UsageError, match=message),
    ):
        call(mesh)
    assert agent.calls == []


def test_a_monitored_barrier_passes_its_time_on_and_raises_what_the_agents_say(
    agent: WatchedAgent,
) -> None:
    agent.home.joinpath("other").mkdir()
    times: list[float] = []

    def times_out(trainer: TrainerSocket, request: AnyRequest | None) -> None:
        times.append(getattr(request, "timeout_s", 0))
        verdict = Verdict("OpTimedOut", "op 0: rank 1 (mac-1) and rank 2 (mac-2) did not come")
        trainer.send(OpFailed(OpNumber(0), verdict))

    with ScriptedAgent(agent.home / "other", joins, times_out):
        mesh = pmesh.connect("job", home=agent.home / "other")
        with pytest.raises(pmesh.OpTimedOut, match=r"\(mac-1\) and rank 2 \(mac-2\)"):
            mesh.monitored_barrier(2.5)
        mesh.close()
    assert times == [2.5]


def test_barriers_match_each_other(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> int:
        mesh.barrier() if mesh.rank else mesh.monitored_barrier(20)
        return -1 if mesh.last_op is None else mesh.last_op.op

    assert run_ranks(agent.home, 2, program) == [0, 0]
