"""Who takes over the layers of a rank in whose place nobody comes."""

import pytest

from pmesh.errors import RosterChanged, UsageError
from pmesh.mlx.pipeline.rules.meeting import Holding, replaced, stages_of
from pmesh.mlx.pipeline.rules.takeover import is_due, join_states, plan_takeover

MACS = ("mac-1", "mac-2", "mac-3", "mac-4")
LAYERS = (1, 2, 3, 4)


def waiting(stage: int, *, copies: tuple[int, ...] = (6, 7), has_waited: bool = True) -> Holding:
    return Holding(3, stage, (6, 7), copies, LAYERS, MACS, has_waited)


@pytest.mark.parametrize(
    ("lost", "ranks", "layers", "keeper", "heir"),
    [
        (0, (2, 1, 0), (3, 3, 4), 1, 1),
        (1, (2, 1, 0), (1, 5, 4), 2, 2),
        (3, (2, 1, 0), (1, 2, 7), 0, 2),  # the copy travels: layers stay in their order
    ],
)
def test_a_stage_beside_the_lost_one_gets_its_layers(
    lost: int, ranks: tuple[int, ...], layers: tuple[int, ...], keeper: int, heir: int
) -> None:
    holdings = [waiting(stage) for stage in (3, 2, 1, 0) if stage != lost]
    assert is_due(holdings)
    plan = plan_takeover(holdings)
    assert (plan.ranks, plan.layers, plan.step) == (ranks, layers, 7)
    assert (plan.lost, plan.keeper, plan.heir, plan.has_copy) == (lost, keeper, heir, True)
    assert [plan.place_of(s) for s in range(4) if s != lost] == [0, 1, 2]


def test_all_go_back_to_the_step_of_the_copy() -> None:
    holdings = [waiting(0), waiting(2, copies=(6,)), waiting(3)]
    assert plan_takeover(holdings).step == 6


def test_before_the_first_copy_the_state_is_that_of_the_model() -> None:
    holdings = [Holding(1, stage, (0,), (), LAYERS, MACS, has_waited=True) for stage in (0, 1, 3)]
    plan = plan_takeover(holdings)
    assert (plan.step, plan.has_copy) == (0, False)


def test_a_stage_without_a_whole_copy_is_named() -> None:
    with pytest.raises(RosterChanged, match="stage 1 of the pipeline is lost with mac-2, and"):
        plan_takeover([waiting(0), waiting(2, copies=()), waiting(3)])


def test_nobody_takes_over_before_all_have_waited_or_while_two_are_lost_or_one_is_new() -> None:
    three = [waiting(0), waiting(2), waiting(3)]
    assert is_due(three)
    assert not is_due([*three[:2], waiting(3, has_waited=False)])
    assert not is_due(three[:2])
    assert not is_due([*three, waiting(1)])
    assert not is_due([*three[:2], Holding(own=(0,), has_waited=True)])


def test_a_rank_that_comes_back_after_all_has_no_stage_any_more() -> None:
    left = [Holding(4, stage, (8,), (8,), (3, 3, 4), MACS[1:]) for stage in range(3)]
    late = waiting(3)
    assert stages_of([late, *left]) == 3
    assert replaced([late, *left]) == {0}


def test_states_are_joined_module_by_module() -> None:
    first = {"weights": {"layers": ["a", "b"]}, "optimizer": {"layers": ["A", "B"]}}
    second = {"weights": {"layers": ["b", "c"]}, "optimizer": {"layers": ["B", "C"], "step": 7}}
    order = [(0, 0), (1, 0), (1, 1)]
    assert join_states((first, second), order) == {
        "weights": {"layers": ["a", "b", "c"]},
        "optimizer": {"layers": ["A", "B", "C"], "step": 7},
    }


@pytest.mark.parametrize("odd", [{}, {"layers": ["a"]}, {"layers": 7}, {"layers": None}])
def test_a_copy_of_another_model_is_refused(odd: object) -> None:
    with pytest.raises(UsageError, match="has other modules than this model"):
        join_states((odd, {"layers": ["c"]}), [(0, 1), (1, 0)])
