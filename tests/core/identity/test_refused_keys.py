"""An event for each machine with another mesh key, but never many."""

import re

from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.identity.refused_keys import MOST, WINDOW_S, RefusedKeys

TRIES = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, int(WINDOW_S))), max_size=60)


def test_a_machine_that_tries_again_and_again_is_one_event() -> None:
    refused = RefusedKeys()
    first = refused.refuse("192.0.2.9", now=0.0)
    assert first is not None
    assert first.startswith(
        "a machine at 192.0.2.9 came with another mesh key, and was refused; if it is yours"
    )
    assert [refused.refuse("192.0.2.9", now=second) for second in (1.0, WINDOW_S - 1)] == [None] * 2
    again = refused.refuse("192.0.2.9", now=WINDOW_S)
    assert again is not None
    assert "was refused (2 before it, too)" in again


@given(TRIES)
def test_however_many_come_few_are_said_and_all_are_counted(tries: list[tuple[str, int]]) -> None:
    refused, now, said = RefusedKeys(), 0.0, list[tuple[float, str]]()
    counted = 0
    for host, later_s in tries:
        now += later_s
        text = refused.refuse(host, now=now)
        if text is not None:
            unsaid = re.search(r"\((\d+) before it", text)
            counted += 1 + (int(unsaid[1]) if unsaid else 0)
            said.append((now, host))
    for at, host in said:
        window = [other for when, other in said if at <= when < at + WINDOW_S]
        assert len(window) <= MOST
        assert window.count(host) == 1
    last = refused.refuse("-", now=now + WINDOW_S)
    left = len(tries) - counted
    assert last is not None
    assert f"({left} before it, too)" in last if left else "before it" not in last
