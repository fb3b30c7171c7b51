"""What the other ranks see when one is lost in the middle of an op, or calls something else."""

import json
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import pytest

from tests.e2e.harness import Agent, Fleet, Running

# Calls op after op, 32 MiB each, so that whatever happens happens in the middle of one.
TRAINER = """
import json, sys
import numpy as np
import pmesh

big = np.ones(8 * 1024 * 1024, np.float32)
with pmesh.connect(job=sys.argv[1], wait_for=int(sys.argv[2])) as mesh:
    last = None
    try:
        while True:
            last = mesh.all_reduce(big)[0], mesh.last_op.op
            if last[1] == 1:
                print("busy as rank", mesh.rank, flush=True)
    except pmesh.PmeshError as e:
        print(json.dumps({"rank": mesh.rank, "error": type(e).__name__, "says": str(e),
                          "completed": last[1]}), flush=True)
"""

# Op 1 of rank 1 differs from the others'; ops 0 and 2 are alike.
OUT_OF_STEP = """
import sys
import numpy as np
import pmesh

with pmesh.connect(job="steps", wait_for=3) as mesh:
    mesh.barrier()
    try:
        if mesh.rank == 1:
            mesh.all_reduce(np.ones(5, np.float64), op="max")
        else:
            mesh.all_reduce(np.ones(4, np.float32))
    except pmesh.OpMismatch as e:
        print("OpMismatch:", e)
    print("then", mesh.all_reduce(np.ones(2)), mesh.last_op.op)
"""


Ring: TypeAlias = tuple[Fleet, list[Agent]]


@pytest.fixture(scope="module")
def ring() -> Iterator[Ring]:
    with Fleet() as fleet:
        yield fleet, fleet.start_ring("mac-1", "mac-2", "mac-3")


def is_leader(agent: Agent) -> bool:
    status = agent.status()
    return status.view.leader == status.node.id


def outcomes(trainers: Sequence[Running], *, since: float) -> list[dict[str, Any]]:
    """What each of them raised."""
    raised = [json.loads(t.await_line(r"^\{.*\}$")[0]) for t in trainers]
    # Measured, not asserted: this machine may be busy. That it takes less than 5 s is shown on a
    # clock that jumps, in tests/agent/test_disturbed_ops.py.
    print(f"all survivors had raised {time.monotonic() - since:.2f} s later")  # noqa: T201
    for trainer in trainers:
        trainer.await_end()
    return raised


def start_job(fleet: Fleet, job: str, *agents: Agent) -> tuple[list[Running], list[int]]:
    """A trainer at each agent, all in the middle of large ops, and their ranks."""
    trainers = [fleet.start_trainer(agent, TRAINER, job, str(len(agents))) for agent in agents]
    return trainers, [int(t.await_line(r"busy as rank (\d)")[1]) for t in trainers]


def test_a_killed_trainer_is_named_to_all_others_for_the_same_op(ring: Ring) -> None:
    fleet, agents = ring
    trainers, ranks = start_job(fleet, "trainer-dies", *agents)

    began = time.monotonic()
    trainers[2].reap()
    raised = outcomes(trainers[:2], since=began)

    assert {r["error"] for r in raised} == {"RankLost"}
    assert {r["says"].partition(":")[0] for r in raised} == {f"rank {ranks[2]} (mac-3) is lost"}
    assert raised[0]["completed"] == raised[1]["completed"]  # so it was the same op
    for agent in agents:
        agent.await_status(lambda status: not status.jobs and len(status.view.members) == 3)


def test_ranks_out_of_step_all_learn_which_op_and_who_called_what(ring: Ring) -> None:
    fleet, agents = ring
    trainers = [fleet.start_trainer(agent, OUT_OF_STEP) for agent in agents]

    told = {trainer.await_line("^OpMismatch: .*")[0] for trainer in trainers}
    ends = {trainer.await_end().splitlines()[-1] for trainer in trainers}

    (text,) = told  # the same on every rank
    assert text.startswith("OpMismatch: op 1 of job 'steps'")
    assert re.search(r"rank 1 \(mac-\d\): all_reduce\(float64, 5, max\)", text)
    # Of the two others, at least the one with whom rank 1 met in this op.
    assert re.search(r"rank [02] \(mac-\d\): all_reduce\(float32, 4, sum\)", text)
    assert ends == {"then [3. 3.] 2"}  # the job goes on


def test_a_killed_agent_is_named_to_all_others_whether_it_leads_or_follows(fleet: Fleet) -> None:
    agents = fleet.start_ring("mac-1", "mac-2", "mac-3")
    leads, follows, dies = sorted(agents, key=lambda agent: not is_leader(agent))
    trainers, ranks = start_job(fleet, "again", leads, follows, dies)

    began = time.monotonic()
    dies.process.reap()
    raised = outcomes(trainers, since=began)

    assert raised.pop()["error"] == "AgentStopped"  # its own trainer's
    assert {r["error"] for r in raised} == {"RankLost"}
    assert all(r["says"].startswith(f"rank {ranks[2]} ({dies.name}) is lost") for r in raised)
    assert raised[0]["completed"] == raised[1]["completed"]

    # The name of a job that has failed is free as soon as its ranks have ended.
    trainers, ranks = start_job(fleet, "again", leads, follows)
    began = time.monotonic()
    leads.process.reap()
    raised = outcomes(trainers, since=began)

    assert [r["error"] for r in raised] == ["AgentStopped", "RankLost"]
    assert raised[1]["says"].startswith(f"rank {ranks[0]} ({leads.name}) is lost")
    follows.await_status(lambda status: len(status.view.members) == 1 and not status.jobs)
