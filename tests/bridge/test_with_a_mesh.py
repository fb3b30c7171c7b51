"""The bridge in a job of real ranks, which are threads, with workers that are threads too."""

import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import numpy as np
import pytest
import trio

from pmesh.bridge.cli.command import MeshJob
from pmesh.bridge.cli.serving import BridgeOptions, Job, serve
from pmesh.bridge.client import average_blocks, average_whole
from pmesh.client.mesh import Mesh
from pmesh.errors import UsageError
from pmesh.testing import SimulatedMesh
from tests.bridge.worker import PARTS, SIZES, RawWorker

T = TypeVar("T")
W = TypeVar("W")


def train_together(
    rank_trains: Callable[[Mesh], T], workers: Sequence[Callable[[int], W]], rows: int | None = None
) -> tuple[list[T | int], list[W]]:
    """Run two ranks, the bridge and these workers; return what ranks and workers return."""
    with ThreadPoolExecutor() as threads:
        working: list[Future[W]] = []

        async def bridge(mesh: Mesh) -> int:
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            port = listeners[0].socket.getsockname()[1]
            working.extend(threads.submit(work, port) for work in workers)
            options = BridgeOptions(
                workers=len(workers), rows=rows, silence_s=60, most_frame=1 << 20, wait_s=60
            )

            async def enter() -> Job:
                return MeshJob(mesh)

            return await serve(listeners, enter, options)

        def train(mesh: Mesh) -> T | int:
            return rank_trains(mesh) if mesh.rank < 2 else trio.run(bridge, mesh)

        results = SimulatedMesh(3, on_loss="continue").run(train)
        return results, [work.result(20) for work in working]


def rank_value(rank: int, step: int, part: str) -> float:
    return 60.0 * (100 * (rank + 1) + step + PARTS.index(part))


def filled(rank: int, step: int, part: str) -> list[np.ndarray]:
    return [np.full(size, rank_value(rank, step, part)) for size in SIZES[part]]


def train_by_blocks(mesh: Mesh, steps: int) -> list[list[float]]:
    means = []
    for step in range(steps):
        blocks = [filled(mesh.rank, step, f"block {index}") for index in range(2)]
        others = [filled(mesh.rank, step, part)[0] for part in PARTS[2:]]
        averaged, rest = average_blocks(mesh, blocks, others)
        assert [[x.size for x in block] for block in averaged] == [[2, 1], [3, 1]]
        arrays = [*averaged[1], *averaged[0], *rest]
        assert all((x == x[0]).all() for x in arrays)
        means.append([float(averaged[1][0][0]), float(averaged[0][1][0]), *(x[0] for x in rest)])
    return means


def work_by_blocks(port: int, steps: int) -> tuple[int, list[list[float]]]:
    means: list[list[float]] = []
    with RawWorker(port) as worker:
        for step in range(steps):
            means.append([])
            for part in PARTS:
                worker.send_part(step, part)
                means[-1].append(worker.receive_part(step, part))
        return worker.id, means


def test_ranks_and_workers_get_the_mean_of_all_their_gradients_part_by_part() -> None:
    (one, other, steps), workers = train_together(
        partial(train_by_blocks, steps=3), [partial(work_by_blocks, steps=3)] * 2
    )
    expected = [
        [
            sum(rank_value(r, step, p) + 60.0 * (10 * r + step + PARTS.index(p)) for r in (0, 1))
            / 4
            for p in PARTS
        ]
        for step in range(3)
    ]
    assert one == other == expected
    assert sorted(workers) == [(0, expected), (1, expected)]
    assert steps == 3


def test_ranks_go_on_alone_when_the_workers_have_ended() -> None:
    (one, other, steps), _ = train_together(
        partial(train_by_blocks, steps=3), [partial(work_by_blocks, steps=1)]
    )
    assert one == other
    assert isinstance(one, list)
    assert one[1:] == [
        [(rank_value(0, step, p) + rank_value(1, step, p)) / 2 for p in PARTS] for step in (1, 2)
    ]
    assert steps == 1


def work_on_rows(port: int) -> list[object]:
    found: list[object] = []
    with RawWorker(port) as worker:
        while (got := worker.receive())[0] == 3:
            step, start, end = struct.unpack("<QQQ", got[1:])
            gradient = struct.pack("<BQIQ4f", 4, step, worker.id, 4, *[float(start)] * 4)
            worker.send(gradient + struct.pack("<fQQ", 1.0 + worker.id, 1, end - start))
            answer = worker.receive()
            found.append(((start, end), struct.unpack("<BQQ4ff", answer)))
        assert got == b"\x07"
        assert worker.receive() == b""
    return found


def test_rows_are_dealt_and_the_job_s_end_is_the_workers_shutdown_between_two_steps() -> None:
    def train(mesh: Mesh) -> list[object]:
        found: list[object] = []
        for _ in range(2):
            gradients = [np.full((2, 1), 20.0), np.full(2, 20.0)]
            (first, second), loss = average_whole(mesh, gradients, loss=6.0, rows=1)
            found.append((first.tolist(), second.tolist(), loss))
        return found

    (one, other, steps), workers = train_together(train, [work_on_rows] * 2, rows=8)

    # 20, 20, 0 and 4; losses of 6, 6 for a row each, and 1 and 2 for four rows each.
    assert one == other == [([[11.0], [11.0]], [11.0, 11.0], 2.4)] * 2
    assert steps == 2
    assert sorted(map(str, workers)) == sorted(
        str([(dealt, (5, step, 4, *[11.0] * 4, np.float32(2.4).item())) for step in range(2)])
        for dealt in ((0, 4), (4, 8))
    )


def test_ranks_whose_gradients_differ_in_size_are_named() -> None:
    def train(mesh: Mesh) -> str:
        with pytest.raises(UsageError) as caught:
            average_whole(mesh, [np.zeros(3 + mesh.rank)], loss=0, rows=1)
        return str(caught.value)

    said = "rank 1 averages a whole gradient of 4 values, and rank 0 a whole gradient of 3 values"
    assert SimulatedMesh(2).run(train) == [said, said]


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ([[0], [0]], "others are head, final norm and embedding, not 2 arrays"),
        ([[0], [np.inf], [0]], "a value of final norm is not finite; skip this step on all ranks"),
    ],
)
def test_wrong_arrays_of_a_rank_are_refused(others: list[list[float]], why: str) -> None:
    def train(mesh: Mesh) -> str:
        with pytest.raises(UsageError) as caught:
            average_blocks(mesh, [], others)
        return str(caught.value)

    assert SimulatedMesh(1).run(train) == [why]


def test_blocks_and_components_may_be_empty() -> None:
    def train(mesh: Mesh) -> list[int]:
        blocks, others = average_blocks(mesh, [[], [np.empty(0)]], [[1], [], [2, 3]])
        return [len(blocks[0]), blocks[1][0].size, *(x.size for x in others)]

    assert SimulatedMesh(2).run(train) == [[0, 0, 1, 0, 2]] * 2
