"""Two machines of one name, as two Macs from one shop: what tells them apart, and where."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

import pytest
from trio.testing import MockClock

from pmesh.agent.mesh.names import load_names
from pmesh.core.values import Terms
from pmesh.core.wire.control import AskMachines, ForgetName, Machines
from pmesh.core.wire.session import Refused
from pmesh.errors import UsageError
from pmesh.ids import node_text
from pmesh.launches.agent.sessions import LaunchFeature
from pmesh.launches.wire.messages import Command, Launch, LaunchTerms
from simulation.wire import AnyReply, AnyRequest
from tests.worlds.trainer import RefusedError, together, until
from tests.worlds.village import Machine, Village, village
from tests.worlds.village_ops import events_of, snapshot_of


@asynccontextmanager
async def two_macs(clock: MockClock) -> AsyncGenerator[tuple[Village, Machine, Machine]]:
    async with village(clock, 0) as here:
        one = here.new_machine("mac", folder="one")
        await one.start()
        two = here.new_machine("mac", folder="two", peers=[one.address])
        yield here, one, two


async def meet(*machines: Machine) -> None:
    await until(lambda: all(len(machine.names) == len(machines) for machine in machines))


def apart(machine: Machine) -> str:
    return f"mac ({node_text(machine.key.node)[:4]})"


async def test_events_name_each_of_them(clock: MockClock) -> None:
    async with two_macs(clock) as (_, one, two):
        await two.start()
        await meet(one, two)
        await two.kill()
        await until(lambda: one.names == ["mac"])  # the only one again
        texts = [event.text for event in events_of(one) if event.kind in {"peer joined", "view"}]
        (gone,) = [event.text for event in events_of(one) if event.kind == "peer lost"]
        first, second = apart(one), apart(two)
        assert f"{second} joined" in texts
        assert any(f"{first} (this machine)" in text and second in text for text in texts)
        assert gone.startswith(f"{second} is gone: ")


async def test_waits_ranks_and_losses_name_each_of_them(clock: MockClock) -> None:
    async with two_macs(clock) as (here, one, two):
        await two.start()
        await meet(one, two)
        waiting = await here.trainer(one)
        with pytest.raises(RefusedError):
            await waiting.join("digits", 2, timeout_s=1.5)
        assert waiting.waits[0].on[-1] == f"machines without one: {apart(two)}"

        a, b = [await here.trainer(machine) for machine in (one, two)]
        await together(
            *[partial(t.join, "digits", 2, terms=Terms(on_loss="raise")) for t in (a, b)]
        )
        assert set(a.names) == {apart(one), apart(two)}
        await two.kill()
        verdict = await a.verdict_of(a.barrier())
        assert f"({apart(two)}) is lost" in verdict.message


async def test_a_job_that_runs_already_is_shown_with_the_names_of_now(clock: MockClock) -> None:
    async with two_macs(clock) as (here, one, two):
        trainer = await here.trainer(one)
        await trainer.join("digits", 1)
        await two.start()
        await meet(one, two)
        (job,) = snapshot_of(one).jobs
        assert [rank.name for rank in job.ranks] == [apart(one)]


async def test_who_takes_the_name_of_a_machine_that_is_away_trains_and_is_not_taken_for_it(
    clock: MockClock,
) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        await two.stop()
        await here.settle(one)
        taker = here.new_machine("mac-1", peers=[one.address], folder="taker")
        await taker.start()
        longer = f"mac-1 ({node_text(taker.key.node)[:4]})"
        await until(lambda: set(one.names) == {"mac-0", longer})
        await here.job(one, taker)
        (news,) = [event for event in events_of(one) if event.kind == "name refused"]
        assert news.text.endswith("type: pmesh forget mac-1")

        launches = one.part(LaunchFeature).launches
        with pytest.raises(UsageError, match="is not the one that had this name before"):
            launches.start(launch_on("mac-1"))
        assert not launches.started
        for name in (longer, node_text(taker.key.node)[:8]):
            (seat,) = launches.start(launch_on(name)).state.seats
            assert (seat.node, seat.name) == (taker.key.node, longer)

        await until(lambda: longer in load_names(one.settings.home))
        for machine in (taker, one):
            await machine.stop()
        await one.start()  # it remembers
        again = here.new_machine("mac-1", peers=[one.address], folder="taker", key=taker.key)
        await again.start()
        await until(lambda: set(one.names) == {"mac-0", longer})

        async def ask(request: AnyRequest) -> AnyReply:
            return await (await here.trainer(one)).ask(request)

        assert await ask(ForgetName("mac-1")) == Machines((node_text(two.key.node),))
        assert set(one.names) == {"mac-0", "mac-1"}
        ids = tuple(node_text(machine.key.node) for machine in (taker, one))
        assert await ask(AskMachines(("mac-1", "mac-0"))) == Machines(ids)
        refused = await ask(AskMachines(("mac-9",)))
        assert isinstance(refused, Refused)
        assert "no machine is called 'mac-9'" in refused.verdict.message


def launch_on(name: str) -> Launch:
    return Launch("", Command(("true",), "/"), LaunchTerms(), on=(name,))
