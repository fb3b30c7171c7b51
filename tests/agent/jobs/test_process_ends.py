"""A trainer's process ends: its agent is told by the system, and tells the others."""

import os
from collections import defaultdict
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.jobs.session import WATCH_S
from pmesh.core.wire.trainer import Leave
from pmesh.net.sessions import processes, sessions
from pmesh.net.sessions.sessions import PeerCredentials
from tests.worlds.faults import Faults
from tests.worlds.trainer import until
from tests.worlds.village import Village, training
from tests.worlds.village_ops import machine_of, ones, ranks_of, reduce_all, swallow


class Ends(defaultdict[str, trio.Event]):
    """The ends of processes, by the machine's name; here all are one process, which goes on."""

    def __init__(self) -> None:
        super().__init__(trio.Event)


@pytest.fixture
def ends(faults: Faults) -> Ends:
    """Set an event, and a process ends whose child keeps its connection open."""
    found, names = Ends(), list[str]()

    def credentials_of(connection: trio.socket.SocketType) -> PeerCredentials:
        names.append(Path(connection.getsockname()).parent.name)
        return PeerCredentials(uid=os.getuid(), pid=len(names) - 1)

    async def wait_for_exit(pid: int) -> None:
        await found[names[pid]].wait()

    faults.pretend(sessions, "credentials_of", credentials_of)
    faults.pretend(processes, "wait_for_exit", wait_for_exit)
    faults.pretend(processes, "is_stopped", lambda _: False)
    return found


async def all_have(here: Village, size: int) -> None:
    await until(lambda: {rank.size for rank in ranks_of(here)} == {size})


async def test_in_the_middle_of_an_op_the_others_hear_of_it_at_once(
    clock: MockClock, ends: Ends
) -> None:
    async with training(clock, 3) as (here, trainers):
        *others, lost = trainers
        await reduce_all(trainers)
        async with trio.open_nursery() as nursery:
            for trainer in (lost, others[0]):
                nursery.start_soon(swallow, trainer.reduce(ones(9)))
            await trio.sleep(1)
            began = clock.current_time()
            ends[machine_of(here, lost).settings.name].set()
            await all_have(here, 2)
            assert clock.current_time() - began <= 0.1
            assert (await others[1].reduce(ones(9)))[0] == 2.0
            await lost.die()


async def test_the_others_are_told_with_which_op_they_go_on(clock: MockClock, ends: Ends) -> None:
    async with training(clock, 3) as (here, trainers):
        await reduce_all(trainers)
        *others, lost = trainers
        async with trio.open_nursery() as nursery:
            nursery.start_soon(others[0].reduce, ones(9))  # op 1 runs on one of the two
            await trio.sleep(1)
            ends[machine_of(here, lost).settings.name].set()
            await all_have(here, 2)
            await others[1].reduce(ones(9))
        assert [text.rpartition(", ")[2] for trainer in others for text in trainer.losses] == [
            "from op 1",
            "from op 1",
        ]
        await lost.die()


async def test_between_two_ops_its_last_words_are_read_first(clock: MockClock, ends: Ends) -> None:
    async with training(clock, 2) as (here, trainers):
        await reduce_all(trainers)
        stays, leaves = trainers
        ends[machine_of(here, leaves).settings.name].set()
        await leaves.send(Leave())
        await all_have(here, 1)
        (loss,) = machine_of(here, stays).agent.jobs.ranks[0].roster.losses
        assert "left" in loss.message


async def test_whose_child_keeps_its_connection_is_lost_all_the_same(
    clock: MockClock, ends: Ends
) -> None:
    async with training(clock, 2) as (here, trainers):
        await reduce_all(trainers)
        stays, lost = trainers
        began = clock.current_time()
        ends[machine_of(here, lost).settings.name].set()
        await all_have(here, 1)
        assert clock.current_time() - began <= WATCH_S + 0.1
        (loss,) = machine_of(here, stays).agent.jobs.ranks[0].roster.losses
        assert "its trainer died" in loss.message
