"""Two machines with two cables between them: both carry an op, and one may be pulled meanwhile."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pmesh.agent.schema import Status
from tests.e2e.harness import Fleet, StartedAgent
from tools.lab.net import NetLab

pytestmark = [pytest.mark.netns, pytest.mark.slow]

GIGABIT = 1_000_000_000
MIB = 1024 * 1024
TRAINER = """
import itertools, os
import numpy as np
import pmesh

with pmesh.connect(job="cables", wait_for=2) as mesh:
    own = np.full(8 * 1024 * 1024, 1.0 + mesh.rank, np.float32)
    for op in itertools.count():
        total = mesh.all_reduce(own)
        assert mesh.size == 2 and (total == 3.0).all(), (mesh.size, total)
        print(f"op {op} has ended", flush=True)
        if mesh.all_reduce(np.array([os.path.exists(os.environ["LAST"])]), "max")[0]:
            break
"""


def reruns(fleet: Fleet, agent: StartedAgent) -> int:
    page = json.loads(fleet.pmesh("events", "--json", home=agent.home).stdout)
    return sum(event["kind"] == "op rerun" for event in page["events"])


def test_both_cables_carry_an_op_and_one_that_is_pulled_meanwhile_costs_none(
    fleet: Fleet, make_lab: Callable[..., NetLab], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = tmp_path / "last"
    monkeypatch.setenv("LAST", str(last))
    lab = make_lab(2, networks=2)
    for host in lab.hosts:
        for network in (0, 1):
            lab.shape(host, bits_per_s=GIGABIT, network=network)
    agents = fleet.start_in(lab)
    for agent in agents:
        agent.await_status(lambda status: any(len(m.paths) == 2 for m in status.view.members))
    trainers = [fleet.start_trainer(agent, TRAINER) for agent in agents]
    victim = lab.hosts[0]

    def carried() -> tuple[int, int]:
        return lab.carried_bytes(victim, 0), lab.carried_bytes(victim, 1)

    trainers[0].await_line("op 4 has ended")
    before, reruns_before = carried(), reruns(fleet, agents[0])
    trainers[0].await_line("op 8 has ended")
    assert all(now - then > 32 * MIB for now, then in zip(carried(), before, strict=True))

    def uses_both(status: Status) -> bool:
        uses = [p.use for member in status.view.members for p in member.paths]
        return uses == ["in use", "in use"]

    agents[0].await_status(uses_both)  # a path counts for less while a busy machine measures it

    lab.unplug(victim, 0)
    *_, newest = re.findall(r"op (\d+) has ended", trainers[0].output)
    trainers[0].await_line(f"op {int(newest) + 3} has ended")
    last.touch()
    for trainer in trainers:
        trainer.await_end()
    assert reruns(fleet, agents[0]) == reruns_before
    assert not any("is gone" in agent.process.output for agent in agents)
