"""A machine is removed: at once where others are, and where they were away once they are back."""

import json
import time

import pytest

from tests.e2e.harness import Fleet, Running, StartedAgent
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


def states(fleet: Fleet, agent: StartedAgent) -> dict[str, str]:
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
        # A view without it may come before the agent itself has given up its link.
        one.await_status(lambda _: states(fleet, one)["mac-3"] == "away")

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
        removed_at = said_at(one.process, "mac-4 was removed")
        for what, at in (
            ("mac-2 had ended its link", said_at(two.process, "mac-4 is gone: it was removed")),
            ("both ranks had gone on", max(said_at(t, "done") for t in trainers[:2])),
            ("mac-4 knew it", said_at(gone.process, "this machine was removed")),
        ):
            print(f"{what} {at - removed_at:.2f} s after the agent of mac-1 was asked")  # noqa: T201
        fleet.await_view(one, two)

        away.await_status(lambda status: len(status.view.members) == 1)
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


STEADY = """
import numpy as np
import pmesh

with pmesh.connect(job="steady", wait_for=2) as mesh:
    while True:
        for _ in range(100):
            assert mesh.all_reduce(np.ones(1000, np.float32))[0] == mesh.size == 2
        print("op", mesh.last_op.op, flush=True)
"""


def said_at(program: Running, text: str) -> float:
    """When it has first printed this, by the monotonic clock."""
    return next(line.at for line in program.lines if text in line.text)


def goes_on(trainer: Running) -> None:
    """It makes a hundred calls more than it has."""
    latest = trainer.printed()[-1]
    while trainer.await_line("^op .*")[0] != latest:
        pass
    trainer.await_line("^op")


def key_at(fleet: Fleet, agent: StartedAgent) -> str:
    shown = fleet.pmesh("key", "show", home=agent.home)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout.strip()


def test_a_new_mesh_key_reaches_one_that_was_away_and_never_a_removed_one() -> None:
    clean()
    with NetLab(4) as lab, Fleet() as fleet:
        one, two, away, gone = agents = fleet.start_in(lab)
        for agent in agents:
            agent.await_status(lambda _, agent=agent: len(states(fleet, agent)) == 4)  # type: ignore[misc]
        first, second = (fleet.start_trainer(agent, STEADY) for agent in (one, two))
        for trainer in (first, second):
            trainer.await_line("^op")
        old = key_at(fleet, one) if (one.home / "mesh_key").exists() else fleet.mesh_key
        away.process.reap()
        fleet.await_view(one, two, gone)

        rotated = fleet.pmesh("key", "rotate", "--without", "mac-4", home=one.home)

        assert rotated.returncode == 0, rotated.stderr
        assert rotated.stdout.splitlines() == [
            "The mesh has a new key, and this machine uses it. Jobs go on.",
            "have it now: mac-2",
            "get it when they are back: mac-3",
            "get none, as they were removed: mac-4",
        ]
        assert "PMESH_KEY" in rotated.stderr
        two.process.await_line("mac-1 has changed the mesh key, and this machine has the new one")
        gone.process.await_line("this machine was removed from the mesh by mac-1")
        for trainer in (first, second):
            goes_on(trainer)
        new = key_at(fleet, one)
        assert new == key_at(fleet, two) != old

        # With the old key in its environment, and found by mDNS alone.
        back = fleet.start_agent("mac-3", host=lab.hosts[2])
        back.await_status(lambda _: True)
        began = time.monotonic()
        back.process.await_line("mac-1 has changed the mesh key")
        print(f"the one that was away had the key {time.monotonic() - began:.2f} s after its start")  # noqa: T201
        fleet.await_view(one, two, back)
        print(f"it was linked {time.monotonic() - began:.2f} s after its start")  # noqa: T201
        assert key_at(fleet, back) == new

        # Killed and started again, with the key that counts only in its home.
        two.process.reap()
        assert "AgentStopped" in second.await_end(code=1)
        again = fleet.start_agent("mac-2", host=lab.hosts[1], mesh_key="")
        fleet.await_view(one, again, back)
        first.reap()

        assert (gone.home / "mesh_key").exists() is False
        assert {member.name for member in gone.status().view.members} == {"mac-4"}
        late = fleet.start_agent("mac-5", host=lab.hosts[3], mesh_key=new, listen=":24161")
        fleet.await_view(one, again, back, late)
