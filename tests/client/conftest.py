from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worlds.fake_agent import FakeAgent


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    with FakeAgent(tmp_path / "home") as running:
        yield running
