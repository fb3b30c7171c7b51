"""`mesh.compare`: whether all ranks have the same weights, and where that is shown."""

from pathlib import Path

import numpy as np
import pytest

import pmesh
from pmesh.agent.events import Event, decode_events
from pmesh.agent.schema import JobStatus, decode_status
from pmesh.cli.sentences import job_line
from pmesh.client.control import ask_events, ask_status
from pmesh.core.wire.calls import Call
from tests.worlds.watched_agent import WatchedAgent, run, run_ranks, watched_agent


def job_of(home: Path) -> JobStatus:
    (job,) = decode_status(ask_status(home)).jobs
    return job


def differences(home: Path) -> list[Event]:
    page = decode_events(ask_events(home, -1))
    return [event for event in page.events if event.kind == "states differ"]


def test_equal_weights_have_one_hash_which_the_status_shows(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> pmesh.Compared:
        found = mesh.compare({"w": np.arange(1000, dtype=np.float16), "step": 3})
        mesh.barrier()  # it takes along what was found
        if mesh.rank == 0:
            assert f"; state {found.digest[:12]} on all" in job_line(job_of(agent.home)).plain
        mesh.barrier()
        return found

    found = run(agent, 3, program)
    assert found == [pmesh.Compared(found[0].digest, ())] * 3
    assert agent.calls[0] == Call("exchange", "int64", (2,), tree="compare")
    assert differences(agent.home) == []


def test_a_rank_with_one_other_bit_is_named_to_all_in_the_status_and_in_one_event(
    agent: WatchedAgent,
) -> None:
    def program(mesh: pmesh.Mesh) -> pmesh.Compared:
        weights = np.ones(1000, np.float32)
        if mesh.rank == 1:
            weights.view(np.uint32)[999] ^= 1
        found = mesh.compare(weights)
        mesh.barrier()
        if mesh.rank == 0:
            line = job_line(job_of(agent.home)).plain
            assert line.endswith("; another state than the others: rank 1 (simulated)")
        mesh.barrier()
        return found

    found = run(agent, 3, program)
    assert [one.others for one in found] == [(1,)] * 3
    assert found[0].digest == found[2].digest != found[1].digest
    (event,) = differences(agent.home)
    text = "rank 1 (simulated) had another state than the other 2 ranks in op 0"
    assert (event.text, event.job, event.op) == (f"job 'job': {text}", "job", 0)


def test_a_group_compares_its_own_ranks_alone_and_is_named_in_the_event(
    agent: WatchedAgent,
) -> None:
    def program(mesh: pmesh.Mesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
        pair = mesh.split(mesh.rank % 2)  # of ranks 0 and 2, which differ, and of 1 and 3
        assert pair is not None
        mine = np.full(4, 2 if mesh.rank == 2 else mesh.rank % 2)
        in_pair = pair.compare(mine).others
        pair.barrier()  # it takes along what was found
        mesh.barrier()
        shown = [job_line(job).plain for job in decode_status(ask_status(agent.home)).jobs]
        ends = sorted(line.rpartition("; ")[2].partition(" ")[0] for line in shown)
        assert ends == ["Job", "another", "state"]  # the job knows nothing yet; both groups do
        return in_pair, mesh.compare(mesh.rank % 2).others

    found = run(agent, 4, program)
    assert found == [((1,), (1, 3)), ((), (1, 3))] * 2
    in_group, in_mesh = differences(agent.home)
    assert "(simulated) had another state than the other rank in op" in in_group.text
    assert (in_group.job or "").startswith("job/")
    assert in_mesh.job == "job"


def test_a_difference_is_sent_though_the_rank_calls_nothing_after_it(agent: WatchedAgent) -> None:
    run_ranks(agent.home, 2, lambda mesh: mesh.compare(mesh.rank))
    assert [event.op for event in differences(agent.home)] == [0]


def test_a_sync_shows_the_state_that_all_have_and_who_had_to_get_it(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        mesh.sync(0)
        mesh.sync(mesh.rank)
        mesh.barrier()
        if mesh.rank == 0:
            job = job_of(agent.home)
            assert job.comparison is not None
            assert (job.comparison.step, job.comparison.mended) == (2, True)
            assert "; state " in job_line(job).plain
        mesh.barrier()

    run(agent, 2, program)
    (event,) = differences(agent.home)
    assert event.text.endswith("than the other rank in step 2, and got theirs")


def test_a_rank_that_is_alone_agrees_with_itself(tmp_path: Path) -> None:
    with watched_agent(tmp_path):
        mesh = pmesh.connect("job", home=tmp_path, on_superseded="sync")
        found = mesh.compare([])
    with mesh:
        assert mesh.compare([]) == found == pmesh.Compared(found.digest, ())


def test_what_has_no_bytes_is_refused_before_an_op(agent: WatchedAgent) -> None:
    with (
        pmesh.connect("job", home=agent.home) as mesh,
        pytest.raises(pmesh.UnsupportedArray),
    ):
        mesh.compare(object())
    assert agent.calls == []
