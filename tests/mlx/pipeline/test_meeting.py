"""What the ranks of a pipeline agree on after a loss."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.errors import RosterChanged, UsageError
from pmesh.mlx.pipeline.rules.meeting import (
    Agreement,
    Holding,
    agree,
    is_settled,
    is_superfluous,
    neighbour,
    replaced,
    stages_of,
)

MACS = ("mac-1", "mac-2", "mac-3")
NEW = Holding(own=(0,))


def agreement(ranks: tuple[int, ...], step: int, receivers: tuple[int, ...] = ()) -> Agreement:
    return Agreement(ranks=ranks, layers=(), step=step, receivers=receivers)


def veteran(
    stage: int, step: int, *, copied: bool = True, machines: tuple[str, ...] = MACS
) -> Holding:
    """A rank that computes this step; the copies of its state may have arrived already."""
    own = (step - 1, step) if step else (0,)
    copies = tuple(s for s in (step - 1, step) if s >= 0 and (copied or s < step))
    return Holding(3, stage, own, copies, machines=machines)


def test_ranks_that_begin_have_the_stages_in_their_order() -> None:
    assert agree([NEW] * 3, MACS) == agreement((0, 1, 2), step=0)


def test_a_new_rank_takes_the_lost_stage_and_gets_its_state_from_the_neighbour() -> None:
    holdings = [veteran(2, 7), NEW, veteran(0, 7)]
    found = agree(holdings, ("mac-3", "mac-2", "mac-1"))
    assert found == agreement((2, 1, 0), step=7, receivers=(1,))


def test_all_go_back_to_the_step_whose_copy_has_arrived() -> None:
    holdings = [veteran(0, 7), NEW, veteran(2, 7, copied=False)]
    assert agree(holdings, MACS) == agreement((0, 1, 2), step=6, receivers=(1,))


def test_a_rank_that_has_not_ended_the_step_yet_keeps_all_from_going_on() -> None:
    holdings = [veteran(0, 7), veteran(1, 6), veteran(2, 7, copied=False)]
    assert agree(holdings, MACS) == agreement((0, 1, 2), step=6)


def test_a_stage_that_was_lost_before_its_first_copy_begins_with_the_model_as_it_was_made() -> None:
    holdings = [veteran(0, 0), NEW, veteran(2, 0, copied=False)]
    assert agree(holdings, MACS) == agreement((0, 1, 2), step=0)


def test_two_new_ranks_take_the_stages_of_their_own_machines_first() -> None:
    names = ("mac-1", "mac-9", "mac-4", "mac-3")
    before = ("mac-1", "mac-2", "mac-3", "mac-4")
    third, first = (veteran(stage, 5, machines=before) for stage in (3, 1))
    holdings = [NEW, NEW, third, first]
    found = agree(holdings, names)
    assert found == agreement((0, 3, 1, 2), step=5, receivers=(0, 2))


def test_a_stage_that_is_lost_with_its_copy_is_named() -> None:
    holdings = [veteran(0, 7), NEW, NEW]
    with pytest.raises(RosterChanged, match="stage 1 of the pipeline is lost, as mac-2 was"):
        agree(holdings, MACS)


def test_a_rank_that_missed_the_end_of_a_meeting_keeps_its_stage() -> None:
    away = Holding(2, 1, (6, 7), (6, 7), machines=MACS)  # its agent was killed at that moment
    holdings = [veteran(0, 7), away, veteran(2, 7)]
    assert not replaced(holdings)
    assert agree(holdings, MACS) == agreement((0, 1, 2), step=7)


def test_a_rank_whose_stage_another_one_has_got_meanwhile_is_named() -> None:
    away = Holding(2, 1, (5, 6), (5, 6), machines=MACS)
    assert replaced([veteran(0, 7), away, veteran(1, 7), veteran(2, 7)]) == {1}
    assert not replaced([NEW, NEW])


def test_a_new_rank_takes_a_lost_stage_although_one_that_was_replaced_is_there() -> None:
    away = Holding(2, 1, (5, 6), (5, 6), machines=MACS)
    holdings = [away, veteran(1, 7), veteran(2, 7), NEW]
    assert not is_superfluous(3, holdings)


@given(st.data())
def test_a_lost_rank_costs_at_most_the_step_under_way(data: st.DataObject) -> None:
    """Whatever moment of a step each rank is at, while all hold the invariant of the copies."""
    stages = data.draw(st.integers(2, 6))
    step = data.draw(st.integers(2, 9))
    lost = data.draw(st.integers(0, stages - 1))
    all_ended = data.draw(st.booleans())  # the exchange at the end of the step
    macs = tuple(f"mac-{stage}" for stage in range(stages))
    holdings = list[Holding]()
    for stage in range(stages):
        if all_ended and data.draw(st.booleans()):  # some have not computed the update yet
            own, copies = [step, step + 1], [step]
        else:
            copied = all_ended or data.draw(st.booleans())
            own, copies = [step - 1, step], [step - 1, *[step] * copied]
        holdings.append(
            NEW if stage == lost else Holding(1, stage, tuple(own), tuple(copies), (), macs)
        )
    order = data.draw(st.permutations(range(stages)))
    found = agree([holdings[s] for s in order], [macs[s] for s in order])
    assert found.step in ((step,) if all_ended else (step - 1, step))
    assert [order[rank] for rank in found.ranks] == list(range(stages))
    assert found.receivers == (lost,)
    giver = holdings[neighbour(lost, stages)]
    assert found.step in giver.copies


def test_the_layers_are_those_that_any_rank_knows() -> None:
    holdings = [Holding(own=(0,), layers=(2, 3)), NEW]
    assert agree(holdings, MACS[:2]).layers == (2, 3)


def test_ranks_that_begin_with_other_layers_are_told_so() -> None:
    holdings = [Holding(own=(0,), layers=(2, 3)), Holding(own=(0,), layers=(3, 2))]
    with pytest.raises(UsageError, match=r"some ranks have by=\[2, 3\], others \[3, 2\]"):
        agree(holdings, MACS[:2])


def test_a_new_rank_gets_the_layers_that_the_others_have() -> None:
    others = [Holding(1, stage, (3,), (3,), (2, 3, 1), MACS) for stage in (0, 2)]
    assert agree([*others, Holding(own=(0,), layers=(3, 1, 2))], MACS).layers == (2, 3, 1)


def test_ranks_that_nobody_needs_are_the_latest_new_ones() -> None:
    holdings = [veteran(0, 4), NEW, veteran(2, 4), NEW]
    assert stages_of(holdings) == 3
    assert [is_superfluous(rank, holdings) for rank in range(4)] == [False, False, False, True]
    assert not any(is_superfluous(rank, [NEW] * 3) for rank in range(3))


def test_a_training_ends_when_all_have_the_last_state() -> None:
    ended = [veteran(stage, 8) for stage in range(3)]
    assert is_settled(ended, 8)
    assert not is_settled([*ended[:2], veteran(2, 7)], 8)
    assert not is_settled([*ended[:2], NEW], 8)
    assert not is_settled([NEW] * 3, 0)
