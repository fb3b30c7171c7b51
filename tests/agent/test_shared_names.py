"""Two machines of one name, as two Macs from one shop: what tells them apart, and where."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

import pytest
from trio.testing import MockClock

from pmesh.core.values import Terms
from pmesh.ids import node_text
from tests.worlds.trainer import RefusedError, together, until
from tests.worlds.village import Machine, Village, village
from tests.worlds.village_ops import events_of


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
        (job,) = one.agent._snapshot().jobs  # noqa: SLF001 - without a session, at this instant
        assert [rank.name for rank in job.ranks] == [apart(one)]
