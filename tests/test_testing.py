import asyncio
import logging
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

import pmesh
from pmesh.testing import SimulatedMesh
from tests.docs.pages import DOCS, read

SIZES = pytest.mark.parametrize("size", [1, 2, 3, 4])
PATIENCE_S = 20.0


def values(rank: int) -> Any:  # noqa: ANN401 - an array
    return np.random.default_rng(rank).random((5, 3)).astype(np.float32)


@SIZES
@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "prod"])
def test_reductions_are_what_numpy_says_with_the_same_bits_on_all_ranks(size: int, op: str) -> None:
    def train(mesh: pmesh.Mesh) -> tuple[Any, Any, Any]:
        x = values(mesh.rank)
        root = mesh.size - 1
        return mesh.all_reduce(x, op), mesh.reduce(x, root, op), mesh.reduce_scatter(x, op)

    results = SimulatedMesh(size).run(train)

    expected = getattr(np, op)([values(rank) for rank in range(size)], axis=0)
    assert len({everywhere.tobytes() for everywhere, _, _ in results}) == 1
    np.testing.assert_allclose(results[0][0], expected, rtol=1e-6)
    np.testing.assert_allclose(results[-1][1], expected, rtol=1e-6)
    assert all(rooted is None for _, rooted, _ in results[:-1])
    for (everywhere, _, part), rows in zip(results, np.array_split(range(5), size), strict=True):
        np.testing.assert_allclose(part, everywhere[rows], rtol=1e-6)


@SIZES
def test_arrays_are_moved_to_whom_they_are_for(size: int) -> None:
    def train(mesh: pmesh.Mesh) -> list[Any]:
        rank, root = mesh.rank, mesh.size - 1
        own = np.full((rank + 1, 2), rank)
        to_all = [np.full(rank + to, 10 * rank + to) for to in range(mesh.size)]
        xs = [np.full(to, to) for to in range(mesh.size)] if rank == root else None
        mesh.barrier()
        return [
            mesh.broadcast(own[:1], root),
            mesh.all_gather(own),
            mesh.gather(own, root),
            mesh.scatter(xs, root),
            mesh.all_to_all(to_all),
            mesh.all_gather_object({"rank": rank}),
            mesh.broadcast_object(rank, root),
            mesh.sync({"w": own}),
        ]

    results = SimulatedMesh(size).run(train)

    everything = np.concatenate([np.full((rank + 1, 2), rank) for rank in range(size)])
    for rank, (sent, all_, gathered, part, exchanged, told, said, state) in enumerate(results):
        np.testing.assert_array_equal(sent, np.full((1, 2), size - 1))
        np.testing.assert_array_equal(all_, everything)
        if rank == size - 1:
            np.testing.assert_array_equal(gathered, everything)
        else:
            assert gathered is None
        np.testing.assert_array_equal(part, np.full(rank, rank))
        for from_, x in enumerate(exchanged):
            np.testing.assert_array_equal(x, np.full(from_ + rank, 10 * from_ + rank))
        assert told == [{"rank": other} for other in range(size)]
        assert said == size - 1
        np.testing.assert_array_equal(state["w"], np.full((1, 2), 0))


def test_groups_have_ranks_of_their_own_and_handles_come_in_any_order() -> None:
    def train(mesh: pmesh.Mesh) -> tuple[float, float]:
        group = mesh.split(mesh.rank % 2)
        assert group is not None
        first = mesh.all_reduce(np.float32(mesh.rank), async_op=True)
        second = group.all_reduce(np.float32(mesh.rank), async_op=True)
        return float(second.wait()), float(first.wait())

    assert SimulatedMesh(4).run(train) == [(2.0, 6.0), (4.0, 6.0), (2.0, 6.0), (4.0, 6.0)]


def test_a_group_for_which_a_rank_has_waited_in_vain_comes_together_later() -> None:
    def train(mesh: pmesh.Mesh) -> Any:  # noqa: ANN401 - an array
        if mesh.rank == 0:
            with pytest.raises(pmesh.NotEnoughRanks, match=r"1 of 2 .* are here after 0.01 s"):
                mesh.group([0, 1], timeout_s=0.01)
        mesh.barrier()
        group = mesh.group([0, 1])
        assert group is not None
        return float(group.all_reduce(np.array(1.0)))

    assert SimulatedMesh(2).run(train) == [2, 2]


def test_calls_that_differ_fail_on_all_ranks_and_both_are_named() -> None:
    def train(mesh: pmesh.Mesh) -> float:
        with pytest.raises(pmesh.OpMismatch, match=r"rank 0 .*all_reduce.*rank 1 .*barrier"):
            mesh.all_reduce(np.ones(2)) if mesh.rank == 0 else mesh.barrier()
        return float(mesh.all_reduce(np.float32(1)))  # and they go on

    assert SimulatedMesh(2).run(train) == [2.0, 2.0]


def test_a_timeout_names_who_is_late_who_hears_of_it_too() -> None:
    def train(mesh: pmesh.Mesh) -> None:
        if mesh.rank == 1:
            told.wait(PATIENCE_S)
        with pytest.raises(pmesh.OpTimedOut, match="not started by rank 1"):
            mesh.barrier(timeout_s=0.01)
        told.set()

    told = threading.Event()
    SimulatedMesh(2).run(train)
    assert told.is_set()


def fails(mesh: pmesh.Mesh) -> None:
    if mesh.rank == 1:
        raise ValueError("mine")
    mesh.barrier(PATIENCE_S)


