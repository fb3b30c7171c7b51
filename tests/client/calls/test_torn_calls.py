# ruff: noqa: ANN401 - results of calls of every kind
"""Ranks that are lost before, between and in the two ops of a call, and ranks that are alone."""

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import pmesh
from pmesh.client.calls.queue import Caller
from tests.worlds.every_array import make, seen
from tests.worlds.scripted_agent import ScriptedAgent, joins
from tests.worlds.watched_agent import WatchedAgent

X = np.ones(2)
LOST = 2
BOUND: dict[str, Callable[[Any], object]] = {
    "all_gather": lambda m: m.all_gather(X),
    "scatter": lambda m: m.scatter(None if m.rank else [X] * m.size),
    "all_to_all": lambda m: m.all_to_all([X] * m.size),
    "all_gather_object": lambda m: m.all_gather_object(1),
}


def survivors(agent: WatchedAgent, program: Callable[[pmesh.Mesh], Any], lost: int = LOST) -> Any:
    """What the program gives on ranks 0 to 2 but for the lost one, whose connection ends."""

    def rank(_: int) -> Any:
        with pmesh.connect("job", wait_for=3, home=agent.home) as mesh:
            me = mesh.rank
            if me != lost:
                return me, program(mesh)
            with pytest.raises(pmesh.AgentStopped):
                program(mesh)
            return me, None

    with ThreadPoolExecutor(3) as pool:
        results = sorted(pool.map(rank, range(3)))
    return [result for me, result in results if me != lost]


def in_step(mesh: pmesh.Mesh) -> tuple[int, float]:
    return mesh.size, float(mesh.all_reduce(np.array(1.0)))


# In the second op of a gather or a scatter, some ranks are done before they learn of a loss.
@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "all_gather_object"])
def test_a_rank_lost_in_the_second_op_fails_the_call_on_all(agent: WatchedAgent, name: str) -> None:
    agent.losses = {1: LOST}

    def program(mesh: pmesh.Mesh) -> Any:
        with pytest.raises(pmesh.RosterChanged) as caught:
            BOUND[name](mesh)
        return str(caught.value), in_step(mesh), BOUND[name](mesh) is not Ellipsis

    first, second = survivors(agent, program)
    assert first == second
    assert first[1:] == ((2, 2), True)


def test_a_gather_that_lacks_the_rows_of_a_lost_rank_fails_at_its_root(agent: WatchedAgent) -> None:
    agent.losses = {1: LOST}

    def program(mesh: pmesh.Mesh) -> None:
        if mesh.rank:
            with contextlib.suppress(pmesh.RosterChanged):
                mesh.gather(X)
        else:
            with pytest.raises(pmesh.RosterChanged):
                mesh.gather(X)

    survivors(agent, program)


def test_a_rank_lost_in_a_reduce_scatter_fails_it_on_all(agent: WatchedAgent) -> None:
    agent.losses = {0: LOST}

    def program(mesh: pmesh.Mesh) -> Any:
        with pytest.raises(pmesh.RosterChanged):
            mesh.reduce_scatter(X)
        return mesh.reduce_scatter(np.arange(3)).tolist()

    assert survivors(agent, program) == [[0, 2], [4]]


@pytest.mark.parametrize("name", ["scatter", "all_to_all"])
def test_a_rank_lost_in_the_first_op_fails_what_had_something_for_it(
    agent: WatchedAgent, name: str
) -> None:
    agent.losses = {0: LOST}

    def program(mesh: pmesh.Mesh) -> Any:
        with pytest.raises(pmesh.RosterChanged, match="an array for each could be sent"):
            BOUND[name](mesh)
        return in_step(mesh)

    assert survivors(agent, program) == [(2, 2)] * 2


@pytest.mark.parametrize("name", ["scatter", "all_to_all"])
def test_ranks_that_change_places_before_the_first_op_fail_what_has_something_for_each(
    agent: WatchedAgent, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """O4: a faster ring may be found at any time. The arrays are for the ranks as they were."""
    now: property = vars(Caller)["trainers"]
    before = property(lambda mesh: now.__get__(mesh)[::-1])  # a view has come since the last call
    monkeypatch.setattr(Caller, "trainers", before)

    def rank(_: int) -> None:
        with (
            pmesh.connect("job", wait_for=3, home=agent.home) as mesh,
            pytest.raises(pmesh.RosterChanged, match="the ranks changed before"),
        ):
            BOUND[name](mesh)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(rank, range(3)))


def test_a_rank_lost_in_the_first_op_is_not_missed_by_the_others(agent: WatchedAgent) -> None:
    agent.losses = {0: LOST}

    def program(mesh: pmesh.Mesh) -> Any:
        rows = mesh.all_gather(np.full(1, mesh.rank))
        return rows.tolist(), mesh.size, mesh.gather(X, root=1) is None, mesh.all_gather_object(7)

    expected = [([0, 1], 2, True, [7, 7]), ([0, 1], 2, False, [7, 7])]
    assert survivors(agent, program) == expected


ROOTED: dict[str, Callable[[Any], object]] = {
    "gather": lambda m: m.gather(X, root=2),
    "scatter": lambda m: m.scatter([X] * 3 if m.rank == 2 else None, root=2),
    "broadcast_object": lambda m: m.broadcast_object(1, root=2),
}


ROOTS_LOST = [(name, op) for name in ROOTED for op in (0, 1) if (name, op) != ("gather", 1)]


