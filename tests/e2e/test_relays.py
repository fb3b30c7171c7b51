"""Machines of which two can't reach each other, but both reach a third."""

from collections.abc import Callable

import pytest

from tests.e2e.harness import Fleet
from tools.lab.net import NetLab

pytestmark = pytest.mark.netns


def test_two_machines_that_only_a_third_reaches_are_in_one_mesh_with_it(
    fleet: Fleet, make_lab: Callable[[int], NetLab]
) -> None:
    lab = make_lab(3)
    first, _, last = lab.hosts
    lab.cut(first, last)
    agents = [fleet.start_agent(f"mac-{host.number}", host=host) for host in lab.hosts]
    fleet.await_view(*agents)

    lab.mend(first, last)
    agents[0].process.await_line(r"mac-3 is reached over eth0 \(wired\)")
    agents[2].process.await_line(r"mac-1 is reached over eth0 \(wired\)")
    lab.cut(first, last)
    agents[0].process.await_line(r"mac-3 is reached over mac-2 \(relayed\)")
    agents[2].process.await_line(r"mac-1 is reached over mac-2 \(relayed\)")
    assert not any("is gone" in agent.process.output for agent in agents)

    agents[1].process.reap()
    for agent in (agents[0], agents[2]):
        agent.await_status(lambda status: len(status.view.members) == 1)
