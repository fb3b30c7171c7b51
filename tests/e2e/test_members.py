"""A machine is removed: at once where others are, and where they were away once they are back."""

import json
import time

import pytest

from tests.e2e.harness import Agent, Fleet
from tools.lab.net import NetLab, clean

pytestmark = [pytest.mark.netns, pytest.mark.slow]

TRAINER = """
import numpy as np
import pmesh

with pmesh.connect(job="digits", wait_for=4) as mesh:
    size = 0
    while mesh.size > 2:
        mesh.all_reduce(np.ones(1000, np.float32))
        if mesh.size != size:
            size = mesh.size
            print(size, "ranks", flush=True)
    print("done", flush=True)
"""


def states(fleet: Fleet, agent: Agent) -> dict[str, str]:
    """What `pmesh members` says there of each machine."""
    said = fleet.pmesh("members", "--json", home=agent.home)
    assert said.returncode == 0, said.stderr
    return {member["name"]: member["state"] for member in json.loads(said.stdout)["members"]}


def test_a_removed_machine_is_out_for_all_also_for_one_that_was_away() -> None:
    clean()
    with NetLab(4) as lab, Fleet() as fleet:
        one, two, away, gone = agents = fleet.start_in(lab)
        trainers = [fleet.start_trainer(agent, TRAINER) for agent in agents]
        for trainer in trainers:
            trainer.await_line("^4 ranks")
        hosts = dict(zip(agents, lab.hosts, strict=True))
        others = [hosts[agent] for agent in (one, two, gone)]
        lab.cut(hosts[away], *others)
        for trainer in (trainers[0], trainers[1], trainers[3]):
            trainer.await_line("^3 ranks")

        began = time.monotonic()
        removed = fleet.pmesh("remove", "mac-4", home=one.home)
        assert removed.returncode == 0, removed.stderr
        assert removed.stdout.splitlines() == [
            "mac-4 is shut out of the mesh",
            "told now: mac-2",
            "told when they are back: mac-3",
        ]
        for agent in (one, two):
            agent.process.await_line("mac-4 was removed from the mesh by mac-1")
            agent.process.await_line("mac-4 is gone: it was removed by mac-1")
        gone.process.await_line("this machine was removed from the mesh by mac-1")
        for trainer in trainers[:2]:
            trainer.await_line("done")
        # Measured, not asserted: this machine may be busy.
        print(f"all went on without it {time.monotonic() - began:.2f} s after the command began")  # noqa: T201
        fleet.await_view(one, two)

        assert states(fleet, away)["mac-4"] == "away"  # cut off is all that it knows
        began = time.monotonic()
        lab.mend(hosts[away], hosts[one], hosts[two])
        away.process.await_line("mac-4 was removed from the mesh by mac-1")
        print(f"the one that was away knew it {time.monotonic() - began:.2f} s after it was back")  # noqa: T201
        fleet.await_view(one, two, away)
        lab.mend(hosts[away], hosts[gone])
        for agent in (one, two, away):
            assert states(fleet, agent)["mac-4"] == "removed"
        reasons = [peer.reason or "" for peer in gone.status().peers if peer.state == "refused"]
        assert reasons
        assert all("this machine was removed from the mesh by mac-1" in why for why in reasons)

        undone = fleet.pmesh("remove", "--undo", "mac-4", home=away.home)
        assert undone.returncode == 0, undone.stderr
        fleet.await_view(*agents)
