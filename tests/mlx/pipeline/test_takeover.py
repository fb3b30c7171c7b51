"""Who gets the layers of a rank in whose place nobody comes."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.errors import RosterChanged, UsageError
from pmesh.mlx.pipeline.rules.meeting import Holding, replaced, stages_of
from pmesh.mlx.pipeline.rules.takeover import (
    Takeover,
    check_divisible,
    is_due,
    join_modules,
    pick_modules,
    plan_parcels,
    plan_takeover,
)

MACS = ("mac-1", "mac-2", "mac-3", "mac-4", "mac-5")
LAYERS = (1, 2, 3, 4, 5)


def waiting(
    stage: int, *, of: int = 4, copies: tuple[int, ...] = (6, 7), has_waited: bool = True
) -> Holding:
    return Holding(3, stage, (6, 7), copies, LAYERS[:of], MACS[:of], has_waited)


@pytest.mark.parametrize(
    ("lost", "joined", "keeper"),
    [
        (0, (3, 3, 4), 1),
        (1, (1, 5, 4), 2),
        (3, (1, 2, 7), 0),  # layers stay in their order, the copy is at the first
    ],
)
def test_the_states_of_a_lost_stage_are_at_the_next_one(
    lost: int, joined: tuple[int, ...], keeper: int
) -> None:
    holdings = [waiting(stage) for stage in (3, 2, 1, 0) if stage != lost]
    assert is_due(holdings)
    plan = plan_takeover(holdings)
    assert (plan.ranks, plan.before, plan.joined) == ((2, 1, 0), LAYERS[:4], joined)
    assert (plan.step, plan.keepers) == (7, {lost: keeper})
    assert plan.left == tuple(stage for stage in range(4) if stage != lost)
    assert [plan.place_of(stage) for stage in plan.left] == [0, 1, 2]


def test_two_that_are_no_neighbours_may_be_lost() -> None:
    holdings = [waiting(stage, of=5) for stage in (0, 2, 4)]
    assert is_due(holdings)
    plan = plan_takeover(holdings)
    assert (plan.left, plan.joined) == ((0, 2, 4), (1, 5, 9))
    assert plan.keepers == {1: 2, 3: 4}


def test_all_go_back_to_the_step_of_the_copy() -> None:
    holdings = [waiting(0), waiting(2, copies=(6,)), waiting(3)]
    assert plan_takeover(holdings).step == 6


def test_before_the_first_copy_the_state_is_that_of_the_model() -> None:
    left = [Holding(1, s, (0,), (), LAYERS[:4], MACS[:4], has_waited=True) for s in (0, 1, 3)]
    plan = plan_takeover(left)
    assert (plan.step, plan.keepers) == (0, {})


def test_a_stage_without_a_whole_copy_is_named() -> None:
    with pytest.raises(RosterChanged, match="stage 1 of the pipeline is lost with mac-2, and"):
        plan_takeover([waiting(0), waiting(2, copies=()), waiting(3)])


def test_nobody_takes_over_before_all_have_waited_or_while_neighbours_are_lost_or_one_is_new() -> (
    None
):
    three = [waiting(0), waiting(2), waiting(3)]
    assert is_due(three)
    assert not is_due([*three[:2], waiting(3, has_waited=False)])
    assert not is_due(three[1:])  # both of the others may come back with their stages
    assert not is_due([*three, waiting(1)])
    assert not is_due([*three[:2], Holding(own=(0,), has_waited=True)])


def test_nobody_takes_over_before_the_layers_are_split() -> None:
    assert not is_due([Holding(1, 0, (0,), (), (), MACS[:2], has_waited=True)])


def test_a_rank_that_comes_back_after_all_has_no_stage_any_more() -> None:
    left = [Holding(4, stage, (8,), (8,), (3, 3, 4), MACS[1:4]) for stage in range(3)]
    late = waiting(3)
    assert stages_of([late, *left]) == 3
    assert replaced([late, *left]) == {0}


@st.composite
def deals(draw: st.DrawFn) -> tuple[Takeover, list[list[int]], list[list[int]]]:
    """A loss of stages that are no neighbours, and any new deal; some modules are tied."""
    stages = draw(st.integers(2, 7))
    lost = set[int]()
    for stage in draw(st.lists(st.integers(0, stages - 1), min_size=1)):
        if not {(stage - 1) % stages, (stage + 1) % stages} & lost:
            lost.add(stage)
    left = tuple(stage for stage in range(stages) if stage not in lost)
    model = draw(st.lists(st.integers(0, 9), min_size=stages, max_size=20))
    before, after = (
        [list(dict.fromkeys(model[begin:end])) for begin, end in pairwise((0, *cuts, len(model)))]
        for cuts in (draw(_cuts(len(model), number)) for number in (stages, len(left)))
    )
    has_copies = draw(st.booleans())
    plan = Takeover(
        left=left,
        ranks=left,
        before=(),
        joined=(),
        step=0,
        keepers={stage: (stage + 1) % stages for stage in lost if has_copies},
    )
    return plan, before, after


def _cuts(layers: int, stages: int) -> st.SearchStrategy[list[int]]:
    size = stages - 1
    inner = st.integers(1, layers - 1)
    return st.lists(inner, min_size=size, max_size=size, unique=True).map(sorted)


@given(deals())
def test_each_rank_gets_all_modules_of_its_stage_once_from_one_that_has_their_state(
    deal: tuple[Takeover, list[list[int]], list[list[int]]],
) -> None:
    plan, before, after = deal
    parcels = plan_parcels(plan, before, after)
    for receiver, wanted in zip(plan.left, after, strict=True):
        got = Counter(m for p in parcels if p.receiver == receiver for m in p.modules)
        assert got == Counter(wanted)
    for parcel in parcels:
        giver, receiver = parcel.between
        assert giver in plan.left
        assert [before[parcel.stage][place] for place in parcel.places] == [*parcel.modules]
        if parcel.stage in plan.left:
            assert giver == parcel.stage
            assert giver == receiver or not {*before[receiver]} & {*parcel.modules}
        else:
            assert giver == plan.keepers.get(parcel.stage, receiver)


@given(deals())
def test_the_states_that_arrive_are_those_of_the_modules(
    deal: tuple[Takeover, list[list[int]], list[list[int]]],
) -> None:
    plan, before, after = deal
    states = [{"weights": {"layers": [f"w{m}" for m in stage], "n": 7}} for stage in before]
    for receiver, wanted in zip(plan.left, after, strict=True):
        found = [
            (parcel.modules, pick_modules(states[parcel.stage], parcel.places))
            for parcel in plan_parcels(plan, before, after)
            if parcel.receiver == receiver
        ]
        state = join_modules(states[receiver], found, wanted)
        assert state == {"weights": {"layers": [f"w{m}" for m in wanted], "n": 7}}


@pytest.mark.parametrize("odd", [{}, {"layers": ["a"]}, {"layers": 7}, {"layers": None}])
def test_a_copy_of_another_model_is_refused(odd: object) -> None:
    with pytest.raises(UsageError, match="has other modules than this model"):
        pick_modules({"weights": odd}, [0, 1])


def test_an_optimizer_without_a_state_for_each_layer_is_refused() -> None:
    with pytest.raises(UsageError, match="and Odd has no 'layers': leave fewer_after_s out"):
        check_divisible("Odd", {"step": 0})
    with pytest.raises(UsageError, match="and Odd has 'means', too: leave"):
        check_divisible("Odd", {"layers": [], "means": {"layers": []}})
