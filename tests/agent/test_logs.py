"""Logs: one call, two forms."""

import contextlib
import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from pmesh.cli.up import MAX_KINDS, MOST_LINES, Throttle, set_up_logs
from tests.worlds.system import Terminal


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:], root.level = handlers, level


def test_json_lines_are_one_object_each() -> None:
    stream = io.StringIO()
    set_up_logs(level="info", as_json=True, stream=stream)
    structlog.get_logger().info("view installed", epoch=3)
    logging.getLogger("zeroconf").warning("%s is gone", "en0")
    try:
        raise ValueError("why")  # noqa: TRY301 - something to log
    except ValueError:
        structlog.get_logger().exception("failed")
    first, second, third = map(json.loads, stream.getvalue().splitlines())
    assert (first["event"], first["level"], first["epoch"]) == ("view installed", "info", 3)
    assert (second["event"], second["logger"]) == ("en0 is gone", "zeroconf")
    assert third["exception"][0]["exc_value"] == "why"


def test_text_lines_are_for_a_person() -> None:
    stream = io.StringIO()
    set_up_logs(level="info", as_json=False, stream=stream)
    structlog.get_logger().warning("peer is late", name="mac-2")
    assert "peer is late" in stream.getvalue()
    assert "name=mac-2" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()  # a file gets no colours


@pytest.mark.parametrize(("no_color", "colored"), [("", True), ("1", False)])
def test_no_color_leaves_a_terminal_without_colors(
    no_color: str, *, colored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    stream = Terminal()
    set_up_logs(level="info", as_json=False, stream=stream)
    structlog.get_logger().warning("peer is silent", peer="mac-2")
    assert ("\x1b" in stream.getvalue()) == colored


@pytest.mark.parametrize("as_json", [False, True])
def test_no_traceback_shows_the_values_of_variables(*, as_json: bool) -> None:
    stream = io.StringIO()
    set_up_logs(level="info", as_json=as_json, stream=stream)
    mesh_key = "correct horse battery staple".upper()
    try:
        raise ValueError(len(mesh_key))  # noqa: TRY301 - something to log
    except ValueError as e:
        structlog.get_logger().error("internal error", exc_info=e)
    assert "ValueError" in stream.getvalue()
    assert mesh_key not in stream.getvalue()


def test_an_interface_without_its_address_is_one_line_and_no_traceback() -> None:
    stream = io.StringIO()
    set_up_logs(level="info", as_json=False, stream=stream)
    logging.getLogger("zeroconf").warning("Error with socket 17", exc_info=OSError("unreachable"))
    (line,) = stream.getvalue().splitlines()
    assert "Error with socket 17" in line


@pytest.mark.parametrize("as_json", [False, True])
def test_no_text_of_others_controls_a_terminal_or_looks_like_a_line(*, as_json: bool) -> None:
    stream = io.StringIO()
    set_up_logs(level="info", as_json=as_json, stream=stream)
    evil = "a\x1b[2J\x9b\n2026-11-22T12:00:00Z [info     ] all is well \u202e"
    structlog.get_logger().warning("no link", peer="mac\x1b2", reason=evil)
    logging.getLogger("zeroconf").warning("%s is gone", evil)
    try:
        raise ValueError(evil)  # noqa: TRY301 - something to log
    except ValueError:
        structlog.get_logger().exception("failed")
    lines = stream.getvalue().splitlines()
    assert all(line.isprintable() for line in lines)
    assert sum(not line.startswith("    ") for line in lines) == 3


def test_what_is_below_the_level_is_not_written() -> None:
    stream = io.StringIO()
    set_up_logs(level="error", as_json=False, stream=stream)
    structlog.get_logger().warning("quiet")
    logging.getLogger("zeroconf").warning("quiet")
    assert not stream.getvalue()


def test_a_hundred_lines_of_one_kind_are_thirty_and_the_next_minute_says_so() -> None:
    now = 0.0
    throttle = Throttle(clock=lambda: now)

    def said(kind: str, count: int) -> list[structlog.typing.EventDict]:
        lines = list[structlog.typing.EventDict]()
        for _ in range(count):
            with contextlib.suppress(structlog.DropEvent):
                lines.append(throttle(None, "error", {"event": kind}))
        return lines

    assert len(said("a peer broke the protocol", 100)) == MOST_LINES
    assert said("peer is silent", 1) == [{"event": "peer is silent"}]
    now = 60.0
    first, second = said("a peer broke the protocol", 2)
    assert (first.get("dropped"), second.get("dropped")) == (70, None)
    for number in range(2 * MAX_KINDS):
        said(str(number), 1)
    assert len(said("a peer broke the protocol", 100)) == MOST_LINES


def test_what_is_dropped_is_not_written() -> None:
    stream = io.StringIO()
    set_up_logs(level="info", as_json=True, stream=stream)
    for _ in range(2 * MOST_LINES):
        structlog.get_logger().info("again")
    assert len(stream.getvalue().splitlines()) == MOST_LINES
