# ruff: noqa: ANN401 - arrays of libraries that have no common type
"""Groups: some ranks of a mesh, in their own order, with collectives of their own."""

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import trio

import pmesh
from pmesh.agent.jobs import session as agent_session
from pmesh.client.calls.reducing import all_reduce_in_turn
from pmesh.client.elastic.place import Place
from pmesh.core.wire.trainer import StartOp
from tests.worlds.faults import Faults, Real
from tests.worlds.system import forked
from tests.worlds.watched_agent import WatchedAgent, WatchedSession, run_ranks

RANKS = 3


def of_groups(agent: WatchedAgent) -> list[WatchedSession]:
    """The sessions of ranks that make a group."""
    return [session for session in agent.sessions if "/" in session.job]


def made_of(
    agent: WatchedAgent, mesh: pmesh.Mesh, order: Sequence[int], coming: Sequence[int]
) -> Any:
    """A group whose ranks come to its agents in an order of their own: so is its ring."""
    turn = coming.index(mesh.rank)
    agent.wait_until(lambda: len(of_groups(agent)) >= turn)
    return mesh.group(order)


ORDERS = [*permutations(range(RANKS))]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("coming", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_every_call_counts_ranks_in_the_groups_order(
    agent: WatchedAgent, order: tuple[int, ...], coming: tuple[int, ...]
) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        group = made_of(agent, mesh, order, coming)
        me, r = order.index(mesh.rank), mesh.rank
        assert (group.rank, group.size, group.ranks) == (me, RANKS, order)
        title = f"Group of ranks {list(order)}, rank {me} of 3"
        assert repr(group) == f"<{title}: {', '.join(group.names)}>"
        assert title in group._repr_html_()
        rows = np.full(r + 1, r)
        everything = [rank for rank in order for _ in range(rank + 1)]
        assert group.all_gather(rows).tolist() == everything
        assert group.all_gather_object({"r": r}) == [{"r": rank} for rank in order]
        assert group.all_reduce(np.array(r)).tolist() == 3
        parts = group.reduce_scatter(np.arange(8) * 1.0)
        assert parts.tolist() == np.array_split(np.arange(8) * 3.0, RANKS)[me].tolist()
        got = group.all_to_all([np.full(to + 1, 10 * r + to) for to in range(RANKS)])
        assert [x.tolist() for x in got] == [[10 * rank + me] * (me + 1) for rank in order]
        for root in range(RANKS):
            is_root = me == root
            assert group.broadcast(np.array(r), root=root) == order[root]
            assert group.broadcast_object(r, root=root) == order[root]
            reduced, gathered = group.reduce(np.array(r), root), group.gather(rows, root)
            assert (reduced is not None) == (gathered is not None) == is_root
            assert gathered is None or gathered.tolist() == everything
            xs = [np.full(to, to) for to in range(RANKS)] if is_root else None
            assert group.scatter(xs, root=root).tolist() == [me] * me
        assert group.names == group.last_op.names
        group.barrier()
        assert group.names == group.last_op.names
        assert group.average_gradients(np.array(r * 1.0)) == 1
        assert group.names == group.last_op.names

    run_ranks(agent.home, RANKS, program)


def test_groups_run_beside_each_other_and_other_ranks_get_none(
    agent: WatchedAgent,
) -> None:
    done = threading.Event()

    def program(mesh: pmesh.Mesh) -> tuple[bool, float]:
        low = mesh.rank < 2
        other = mesh.group([2, 3] if low else [0, 1])
        mine = mesh.group([0, 1] if low else [2, 3])
        assert mine is not None
        if mesh.rank == 0:
            assert done.wait(20)  # rank 1's op waits meanwhile, and nobody else's
        under_way = mine.all_reduce(np.array(float(mesh.rank)), async_op=True)
        result = under_way.wait() if mesh.rank != 1 else None
        if mesh.rank == 3:
            done.set()
        mesh.barrier()  # rank 1 comes to it while its group's op waits
        return other is None, float(under_way.wait() if result is None else result)

    assert run_ranks(agent.home, 4, program) == [(True, 1)] * 2 + [(True, 5)] * 2


def test_the_same_ranks_may_make_several_groups(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> list[float]:
        groups = [mesh.group([1, 0]), mesh.group([1, 0]), mesh.group([0, 1])]
        return [float(g.all_reduce(np.array(1.0))) for g in groups if g is not None]

    assert run_ranks(agent.home, 2, program) == [[2, 2, 2]] * 2
    assert len({session.job for session in of_groups(agent)}) == 3


def test_jobs_with_long_names_that_begin_alike_keep_their_groups_apart(agent: WatchedAgent) -> None:
    for end in "ab":
        with pmesh.connect("j" * 60 + end, home=agent.home) as mesh:
            assert mesh.group([0]) is not None
    assert len({session.job for session in of_groups(agent)}) == 2
    assert all(len(session.job) <= 64 for session in agent.sessions)


def test_split_makes_a_group_for_each_color_ordered_by_key(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> Any:
        group = mesh.split(None if mesh.rank == 4 else mesh.rank % 2, key=-(mesh.rank // 2))
        return (
            None
            if group is None
            else (group.ranks, group.all_gather(np.array([mesh.rank])).tolist())
        )

    even, odd = ((2, 0), [2, 0]), ((3, 1), [3, 1])
    assert run_ranks(agent.home, 5, program) == [even, odd, even, odd, None]


def test_split_keeps_the_meshs_order_where_keys_are_alike(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> Any:
        group = mesh.split(0)
        return group and group.ranks

    assert run_ranks(agent.home, 3, program) == [(0, 1, 2)] * 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.group([]), r"different ranks from 0 to 0, at least one, not \[\]"),
        (lambda m: m.group(np.empty(0, int)), "at least one"),
        (lambda m: m.group([0, 0]), r"not \[0, 0\]"),
        (lambda m: m.group([1]), "from 0 to 0"),
        (lambda m: m.group([-1]), "from 0 to 0"),
        (lambda m: m.group([0], timeout_s=0), "timeout_s"),
        (lambda m: m.split(-1), "a color is at least 0, or None, not -1"),
        (lambda m: m.group([0]).broadcast(np.ones(1), root=1), "ranks 0 to 0"),
    ],
)
def test_what_can_not_be_a_group_is_refused(
    agent: WatchedAgent, call: Callable[[Any], object], message: str
) -> None:
    with pmesh.connect("job", home=agent.home) as mesh:
        with pytest.raises(pmesh.UsageError, match=message):
            call(mesh)
        mesh.barrier()


def test_after_a_group_for_which_a_rank_did_not_come_the_next_one_works(
    agent: WatchedAgent,
) -> None:
    def program(mesh: pmesh.Mesh) -> float:
        if mesh.rank == 0:  # the other has not tried, and can't know that there was to be a group
            with pytest.raises(pmesh.NotEnoughRanks):
                mesh.group([0, 1], timeout_s=0.01)
        mesh.barrier()
        group = mesh.group([0, 1])
        assert group is not None
        return float(group.all_reduce(np.array(1.0)))

    assert run_ranks(agent.home, 2, program) == [2, 2]


WITH_A_LOSS: dict[str, Callable[[Any], object]] = {
    "all_reduce": lambda g: g.all_reduce(np.ones(2)),
    "all_gather": lambda g: g.all_gather(np.ones(2)),
    "reduce_scatter": lambda g: g.reduce_scatter(np.ones(2)),
    "all_gather_object": lambda g: g.all_gather_object(1),
    "barrier": lambda g: g.barrier(),
    "async_op": lambda g: g.all_reduce(np.ones(2), async_op=True).wait(),
}


@pytest.mark.parametrize("call", WITH_A_LOSS.values(), ids=WITH_A_LOSS.keys())
def test_a_group_that_loses_a_rank_is_broken_on_all_and_for_good(
    agent: WatchedAgent, call: Callable[[Any], object]
) -> None:
    def program(mesh: pmesh.Mesh) -> Any:
        group = mesh.group([2, 1, 0])
        assert group is not None
        group.barrier()
        if mesh.rank == 0:
            group.close()
            with pytest.raises(pmesh.MeshClosed, match="it was closed"):
                group.barrier()
        else:
            for _ in range(2):
                with pytest.raises(
                    pmesh.GroupBroken, match=r"ranks \[2, 1, 0\] is broken: .*has left"
                ):
                    call(group)
            with pytest.raises(pmesh.GroupBroken):
                group.broadcast(np.ones(1), root=2)  # a rank that the group had
        mesh.barrier()
        again = mesh.group([1, 2])
        result = again and float(again.all_reduce(np.array(1.0)))
        mesh.barrier()  # the others make that group while this rank is still there
        return result

    assert run_ranks(agent.home, RANKS, program) == [None, 2, 2]


def test_a_rank_that_is_lost_while_a_group_is_made_breaks_it(agent: WatchedAgent) -> None:
    def before_op(session: WatchedSession, request: StartOp) -> None:
        if "/" in session.job and request.call.kind == "exchange" and session.me == 0:
            raise trio.EndOfChannel

    agent.before_op = before_op

    def program(mesh: pmesh.Mesh) -> str:
        with pytest.raises(pmesh.GroupBroken, match=r"ranks \[0, 1, 2\] is broken"):
            mesh.group([0, 1, 2])
        mesh.barrier()
        return "in step"

    assert run_ranks(agent.home, RANKS, program) == ["in step"] * RANKS


def test_a_group_one_of_whose_ranks_is_lost_before_it_comes_is_broken(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> str:
        mesh.barrier()
        if mesh.rank == 0:
            agent.wait_until(lambda: len(of_groups(agent)) == 2)
            mesh.close()
            return "gone"
        with pytest.raises(pmesh.GroupBroken, match=r"\[0, 1, 2\] is broken: rank 0 .* has left"):
            mesh.group([0, 1, 2])
        mesh.barrier()
        return "in step"

    assert run_ranks(agent.home, RANKS, program) == ["gone", "in step", "in step"]


def test_leaving_a_mesh_leaves_its_groups(agent: WatchedAgent) -> None:
    with pmesh.connect("job", home=agent.home) as mesh:
        group = mesh.group([0])
        assert group is not None
        group.all_reduce(np.ones(1))
    agent.wait_until(lambda: len(agent.left) >= 2)  # the other rank may leave the mesh already
    with pytest.raises(pmesh.MeshClosed, match="it was closed"):
        group.barrier()


def test_a_group_that_is_closed_leaves_no_memory_behind(agent: WatchedAgent) -> None:
    with pmesh.connect("job", home=agent.home) as mesh:
        group = mesh.group([0])
        assert group is not None
        left = weakref.ref(group)
        group.close()
        del group
        gc.collect()
        assert left() is None


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_a_group_that_nobody_holds_is_left(agent: WatchedAgent, *, in_a_cycle: bool) -> None:
    with pmesh.connect("job", home=agent.home) as mesh:
        held: list[Any] = [mesh.group([0])]
        held[0].barrier()
        if in_a_cycle:
            held.append(held)
        del held
        collector = threading.Thread(target=gc.collect)
        collector.start()
        collector.join()
        agent.wait_until(lambda: len(agent.left) == 1)
        mesh.barrier()
    assert agent.crashed == []


def test_a_group_stays_until_nobody_holds_a_handle_of_its_calls(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> float:
        group: Any = mesh.group([0, 1])
        handle = group.all_reduce(np.array(1.0), async_op=True)
        del group
        result = float(handle.wait())
        mesh.barrier()
        assert agent.left == []
        mesh.barrier()
        del handle
        agent.wait_until(lambda: len(agent.left) >= 2)  # the other rank may leave the mesh already
        return result

    assert run_ranks(agent.home, 2, program) == [2, 2]


def test_a_message_under_way_keeps_its_group(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> float | None:
        group: Any = mesh.group([0, 1])
        if mesh.rank == 0:
            sent = group.send(np.array(7.0), 1, async_op=True)
            del group
            mesh.barrier()
            sent.wait()
            return None
        mesh.barrier()
        got = group.recv(0)
        return float(got)

    assert run_ranks(agent.home, 2, program) == [None, 7]


def test_a_rank_that_drops_its_group_early_spoils_nothing_for_the_others(
    agent: WatchedAgent, caplog: pytest.LogCaptureFixture
) -> None:
    def before_op(session: WatchedSession, request: StartOp) -> None:
        if "/" in session.job and request.call.kind == "broadcast" and request.arena < 0:
            agent.wait_until(lambda: len(agent.left) >= 1)  # another may have left before it looks

    agent.before_op = before_op

    def program(mesh: pmesh.Mesh) -> float:
        group = made_of(agent, mesh, (0, 1, 2), (0, 1, 2))
        got = float(group.broadcast(np.array(mesh.rank + 5.0), root=0))
        del group
        mesh.barrier()
        return got

    assert run_ranks(agent.home, RANKS, program) == [5, 5, 5]
    assert caplog.messages == []


def test_a_forked_childs_copy_of_a_group_is_not_left(agent: WatchedAgent, faults: Faults) -> None:
    with pmesh.connect("job", home=agent.home) as mesh:
        parents = list[Place]()  # what the parent goes on with

        def keep(real: Real, *given: object) -> Place:
            parents.append(real(*given))
            return parents[-1]

        with faults.around(Place, "open", keep):
            group = mesh.group([0])
        with forked():
            del group
        mesh.barrier()
        assert agent.left == []
        parents[0].check_open()
        parents[0].leave()


def test_after_a_group_has_rested_its_calls_have_their_values(
    agent: WatchedAgent, faults: Faults
) -> None:
    faults.limit(agent_session, "IDLE_S", 0.0)
    faults.limit(agent_session, "WATCH_S", 0.01)
    x = np.arange(100_000.0)
    calls: dict[str, Callable[[Any], Any]] = {
        "all_reduce": lambda g: g.all_reduce(x),
        "sent together": lambda g: [
            call() for call in all_reduce_in_turn(g, [x[:9].copy(), x[:5].copy()], "sum", 60.0)
        ],
        "in several buckets": lambda g: g.average_gradients({"a": x, "b": x}, bucket_bytes=65536),
        "broadcast": lambda g: g.broadcast(x, root=0),
        "compressed": lambda g: g.all_reduce(x, compression="int8"),
    }
    with pmesh.connect("job", home=agent.home) as mesh:
        group: Any = mesh.group([0])
        kept = group.empty((3,), np.float32)
        kept[:] = 7
        (session,) = of_groups(agent)
        assert session.jobs is not None
        arenas = next(r for r in session.jobs.ranks if "/" in r.roster.job).arenas
        before = {name: call(mesh) for name, call in calls.items()}
        for name, call in calls.items():
            while arenas.outputs.nbytes or arenas.inputs.nbytes > 2 * 65536:  # what is kept
                mesh.barrier()
            np.testing.assert_equal(call(group), before[name])
            assert group.all_reduce(kept).tolist() == [7] * 3


def test_a_crash_of_the_mesh_is_one_of_its_groups(agent: WatchedAgent) -> None:
    def crashes() -> None:
        with pmesh.connect("job", home=agent.home) as mesh:
            held = mesh.group([0])
            assert held is not None
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        crashes()
    agent.wait_until(lambda: len(agent.crashed) == 2)
    assert agent.left == []
