"""I5: ranks whose trees differ read which paths do, all the same text."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import trio

import pmesh
from pmesh.core.wire.trainer import StartOp
from pmesh.testing import SimulatedMesh
from tests.worlds.watched_agent import WatchedAgent, WatchedSession, run_ranks

RANKS = 2  # of three, one may not have called when two differ already
LAYERS = 20


def tree_of(
    rank: int, changed: Callable[[dict[str, Any]], object], *, at: int = 1
) -> dict[str, Any]:
    tree: dict[str, Any] = {f"layer{i}.w": np.ones((10, 10)) for i in range(LAYERS)}
    tree["l"] = np.ones((10, 10))
    if rank == at:
        changed(tree)
    return tree


def messages(call: Callable[[pmesh.Mesh], object]) -> list[str]:
    def train(mesh: pmesh.Mesh) -> str:
        with pytest.raises(pmesh.OpMismatch) as caught:
            call(mesh)
        assert mesh.all_reduce(np.array(1.0)) == RANKS  # all are at the same op
        return str(caught.value)

    return SimulatedMesh(RANKS).run(train)


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another shape": (
        lambda tree: tree.update({"l": np.ones((10, 11))}),
        "l: (10, 10) float64 on rank 0 (simulated), (10, 11) float64 on rank 1 (simulated)",
    ),
    "one more": (
        lambda tree: tree.update(extra=np.ones(1)),
        "extra: only on rank 1 (simulated)",
    ),
    "a name that is no Unicode": (
        lambda tree: tree.update({"\ud800": np.ones(1)}),
        r"\ud800: only on rank 1 (simulated)",
    ),
    "two of one path": (
        lambda tree: tree.update({"layer3": {"w": np.ones((10, 10))}}),
        "layer3.w (2): only on rank 1 (simulated)",
    ),
    "one less": (
        lambda tree: tree.pop("layer3.w"),
        "layer3.w: only on rank 0 (simulated)",
    ),
    "no gradient": (
        lambda tree: tree.update({"layer3.w": None}),
        "layer3.w: (10, 10) float64 on rank 0 (simulated), None on rank 1 (simulated)",
    ),
}


@pytest.mark.parametrize("call", ["all_reduce", "average_gradients"])
@pytest.mark.parametrize(("changed", "named"), CHANGES.values(), ids=CHANGES)
def test_the_error_names_the_path_and_the_ranks(
    changed: Callable[[dict[str, Any]], object], named: str, call: str
) -> None:
    said = messages(lambda mesh: getattr(mesh, call)(tree_of(mesh.rank, changed)))
    if call == "average_gradients" and "None" in named:
        named += "; average_gradients(..., missing='zeros') counts None as zeros"
    assert said == [f"op 0 of job 'simulated' differs: {named}"] * RANKS


def test_at_most_three_paths_are_shown() -> None:
    def changed(tree: dict[str, Any]) -> None:
        tree.update({f"layer{i}.w": np.ones(3) for i in range(5)})

    (said, *_) = messages(lambda mesh: mesh.all_reduce(tree_of(mesh.rank, changed)))
    assert said.count("layer") == 3
    assert said.endswith("; and 2 more")


def test_what_is_none_where_no_rank_has_an_array_is_not_named() -> None:
    def tree(rank: int) -> dict[str, Any]:
        return {"w": np.ones(1 + rank), "unused": None} if rank else {"w": np.ones(1)}

    (said, *_) = messages(lambda mesh: mesh.all_reduce(tree(mesh.rank)))
    assert "w: (1,) float64 on rank 0" in said
    assert "unused" not in said


def test_other_calls_are_named_as_they_are() -> None:
    said = messages(lambda mesh: mesh.all_reduce([np.ones(1)]) if mesh.rank else mesh.barrier())
    assert "rank 0 (simulated): barrier(" in said[0]
    assert "rank 1 (simulated): all_reduce(" in said[0]


def test_a_rank_that_is_lost_meanwhile_leaves_the_error_as_it_was(agent: WatchedAgent) -> None:
    def before_op(session: WatchedSession, request: StartOp) -> None:
        if request.call.kind == "collect" and session.me == 1:
            raise trio.EndOfChannel

    def program(mesh: pmesh.Mesh) -> str:
        try:
            mesh.all_reduce([np.ones(1 + mesh.rank)])
        except pmesh.OpMismatch as e:
            return str(e)
        except pmesh.AgentStopped:
            return "lost"
        return "no error"

    agent.before_op = before_op
    one, lost = run_ranks(agent.home, RANKS, program)
    assert lost == "lost"
    assert one.count("tree ") == RANKS
