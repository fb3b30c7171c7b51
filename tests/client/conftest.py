from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worlds.watched_agent import WatchedAgent, watched_agent


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[WatchedAgent]:
    with watched_agent(tmp_path / "home") as running:
        yield running
