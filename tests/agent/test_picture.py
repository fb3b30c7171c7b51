"""What `pmesh status` shows of whole agents."""

from functools import partial

import numpy as np
import trio
from trio.testing import MockClock

from pmesh.agent.status import Status, decode_status
from pmesh.core.session import AskStatus
from pmesh.core.session import Status as StatusReply
from pmesh.ids import node_text
from tests.agent.fake_trainer import Trainer, together, until
from tests.agent.fakes import Machine, village


async def status_of(machine: Machine) -> Status:
    trainer = await Trainer.open(machine.settings.home)
    reply = await trainer.ask(AskStatus())
    assert isinstance(reply, StatusReply)
    await trainer.die()
    return decode_status(reply.json)


async def test_both_machines_show_one_ring_with_its_leader_and_round_trips(
    clock: MockClock,
) -> None:
    async with village(clock, 2) as here:
        await trio.sleep(3)
        pictures = [await status_of(machine) for machine in here.machines]
        one, two = pictures
        assert one.view.epoch == two.view.epoch
        assert [m.name for m in one.view.members] == [m.name for m in two.view.members]
        assert [m.rank for m in one.view.members] == [0, 1]
        assert one.view.leader in {m.id for m in one.view.members}
        for machine, picture in zip(here.machines, pictures, strict=True):
            by_health = {m.health: m for m in picture.view.members}
            assert by_health["self"].id == node_text(machine.key.node)
            assert by_health["self"].addresses == (f"127.0.0.1:{machine.port}",)
            assert by_health["healthy"].rtt_ms is not None
            assert by_health["healthy"].interface is not None
            assert picture.traffic.control_sent_bytes > 1000
            assert picture.uptime_s >= 3


async def test_a_member_whose_link_is_gone_is_shown_as_gone(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        one.agent.peers.links.clear()
        one.agent.membership._contacts.clear()  # noqa: SLF001 - between a loss and its view
        (other,) = [m for m in one.agent._picture().view.members if m.health != "self"]  # noqa: SLF001
        assert (other.health, other.rtt_ms, other.addresses) == ("gone", None, ())
        assert other.id == node_text(two.key.node)


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
            picture = await status_of(one)
            jobs = {job.name: job for job in picture.jobs}
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
            assert picture.traffic.data_sent_bytes > 3 * x.nbytes
            assert picture.traffic.data_received_bytes > 3 * x.nbytes
            nursery.cancel_scope.cancel()
        await blue[1].die()
        await until(
            lambda: any(job.state == "failed" for job in one.agent._picture().jobs)  # noqa: SLF001
        )
        (failed,) = [job for job in (await status_of(one)).jobs if job.state == "failed"]
        assert failed.name == "blue"
        assert "is lost: its trainer died" in (failed.reason or "")
        assert [r.lost for r in failed.ranks] == [False, True]


async def test_bytes_of_jobs_that_have_ended_stay_counted(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        trainers = await here.job(*here.machines)
        x = np.ones(100_000, np.float32)
        await together(*[partial(t.reduce, x) for t in trainers])
        before = here.machines[0].agent.jobs.traffic
        for trainer in trainers:
            await trainer.leave()
        await until(lambda: not here.machines[0].agent.jobs.ranks)
        assert here.machines[0].agent.jobs.traffic >= before
        assert before[0] > x.nbytes / 2
