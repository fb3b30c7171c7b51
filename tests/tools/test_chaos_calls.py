"""The calls of the campaigns: right among ranks that are all there, and wrong values are seen."""

import pytest

import pmesh
from pmesh.testing import SimulatedMesh
from tools.chaos import calls
from tools.chaos.calls import (
    CALLS,
    At,
    Outcome,
    Pattern,
    Trial,
    _envelopes,
    _group,
    prepare,
)

NBYTES = 1 << 18
SIZE = 3
EACH = [(kind, step) for kind, each in CALLS.items() for step in range(len(each))]


@pytest.fixture(autouse=True)
def _names_as_in_a_campaign(monkeypatch: pytest.MonkeyPatch) -> None:
    """There each rank has a machine of its own; simulated ones share one."""

    def names(ranks: pmesh.Mesh | pmesh.Group) -> tuple[str, ...]:
        numbers = ranks.ranks if isinstance(ranks, pmesh.Group) else range(ranks.size)
        return tuple(f"mac-{number + 1}" for number in numbers)

    for kind in (pmesh.Mesh, pmesh.Group):
        monkeypatch.setattr(kind, "names", property(names))
    most = lambda mesh, x: (mesh.all_reduce(x, op="max"), mesh.names)  # noqa: E731
    monkeypatch.setattr(calls, "_all_reduced", most)


def trial_of(mesh: pmesh.Mesh, kind: str, step: int) -> Trial:
    return prepare(kind, At(mesh, Pattern(NBYTES), mesh.rank + 1, step))


@pytest.mark.parametrize(("kind", "step"), EACH)
def test_each_call_is_right_and_alike_on_all_ranks(kind: str, step: int) -> None:
    def train(mesh: pmesh.Mesh) -> Outcome:
        trial = trial_of(mesh, kind, step)
        return trial.judge(trial.call())

    outcomes = SimulatedMesh(SIZE).run(train)
    assert all(outcome.right for outcome in outcomes), outcomes
    assert len({outcome.digest for outcome in outcomes}) == 1


@pytest.mark.parametrize(("kind", "step"), EACH)
def test_what_other_ranks_would_give_is_seen(kind: str, step: int) -> None:
    def train(mesh: pmesh.Mesh) -> bool:
        trial = prepare(kind, At(mesh, Pattern(NBYTES), mesh.rank + 2, step))
        return trial.judge(trial.call()).right

    assert not all(SimulatedMesh(SIZE).run(train))


def test_a_group_that_breaks_and_a_message_that_is_lost_without_a_loss_are_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def breaks(*_: object) -> None:
        raise pmesh.GroupBroken("for no reason")

    def loses(*_: object) -> None:
        raise pmesh.RankLost("for no reason")

    monkeypatch.setattr(pmesh.Mesh, "split", breaks)
    monkeypatch.setattr(pmesh.Mesh, "recv_like", loses)
    # Who does not receive does not end the other's send.
    monkeypatch.setattr(pmesh.Mesh, "send", lambda *_, **__: None)

    def train(mesh: pmesh.Mesh) -> list[Outcome]:
        trials = [
            make(At(mesh, Pattern(NBYTES), mesh.rank + 1, 0)) for make in (_group, _envelopes)
        ]
        return [trial.judge(trial.call()) for trial in trials]

    wrong = [Outcome("grouped", right=False), Outcome("told", right=False)]
    assert SimulatedMesh(SIZE).run(train) == [wrong] * SIZE


def test_a_call_that_is_bound_to_its_ranks_may_end_with_an_error_and_a_sum_may_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lose() -> None:
        raise pmesh.RosterChanged("a rank was lost")

    def trial(at: At) -> Trial:
        return Trial(lose, lambda _: Outcome(f"never at {at.step}", right=False))

    monkeypatch.setattr(calls, "CALLS", {"sum": [trial], "collectives": [trial]})

    def train(mesh: pmesh.Mesh) -> Outcome:
        with pytest.raises(pmesh.RosterChanged):
            trial_of(mesh, "sum", 0).call()
        bound = trial_of(mesh, "collectives", 0)
        return bound.judge(bound.call())

    assert SimulatedMesh(2).run(train) == [Outcome("RosterChanged", right=True)] * 2
