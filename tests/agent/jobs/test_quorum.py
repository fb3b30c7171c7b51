"""V10: ops wait until a majority is seen to have installed the roster."""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import trio
from trio.testing import MockClock

from pmesh.core.ops.reductions import Values
from pmesh.core.values import Terms
from pmesh.core.wire.channels import Channels, Message
from pmesh.core.wire.views import Heartbeat
from pmesh.ids import Member
from tests.worlds.control import change_received
from tests.worlds.trainer import TrainerClient, together, until
from tests.worlds.village import Village, village
from tests.worlds.village_ops import machine_of, ones, ranks_of, snapshot_of

MAJORITY = Terms(quorum="majority")


@contextmanager
def nobody_seen_to_install(monkeypatch: pytest.MonkeyPatch, here: Village) -> Iterator[None]:
    """What peers say of their views comes late; they are heard all the same."""
    memberships = {m.agent.channels: m.agent.membership for m in here.machines}

    def change(channels: Channels, member: Member, message: Message) -> Message:
        before = memberships[channels].state.peers.get(member.node)
        if isinstance(message, Heartbeat) and before is not None:
            message = msgspec.structs.replace(message, view=before.view.epoch, in_force=())
        return message

    with monkeypatch.context() as patch:
        change_received(patch, change)
        yield


async def test_an_op_waits_until_the_others_are_seen_to_have_installed_its_roster(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with village(clock, 3) as here:
        a, b, c = await here.job(*here.machines, terms=MAJORITY)
        results: list[Values] = []

        async def reduce(trainer: TrainerClient) -> None:
            results.append(await trainer.reduce(ones(9)))

        async with trio.open_nursery() as nursery:
            with nobody_seen_to_install(monkeypatch, here):
                await machine_of(here, c).kill()
                await until(lambda: all(rank.size == 2 for rank in ranks_of(here)[:2]))
                for trainer in (a, b):
                    nursery.start_soon(reduce, trainer)
                await trio.sleep(1)
                assert results == []
        assert [r[0] for r in results] == [2.0] * 2


async def test_who_waits_for_a_majority_says_so(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with village(clock, 3) as here:
        a, b, c = await here.job(*here.machines, terms=MAJORITY)
        await together(*[t.sync for t in (a, b, c)])
        with nobody_seen_to_install(monkeypatch, here):
            await machine_of(here, c).kill()
            await until(lambda: all(rank.size == 2 for rank in ranks_of(here)[:2]))
            (job,) = snapshot_of(here.machines[0]).jobs
            assert job.state == "no_quorum"
            assert job.reason == "no majority is known to have agreed to the last change"
            verdict = await a.verdict_of(a.barrier(timeout_s=1))
        assert verdict.error == "NotEnoughRanks"
        assert "a majority, which has not been seen to have agreed" in verdict.message
