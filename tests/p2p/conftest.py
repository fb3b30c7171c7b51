"""The clock of the tests of messages, which jumps."""

import pytest
from trio.testing import MockClock

from pmesh.net.lanes import native
from tests.worlds.faults import Faults


@pytest.fixture
def clock(clock: MockClock, faults: Faults) -> MockClock:
    """Jumps whenever no task has anything to do, so messages go without threads."""
    faults.pretend(native, "library_for", lambda *_: None)
    return clock
