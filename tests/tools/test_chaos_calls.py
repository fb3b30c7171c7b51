"""The calls of the campaigns: right among ranks that are all there, and wrong values are seen."""

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest

import pmesh
from pmesh.testing import SimulatedMesh
from tests.worlds.faults import Faults
from tools.chaos import calls, ranks
from tools.chaos.calls import (
    CALLS,
    MOST_TRAINERS,
    At,
    CallOutcome,
    CheckedCall,
    Pattern,
    Values,
    _envelopes,
    _group,
    digest,
    own_value,
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


def trial_of(mesh: pmesh.Mesh, kind: str, step: int) -> CheckedCall:
    return prepare(kind, At(mesh, Pattern(NBYTES), mesh.rank + 1, step))


@pytest.mark.parametrize(("kind", "step"), EACH)
def test_each_call_is_right_and_alike_on_all_ranks(kind: str, step: int) -> None:
    def train(mesh: pmesh.Mesh) -> CallOutcome:
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
    faults: Faults,
) -> None:
    faults.fail(pmesh.Mesh, "split", pmesh.GroupBroken("for no reason"))
    faults.fail(pmesh.Mesh, "recv_like", pmesh.RankLost("for no reason"))
    # Who does not receive does not end the other's send.
    faults.skip(pmesh.Mesh, "send")

    def train(mesh: pmesh.Mesh) -> list[CallOutcome]:
        trials = [
            make(At(mesh, Pattern(NBYTES), mesh.rank + 1, 0)) for make in (_group, _envelopes)
        ]
        return [trial.judge(trial.call()) for trial in trials]

    wrong = [CallOutcome("grouped", right=False), CallOutcome("told", right=False)]
    assert SimulatedMesh(SIZE).run(train) == [wrong] * SIZE


def test_a_call_that_is_bound_to_its_ranks_may_end_with_an_error_and_a_sum_may_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lose() -> None:
        raise pmesh.RosterChanged("a rank was lost")

    def trial(at: At) -> CheckedCall:
        return CheckedCall(lose, lambda _: CallOutcome(f"never at {at.step}", right=False))

    monkeypatch.setattr(calls, "CALLS", {"sum": [trial], "collectives": [trial]})

    def train(mesh: pmesh.Mesh) -> CallOutcome:
        with pytest.raises(pmesh.RosterChanged):
            trial_of(mesh, "sum", 0).call()
        bound = trial_of(mesh, "collectives", 0)
        return bound.judge(bound.call())

    assert SimulatedMesh(2).run(train) == [CallOutcome("RosterChanged", right=True)] * 2


@pytest.mark.parametrize("dtype", sorted({dtype.__name__ for dtype in ranks.DTYPES}))
@pytest.mark.parametrize("make", dict.fromkeys(ranks.CALLS))
def test_calls_of_several_trainers_on_a_machine_are_right_and_a_wrong_value_is_seen(
    make: Callable[[At, type[Any]], CheckedCall], dtype: str
) -> None:
    def train(mesh: pmesh.Mesh) -> tuple[CallOutcome, bool]:
        trial = make(At(mesh, Pattern(NBYTES), 0, 5), getattr(np, dtype))
        result = trial.call()
        outcome = trial.judge(result)
        match result:
            case np.ndarray():
                wrong: Any = result + 1
            case {"w": w, **more}:
                wrong = {"w": w + 1000, **more}
            case (first, before, second):
                wrong = first, before, second + 1
            case _:  # a barrier brings no values
                return outcome, False
        return outcome, trial.judge(wrong).right

    outcomes = SimulatedMesh(SIZE).run(train)
    assert {(outcome.right, wrong) for outcome, wrong in outcomes} == {(True, False)}
    assert len({outcome.digest for outcome, _ in outcomes}) == 1


def test_ops_of_several_trainers_have_any_size_and_any_call() -> None:
    most = 16 << 20
    sizes = [ranks.bytes_in(step, most) for step in range(400)]
    assert min(sizes) < 100 < most // 4 < max(sizes) <= most

    def train(mesh: pmesh.Mesh) -> None:
        made = [ranks.prepare_call(At(mesh, Pattern(NBYTES), 0, step)) for step in range(30)]
        assert all(trial.judge(trial.call()).right for trial in made)

    SimulatedMesh(2).run(train)


def test_no_two_trainers_of_a_job_give_the_same_and_their_sum_is_exact() -> None:
    units = {ranks.unit_of(trainer) for trainer in range(1021)}
    assert len(units) == 1021
    most = sorted(range(1021), key=ranks.unit_of)[-7:]
    assert ranks.total_of(most, 96, PATTERN_BYTES // 4).max() < 2**24


PATTERN_BYTES = 1 << 20
SEGMENT = 65536  # values: 256 KiB


def total(step: int, *numbers: int) -> Values:
    pattern = Pattern(PATTERN_BYTES)
    result = np.zeros_like(pattern.input(step, 1))
    for number in numbers:
        result += pattern.input(step, number)
    return result


def test_a_sum_is_right_for_exactly_those_who_gave() -> None:
    pattern, result = Pattern(PATTERN_BYTES), total(5, 1, 2, 4)

    assert pattern.is_right(result, 5, [4, 2, 1])
    for numbers in ([1, 2], [1, 2, 4, 8], [1, 2, 3], [7]):
        assert not pattern.is_right(result, 5, numbers)
    assert not pattern.is_right(result, 4, [1, 2, 4])


def test_no_two_sets_of_contributors_have_the_same_sum() -> None:
    everybody = range(1, MOST_TRAINERS + 1)
    groups = [group for n in everybody for group in combinations(everybody, n)]
    sums = {sum(own_value(996, number) for number in group) for group in groups}

    assert len(sums) == len(groups)


def test_the_largest_sums_are_exact_in_float32() -> None:
    everybody = range(1, MOST_TRAINERS + 1)

    assert total(996, *everybody).max() < 2**24
    assert Pattern(PATTERN_BYTES).is_right(total(996, *everybody), 996, everybody)


@pytest.mark.parametrize("place", [0, 77, -1])
def test_one_wrong_value_is_seen_and_changes_the_hash(place: int) -> None:
    result = total(1, 1, 2)
    before = digest(result)
    result.flat[place] += 1

    assert not Pattern(PATTERN_BYTES).is_right(result, 1, [1, 2])
    assert digest(result) != before


def test_a_segment_in_the_place_of_another_is_seen() -> None:
    result = total(1, 1, 2)
    flat = result.reshape(-1)
    flat[:SEGMENT] = flat[SEGMENT : 2 * SEGMENT].copy()

    assert not Pattern(PATTERN_BYTES).is_right(result, 1, [1, 2])
