"""A grid of ranks, and the groups along its dimensions."""

from collections.abc import Sequence

import numpy as np
import pytest

import pmesh
from pmesh import DeviceMesh, Mesh
from tests.worlds.faults import Faults, Real
from tests.worlds.watched_agent import WatchedAgent, run_ranks


def test_a_rank_has_the_group_of_its_row_and_of_its_column(agent: WatchedAgent) -> None:
    def look(mesh: Mesh) -> tuple[tuple[int, ...], list[int], list[int], str]:
        grid = DeviceMesh(mesh, (2, 3), ("data", "model"))
        rows = grid["model"].all_gather(np.array([mesh.rank])).tolist()
        columns = grid["data"].all_gather(np.array([mesh.rank])).tolist()
        assert (grid.shape, grid.names) == ((2, 3), ("data", "model"))
        return grid.coordinate, rows, columns, repr(grid)

    found = run_ranks(agent.home, 6, look)
    assert [coordinate for coordinate, *_ in found] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
    ]
    assert [rows for _, rows, _, _ in found] == [[0, 1, 2]] * 3 + [[3, 4, 5]] * 3
    assert [columns for _, _, columns, _ in found] == [[0, 3], [1, 4], [2, 5]] * 2
    assert found[4][3] == "<DeviceMesh data=2, model=3, at (1, 1)>"


@pytest.mark.parametrize(
    ("shape", "names", "why"),
    [
        ((2, 2), ("data", "model"), r"the shape \(2, 2\) does not hold the 2 ranks"),
        ((), (), r"the shape \(\) does not hold"),
        ((2, 1), ("data",), r"the names \('data',\) are not one for each of 2"),
        ((2, 1), ("data", "data"), "are not one for each of 2 dimensions"),
    ],
)
def test_a_shape_or_names_that_do_not_fit_are_refused(
    agent: WatchedAgent, shape: tuple[int, ...], names: tuple[str, ...], why: str
) -> None:
    def make(mesh: Mesh) -> None:
        with pytest.raises(pmesh.UsageError, match=why):
            DeviceMesh(mesh, shape, names)

    run_ranks(agent.home, 2, make)


def test_a_dimension_that_does_not_exist_is_named_with_those_that_do(agent: WatchedAgent) -> None:
    def ask(mesh: Mesh) -> None:
        grid = DeviceMesh(mesh, (1, 2), ("data", "model"))
        with pytest.raises(pmesh.UsageError, match="dimensions data, model, not 'tensor'"):
            grid["tensor"]

    run_ranks(agent.home, 2, ask)


def test_a_grid_that_is_closed_or_not_completed_leaves_its_groups(
    agent: WatchedAgent, faults: Faults
) -> None:
    def row_in_no_time(group: Real, mesh: Mesh, ranks: Sequence[int], timeout_s: float) -> object:
        return group(mesh, ranks, timeout_s if len(ranks) == 1 else 0.01)

    def make(mesh: Mesh) -> None:
        if mesh.rank == 0:  # its column is a group already when nobody comes to its row
            with (
                faults.around(Mesh, "group", row_in_no_time),
                pytest.raises(pmesh.NotEnoughRanks),
            ):
                DeviceMesh(mesh, (1, 2), ("data", "model"))
            agent.wait_until(lambda: len(agent.left) == 1)
        mesh.barrier()
        grid = DeviceMesh(mesh, (1, 2), ("data", "model"))
        grid.close()
        for name in grid.names:
            with pytest.raises(pmesh.MeshClosed):
                grid[name].barrier()
        mesh.barrier()

    run_ranks(agent.home, 2, make)
