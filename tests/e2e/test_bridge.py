"""`pmesh bridge entrenar` between real ranks and workers, of which one is killed and one lies."""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bridge import worker
from tests.bridge.worker import PARTS, SIZES, RawWorker
from tests.e2e.harness import Fleet, Running, StartedAgent

pytestmark = [pytest.mark.slow, pytest.mark.measured]

RANK = """
import json
import sys
import numpy as np
import pmesh
from pmesh.bridge.client import average_blocks

PARTS, SIZES = json.loads(sys.argv[1])
with pmesh.connect(job="bridged", wait_for=3) as mesh:
    for step in range(6):
        def filled(part):
            value = 60 * (100 + step + PARTS.index(part))
            return [np.full(size, value, np.float32) for size in SIZES[part]]
        blocks, others = average_blocks(
            mesh, [filled("block 0"), filled("block 1")], [filled(part)[0] for part in PARTS[2:]]
        )
        means = [float(x[0]) for x in (blocks[1][0], blocks[0][0], *others)]
        print(json.dumps([step, means]), flush=True)
"""


def start_bridge(fleet: Fleet, agent: StartedAgent, *options: str) -> tuple[Running, int]:
    running = fleet.start_command(
        *("bridge", "entrenar", "--listen", "127.0.0.1:0", *options), home=agent.home
    )
    return running, int(running.await_line(r"entrenar at 127\.0\.0\.1:(\d+)")[1])


def expected(step: int, workers_at: list[int]) -> list[float]:
    """The means of a step; `workers_at` has the number of workers of each part, from worker 0."""
    means = []
    for place, count in enumerate(workers_at):
        ours = 2 * 60 * (100 + step + place)
        theirs = sum(60 * (10 * number + step + place) for number in range(count))
        means.append((ours + theirs) / (2 + count))
    return means


def test_means_are_exact_while_a_worker_is_killed_and_another_lies(
    fleet: Fleet, ring: list[StartedAgent]
) -> None:
    bridge, port = start_bridge(fleet, ring[0], "--job", "bridged", "--workers", "3")
    arguments = json.dumps([PARTS, SIZES])
    ranks = [fleet.start_trainer(agent, RANK, arguments) for agent in ring[1:]]
    workers = []
    for number, faults in enumerate(([], ["nan", "3", "block 0"], ["kill", "2", "block 0"])):
        command = [sys.executable, str(Path(worker.__file__)), str(port), "5", *faults]
        workers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        bridge.await_line(f"worker {number} .* has joined")
    bridge.await_end()

    means = [
        *([step, expected(step, [3] * 5)] for step in (0, 1)),
        [2, expected(2, [3, 2, 2, 2, 2])],
        [3, expected(3, [2, 1, 1, 1, 1])],
        [4, expected(4, [1] * 5)],
        [5, expected(5, [0] * 5)],
    ]
    said = [
        [json.loads(line) for line in rank.await_end().splitlines() if line[0] == "["]
        for rank in ranks
    ]
    printed = [done.communicate()[0] for done in workers]
    heard = [json.loads(line) for line in printed[0].splitlines()]
    assert said == [means] * 2
    assert heard == means[:5]
    assert [done.returncode for done in workers] == [0, 0, -signal.SIGKILL]
    assert "worker 1 (node-nan) has NaN in block 0 of step 3, at value 1; it is" in bridge.output
    assert (
        "worker 2 (node-kill) has closed its connection before block 0 of step 2" in bridge.output
    )
    assert "worker 0 (node-good) has ended after 5 steps" in bridge.output


def test_ctrl_c_is_the_workers_shutdown_and_wrong_use_is_one_sentence(
    fleet: Fleet, ring: list[StartedAgent]
) -> None:
    bridge, port = start_bridge(fleet, ring[0], "--job", "none", "--workers", "2")
    with RawWorker(port) as first:
        bridge.send_signal(signal.SIGINT)
        assert first.receive() == b"\x07"
    bridge.await_end(code=130)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = ("bridge", "entrenar", "--job", "x", "--workers", "1")
        refused = fleet.pmesh(*command, "--listen", f"127.0.0.1:{port}", home=ring[0].home)
    assert (refused.returncode, refused.stderr) == (
        1,
        f"PortTaken: port {port} is taken: choose another one with --listen\n",
    )
