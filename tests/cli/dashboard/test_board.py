"""What pages are sent when they open, and then."""

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pmesh.charts.rules.history import SLOT_S
from pmesh.cli.dashboard import board as module
from pmesh.cli.dashboard.board import MOST_LINES
from tests.cli.dashboard.boards import GONE, Script
from tests.worlds.fake_status_agent import SNAPSHOT
from tests.worlds.faults import Faults


class Stop(Exception):  # noqa: N818 - it is none of ours
    """Ends a watch or a stream."""


def test_a_page_gets_all_that_is_kept_and_then_what_is_new() -> None:
    script = Script()
    script.board.refresh()
    script.now = SLOT_S
    script.board.refresh()

    def go_on() -> None:
        script.now = 2 * SLOT_S
        script.events.note("peer lost", "mac-2 is gone")
        script.board.refresh()

    first, second = script.stream(go_on)
    assert (first["whole"], second["whole"]) == (True, False)
    assert first["charts"] == [["digits", "steps a second", [0, 1], [2.0, 2.0]]]
    assert second["charts"] == [["digits", "steps a second", [2], [2.0]]]
    assert [line["kind"] for line in first["lines"]] == ["agent started"]
    assert [line["text"] for line in second["lines"]] == ["mac-2 is gone"]


def test_a_page_that_missed_an_update_gets_the_next_one_whole() -> None:
    script = Script()
    script.board.refresh()

    def miss_one() -> None:
        script.board.refresh()
        script.board.refresh()

    updates = script.stream(miss_one, script.board.refresh)
    assert [update["whole"] for update in updates] == [True, True, False]


def test_an_agent_that_goes_away_is_told_with_its_last_picture_until_it_is_back() -> None:
    script = Script()
    script.answers = False
    script.board.refresh()

    def come() -> None:
        script.answers = True
        script.board.refresh()

    def go() -> None:
        script.answers = False
        script.board.refresh()

    before, here, gone, back = script.stream(come, go, come)
    assert (before["gone"], before["picture"]) == (GONE, None)
    assert here["gone"] is None
    assert (gone["gone"], gone["picture"]) == (GONE, here["picture"])
    assert gone["charts"] == []
    assert (back["gone"], back["picture"]) == (None, here["picture"])


def test_only_the_last_events_are_kept() -> None:
    script = Script()
    for number in range(MOST_LINES + 5):
        script.events.note("view", f"{number}")
    script.board.refresh()
    (update,) = script.stream()
    assert [line["text"] for line in update["lines"]] == [str(n) for n in range(5, MOST_LINES + 5)]


def test_a_page_costs_the_agent_less_while_there_is_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = list[float]()

    class StopsWhenItWaits(threading.Condition):
        def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:  # noqa: ANN401 - as the library's
            if timeout is None:
                return super().wait_for(predicate)
            pauses.append(timeout)
            raise Stop

    monkeypatch.setattr(threading, "Condition", StopsWhenItWaits)
    script = Script()

    def watch() -> None:
        with pytest.raises(Stop):
            script.board.watch()

    def rest() -> None:
        script.status = msgspec.structs.replace(SNAPSHOT, jobs=())
        watch()

    watch()
    script.stream(watch, rest)
    assert pauses == [module.UNWATCHED_S, module.WATCHED_S, module.AT_REST_S]


def test_the_agent_is_asked_at_once_when_a_page_opens_and_then_each_second(
    monkeypatch: pytest.MonkeyPatch,
    faults: Faults,
) -> None:
    waits = threading.Event()

    class TellsWhenItWaits(threading.Condition):
        def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:  # noqa: ANN401 - as the library's
            waits.set()  # whoever wants the lock gets it only once this has begun to wait
            return super().wait_for(predicate, timeout)

    monkeypatch.setattr(threading, "Condition", TellsWhenItWaits)
    faults.limit(module, "UNWATCHED_S", 1e6)  # if opening a page did nothing, it would hang
    faults.limit(module, "WATCHED_S", 0.0)
    script, asked = Script(), 0
    refresh = script.board.refresh

    def refresh_and_count() -> None:
        nonlocal asked
        refresh()
        asked += 1
        if asked == 5:
            raise Stop

    def take(_: bytes) -> None:
        if asked >= 5:
            raise BrokenPipeError

    def open_page() -> None:
        waits.wait()
        with pytest.raises(BrokenPipeError):
            script.board.stream(take)

    faults.instead(script.board, "refresh", refresh_and_count)
    page = threading.Thread(target=open_page, daemon=True)
    page.start()
    with pytest.raises(Stop):
        script.board.watch()
    refresh()
    page.join()
