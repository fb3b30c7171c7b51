from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.links.dialing import (
    FIRST_DELAY_S,
    GRACE_S,
    LONGEST_DELAY_S,
    UNPROVEN_S,
    Target,
    TargetPhase,
    aim_at,
    begin_dial,
    dial_failed,
    link_lost,
    link_up,
    name_again,
    next_deadline,
    withdraw,
)
from pmesh.core.wire.link import Address

HERE = (Address("10.0.0.1", 1),)
ELSEWHERE = (Address("10.0.0.2", 1),)


def a_target(*, forever: bool = False) -> Target:
    return aim_at(HERE, forever=forever, now=0.0)


def fail_once(target: Target, *, jitter: float = 1.0) -> Target:
    due = next_deadline(target)
    assert due is not None
    return dial_failed(begin_dial(target), now=due, jitter=jitter)


def linked_target(*, forever: bool = False, since: float = 0.0) -> Target:
    return link_up(begin_dial(a_target(forever=forever)), now=since)


def test_a_new_target_is_dialled_at_once() -> None:
    assert next_deadline(aim_at(HERE, forever=False, now=5.0)) == 5.0


def test_nothing_is_due_while_a_dial_runs_or_a_link_is_up() -> None:
    assert next_deadline(begin_dial(a_target())) is None
    assert next_deadline(linked_target()) is None


def pauses_of(target: Target, count: int) -> list[float]:
    pauses = list[float]()
    for _ in range(count):
        before = target.due
        target = fail_once(target)
        pauses.append(target.due - before)
    return pauses


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(replace(a_target(), proven=True), id="it has answered before"),
        pytest.param(a_target(forever=True), id="the user has named it"),
    ],
)
def test_pauses_double_from_a_tenth_of_a_second_up_to_ten(target: Target) -> None:
    expected = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert pauses_of(target, 9) == pytest.approx(expected)


def test_pauses_grow_to_minutes_for_what_has_never_answered() -> None:
    pauses = pauses_of(a_target(), 14)
    assert pauses[6:] == pytest.approx([6.4, 12.8, 25.6, 51.2, 102.4, 204.8, 300.0, 300.0])


def test_a_link_proves_that_a_machine_is_no_invention() -> None:
    lost = link_lost(linked_target(), now=50.0, jitter=1.0)
    assert pauses_of(replace(lost, failures=20), 1) == [LONGEST_DELAY_S]


@given(failures=st.integers(0, 10**6), jitter=st.floats(0, 1))
def test_a_pause_is_between_half_and_all_of_its_length(failures: int, jitter: float) -> None:
    target = begin_dial(replace(a_target(), failures=failures, proven=True))
    pause = dial_failed(target, now=0.0, jitter=jitter).due
    assert FIRST_DELAY_S / 2 <= pause <= LONGEST_DELAY_S


def an_introduction() -> Target:
    return aim_at(HERE, forever=False, introduced=True, now=0.0)


def test_a_peers_word_for_a_machine_counts_for_two_minutes() -> None:
    target = an_introduction()
    while target.phase is not TargetPhase.OVER:
        last = target.due
        target = fail_once(target)
    assert last == UNPROVEN_S


def test_a_peers_word_that_comes_again_counts_anew() -> None:
    again = name_again(an_introduction(), HERE, now=100.0)
    again = replace(again, due=150.0)
    assert fail_once(again).phase is TargetPhase.WAITING


def test_an_introduction_that_has_led_to_a_link_does_not_expire() -> None:
    linked = link_up(begin_dial(an_introduction()), now=5.0)
    lost = link_lost(linked, now=1000.0, jitter=1.0)
    assert fail_once(lost).phase is TargetPhase.WAITING


def test_a_lost_link_is_redialled_at_once_and_then_with_pauses() -> None:
    lost = link_lost(linked_target(since=0.0), now=50.0, jitter=1.0)
    assert next_deadline(lost) == 50.0
    assert next_deadline(fail_once(lost)) == pytest.approx(50.1)


def test_a_link_that_never_holds_is_redialled_with_growing_pauses() -> None:
    target, pauses = a_target(), list[float]()
    for _ in range(3):
        due = target.due
        target = link_lost(link_up(begin_dial(target), now=due), now=due, jitter=1.0)
        pauses.append(target.due - due)
    assert pauses == pytest.approx([0.1, 0.2, 0.4])


def test_a_link_that_the_peer_has_dialled_ends_the_waiting() -> None:
    assert link_up(a_target(), now=0.0).phase is TargetPhase.LINKED


def test_a_dial_of_ours_that_fails_after_the_peers_succeeded_changes_nothing() -> None:
    target = dial_failed(linked_target(), now=1.0, jitter=0.0)
    assert target.phase is TargetPhase.LINKED


def test_a_second_link_does_not_make_the_first_younger() -> None:
    target = link_up(linked_target(since=0.0), now=9.5)
    assert next_deadline(link_lost(target, now=10.0, jitter=1.0)) == 10.0


def test_a_withdrawn_target_is_given_up_when_it_fails_after_the_grace() -> None:
    target = withdraw(a_target(), now=0.0)
    while target.phase is not TargetPhase.OVER:
        target = fail_once(target)
    assert target.due == GRACE_S
    assert next_deadline(target) is None


def test_withdrawing_twice_does_not_prolong_the_grace() -> None:
    target = withdraw(withdraw(a_target(), now=0.0), now=30.0)
    assert target.give_up_at == GRACE_S


def test_a_withdrawn_target_keeps_its_link() -> None:
    target = withdraw(linked_target(), now=0.0)
    target = dial_failed(target, now=GRACE_S + 1, jitter=0.0)
    assert target.phase is TargetPhase.LINKED
    lost = link_lost(target, now=GRACE_S + 2, jitter=0.0)
    assert next_deadline(lost) == GRACE_S + 2
    assert fail_once(lost).phase is TargetPhase.OVER


def test_a_target_that_the_user_named_is_dialled_for_ever() -> None:
    target = withdraw(a_target(forever=True), now=0.0)
    for _ in range(100):
        target = fail_once(target)
    assert next_deadline(target) is not None


def test_new_addresses_are_dialled_at_once() -> None:
    target = name_again(fail_once(fail_once(a_target())), ELSEWHERE, now=3.0)
    assert (next_deadline(target), target.addresses, target.failures) == (3.0, ELSEWHERE, 0)


def test_the_same_addresses_again_do_not_shorten_the_pause() -> None:
    failed = fail_once(a_target())
    assert name_again(failed, HERE, now=0.01) == failed


def test_a_target_that_was_given_up_and_is_named_again_is_dialled() -> None:
    target = withdraw(a_target(), now=-GRACE_S)
    over = fail_once(target)
    assert over.phase is TargetPhase.OVER
    named = name_again(over, HERE, now=70.0)
    assert (next_deadline(named), named.give_up_at) == (70.0, None)


def test_a_target_that_was_given_up_may_dial_us() -> None:
    over = fail_once(withdraw(a_target(), now=-GRACE_S))
    assert link_up(over, now=1.0).phase is TargetPhase.LINKED


@pytest.mark.parametrize("target", [begin_dial(a_target()), linked_target()])
def test_naming_it_again_disturbs_neither_a_dial_nor_a_link(target: Target) -> None:
    assert name_again(target, ELSEWHERE, now=1.0).phase is target.phase