@pytest.mark.parametrize(("name", "op"), ROOTS_LOST)
def test_a_root_that_is_lost_fails_the_call_on_all(agent: WatchedAgent, name: str, op: int) -> None:
    agent.losses = {op: LOST}

    def program(mesh: pmesh.Mesh) -> Any:
        with pytest.raises((pmesh.RosterChanged, pmesh.RankLost)) as caught:
            ROOTED[name](mesh)
        return str(caught.value), in_step(mesh)

    first, second = survivors(agent, program)
    assert first == second
    assert first[1] == (2, 2)


def test_a_root_lost_before_a_call_in_line_fails_it_without_an_op(
    agent: WatchedAgent,
) -> None:
    agent.losses = {0: LOST}

    def program(mesh: pmesh.Mesh) -> Any:
        first = mesh.all_reduce(X, async_op=True)
        second = mesh.gather(X, root=2, async_op=True)
        first.wait()
        with pytest.raises(pmesh.RosterChanged, match="root of this call is lost"):
            second.wait()
        return in_step(mesh)

    assert survivors(agent, program) == [(2, 2)] * 2
    assert [call.kind for call in agent.calls] == ["all_reduce"] * 2


@pytest.mark.parametrize(("lost", "root"), [(2, 1), (2, 0), (0, 1), (0, 2), (1, 2), (1, 0)])
def test_a_reduce_whose_root_lives_goes_on(agent: WatchedAgent, lost: int, root: int) -> None:
    agent.losses = {0: lost}

    def program(mesh: pmesh.Mesh) -> Any:
        me = mesh.rank
        result = mesh.reduce(X, root=root)
        return me, None if result is None else result.tolist()

    results = dict(survivors(agent, program, lost))
    assert results.pop(root) == [2, 2]
    assert [*results.values()] == [None]


def test_a_reduce_whose_root_is_lost_fails_on_all(agent: WatchedAgent) -> None:
    agent.losses = {0: LOST}

    def program(mesh: pmesh.Mesh) -> Any:
        with pytest.raises(pmesh.RankLost):
            mesh.reduce(X, root=2)
        return in_step(mesh)

    assert survivors(agent, program) == [(2, 2)] * 2


def test_a_root_stays_the_same_trainer_when_ranks_before_it_are_lost(agent: WatchedAgent) -> None:
    agent.losses = {0: 0}

    def program(mesh: pmesh.Mesh) -> Any:
        rows = mesh.gather(np.full(1, mesh.rank), root=2)
        return mesh.rank, None if rows is None else rows.tolist()

    assert survivors(agent, program, lost=0) == [(0, None), (1, [1, 2])]


@pytest.mark.parametrize("library", ["numpy", "mlx", "torch"])
@pytest.mark.parametrize("late", [False, True])
def test_a_rank_that_is_alone_gets_copies_of_what_it_gives(
    agent: WatchedAgent, library: str, *, late: bool
) -> None:
    x = make(library, "bfloat16", [1, 2])
    home = agent.home / "alone"
    home.mkdir()
    with ScriptedAgent(home, joins) as scripted:
        mesh: Any = pmesh.connect("job", home=home, on_superseded="sync")
        scripted.wait_until_closed()

        def ended(result: Any) -> Any:
            return result.wait() if late else result

        as_it_is: list[Any] = [
            mesh.all_reduce(x, async_op=late),
            mesh.reduce(x, async_op=late),
            mesh.reduce_scatter(x, async_op=late),
            mesh.broadcast(x, async_op=late),
            mesh.all_gather(x, async_op=late),
            mesh.gather(x, async_op=late),
            mesh.scatter([x], async_op=late),
        ]
        results = [*map(ended, as_it_is), *ended(mesh.all_to_all([x], async_op=late))]
        for result in results:
            assert result is not x
            assert seen(result) == seen(x)
        (stacked,) = ended(mesh.all_gather(x, stacked=True, async_op=late)).tolist()
        assert stacked == [1, 2]
        assert mesh.all_gather_object({"a": 1}) == [{"a": 1}]
        assert mesh.broadcast_object((1,)) == [1]
        assert mesh.broadcast_object("mine", root=5) == "mine"
        mesh.monitored_barrier(1)
        assert mesh.last_op is not None
        assert (mesh.last_op.op, mesh.last_op.names) == (-1, ("here",))
        assert mesh.reduce(x, root=3) is None
        with pytest.raises(pmesh.RosterChanged, match="root of this scatter is not here"):
            mesh.scatter(None, root=3)
        rows = np.ones((1, 3))
        assert mesh.scatter(list(rows)).tolist() == [1, 1, 1]
        mesh.close()


def test_a_rank_that_is_alone_places_what_it_gives_itself(agent: WatchedAgent) -> None:
    home = agent.home / "alone"
    home.mkdir()
    with ScriptedAgent(home, joins) as scripted:
        mesh: Any = pmesh.connect("job", home=home, on_superseded="sync")
        scripted.wait_until_closed()
        x, outs = np.array([1.0, 2.0]), [np.zeros(2) for _ in range(6)]
        mesh.all_gather_into([outs[0]], x)
        mesh.gather_into([outs[1]], x)
        mesh.scatter_into(outs[2], [x])
        mesh.reduce_scatter_into(outs[3], [x])
        mesh.all_to_all_into([outs[4]], [x])
        mesh.all_to_all_into([outs[5]], [x], equal=True)
        assert [out.tolist() for out in outs] == [[1.0, 2.0]] * 6
        mesh.gather_into(None, x, root=3)
        with pytest.raises(pmesh.RosterChanged, match="root of this scatter is not here"):
            mesh.scatter_into(outs[0], None, root=3)
        with pytest.raises(pmesh.UsageError, match="arrays of one size"):
            mesh.all_to_all_into([np.zeros(3)], [x])
        assert (mesh.last_op.op, mesh.last_op.names) == (-1, ("here",))
        mesh.close()
