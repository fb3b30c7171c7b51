"""What watching a mesh holds: the program that measures it, in a few minutes of its day."""

import json

import pytest

from tools.watching import EVENT_EVERY_S, Day, bare_mib, watch_a_day


@pytest.mark.parametrize("command", ["dashboard", "top"])
def test_a_day_says_what_was_held_at_first_and_at_the_end(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    watch_a_day(command, 8, hours=0.025)
    first, last = json.loads(capsys.readouterr().out)
    assert min(first, last) > bare_mib()


def test_a_day_has_eight_machines_and_an_event_each_minute() -> None:
    day = Day(8)
    assert [machine.name for machine in day.status().view.members][-1] == "mac-7"
    assert len(day.next_events()) == 1
    day.now = EVENT_EVERY_S + 1
    assert day.next_events() == ()
