"""Equal weights and NaN gradients, with real agents and trainers: what ranks and agents say."""

import json
import signal
from collections.abc import Sequence

import pytest

from tests.e2e.harness import Fleet, Running, StartedAgent

pytestmark = pytest.mark.slow

# After each line it waits for a signal.
TRAINER = """
import json
import logging
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # before numpy starts threads
import numpy as np
import pmesh

logging.basicConfig(format="warned: %(message)s")

def say(*found):
    mesh.barrier()  # it takes along what was found
    print(json.dumps([mesh.rank, *found]), flush=True)
    signal.sigwait([signal.SIGUSR1])

def average(mode):
    own = np.array([4.0 ** mesh.rank, np.nan if mesh.rank == 1 else 1.0])
    try:
        return mesh.average_gradients(own, on_nonfinite=mode).tolist()
    except pmesh.NonFiniteGradients as e:
        return [str(e), e.ranks]

with pmesh.connect(job="equal", wait_for=3) as mesh:
    weights = np.ones(1000, np.float32)
    say(mesh.compare(weights).digest)
    weights[999] += mesh.rank == 1
    say(mesh.compare(weights).others)
    say(average("skip"), mesh.last_op.contributors)
    say(average("raise"))
"""


def said(trainers: Sequence[Running]) -> list[list[object]]:
    """What each rank says next, in the order of ranks."""
    return sorted(json.loads(trainer.await_line(r"^\[.*\]$").group()) for trainer in trainers)


def go_on(trainers: Sequence[Running]) -> None:
    for trainer in trainers:
        trainer.send_signal(signal.SIGUSR1)


def test_other_weights_and_gradients_of_a_rank_are_named_by_all_ranks_and_all_agents(
    fleet: Fleet, ring: list[StartedAgent]
) -> None:
    trainers = [fleet.start_trainer(at, TRAINER) for at in ring]
    (_, digest), *others = said(trainers)
    assert [found for _, found in others] == [digest] * 2
    await_shown(fleet, ring, f"state {str(digest)[:12]} on all")

    go_on(trainers)
    assert said(trainers) == [[rank, [1]] for rank in range(3)]
    (job,) = ring[0].status().jobs
    differs = f"rank 1 ({job.ranks[1].name})"
    await_shown(fleet, ring, f"another state than the others: {differs}")
    for agent in ring:
        events = fleet.pmesh("events", home=agent.home).stdout
        assert "states differ" in events
        assert f"job 'equal': {differs} had another state than the other 2 ranks" in events

    go_on(trainers)
    assert said(trainers) == [[rank, [8.5, 1.0], [0, 2]] for rank in range(3)]
    go_on(trainers)
    why = f"the gradients of {differs} are NaN or infinite"
    assert said(trainers) == [[rank, [f"{why}; no rank gets a mean", [1]]] for rank in range(3)]
    go_on(trainers)
    for trainer in trainers:
        assert f"warned: {why}; they are left out of the mean" in trainer.await_end()


def await_shown(fleet: Fleet, ring: Sequence[StartedAgent], text: str) -> None:
    """Wait until `pmesh status` says it on each machine; heartbeats carry it there."""
    for agent in ring:
        agent.await_status(
            lambda _, home=agent.home: text in fleet.pmesh("status", home=home).stdout  # type: ignore[misc]
        )
