from collections.abc import Iterator
from pathlib import Path

import pytest

import pmesh
from tests.worlds.watched_agent import WatchedAgent, watched_agent


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[WatchedAgent]:
    with watched_agent(tmp_path / "home") as running:
        yield running


@pytest.fixture
def mesh(agent: WatchedAgent) -> Iterator[pmesh.Mesh]:
    with pmesh.connect("job", home=agent.home) as mesh:
        yield mesh
