"""An agent that ends on purpose: at once, without a traceback, and its peers see a leave."""

import signal
import time

import pytest

from tests.e2e.harness import Fleet, StartedAgent

pytestmark = pytest.mark.slow

TRAINER = """
import numpy as np
import pmesh

big = np.ones(8 * 1024 * 1024, np.float32)
try:
    with pmesh.connect(job="long", wait_for=2) as mesh:
        while mesh.size > 1 or mesh.last_op is None:
            mesh.all_reduce(big)
            if mesh.last_op.op == 1:
                print("busy as rank", mesh.rank, flush=True)
        print("alone after", *mesh.last_op.names)
except pmesh.PmeshError as e:
    print(f"{type(e).__name__}: {e}")
"""


def end(agent: StartedAgent, number: signal.Signals, *peers: StartedAgent, code: int) -> None:
    """End it by the signal: its peers hear of it, and it says nothing more."""
    before, began = agent.process.output, time.monotonic()
    agent.process.send_signal(number)
    reasons = {peer.process.await_line(f"^{agent.name} is gone: (.*)")[1] for peer in peers}
    if peers:  # one may install the view without it before it reads of the leave itself
        stopped, told = {"its agent was stopped"}, {"the others no longer hear it"}
        assert stopped <= reasons <= stopped | told
    left_s = time.monotonic() - began
    said = agent.process.await_end(code=code)
    ended_s = time.monotonic() - began
    # Measured, not asserted: this machine may be busy. That a leave takes less than 1 s is shown on
    # a clock that jumps, in tests/agent/test_run.py.
    print(f"{agent.name}: {number.name}, left in {left_s:.2f} s, ended in {ended_s:.2f} s")  # noqa: T201
    assert "Traceback" not in said
    assert said[len(before) :].count("\n") <= 1, said  # a job's end, if it had a rank


def test_a_stopped_agent_leaves_at_once_also_while_a_job_runs(fleet: Fleet) -> None:
    one, two, three, four = fleet.start_ring("mac-1", "mac-2", "mac-3", "mac-4")
    trainers = [fleet.start_trainer(agent, TRAINER) for agent in (one, two)]
    ranks = [trainer.await_line(r"busy as rank (\d)")[1] for trainer in trainers]

    end(three, signal.SIGINT, one, two, four, code=130)
    end(two, signal.SIGTERM, one, four, code=0)

    assert trainers[1].await_end().splitlines()[-1].startswith("AgentStopped: ")
    assert trainers[0].await_end().splitlines()[-1] == "alone after mac-1"
    one.process.await_line(rf"rank {ranks[1]} \(mac-2\) is lost: its agent (was stopped|is gone)$")

    down = fleet.pmesh("down", home=four.home)

    said = f"The agent has left the mesh (pid {four.process.pid}).\n"
    assert (down.returncode, down.stdout, down.stderr) == (0, said, "")
    four.process.await_end()
    assert one.process.await_line("^mac-4 is gone: (.*)")[1] == "its agent was stopped"
    end(one, signal.SIGINT, code=130)
    files = {"agent.lock", "members", "names", "node_key"}  # neither socket, nor keys half written
    for agent in (one, two, three, four):
        assert {path.name for path in agent.home.iterdir()} == files
