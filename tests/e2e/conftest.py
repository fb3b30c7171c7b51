"""Fixtures of the tests with real processes; all of them carry the marker e2e."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.harness import Fleet, StartedAgent, allow_runs
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


@pytest.fixture(scope="session")
def lasting_fleet() -> Iterator[Fleet]:
    with Fleet() as fleet:
        yield fleet


@pytest.fixture(scope="session")
def three_agents(lasting_fleet: Fleet) -> list[StartedAgent]:
    return lasting_fleet.start_ring("mac-1", "mac-2", "mac-3")


@pytest.fixture
def ring(lasting_fleet: Fleet, three_agents: list[StartedAgent]) -> list[StartedAgent]:
    """Three machines, the same for all tests; all allow every member to run commands."""
    address = next(agent.address for agent in three_agents if agent.process.alive)
    for place, agent in enumerate(three_agents):
        if not agent.process.alive:  # the test before this one has killed it
            three_agents[place] = lasting_fleet.start_agent(
                agent.name, "--no-mdns", "--peer", address
            )
    allow_runs(three_agents)
    lasting_fleet.await_view(*three_agents)
    return three_agents


@pytest.fixture
def make_lab() -> Iterator[Callable[..., NetLab]]:
    """Hosts on a network of their own; for tests marked netns."""
    clean()  # what a run that was killed has left
    with ExitStack() as labs:
        yield lambda count, **options: labs.enter_context(NetLab(count, **options))
