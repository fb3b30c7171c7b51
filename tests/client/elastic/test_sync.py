import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pmesh
from pmesh.client import mesh as mesh_module
from pmesh.client.elastic import sync
from pmesh.client.trees.state import Packed
from pmesh.core.ops.reductions import Values
from pmesh.core.wire.calls import Call
from pmesh.core.wire.trainer import SYNC_VALUES, StartOp
from pmesh.errors import ProtocolError
from pmesh.ids import Rank
from tests.worlds.faults import Faults, Real
from tests.worlds.watched_agent import WatchedAgent, WatchedSession, run_ranks

CHUNK_BYTES = 256


@pytest.fixture(autouse=True)
def _small_chunks(faults: Faults) -> None:
    faults.limit(sync, "CHUNK_BYTES", CHUNK_BYTES)


def state_of(rank: int, count: int = 300) -> dict[str, Any]:
    return {"w": np.full(count, rank + 1, np.float16), "position": rank}


def kinds(agent: WatchedAgent) -> list[str]:
    return [call.kind for call in agent.calls]


def chunks(agent: WatchedAgent) -> list[tuple[str, int]]:
    return [(call.tree, call.root) for call in agent.calls if call.kind == "broadcast"]


def assert_is_state_of(rank: int, state: dict[str, Any]) -> None:
    assert state["position"] == rank
    assert state["w"].dtype == np.float16
    assert (state["w"] == rank + 1).all()


def test_a_state_that_all_have_costs_one_small_op_and_comes_back_untouched(
    agent: WatchedAgent,
) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        state = state_of(0)
        assert mesh.sync(state) is state
        assert mesh.last_op is not None
        assert (mesh.last_op.contributors, mesh.last_op.bytes) == ((0, 1, 2), 3 * 8 * SYNC_VALUES)

    run_ranks(agent.home, 3, program)
    assert agent.calls == [Call("sync", "int64", (SYNC_VALUES,))]


