"""What a test needs of the machine, for all of them."""

import functools
import os

import pytest

from tools.virtual_lan import why_not


@functools.cache
def _why_no_network_namespaces() -> str | None:
    return why_not()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("netns") is None:
        return
    reason = _why_no_network_namespaces()
    if reason is None:
        return
    if os.environ.get("CI"):
        pytest.fail(f"in CI these tests run: {reason}", pytrace=False)
    pytest.skip(reason)
