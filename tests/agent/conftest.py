"""Time for the tests of whole agents."""

import pytest
from trio.testing import MockClock


@pytest.fixture
def clock() -> MockClock:
    """Jumps whenever no socket has anything for anybody: deadlines cost nothing."""
    return MockClock(autojump_threshold=0)
