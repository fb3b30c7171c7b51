"""What `pmesh status` shows of whole agents, and its documented schema."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from pmesh.agent import snapshot
from pmesh.agent.mesh.load import MEASURE_EVERY_S
from pmesh.agent.schema import (
    SCHEMA_VERSION,
    HeldOffStatus,
    Status,
    TermsStatus,
    decode_status,
    encode_status,
    json_schema,
)
from pmesh.core.links import health
from pmesh.core.links.paths import PathKey
from pmesh.core.values import Terms
from pmesh.core.wire.control import AskStatus, StatusReply
from pmesh.core.wire.trainer import Compresses, ReportsNumbers
from pmesh.errors import UsageError
from pmesh.ids import node_text
from pmesh.net.links import path as path_module
from tests.worlds.fake_status_agent import SNAPSHOT
from tests.worlds.faults import Faults
from tests.worlds.trainer import TrainerClient, together, until
from tests.worlds.village import Machine, training, village
from tests.worlds.village_ops import enter, snapshot_of, syncing_job


async def status_of(machine: Machine) -> Status:
    trainer = await TrainerClient.open(machine.settings.home)
    reply = await trainer.ask(AskStatus())
    assert isinstance(reply, StatusReply)
    await trainer.die()
    return decode_status(reply.json)


async def test_both_machines_show_one_ring_with_its_leader_and_round_trips(
    clock: MockClock,
) -> None:
    async with village(clock, 2) as here:
        await trio.sleep(3)
        snapshots = [await status_of(machine) for machine in here.machines]
        one, two = snapshots
        assert one.view.epoch == two.view.epoch
        assert [m.name for m in one.view.members] == [m.name for m in two.view.members]
        assert [m.rank for m in one.view.members] == [0, 1]
        assert one.view.leader in {m.id for m in one.view.members}
        for machine, snapshot in zip(here.machines, snapshots, strict=True):
            by_health = {m.health: m for m in snapshot.view.members}
            assert by_health["self"].id == node_text(machine.key.node)
            assert by_health["self"].addresses == (f"127.0.0.1:{machine.port}",)
            assert by_health["healthy"].rtt_ms is not None
            assert by_health["healthy"].interface is not None
            (path,) = by_health["healthy"].paths
            assert (path.kind, path.use, path.slow) == ("loopback", "in use", None)
            assert path.rtt_ms == by_health["healthy"].rtt_ms
            assert [edge.rtt_ms is not None for edge in snapshot.view.edges] == [True, True]
            assert snapshot.traffic.control_sent_bytes > 1000
            assert snapshot.uptime_s >= 3


async def test_the_edges_between_others_are_shown_as_they_report_them(
    clock: MockClock, faults: Faults
) -> None:
    faults.instead(health, "measure_round_trip_s", lambda **_: 0.002)  # time stands still
    async with village(clock, 3) as here:
        await trio.sleep(3)
        for machine in here.machines:
            view = snapshot_of(machine).view
            ring = [member.id for member in view.members]
            assert [edge.sender for edge in view.edges] == ring
            assert [edge.receiver for edge in view.edges] == [*ring[1:], ring[0]]
            assert [edge.rtt_ms for edge in view.edges] == [2.0, 2.0, 2.0]


async def test_a_second_path_and_one_that_is_silent_are_shown(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        link = one.agent.peers.links[two.key.node]
        (live,) = link.paths.values()
        key = PathKey("wlan0", "wlan1")
        link.paths[key] = other = replace(live, key=key, kind="wifi", speed_mbit_s=54)
        other.bandwidth.note(9, "probe")
        shown = {m.health: m.paths for m in snapshot_of(one).view.members}["healthy"]
        assert [(p.interface, p.use, p.speed_mbit_s, p.mbit_s) for p in shown][1:] == [
            ("wlan0", "standby", 54, 9)
        ]
        assert shown[0].mbit_s is None
        assert "carries 9 Mbit/s" in (shown[1].slow or "")
        other.asked_at = trio.current_time() - 2
        shown = {m.health: m.paths for m in snapshot_of(one).view.members}["healthy"]
        assert [path.use for path in shown] == ["in use", "silent"]
        del link.paths[key]


@pytest.mark.parametrize(("able", "marked"), [(0, True), (100, False), (1000, True)])
async def test_a_cable_at_100_mbit_s_is_marked_unless_an_end_can_do_no_more(
    clock: MockClock, faults: Faults, able: int, *, marked: bool
) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        (live,) = one.agent.peers.links[two.key.node].paths.values()
        watch = one.agent.watch  # as if its interface was a cable
        watch.current = tuple(replace(own, kind="wired", speed_mbit_s=100) for own in watch.current)
        asked: list[str] = []

        def ask(interface: str) -> int:
            asked.append(interface)
            return able

        faults.instead(snapshot, "able_mbit_s", ask)
        shown = {m.health: m.paths for m in snapshot_of(one).view.members}["healthy"]
        assert [path.slow is not None for path in shown] == [marked]
        assert asked == [live.key.interface]


async def test_the_loss_of_each_link_is_shown(clock: MockClock, faults: Faults) -> None:
    async with village(clock, 2) as here:
        assert [m.loss_percent for m in snapshot_of(here.machines[0]).view.members] == [None, None]
        faults.instead(path_module, "loss_of", lambda _: 0.0214)
        shown = {m.health: m.loss_percent for m in snapshot_of(here.machines[0]).view.members}
        assert shown == {"self": None, "healthy": 2.14}


async def test_a_member_whose_link_is_gone_is_shown_as_gone(
    clock: MockClock, faults: Faults
) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        one.agent.peers.links.clear()
        faults.instead(one.agent.membership, "health_of", lambda _: None)  # until its view
        (other,) = [m for m in snapshot_of(one).view.members if m.health != "self"]
        assert (other.health, other.rtt_ms, other.addresses) == ("gone", None, ())
        assert other.id == node_text(two.key.node)


async def test_a_machine_that_was_just_lost_is_not_linked_by_its_name(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        gone, dials_it = here.machines
        await gone.kill()
        await until(lambda: len(snapshot_of(dials_it).view.members) == 1)
        (peer,) = snapshot_of(dials_it).peers
        assert peer.state != "linked"
        assert peer.name == gone.settings.name
        assert peer.reason is not None


async def test_jobs_are_shown_with_how_far_each_rank_is(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        red = await here.job(one, two, name="red")
        blue = await here.job(one, two, name="blue")
        waits = await here.trainer(one)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waits.join, "green", 5)
            x = np.ones(100_000, np.float32)
            for _ in range(3):
                await together(*[partial(t.reduce, x) for t in red])
            await trio.sleep(1)
            snapshot = await status_of(one)
            jobs = {job.name: job for job in snapshot.jobs}
            assert {name: job.state for name, job in jobs.items()} == {
                "red": "running",
                "blue": "running",
                "green": "waiting",
            }
            assert jobs["green"].wait_for == 5
            assert [(r.started, r.completed) for r in jobs["red"].ranks] == [(2, 2)] * 2
            assert [(r.started, r.completed) for r in jobs["blue"].ranks] == [(-1, -1)] * 2
            assert jobs["red"].stable == 2
            programs = {r.name: r.program for r in jobs["red"].ranks}
            assert programs == {"mac-0": "test.py", "mac-1": None}
            assert snapshot.traffic.data_sent_bytes > 3 * x.nbytes
            assert snapshot.traffic.data_received_bytes > 3 * x.nbytes
            assert [(r.rank, r.trainer) for r in jobs["red"].ranks] == [(0, 0), (1, 1)]
            assert jobs["red"].terms == TermsStatus(min_ranks=1, on_loss="continue", quorum="any")
            nursery.cancel_scope.cancel()
        assert len(blue) == 2


async def test_every_machine_shows_the_step_of_a_job_its_speed_and_whose_time_it_takes(
    clock: MockClock,
) -> None:
    async with village(clock, 3) as here:
        one, two, looks_on = here.machines
        fast, slow = await here.job(one, two)

        async def train(trainer: TrainerClient, own_s: float) -> None:
            for step in range(1, 41):
                await trio.sleep(own_s)
                await trainer.sync(step=step, share_percent=80 if trainer is fast else 20)

        await together(partial(train, fast, 0.02), partial(train, slow, 0.5))
        await trio.sleep(0.3)  # a heartbeat
        for machine in (one, two, looks_on):
            (job,) = snapshot_of(machine).jobs
            assert job.step == 40
            assert job.steps_per_s == pytest.approx(2.0, rel=0.1)
            assert job.ops_per_s == pytest.approx(2.0, rel=0.1)
            assert job.ranks[fast.rank].own_percent in range(20)
            assert job.ranks[slow.rank].own_percent in range(90, 101)
            assert job.ranks[fast.rank].share_percent == 80
            assert job.ranks[slow.rank].share_percent == 20


async def test_trainers_hear_of_the_agents_compression_and_say_what_they_do(
    clock: MockClock,
) -> None:
    async with village(clock, 0) as here:
        machine = here.new_machine("mac", compression="int8")
        await machine.start()
        trainer = await here.trainer(machine)
        joined = await trainer.join("digits", 1)
        assert joined.compression == "int8"
        before = await status_of(machine)
        assert before.node.compression == "int8"
        assert [rank.compression for rank in before.jobs[0].ranks] == [None]
        await trainer.send(Compresses("bf16: it was fastest"))
        await trainer.barrier()
        after = await status_of(machine)
        assert [rank.compression for rank in after.jobs[0].ranks] == ["bf16: it was fastest"]
        await trainer.leave()


async def test_every_machine_shows_how_busy_the_others_are(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        await trio.sleep(3 * MEASURE_EVERY_S)
        for machine in here.machines:
            for member in snapshot_of(machine).view.members:
                assert member.cpu_percent in range(101)
                assert member.memory_percent in range(1, 101)


async def test_what_ranks_report_is_seen_from_every_machine(clock: MockClock) -> None:
    async with village(clock, 3) as here:
        one, two, looks_on = here.machines
        first, second = await here.job(one, two)
        await first.send(ReportsNumbers({"loss": 0.5, "accuracy": 0.25}))
        await first.send(ReportsNumbers({"loss": 0.25}))  # all that it has reported, each time
        await second.send(ReportsNumbers({"loss": math.nan}))
        await together(first.barrier, second.barrier)
        await trio.sleep(0.3)  # a heartbeat
        for machine in (one, two, looks_on):
            (job,) = (await status_of(machine)).jobs
            assert job.ranks[first.rank].reports == {"loss": 0.25}
            assert job.ranks[second.rank].reports == {"loss": "nan"}


async def test_a_trainer_without_a_rank_reports_in_vain(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        (runs,) = await syncing_job(here, one)
        late = await here.trainer(two)
        await late.join("digits", 1)
        await late.send(ReportsNumbers({"loss": 0.5}))
        await enter(here, [late], [runs])
        (job,) = snapshot_of(two).jobs
        assert [rank.reports for rank in job.ranks] == [{}, {}]


async def test_a_rank_that_is_lost_is_gone_from_its_job_with_the_reason(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, _ = here.machines
        trainers = await here.job(*here.machines, terms=Terms(min_ranks=2))
        (whole,) = (await status_of(one)).jobs
        assert (whole.state, whole.reason, whole.losses) == ("running", None, ())
        await trainers[0].die()
        await until(lambda: len(snapshot_of(one).jobs[0].ranks) == 1)
        (left,) = (await status_of(one)).jobs
        assert (left.state, left.reason) == (
            "below_min_ranks",
            "it has 1 of at least 2 ranks (min_ranks)",
        )
        assert [(r.rank, r.trainer, r.name) for r in left.ranks] == [(0, 1, trainers[0].names[1])]
        (loss,) = left.losses
        assert "is lost: its trainer died" in loss


async def held_off_by(machine: Machine) -> HeldOffStatus:
    """Whom it holds off, once that one is linked again."""
    await until(lambda: bool(snapshot_of(machine).held_off))
    (held,) = snapshot_of(machine).held_off
    return held


async def test_a_machine_that_is_lost_again_and_again_is_shown_while_it_is_held_off(
    clock: MockClock,
) -> None:
    async with village(clock, 3) as here:
        *others, flaps = here.machines
        speaks: Callable[..., None] = flaps.agent.membership.send
        says_nothing: Callable[..., None] = lambda *_: None  # noqa: E731
        for _ in range(3):
            await here.settle(*here.machines)
            flaps.agent.membership.send = says_nothing
            await here.settle(*others)
            flaps.agent.membership.send = speaks
        for machine in others:
            held = await held_off_by(machine)
            assert (held.name, held.losses) == ("mac-2", 3)
            assert 0.0 < held.back_in_s <= 2.0
        await here.settle(*here.machines)
        assert snapshot_of(others[0]).held_off == ()


async def test_who_waits_for_a_job_is_shown_on_every_machine_until_it_has_entered(
    clock: MockClock,
) -> None:
    async with village(clock, 3) as here:
        one, two, three = here.machines
        runs = await here.job(one, two)
        newcomer = await here.trainer(three)
        await newcomer.join("digits", 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(newcomer.sync)
            for machine, program in ((one, None), (three, "test.py")):
                await until(lambda: bool(snapshot_of(machine).jobs[0].newcomers))  # noqa: B023 - called in its turn
                (job,) = snapshot_of(machine).jobs
                assert (job.state, len(job.ranks)) == ("running", 2)
                assert [(n.name, n.program) for n in job.newcomers] == [("mac-2", program)]
            await together(*[trainer.sync for trainer in runs])
        for machine in here.machines:
            (job,) = snapshot_of(machine).jobs
            assert [r.trainer for r in job.ranks] == sorted(r.trainer for r in job.ranks)
            assert (len(job.ranks), job.newcomers) == (3, ())


async def test_trainers_that_wait_elsewhere_for_a_job_to_begin_are_shown(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        async with trio.open_nursery() as nursery:
            for machine, wanted in ((two, 3), (two, 5), (one, 4)):
                trainer = await here.trainer(machine)
                nursery.start_soon(trainer.join, "green", wanted)
            await until(lambda: [len(j.newcomers) for j in snapshot_of(one).jobs] == [3])
            (green,) = (await status_of(one)).jobs
            assert (green.name, green.state, green.wait_for) == ("green", "waiting", 5)
            assert sorted(n.name for n in green.newcomers) == ["mac-0", "mac-1", "mac-1"]
            nursery.cancel_scope.cancel()


async def test_a_job_on_the_smaller_side_shows_that_it_has_no_quorum(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        trainers = await here.job(*here.machines, terms=Terms(quorum="majority"))
        senior, other = sorted(
            here.machines, key=lambda machine: machine.settings.name != trainers[0].names[0]
        )
        await senior.kill()
        await until(lambda: [j.state for j in snapshot_of(other).jobs] == ["no_quorum"])
        assert "not a majority" in (snapshot_of(other).jobs[0].reason or "")


async def test_a_stopped_trainer_is_marked(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        await here.job(here.machines[0])
        (rank,) = here.machines[0].agent.jobs.ranks
        assert [r.stopped for r in snapshot_of(here.machines[0]).jobs[0].ranks] == [False]
        rank.stopped = True
        assert [r.stopped for r in snapshot_of(here.machines[0]).jobs[0].ranks] == [True]


async def test_bytes_of_jobs_that_have_ended_stay_counted(clock: MockClock) -> None:
    async with training(clock, 2) as (here, trainers):
        x = np.ones(100_000, np.float32)
        await together(*[partial(t.reduce, x) for t in trainers])
        before = here.machines[0].agent.jobs.traffic
        for trainer in trainers:
            await trainer.leave()
        await until(lambda: not here.machines[0].agent.jobs.ranks)
        assert here.machines[0].agent.jobs.traffic >= before
        assert before[0] > x.nbytes / 2


REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "status.schema.json"


def test_the_schema_in_the_reference_is_current() -> None:
    assert REFERENCE.read_bytes() == json_schema(Status), "run: python tools/status_schema.py"


def test_a_snapshot_survives_its_json() -> None:
    assert decode_status(encode_status(SNAPSHOT)) == SNAPSHOT


def test_the_json_holds_what_the_issue_promises() -> None:
    snapshot = json.loads(encode_status(SNAPSHOT))
    assert snapshot["schema"] == SCHEMA_VERSION
    assert {"node", "view", "peers", "jobs", "traffic", "loop_lag_ms"} <= snapshot.keys()
    assert {"epoch", "leader", "members"} <= snapshot["view"].keys()
    members = snapshot["view"]["members"]
    assert all(
        {"id", "name", "rank", "health", "rtt_ms", "addresses"} <= member.keys()
        for member in members
    )
    assert [member["rank"] for member in members] == [0, 1, 2]


def test_a_field_of_a_later_pmesh_is_ignored() -> None:
    later = json.loads(encode_status(SNAPSHOT)) | {"news": 1}
    assert decode_status(json.dumps(later).encode()) == SNAPSHOT


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b'{"schema": 1}'])
def test_another_schema_says_what_to_do(data: bytes) -> None:
    with pytest.raises(UsageError, match="restart the agent"):
        decode_status(data)
