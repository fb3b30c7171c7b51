"""Fixtures of the tests with real processes; all of them carry the marker e2e."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.harness import Fleet
from tools.lab.net import NetLab, clean

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:  # of all folders, not of this one alone
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Fleet() as fleet:
        yield fleet


@pytest.fixture
def make_lab() -> Iterator[Callable[..., NetLab]]:
    """Hosts on a network of their own; for tests marked netns."""
    clean()  # what a run that was killed has left
    with ExitStack() as labs:
        yield lambda count, **options: labs.enter_context(NetLab(count, **options))
