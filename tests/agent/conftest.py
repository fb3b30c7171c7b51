"""Time for the tests of whole agents."""

import math

import pytest
from trio.testing import MockClock

from pmesh.net.lanes import executor


@pytest.fixture
def clock() -> MockClock:
    """Jumps whenever no socket has anything for anybody: deadlines cost nothing."""
    return MockClock(autojump_threshold=0)


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that jumps when no task has anything to do doesn't see that threads have."""
    monkeypatch.setattr(executor, "THREADS_FROM_BYTES", math.inf)
    monkeypatch.setattr(executor, "COMPUTING_THREADS_FROM_BYTES", math.inf)
