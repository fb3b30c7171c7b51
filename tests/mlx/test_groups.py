"""Groups of the drop-in: the numbers of the start, splits, losses, and the global group."""

import atexit
import logging
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import pmesh
import pmesh.mlx
from pmesh.launches.client.launched import MLXLaunch
from pmesh.mlx import groups
from pmesh.testing import SimulatedMesh
from tests.worlds.faults import Faults
from tests.worlds.watched_agent import watched_agent


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The global group, which is none before and after each test."""
    made: list[Any] = []
    monkeypatch.setattr(groups, "_world", made)
    for name in MLXLaunch(job="", wait_for=0).variables():
        monkeypatch.delenv(name, raising=False)
    return made


def test_ranks_are_numbered_by_the_key_within_their_color() -> None:
    def split(mesh: pmesh.Mesh) -> tuple[int, int, int]:
        whole = pmesh.mlx.Group(mesh)
        half = whole.split(whole.rank() % 2, 10 - whole.rank())
        quarter = half.split(half.rank())
        return half.rank(), half.size(), quarter.size()

    assert SimulatedMesh(4).run(split) == [(1, 2, 1), (1, 2, 1), (0, 2, 1), (0, 2, 1)]


def test_a_negative_key_is_the_rank_itself() -> None:
    def split(mesh: pmesh.Mesh) -> tuple[int, object]:
        whole = pmesh.mlx.Group(mesh)
        half = whole.split(7, -1 if whole.rank() else 1)  # which is 1 for both
        return half.rank(), pmesh.mlx.all_sum(mx.array(1.0), group=half).item()

    assert SimulatedMesh(2).run(split) == [(0, 2.0), (1, 2.0)]
    assert pmesh.mlx.Group(None).split(3).size() == 1


def lose_one(caplog: pytest.LogCaptureFixture, lost: int) -> list[tuple[Any, ...]]:
    """Three ranks, one of which is lost; what the others compute then."""
    simulated = SimulatedMesh(3, on_loss="continue")

    def train(mesh: pmesh.Mesh) -> tuple[Any, ...]:
        group = pmesh.mlx.Group(mesh)
        assert "rank" in repr(group)
        mesh.barrier()
        if group.rank() == lost:
            simulated.lose(lost)
        total = [pmesh.mlx.all_sum(mx.array(1.0), group=group).item() for _ in range(3)]
        mean = pmesh.mlx.average_gradients({"w": mx.array([group.rank() + 0.0])}, group)
        with pytest.raises(pmesh.RankLost, match="all 3 ranks that the program began with"):
            pmesh.mlx.all_gather(mx.ones(2), group=group)
        with pytest.raises(pmesh.RankLost, match=f"rank {lost} .* is lost"):
            pmesh.mlx.send(mx.ones(2), lost, group=group)
        other = 3 - lost - group.rank()
        pmesh.mlx.send(mx.array([group.rank()]), other, group=group)
        came = pmesh.mlx.recv((1,), mx.int32, other, group=group).item()
        group.close()
        return group.rank(), group.size(), total[-1], mean["w"].item(), came

    with caplog.at_level(logging.WARNING, "pmesh"):
        return simulated.run(train)


def test_the_others_go_on_with_their_numbers(caplog: pytest.LogCaptureFixture) -> None:
    assert lose_one(caplog, 1) == [(0, 3, 2.0, 1.0, 2), (2, 3, 2.0, 1.0, 0)]
    assert not any("nobody will save" in text for text in caplog.messages)


def test_when_rank_0_is_lost_each_rank_warns_once_that_nobody_will_save(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert lose_one(caplog, 0) == [(1, 3, 2.0, 1.5, 2), (2, 3, 2.0, 1.5, 1)]
    assert sum("nobody will save" in text for text in caplog.messages) == 2


def test_without_a_launch_the_process_is_alone(world: list[Any]) -> None:
    assert not groups.is_shared()
    group = pmesh.mlx.init()
    assert group is pmesh.mlx.init(backend="pmesh")
    assert (group.rank(), group.size()) == (0, 1)
    assert world == [group]
    assert not groups.is_shared()
    groups.leave()


def test_a_launch_for_one_needs_no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in MLXLaunch(job="j", wait_for=1).variables().items():
        monkeypatch.setenv(name, value)
    assert pmesh.mlx.init().size() == 1


def test_a_launch_for_several_joins_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: Faults, world: list[Any]
) -> None:
    launch = MLXLaunch(job="program", wait_for=2, compression="int8")
    for name, value in launch.variables().items():
        monkeypatch.setenv(name, value)
    assert groups.is_shared()
    with watched_agent(tmp_path / "home") as agent:
        monkeypatch.setenv("PMESH_HOME", str(agent.home))
        registered: list[Any] = []
        faults.instead(atexit, "register", registered.append)
        faults.instead(MLXLaunch, "join", lambda self: pmesh.connect(self.job, home=agent.home))
        group = pmesh.mlx.init()
        assert isinstance(group, pmesh.mlx.Group)
        assert group.compression == "int8"
        assert registered == [groups.leave]
        groups.leave(crashed=KeyError("x"))
        with pytest.raises(pmesh.MeshClosed):
            group.run(lambda mesh: mesh.barrier())
    assert world == [group]


def test_variables_that_are_no_launch_are_told_apart() -> None:
    assert MLXLaunch.of({}) is None
    launch = MLXLaunch(job="a", wait_for=3, compression="int8")
    assert MLXLaunch.of(launch.variables()) == launch
    with pytest.raises(pmesh.UsageError, match="is the number of trainers, not 'many'"):
        MLXLaunch.of(launch.variables() | {"PMESH_MLX_WAIT_FOR": "many"})


def test_backends_of_mlxs_own_are_mlxs(world: list[Any]) -> None:
    native = pmesh.mlx.init(backend="ring")
    assert not isinstance(native, pmesh.mlx.Group)
    assert world == []
    assert pmesh.mlx.is_available("pmesh")
    assert pmesh.mlx.is_available()
    assert pmesh.mlx.is_available("ring") == mx.distributed.is_available("ring")


def test_the_first_backend_that_has_ranks_becomes_the_global_group_as_in_mlx(
    world: list[Any], faults: Faults
) -> None:
    class GroupOfTwo:
        def size(self) -> int:
            return 2

    made = GroupOfTwo()
    faults.instead(groups, "_native_init", lambda *_, **__: made)
    pmesh.mlx.init(backend="jaccl", all_gather_factory=lambda *_: None)
    assert world == [made]
    assert pmesh.mlx.init() is made  # type: ignore[comparison-overlap]
    assert not groups.is_shared()


def test_a_message_that_nobody_receives_is_a_warning_at_the_end(
    caplog: pytest.LogCaptureFixture, faults: Faults
) -> None:
    faults.limit(groups, "_PATIENCE_S", 0.01)
    left = threading.Event()

    def train(mesh: pmesh.Mesh) -> None:
        group = pmesh.mlx.Group(mesh)
        if group.rank() == 0:
            pmesh.mlx.send(mx.ones(1), 1, group=group)
            group.close()
            left.set()
        else:
            left.wait()

    SimulatedMesh(2, on_loss="continue").run(train)
    assert "a message was not received" in caplog.text
