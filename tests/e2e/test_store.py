"""The store of a job, with real agents: the one that coordinates it is killed."""

import json
import signal
from pathlib import Path

import pytest

from tests.e2e.harness import Fleet, StartedAgent

pytestmark = pytest.mark.slow

# Each rank draws numbers as fast as it can, while the agent of rank 0 is killed, until it is told.
TRAINER = """
import json, os, sys
import pmesh

with pmesh.connect(job="store", wait_for=3) as mesh:
    store, rank = mesh.store, mesh.rank
    store.set(f"large {rank}", bytes([rank]) * 1024 * 1024)
    store.wait([f"large {rank}" for rank in range(3)])
    print("coordinator", mesh.names[0], flush=True)
    sums = []
    try:
        while not os.path.exists(sys.argv[1]):
            sums.append(store.add("drawn"))
            if len(sums) == 100:
                print("busy", flush=True)
        assert store.get("large 0") == bytes(1024 * 1024)
        assert store.keys() == ["drawn", "large 0", "large 1", "large 2"]
    except pmesh.AgentStopped:
        print("AgentStopped", flush=True)
    print(json.dumps(sums), flush=True)
"""


def test_no_answered_call_is_lost_with_the_agent_that_coordinates(
    fleet: Fleet, ring: list[StartedAgent], tmp_path: Path
) -> None:
    enough = tmp_path / "enough"
    trainers = {agent.name: fleet.start_trainer(agent, TRAINER, str(enough)) for agent in ring}
    names = {t.await_line(r"coordinator (\S+)").group(1) for t in trainers.values()}
    (coordinator,) = (agent for agent in ring if {agent.name} == names)
    for trainer in trainers.values():
        trainer.await_line("busy")
    coordinator.process.send_signal(signal.SIGKILL)
    fleet.await_view(*(agent for agent in ring if agent is not coordinator))
    enough.touch()
    printed = {name: t.await_end().splitlines() for name, t in trainers.items()}

    stopped = [name for name, lines in printed.items() if "AgentStopped" in lines]
    assert stopped == [coordinator.name]
    drawn = [number for lines in printed.values() for number in json.loads(lines[-1])]
    assert len(set(drawn)) == len(drawn)
    # Its trainer may not have learned of the last one that it drew.
    assert max(drawn) - len(drawn) in (0, 1)
