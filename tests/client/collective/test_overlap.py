"""While the op of a bucket runs, the next one is laid out and the one before is read."""

from typing import Any, cast

import numpy as np
import pytest

import pmesh
from pmesh.client.collective import bucketed
from pmesh.client.collective.bucketed import Collective, run_collective, take_apart
from pmesh.client.session.session import TrainerSession
from pmesh.errors import MeshClosed
from pmesh.ids import TrainerId
from tests.client.collective.recorder import OpRecorder
from tests.worlds.faults import Faults, Real
from tests.worlds.watched_agent import WatchedAgent, run_ranks

BUCKET_BYTES = 16
WEIGHT_BYTES = 8


@pytest.fixture
def recorder(faults: Faults) -> OpRecorder:
    made = OpRecorder()

    def recorded(read: Real, *arguments: Any, **more: Any) -> Any:  # noqa: ANN401 - whatever it takes
        made.events.append("read")
        return read(*arguments, **more)

    faults.around(bucketed, "read", recorded)
    return made


def run(
    recorder: OpRecorder, *sizes: int, kind: str = "all_reduce", weight: float | None = None
) -> list[Any]:
    arrays = take_apart([np.full(size, i + 1, np.float32) for i, size in enumerate(sizes)])
    root = TrainerId(0) if kind == "broadcast" else None
    wanted = Collective(
        kind=kind,
        reduction="" if kind == "broadcast" else "sum",
        root=root,
        weight=weight,
        bucket_bytes=BUCKET_BYTES,
        timeout_s=1.0,
    )
    results, _ = run_collective(cast("TrainerSession", recorder), wanted, arrays)
    for i, size in enumerate(sizes):
        np.testing.assert_array_equal(np.asarray(results[i]), np.full(size, i + 1))
    return results


@pytest.mark.parametrize("weight", [None, 2.0])
def test_laying_out_and_reading_take_no_time_between_two_ops(
    recorder: OpRecorder, weight: float | None
) -> None:
    run(recorder, 4, 3, 2, weight=weight)
    assert recorder.events == [
        "lay out",
        *("op 0", "lay out ahead", "op 0 is done"),
        *("op 1", "lay out ahead", "read", "op 1 is done"),
        *("op 2", "read", "op 2 is done"),
        "read",
    ]
    assert recorder.prepared == 3 * 4 + WEIGHT_BYTES


def test_an_array_larger_than_a_bucket_does_not_take_as_much_memory_again(
    recorder: OpRecorder,
) -> None:
    run(recorder, 4, 100, 2)
    assert recorder.events.count("lay out") == 2
    assert recorder.events.count("lay out ahead") == 1
    assert recorder.prepared == 2 * 4 + WEIGHT_BYTES


def test_what_lies_where_it_is_reduced_is_not_laid_out(recorder: OpRecorder) -> None:
    recorder.in_place = {4, 3}
    run(recorder, 4, 3, 2)
    assert recorder.events == [
        *("op 0", "op 0 is done"),
        *("op 1", "lay out ahead", "read", "op 1 is done"),
        *("op 2", "read", "op 2 is done"),
        "read",
    ]


def test_one_bucket_takes_no_memory_for_another(recorder: OpRecorder) -> None:
    run(recorder, 4)
    assert recorder.events == ["lay out", "op 0", "op 0 is done", "read"]
    assert recorder.prepared == 0


def test_what_a_root_has_sent_is_read_before_its_memory_is_asked_for_again(
    recorder: OpRecorder,
) -> None:
    run(recorder, 4, 3, kind="broadcast")
    once = ("lay out", "op 0", "op 0 is done", "read")
    assert recorder.events == [*once, "lay out", "op 1", "op 1 is done", "read"]
    assert recorder.prepared == 0


def tree(size: int, value: float) -> list[Any]:
    return [np.full(size, value * i, np.float32) for i in range(1, 4)]


def test_memory_for_the_next_bucket_is_kept_until_a_larger_one_comes(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> list[Any]:
        for size in (4, 4, 40_000):
            found = mesh.average_gradients(tree(size, mesh.rank), bucket_bytes=4 * size)
        return found

    for result in run_ranks(agent.home, 2, program):
        for got, expected in zip(result, tree(40_000, 0.5), strict=True):
            np.testing.assert_array_equal(got, expected)
    assert len(agent.wanted) == 2 * 4  # two arenas in the first call, two larger ones in the last


def test_what_a_root_has_sent_is_never_filled_ahead(agent: WatchedAgent) -> None:
    """Also if the first bucket has nothing to lay out, and so asks for no memory."""
    grads = [np.empty(0), *tree(4, 1.0)]

    def program(mesh: pmesh.Mesh) -> None:
        mesh.broadcast(np.full(100, 7, np.float32), root=0)
        for _ in range(2):
            mesh.all_reduce(grads)  # two buckets: the first has no values
            mesh.average_gradients(tree(4, 1.0), bucket_bytes=16)

    run_ranks(agent.home, 2, program)
    assert agent.retained
    assert all(sent.unchanged for sent in agent.retained)


def test_what_was_laid_out_for_an_op_that_never_ran_is_not_the_next_calls(
    agent: WatchedAgent,
) -> None:
    def program(mesh: pmesh.Mesh) -> tuple[str, float]:
        with pytest.raises(pmesh.UsageError) as caught:
            mesh.average_gradients(tree(4, 1), weight=0, bucket_bytes=16)
        return str(caught.value), float(mesh.all_reduce(np.ones(4, np.float32))[0])

    for message, total in run_ranks(agent.home, 2, program):
        assert "the weights of all ranks add up to 0" in message
        assert total == 2


def test_an_interrupt_while_the_next_bucket_is_laid_out_ends_the_mesh(
    agent: WatchedAgent, faults: Faults
) -> None:
    """As one in the middle of any op: the reply would be taken for another's."""
    filled = 0

    def interrupted(fill: Real, *arguments: Any) -> None:  # noqa: ANN401 - whatever it takes
        nonlocal filled
        filled += 1
        if filled == 2:
            raise KeyboardInterrupt
        fill(*arguments)

    faults.around(bucketed, "fill", interrupted)
    with pmesh.connect("job", home=agent.home) as mesh:
        with pytest.raises(KeyboardInterrupt):
            mesh.average_gradients(tree(4, 1), bucket_bytes=16)
        with pytest.raises(MeshClosed, match="KeyboardInterrupt"):
            mesh.barrier()
