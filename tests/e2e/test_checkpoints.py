"""Checkpoints of trainers at real agents: killed while they save, and begun again."""

import re
import signal
from pathlib import Path

import pytest

from tests.e2e.harness import Fleet, StartedAgent

pytestmark = pytest.mark.slow

# Each line tells of a step that has been loaded or saved; each trainer has a folder of its own.
TRAINER = """
import hashlib, itertools, sys
import numpy as np
import pmesh

folder, steps, wait_for = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
state = {"weights": [np.zeros(100_003) for _ in range(7)], "step": 0}
with (
    pmesh.connect(job="saved", wait_for=wait_for) as mesh,
    pmesh.Checkpoints(folder, mesh) as checkpoints,
):
    loaded = checkpoints.load(like=state)
    if loaded is not None:
        state = loaded.state
        assert loaded.step == state["step"]
        assert all((w == w[0]).all() for w in state["weights"])
        assert state["weights"][0][0] == loaded.step
    print("began at", state["step"], flush=True)
    for _ in range(steps) if steps else itertools.count():
        state = mesh.sync(state)
        ones = mesh.average_gradients([np.ones_like(w) for w in state["weights"]])
        weights = [w + one for w, one in zip(state["weights"], ones)]
        state = {"weights": weights, "step": state["step"] + 1}
        checkpoints.save(state, state["step"])
        print("saved", state["step"], flush=True)
digest = hashlib.sha256(b"".join(w.tobytes() for w in state["weights"])).hexdigest()
print("ended at", state["step"], digest, flush=True)
"""


def test_trainers_that_are_all_killed_while_they_save_go_on_from_a_whole_step(
    fleet: Fleet, ring: list[StartedAgent], tmp_path: Path
) -> None:
    folders = [str(tmp_path / agent.name) for agent in ring]
    trainers = [
        fleet.start_trainer(agent, TRAINER, folder, "0", "3")
        for agent, folder in zip(ring, folders, strict=True)
    ]
    for trainer in trainers:
        trainer.await_line("^saved 5$")
    for trainer in trainers:
        trainer.send_signal(signal.SIGKILL)
    for agent in ring:
        agent.await_status(lambda status: not status.jobs)

    # One machine does not come back; its part is on its neighbour's disk.
    trainers = [
        fleet.start_trainer(agent, TRAINER, folder, "3", "2")
        for agent, folder in zip(ring[1:], folders[1:], strict=True)
    ]
    ends = {re.sub(r".*?(?=ended at)", "", t.await_end(), flags=re.DOTALL) for t in trainers}
    assert len(ends) == 1
    began = {t.await_line(r"^began at (\d+)")[1] for t in trainers}
    assert len(began) == 1
    assert int(began.pop()) >= 3  # the saves before the one under way are whole

    for agent in ring:  # else who comes first may take the job for one that runs
        agent.await_status(lambda status: not status.jobs)

    # All three, the first with an old disk.
    trainers = [
        fleet.start_trainer(agent, TRAINER, folder, "1", "3")
        for agent, folder in zip(ring, folders, strict=True)
    ]
    (end,) = ends
    for trainer in trainers:
        assert f"began at {end.split()[2]}" in trainer.await_end()
    shown = fleet.pmesh("checkpoint", "list", *folders, home=ring[0].home)
    assert "3 of 3" in shown.stdout
