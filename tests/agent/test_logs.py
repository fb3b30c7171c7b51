"""Logs: one call, two forms."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from pmesh.agent.logs import set_up_logs


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


def test_what_is_below_the_level_is_not_written() -> None:
    stream = io.StringIO()
    set_up_logs(level="error", as_json=False, stream=stream)
    structlog.get_logger().warning("quiet")
    logging.getLogger("zeroconf").warning("quiet")
    assert not stream.getvalue()
