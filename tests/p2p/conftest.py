"""The clock of the tests of messages, which jumps."""

import pytest
from trio.testing import MockClock

from pmesh.net.lanes import native


@pytest.fixture
def clock(clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> MockClock:
    """Jumps whenever no task has anything to do, so messages go without threads."""
    monkeypatch.setattr(native, "library_for", lambda *_: None)
    return clock
