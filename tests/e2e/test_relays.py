"""Machines of which two can't reach each other, but both reach a third."""

import json
from collections.abc import Iterator
from typing import TypeAlias

import pytest

from tests.e2e.harness import Fleet, StartedAgent
from tools.lab.net import NetLab, clean

Chain: TypeAlias = tuple[NetLab, Fleet, list[StartedAgent]]
pytestmark = [pytest.mark.netns, pytest.mark.slow]

TRAINER = """
import json
import numpy as np
import pmesh

with pmesh.connect(job="relayed", wait_for=3) as mesh:
    own = np.full(100_000, 1.0 + mesh.rank, np.float32)
    sums = {float(mesh.all_reduce(own)[-1]) for _ in range(10)}
    roots = [float(mesh.broadcast(own, root=rank)[-1]) for rank in range(3)]
    rows = np.ravel(mesh.all_gather(own[:1])).tolist()
    mesh.barrier()
    print(json.dumps([sorted(sums), roots, rows, mesh.size]))
"""


LARGE = """
import numpy as np
import pmesh

with pmesh.connect(job="large", wait_for=3) as mesh:
    own = np.ones(4_000_000, np.float32)
    for _ in range(4):
        assert mesh.all_reduce(own)[-1] == 3
    print("done", flush=True)
    mesh.barrier()
"""
LARGE_BYTES = 4 * 16_000_000


@pytest.fixture(scope="module")
def chain() -> Iterator[Chain]:
    """The first machine and the last one do not reach each other."""
    clean()  # what a run that was killed has left
    with NetLab(3) as lab, Fleet() as fleet:
        first, _, last = lab.hosts
        lab.cut(first, last)
        agents = fleet.start_in(lab)
        yield lab, fleet, agents


def test_two_machines_that_only_a_third_reaches_train_with_it(chain: Chain) -> None:
    _, fleet, agents = chain
    trainers = [fleet.start_trainer(agent, TRAINER) for agent in agents]
    for trainer in trainers:
        results = json.loads(trainer.await_line(r"^\[.*\]$")[0])
        assert results == [[6.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0], 3]


def test_a_large_tensor_goes_along_the_two_cables_and_is_not_forwarded(
    chain: Chain,
) -> None:
    """A chain sends it once over each cable each way; a ring, a third of it more."""
    lab, fleet, agents = chain
    before = [lab.carried_bytes(host) for host in lab.hosts]
    trainers = [fleet.start_trainer(agent, LARGE) for agent in agents]
    for trainer in trainers:
        trainer.await_line("^done$")
    after = [lab.carried_bytes(host) for host in lab.hosts]
    carried = [(b - a) / LARGE_BYTES for a, b in zip(before, after, strict=True)]
    assert all(2 <= at_an_end < 2.3 for at_an_end in (carried[0], carried[2])), carried
    assert 4 <= carried[1] < 4.6, carried


def test_a_direct_path_takes_over_and_a_relayed_one_steps_in(chain: Chain) -> None:
    lab, _, agents = chain
    first, _, last = lab.hosts
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
