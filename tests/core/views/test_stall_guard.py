"""V8: what an agent believes of its view after a sleep."""

from dataclasses import replace

import msgspec

from pmesh.core.values import View
from pmesh.core.views import stall_guard
from pmesh.core.views.stall_guard import StallGuard
from pmesh.core.wire.link import Heartbeat
from tests.worlds.builders import (
    ANNA,
    BERT,
    CARA,
    make_epoch,
    make_heartbeat,
    make_state,
    make_view,
)

AWAKE_US = 100_000_000
BOTH = make_view(5, ANNA, BERT)
ALL = make_view(6, ANNA, BERT, CARA, leader=CARA)
STATE = make_state(ANNA, BOTH)
WOKEN = stall_guard.wake(STATE, now_us=AWAKE_US)


def beat_of(view: View, *, echo_us: int = AWAKE_US) -> Heartbeat:
    return msgspec.structs.replace(make_heartbeat(view), echo_us=echo_us)


def test_every_other_member_is_asked() -> None:
    assert StallGuard(AWAKE_US, frozenset({BERT})) == WOKEN
    assert not stall_guard.wake(make_state(ANNA, make_view(5, ANNA)), now_us=AWAKE_US).unconfirmed


def test_only_a_fresh_answer_that_names_our_view_confirms_it() -> None:
    assert not stall_guard.hear(WOKEN, STATE, BERT, beat_of(BOTH)).unconfirmed
    assert stall_guard.hear(WOKEN, STATE, BERT, beat_of(BOTH, echo_us=AWAKE_US - 1)) == WOKEN
    assert stall_guard.hear(WOKEN, STATE, BERT, beat_of(ALL)) == WOKEN
    assert stall_guard.hear(WOKEN, STATE, CARA, beat_of(BOTH)) == WOKEN


def test_who_is_no_longer_of_the_view_need_not_confirm_it() -> None:
    promised_now = replace(STATE, promised=make_epoch(6), flushed_at=100.0)
    assert not stall_guard.install(WOKEN, promised_now, make_view(6, ANNA, CARA)).unconfirmed
    assert stall_guard.install(WOKEN, promised_now, ALL).unconfirmed == {BERT}


def test_a_view_that_was_promised_before_the_sleep_is_doubted_by_itself() -> None:
    """The others may have installed it and left it meanwhile (seed 224309)."""
    promised_before = replace(STATE, promised=ALL.epoch, flushed_at=99.9)
    assert stall_guard.install(WOKEN, promised_before, ALL).unconfirmed == {BERT, CARA}
    confirmed = StallGuard(AWAKE_US)
    assert stall_guard.install(confirmed, promised_before, ALL).unconfirmed == {BERT, CARA}
    assert stall_guard.install(StallGuard(), promised_before, ALL) == StallGuard()
