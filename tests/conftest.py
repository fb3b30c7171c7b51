"""What a test needs of the machine, for all of them."""

import functools
import os

import pytest

from tools.virtual_lan import why_not


@functools.cache
def _why_no_network_namespaces() -> str | None:
    return why_not()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests run in several processes; those with agents of their own go one after the other."""
    for item in items:
        if item.get_closest_marker("e2e") or item.get_closest_marker("netns"):
            item.add_marker(pytest.mark.xdist_group("machine"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("netns") is None:
        return
    reason = _why_no_network_namespaces()
    if reason is None:
        return
    if os.environ.get("CI"):
        pytest.fail(f"in CI these tests run: {reason}", pytrace=False)
    pytest.skip(reason)
