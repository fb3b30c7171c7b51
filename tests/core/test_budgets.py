"""Shares of one amount, for holders that come and go."""

from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.budgets import Budget


def test_one_alone_has_half_and_each_of_many_an_equal_part_of_one_more() -> None:
    for count in range(1, 10):
        budget = Budget[int](limit=5040)
        while sum(budget.take(holder, 1) for holder in range(count)):
            pass
        assert {budget.held_by(holder) for holder in range(count)} <= {
            5040 // (count + 1),
            5040 // (count + 1) + (5040 % (count + 1) > 0),
        }


def test_who_comes_late_has_something_whatever_the_others_have_taken() -> None:
    budget = Budget[int](limit=100)
    assert [
        budget.allowed(holder) * budget.take(holder, budget.allowed(holder)) for holder in range(9)
    ] == [
        50,
        25,
        12,
        6,
        3,
        2,
        1,
        1,
        0,
    ]


@given(
    limit=st.integers(0, 50),
    asked=st.lists(st.tuples(st.integers(0, 3), st.integers(-10, 10))),
)
def test_never_more_is_held_than_there_is(limit: int, asked: list[tuple[int, int]]) -> None:
    budget, held = Budget[int](limit=limit), dict.fromkeys(range(4), 0)
    for holder, amount in asked:
        if amount < 0:
            returned = min(-amount, held[holder])
            budget.give_back(holder, returned)
            held[holder] -= returned
        elif budget.take(holder, amount):
            held[holder] += amount
        assert budget.held == sum(held.values()) <= limit
        assert all(budget.held_by(holder) == held[holder] for holder in held)


def test_nothing_is_remembered_of_who_holds_nothing() -> None:
    budget = Budget[int](limit=10)
    for holder in range(1000):
        assert budget.take(holder, 5)
        budget.give_back(holder, 5)
    assert not budget._held  # noqa: SLF001 - what it is about