def test_in_the_first_sync_all_get_what_rank_0_has(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> dict[str, Any]:
        own = state_of(mesh.rank)
        got = mesh.sync(own)
        assert (got is own) == (mesh.rank == 0)
        assert_is_state_of(mesh.rank, own)
        return got

    for state in run_ranks(agent.home, 3, program):
        assert_is_state_of(0, state)


def test_a_state_travels_in_chunks_that_only_a_holder_fills(
    agent: WatchedAgent, faults: Faults
) -> None:
    copied: list[int] = []

    def counted(copy_to: Real, self: Packed, region: Values, start: int) -> None:
        copied.append(start)
        copy_to(self, region, start)

    faults.around(Packed, "copy_to", counted)

    def program(mesh: pmesh.Mesh) -> int:
        mesh.sync(state_of(min(mesh.rank, 1)))
        assert mesh.last_op is not None
        return mesh.last_op.bytes

    nbytes = run_ranks(agent.home, 3, program)
    sizes = [call.shape[0] * 4 for call in agent.calls[1:]]
    assert sizes[:-1] == [CHUNK_BYTES] * (len(sizes) - 1)
    assert 0 < sizes[-1] <= CHUNK_BYTES
    assert sum(sizes) >= 600
    assert chunks(agent) == [(f"sync {i * CHUNK_BYTES}", 0) for i in range(len(sizes))]
    assert nbytes == [3 * 8 * SYNC_VALUES + sum(sizes)] * 3
    assert sorted(copied) == [i * CHUNK_BYTES for i in range(len(sizes))]
    assert len(agent.retained) == len(sizes)
    assert all(sent.unchanged for sent in agent.retained)  # O2


def test_a_loop_makes_as_many_passes_as_it_is_told(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> tuple[list[int], int]:
        state, seen = {"passes": 0}, list[int]()
        assert mesh.step == 0
        while mesh.step < 5:
            state = mesh.sync(state)
            seen.append(mesh.step)
            state = {"passes": state["passes"] + 1}
        return seen, state["passes"]

    assert run_ranks(agent.home, 2, program) == [([1, 2, 3, 4, 5], 5)] * 2


@contextmanager
def running_job(
    agent: WatchedAgent, passes: int, *, step: Callable[[pmesh.Mesh, Any], Any]
) -> Iterator[tuple[threading.Event, list["Future[Any]"]]]:
    """Two ranks that have made one pass, and the others once the event is set."""
    go = threading.Event()

    def train(_: int) -> Any:  # noqa: ANN401 - a state
        with pmesh.connect("job", wait_for=2, home=agent.home) as mesh:
            state: Any = {"passes": 0, "w": np.zeros(300, np.float32)}
            while mesh.step < passes:
                if mesh.step == 1:
                    assert go.wait(20)
                state = step(mesh, mesh.sync(state))
            return state, mesh.step, mesh.names

    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(train, i) for i in range(2)]
        agent.wait_until(lambda: bool(agent.calls) and len(agent.calls) >= 2)
        try:
            yield go, ranks
        finally:
            go.set()


def train_once(mesh: pmesh.Mesh, state: Any) -> Any:  # noqa: ANN401 - a state
    w = mesh.average_gradients(state["w"] + mesh.step)
    return {"passes": state["passes"] + 1, "w": w}


def test_a_newcomer_enters_in_a_sync_with_everybodys_state_and_step(agent: WatchedAgent) -> None:
    with running_job(agent, 4, step=train_once) as (go, ranks):
        mesh = pmesh.connect("job", home=agent.home)
        assert (mesh.rank, mesh.step) == (-1, 0)
        assert repr(mesh).startswith("<Mesh 'job', rank -1 of 2, step 0: simulated, ")
        with ThreadPoolExecutor(1) as pool:
            entering = pool.submit(mesh.sync, {"passes": -1, "lazily": None})
            agent.wait_until(lambda: bool(agent.entering))
            go.set()
            state: Any = entering.result()
        assert (state["passes"], state["w"].tolist()) == (1, [1.0] * 300)
        assert (mesh.rank, mesh.size, mesh.step) == (2, 3, 2)
        state = train_once(mesh, state)
        while mesh.step < 4:
            state = train_once(mesh, mesh.sync(state))
        mesh.close()
        for rank in ranks:
            theirs, step, names = rank.result()
            assert (theirs["passes"], step, names) == (4, 4, ("simulated",) * 3)
            assert theirs["w"].tobytes() == state["w"].tobytes()
        assert state["passes"] == 4


@pytest.mark.parametrize(
    "call",
    [
        lambda mesh: mesh.all_reduce(np.ones(1)),
        lambda mesh: mesh.broadcast(np.ones(1)),
        lambda mesh: mesh.barrier(),
        lambda mesh: mesh.average_gradients([np.ones(1)]),
        lambda mesh: mesh.shard(10),
    ],
)
def test_a_newcomer_must_sync_before_anything_else_and_nobody_else_is_bothered(
    agent: WatchedAgent, call: Callable[[pmesh.Mesh], object]
) -> None:
    with (
        running_job(agent, 2, step=train_once),
        pmesh.connect("job", home=agent.home) as mesh,
        pytest.raises(pmesh.UsageError, match=r"'state = mesh\.sync\(state\)' first"),
    ):
        call(mesh)
    assert agent.entering == []


def unless_lost(mesh: pmesh.Mesh, state: dict[str, Any]) -> dict[str, Any] | None:
    """The state after a sync; None for a rank that the agent has cut off."""
    try:
        return mesh.sync(state)
    except pmesh.AgentStopped:
        return None


def test_when_a_source_dies_another_goes_on_where_it_was(agent: WatchedAgent) -> None:
    agent.losses = {3: 1}

    def program(mesh: pmesh.Mesh) -> tuple[Any, ...]:
        state = unless_lost(mesh, state_of(0 if mesh.rank < 2 else 2))
        return state, mesh.rank, mesh.size

    first, lost, third = run_ranks(agent.home, 3, program)
    assert lost[0] is None
    for state, rank, size in (first, third):
        assert_is_state_of(0, state)
        assert size == 2
        assert rank == (0 if state is first[0] else 1)
    roots = chunks(agent)
    assert roots[:4] == [("sync 0", 1), ("sync 256", 1), ("sync 512", 1), ("sync 512", 0)]
    assert [tree for tree, _ in roots[4:]] == [
        f"sync {768 + 256 * i}" for i in range(len(roots) - 4)
    ]


def test_when_all_sources_die_the_rest_agrees_on_the_best_that_is_left(
    agent: WatchedAgent, caplog: pytest.LogCaptureFixture
) -> None:
    agent.losses = {2: 0}

    def program(mesh: pmesh.Mesh) -> tuple[Any, int]:
        return unless_lost(mesh, state_of(mesh.rank)), mesh.step

    with caplog.at_level(logging.WARNING, "pmesh"):
        results = run_ranks(agent.home, 3, program)
    assert results[0] == (None, 0)
    for state, step in results[1:]:
        assert_is_state_of(1, state)
        assert step == 1
    tables = [call for call in agent.sessions[1].calls if call.kind == "sync"]
    assert len(tables) == 2
    assert "all ranks with the newest state are lost" in caplog.text


def test_when_nobody_is_left_who_lacks_the_state_no_more_is_sent(agent: WatchedAgent) -> None:
    agent.losses = {2: 1}

    def program(mesh: pmesh.Mesh) -> tuple[Any, ...]:
        own = state_of(mesh.rank % 2, count=100 * CHUNK_BYTES // 2)
        got = unless_lost(mesh, own)
        return got is own, mesh.rank, mesh.size

    results = run_ranks(agent.home, 3, program)
    assert [results[0], results[2]] == [(True, 0, 2), (True, 1, 2)]
    assert 2 <= len(chunks(agent)) < 100


@pytest.mark.parametrize("lost", [0, 2], ids=["the source", "another rank"])
def test_a_rank_that_asks_for_losses_gets_them_in_a_sync_too(
    agent: WatchedAgent, lost: int
) -> None:
    agent.losses = {1: lost}

    def program(index: int) -> Any:  # noqa: ANN401 - a state
        on_loss: Any = "raise" if index else "continue"  # two ask, so that one of them is left
        with pmesh.connect("job", wait_for=3, home=agent.home, on_loss=on_loss) as mesh:
            own = state_of(mesh.rank)
            if mesh.rank == lost:
                return unless_lost(mesh, own)
            with pytest.raises(pmesh.RankLost):  # in the second, if all had ended the first
                [mesh.sync(own) for _ in range(2)]
            assert mesh.size == 2
            return mesh.sync(own)

    with ThreadPoolExecutor(3) as pool:
        states = [state for state in pool.map(program, range(3)) if state is not None]
    assert len(states) == 2
    assert states[0]["position"] == states[1]["position"] == (1 if lost == 0 else 0)


def test_a_veteran_that_had_to_be_corrected_is_named_by_all(
    agent: WatchedAgent, caplog: pytest.LogCaptureFixture
) -> None:
    def program(mesh: pmesh.Mesh) -> dict[str, Any]:
        mesh.sync(state_of(0))
        return mesh.sync(state_of(mesh.rank // 2))

    with caplog.at_level(logging.WARNING, "pmesh"):
        results = run_ranks(agent.home, 3, program)
    assert_is_state_of(0, results[2])
    said = "rank 2 (simulated) had another state than rank 0 (simulated), and gets that one"
    assert [said in message for message in caplog.messages].count(True) == 3


def test_who_begins_with_other_weights_is_not_called_wrong(
    agent: WatchedAgent, caplog: pytest.LogCaptureFixture
) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        mesh.barrier()
        mesh.sync(state_of(mesh.rank))

    with caplog.at_level(logging.WARNING, "pmesh"):
        run_ranks(agent.home, 2, program)
    assert "another state" not in caplog.text


def other_arrays(caplog: pytest.LogCaptureFixture) -> list[str]:
    said = (message.partition("which has other arrays: ") for message in caplog.messages)
    return [paths for _, found, paths in said if found]


def synced_apart(home: Path, mine: object, theirs: object) -> None:
    """One sync in which rank 1 passes its own state and gets rank 0's."""
    run_ranks(home, 2, lambda mesh: mesh.sync(mine if mesh.rank else theirs))


def test_who_gets_arrays_of_another_shape_or_dtype_reads_which(
    agent: WatchedAgent, caplog: pytest.LogCaptureFixture
) -> None:
    same = {f"layer{i}.w": np.ones((10, 10), np.float32) for i in range(3)}
    mine = {**same, "layer3.w": np.ones((10, 10), np.float32), "b": np.ones(2, ">f4")}
    theirs = {**same, "layer3.w": np.ones((10, 11), np.float32), "b": np.ones(2)}
    with caplog.at_level(logging.WARNING, "pmesh"):
        synced_apart(agent.home, {"model": mine, "step": 1}, {"model": theirs, "step": 2})
    (said,) = other_arrays(caplog)
    assert said == (
        "model.b: (2,) >f4 here, (2,) float64 on rank 0 (simulated); "
        "model.layer3.w: (10, 10) float32 here, (10, 11) float32 on rank 0 (simulated)"
    )


def test_who_loses_arrays_in_a_sync_reads_which_and_how_many_more(
    agent: WatchedAgent, caplog: pytest.LogCaptureFixture
) -> None:
    mine = {"extra": np.ones(1), "w": [np.ones(2)] * 4}
    with caplog.at_level(logging.WARNING, "pmesh"):
        synced_apart(agent.home, mine, {"w": [np.zeros(1)] * 4, "z": np.ones(1)})
    (said,) = other_arrays(caplog)
    assert said.startswith("extra: only here; w.0: (2,) float64 here, (1,) float64 on rank 0 (")
    assert said.endswith("; and 3 more")


@pytest.mark.parametrize("mine", [None, {"w": np.zeros(3), "best": 0.5}])
def test_who_gets_arrays_that_it_had_not_made_yet_is_not_warned(
    agent: WatchedAgent, caplog: pytest.LogCaptureFixture, mine: object
) -> None:
    theirs = {"w": np.ones(3), "optimizer": {"momentum": np.ones(3)}, "best": None}
    with caplog.at_level(logging.WARNING, "pmesh"):
        synced_apart(agent.home, mine, theirs)
    assert other_arrays(caplog) == []


def test_a_state_that_was_garbled_on_its_way_is_not_taken(agent: WatchedAgent) -> None:
    def garble(session: WatchedSession, request: StartOp) -> None:
        if request.call.tree == "sync 256" and session.me == 0:
            session.inputs[request.arena][request.offset + 5] ^= 1

    agent.before_op = garble

    def program(mesh: pmesh.Mesh) -> None:
        own = state_of(mesh.rank)
        if mesh.rank == 0:
            mesh.sync(own)
            assert mesh.step == 1
        else:
            with pytest.raises(pmesh.RunError, match="not the one that was offered"):
                mesh.sync(own)
            assert mesh.step == 0
            assert_is_state_of(1, own)

    run_ranks(agent.home, 2, program)


def test_a_state_that_can_not_be_read_is_an_error_of_the_run(
    agent: WatchedAgent, faults: Faults
) -> None:
    faults.fail(mesh_module, "unpack_untrusted", ProtocolError("not a state"))

    def program(mesh: pmesh.Mesh) -> None:
        if mesh.rank == 0:
            mesh.sync(state_of(0))
        else:
            with pytest.raises(pmesh.RunError, match="can't be read: not a state"):
                mesh.sync(state_of(1))

    run_ranks(agent.home, 2, program)


def test_what_can_not_travel_raises_before_an_op_starts(agent: WatchedAgent) -> None:
    with pmesh.connect("job", home=agent.home) as mesh:
        with pytest.raises(pmesh.UnsupportedArray, match=r"^model: a value of type object"):
            mesh.sync({"model": object()})
        with pytest.raises(pmesh.UsageError, match="timeout_s"):
            mesh.sync({}, timeout_s=0)
        mesh.barrier()
    assert kinds(agent) == ["barrier"]


def test_a_sync_that_another_rank_calls_differently_fails_everywhere(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> tuple[Rank, int]:
        with pytest.raises(pmesh.OpMismatch, match="sync"):
            mesh.sync({}) if mesh.rank else mesh.barrier()
        mesh.sync({})
        return mesh.rank, mesh.step

    assert run_ranks(agent.home, 2, program) == [(0, 1), (1, 1)]
