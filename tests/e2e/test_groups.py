"""What groups hold open in agents."""

import signal

import psutil
import pytest

from tests.e2e.harness import Fleet, StartedAgent

pytestmark = pytest.mark.slow

STEPS = 25
OF_A_GROUP = 2  # descriptors that one may hold while it rests

# After each line it waits for a signal.
TRAINER = f"""
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # before numpy starts threads
import numpy as np
import pmesh

def say(word):
    mesh.barrier()
    print(word, flush=True)
    signal.sigwait([signal.SIGUSR1])

x = np.ones(1_000_000, np.float32)
with pmesh.connect(job="groups", wait_for=3) as mesh:
    for _ in range({STEPS}):
        mesh.barrier()  # then the agents have what the mesh itself needs to repeat one
    say("began")
    held = mesh.group([0, 1, 2])
    sums = [held.all_reduce(x)[0], held.average_gradients([x, x])[0][0], held.broadcast(x, 1)[0]]
    say("one group is made")
    for _ in range({STEPS}):
        group = mesh.group([2, 0, 1])
        group.all_reduce(x)
    say("many groups were made")
    print(*sums, held.all_reduce(x)[0], group.all_reduce(x)[0])
"""

RESTS_SOON = "import pmesh.agent.jobs.session as t; t.IDLE_S = 0.2"


def descriptors(agent: StartedAgent) -> int:
    return psutil.Process(agent.process.pid).num_fds()


def await_descriptors(agent: StartedAgent, most: int) -> None:
    agent.await_status(lambda _: descriptors(agent) <= most)


def test_an_agent_holds_little_for_groups_and_nothing_for_those_that_nobody_holds(
    fleet: Fleet,
) -> None:
    first = fleet.start_agent("mac-1", "--no-mdns", patch=RESTS_SOON)
    peer = ("--no-mdns", "--peer", first.address)
    agents = [first, *(fleet.start_agent(n, *peer, patch=RESTS_SOON) for n in ("mac-2", "mac-3"))]
    fleet.await_view(*agents)
    trainers = [fleet.start_trainer(agent, TRAINER) for agent in agents]
    for trainer in trainers:
        trainer.await_line("began")
    before = {agent: descriptors(agent) for agent in agents}
    for word, groups in (("one group is made", 1), ("many groups were made", 2)):
        for trainer in trainers:
            trainer.send_signal(signal.SIGUSR1)
        for trainer in trainers:
            trainer.await_line(word)
        for agent in agents:
            await_descriptors(agent, before[agent] + groups * OF_A_GROUP)
    for trainer in trainers:
        trainer.send_signal(signal.SIGUSR1)
    for trainer in trainers:
        trainer.await_line("3.0 1.0 1.0 3.0 3.0")
        trainer.await_end()
