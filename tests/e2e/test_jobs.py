"""Who trains with whom: several trainers at one agent, several jobs, jobs on some of the agents."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Fleet, Running, StartedAgent

pytestmark = pytest.mark.slow  # in one process: tests/agent/jobs

# Job, ranks, how often one after the other.
TRAINER = """
import json, sys
import numpy as np
import pmesh

job, ranks, runs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for run in range(runs):
    with pmesh.connect(job=job, wait_for=ranks) as mesh:
        sums = [int(mesh.all_reduce(np.array(10**mesh.rank))) for _ in range(20)]
        print(json.dumps([mesh.rank, mesh.size, sorted(mesh.names), sorted(set(sums))]))
"""

# Holds its job until it is told by a signal; so does nobody else have to wait by the clock.
HOLDER = """
import signal, sys
import pmesh

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
with pmesh.connect(job=sys.argv[1], wait_for=int(sys.argv[2])) as mesh:
    mesh.barrier()
    print("began", mesh.rank, flush=True)
    signal.sigwait([signal.SIGUSR1])
    mesh.barrier()
    print("ended")
"""

HASTY = """
import sys
import pmesh

try:
    pmesh.connect(job=sys.argv[1], wait_for=int(sys.argv[2]), timeout_s=0.3)
except pmesh.PmeshError as e:
    print(f"{type(e).__name__}: {e}")
"""


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[Fleet, StartedAgent, StartedAgent]]:
    with Fleet() as fleet:
        one, other = fleet.start_ring("mac-1", "mac-2")
        yield fleet, one, other


def results(*trainers: Running) -> list[list[object]]:
    """The last line of each, sorted by rank."""
    return sorted(json.loads(trainer.await_end().splitlines()[-1]) for trainer in trainers)


def test_jobs_run_at_once_on_some_or_all_agents_with_several_trainers_on_one(
    two: tuple[Fleet, StartedAgent, StartedAgent],
) -> None:
    fleet, one, other = two
    wide = [fleet.start_trainer(at, TRAINER, "wide", "3", "1") for at in (one, one, other)]
    narrow = [fleet.start_trainer(one, TRAINER, "narrow", "2", "1") for _ in range(2)]
    alone = fleet.start_trainer(other, TRAINER, "alone", "1", "1")

    assert results(*wide) == [[rank, 3, ["mac-1", "mac-1", "mac-2"], [111]] for rank in range(3)]
    assert results(*narrow) == [[rank, 2, ["mac-1", "mac-1"], [11]] for rank in range(2)]
    assert results(alone) == [[0, 1, ["mac-2"], [1]]]


def test_a_trace_has_the_calls_of_all_ranks_on_one_clock(
    two: tuple[Fleet, StartedAgent, StartedAgent], tmp_path: Path
) -> None:
    fleet, one, other = two
    trainers = [fleet.start_trainer(at, TRAINER, "traced", "2", "1") for at in (one, other)]
    results(*trainers)

    path = tmp_path / "trace.json"
    shown = fleet.pmesh("trace", "traced", "--output", str(path), home=one.home)

    assert "40 calls, on one clock within" in shown.stdout, shown.stderr
    found = json.loads(path.read_bytes())
    calls = [each for each in found["traceEvents"] if each["name"] == "all_reduce"]
    assert len({each["pid"] for each in calls}) == 2
    assert 0 < found["otherData"]["clock_error_us"] < 1e6
    by_op: dict[int, list[dict[str, float]]] = {}
    for each in calls:
        by_op.setdefault(each["args"]["op"], []).append(each)
    for pair in by_op.values():
        last_begin, first_end = max(a["ts"] for a in pair), min(a["ts"] + a["dur"] for a in pair)
        assert last_begin <= first_end + found["otherData"]["clock_error_us"]


def test_a_name_is_free_again_as_soon_as_its_job_has_ended(
    two: tuple[Fleet, StartedAgent, StartedAgent],
) -> None:
    fleet, one, other = two
    trainers = [fleet.start_trainer(at, TRAINER, "again", "2", "4") for at in (one, other)]

    assert results(*trainers) == [[rank, 2, ["mac-1", "mac-2"], [11]] for rank in range(2)]
    for agent in (one, other):
        agent.await_status(lambda status: not status.jobs)


def test_nobody_enters_a_running_job_that_never_syncs(
    two: tuple[Fleet, StartedAgent, StartedAgent],
) -> None:
    fleet, one, other = two
    holders = [fleet.start_trainer(at, HOLDER, "held", "2") for at in (one, other)]
    for holder in holders:
        holder.await_line("began")

    refused = fleet.start_trainer(other, HASTY, "held", "2").await_end()

    assert refused.startswith("JobRunning: job 'held' is running and never calls mesh.sync()")
    for holder in holders:
        holder.send_signal(signal.SIGUSR1)
    for holder in holders:
        assert holder.await_end().endswith("ended")


def test_too_few_trainers_are_counted_and_idle_machines_named(
    two: tuple[Fleet, StartedAgent, StartedAgent],
) -> None:
    fleet, one, _ = two

    refused = fleet.start_trainer(one, HASTY, "large", "3").await_end()

    assert refused.startswith(
        "NotEnoughRanks: 1 of 3 trainers of job 'large' are here after 0.3 s;"
    )
    assert refused.endswith("machines without one: mac-2")
    one.await_status(lambda status: not status.jobs)