def leaves(mesh: pmesh.Mesh) -> None:
    if mesh.rank == 1:
        return
    mesh.barrier(PATIENCE_S)


@pytest.mark.parametrize(("train", "error"), [(fails, ValueError), (leaves, pmesh.RankLost)])
def test_nobody_waits_for_a_rank_that_has_ended(
    train: Callable[[pmesh.Mesh], None], error: type[Exception]
) -> None:
    with pytest.raises(error):
        SimulatedMesh(3).run(train)


def test_different_errors_come_in_a_group() -> None:
    def train(mesh: pmesh.Mesh) -> None:
        raise ValueError(str(mesh.rank))

    with pytest.raises(ExceptionGroup) as caught:
        SimulatedMesh(2).run(train)

    assert [str(e) for e in caught.value.exceptions] == ["0", "1"]


def test_a_rank_can_be_lost_on_purpose() -> None:
    simulated = SimulatedMesh(2)

    def train(mesh: pmesh.Mesh) -> str:
        if mesh.rank == 1:
            simulated.lose(1)
        with pytest.raises(pmesh.RankLost, match=r"rank 1 .*is lost") as caught:
            mesh.barrier(PATIENCE_S)
        return str(caught.value)

    assert len(simulated.run(train)) == 1


def test_the_others_go_on_without_a_lost_rank_and_a_newcomer_takes_its_place() -> None:
    simulated = SimulatedMesh(3, on_loss="continue")
    newcomers: list[threading.Thread] = []

    def train(mesh: pmesh.Mesh) -> tuple[int, float]:
        total = 0.0
        while mesh.size < 3 or mesh.step < 5:
            total = mesh.sync(total)
            if mesh.rank == 1 and mesh.step == 2:
                simulated.lose(1)
            total += float(mesh.all_reduce(np.array(1.0)))
            if mesh.size == 2 and mesh.rank == 0 and not newcomers:
                newcomers.append(threading.Thread(target=lambda: train(simulated.connect())))
                newcomers[0].start()
        return mesh.size, total

    results = simulated.run(train)
    newcomers[0].join()
    assert results == [results[0]] * 2
    assert results[0][0] == 3


def test_a_call_in_two_threads_and_in_an_event_loop_does_not_mix() -> None:
    def total(size: int) -> list[float]:
        return SimulatedMesh(size).run(lambda mesh: float(mesh.all_reduce(np.array(1.0))))

    async def within_trio() -> list[float]:
        await trio.lowlevel.checkpoint()
        return total(3)

    async def within_asyncio() -> list[float]:
        return total(4)

    two = SimulatedMesh(2)
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(two.run, lambda mesh: mesh.size) for _ in range(2)]
        assert trio.run(within_trio) == [3] * 3
        assert asyncio.run(within_asyncio()) == [4] * 4
    assert [each.result() for each in both] == [[2, 2]] * 2


@pytest.fixture
def press_ctrl_c() -> Iterator[Callable[[], None]]:
    """For another thread. One signal may not wake a main thread that is just about to wait."""
    main, pressed = threading.get_ident(), threading.Event()

    def interrupt(*_: object) -> None:
        if not pressed.is_set():
            pressed.set()
            raise KeyboardInterrupt

    def press() -> None:
        while not pressed.wait(0.01):
            signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, interrupt)
    yield press
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_the_ranks_that_wait_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, press_ctrl_c: Callable[[], None]
) -> None:
    def train(mesh: pmesh.Mesh) -> None:
        if mesh.rank == 0:
            press_ctrl_c()
            mesh.recv(1)
        mesh.barrier()

    def process() -> object:
        handlers = [signal.getsignal(number) for number in signal.valid_signals()]
        threads = [thread for thread in threading.enumerate() if not thread.daemon]
        return handlers, [*logging.getLogger().handlers], dict(os.environ), threads

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = process()
    with pytest.raises(KeyboardInterrupt):
        SimulatedMesh(2).run(train)
    assert process() == before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [0, 65])
def test_a_mesh_has_at_least_one_rank_and_at_most_what_an_agent_gives_to_a_program(
    size: int,
) -> None:
    with pytest.raises(pmesh.UsageError, match=f"at least 1 rank and at most 64, not {size}"):
        SimulatedMesh(size)


def test_ranks_are_added_and_lost_only_while_they_run() -> None:
    simulated = SimulatedMesh(2)

    def refused() -> None:
        with pytest.raises(pmesh.UsageError, match=r"connect\(\) .* call it during run\(\)"):
            simulated.connect()
        with pytest.raises(pmesh.UsageError, match=r"lose\(\) .* call it during run\(\)"):
            simulated.lose(0)

    def train(mesh: pmesh.Mesh) -> None:
        for rank in (2, -1):
            with pytest.raises(pmesh.UsageError, match=f"no rank {rank}: there are ranks 0 to 1"):
                simulated.lose(rank)
        mesh.barrier(PATIENCE_S)

    refused()
    simulated.run(train)
    refused()


@pytest.mark.parametrize("number", [0, 1])
def test_the_scripts_of_the_how_to_pass(number: int) -> None:
    page = read(DOCS / "how-to" / "test-your-script.md")
    found: dict[str, Any] = {}

    script = page.split("```python\n")[number + 1].split("```")[0]
    exec(script, found)  # noqa: S102 - our own page

    (test,) = [value for name, value in found.items() if name.startswith("test_")]
    test()
