"""An agent that is frozen, or killed, under the trainers and commands of its machine."""

import signal
from collections.abc import Iterator

import pytest

from tests.e2e.harness import Fleet, StartedAgent

pytestmark = pytest.mark.slow

TRAIN = """
import numpy as np
import pmesh
with pmesh.connect("job") as mesh:
    print("rank", mesh.rank, flush=True)
    try:
        while True:
            mesh.all_reduce(np.ones(3))
    except pmesh.AgentStopped as e:
        print(e)
"""


@pytest.fixture(scope="module")
def agent() -> Iterator[StartedAgent]:
    with Fleet() as fleet:
        (agent,) = fleet.start_ring("mac-1")
        yield agent


def test_who_meets_a_frozen_agent_reads_how_to_continue_it(
    fleet: Fleet, agent: StartedAgent
) -> None:
    pid = agent.process.pid
    silent = f"the agent at {agent.home}/agent.sock"
    state = f"its process (pid {pid}) is stopped; run 'kill -CONT {pid}'"

    agent.process.send_signal(signal.SIGSTOP)
    trainer = fleet.start_trainer(agent, TRAIN)
    status = fleet.pmesh("status", home=agent.home)
    warned = trainer.await_line("does not answer")
    agent.process.send_signal(signal.SIGCONT)
    trainer.await_line("rank 0")

    assert status.stderr == f"AgentStopped: {silent} has not answered for 5 s: {state}\n"
    assert warned.string == f"{silent} does not answer: {state}"


def test_a_call_under_way_says_that_its_agent_is_frozen(fleet: Fleet, agent: StartedAgent) -> None:
    trainer = fleet.start_trainer(agent, TRAIN)
    trainer.await_line("rank 0")

    agent.process.send_signal(signal.SIGSTOP)
    warned = trainer.await_line("does not answer")
    agent.process.send_signal(signal.SIGCONT)

    pid = agent.process.pid
    assert warned.string == (
        f"the agent at {agent.home}/agent.sock does not answer: its process (pid {pid}) is "
        f"stopped; run 'kill -CONT {pid}'"
    )


def test_who_loses_a_killed_agent_reads_how_to_start_another(
    fleet: Fleet, agent: StartedAgent
) -> None:
    (agent.home / "agent.log").touch()  # as --detach does
    trainer = fleet.start_trainer(agent, TRAIN)
    trainer.await_line("rank 0")
    agent.process.send_signal(signal.SIGKILL)

    assert trainer.await_end().splitlines()[-1] == (
        f"the agent at {agent.home}/agent.sock has ended; its log is {agent.home}/agent.log; "
        "start another with 'pmesh up'"
    )
