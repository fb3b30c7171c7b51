"""Whole agents and trainers that die and come back at random moments, against I3 and O5."""

import contextlib
import random
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.config import AgentSettings, Listen
from pmesh.ids import TrainerId
from tests.worlds.trainer import OpError, RefusedError, TrainerClient, until
from tests.worlds.village import Machine, Village, village

COUNT = 20_000
GONE = (trio.EndOfChannel, OSError, trio.BrokenResourceError, trio.ClosedResourceError)


class Storm:
    """Scripts that sync at the top of their loops and reduce; each is restarted when it dies."""

    def __init__(self, here: Village, dice: random.Random) -> None:
        self.here = here
        self.dice = dice
        self.alive: dict[str, trio.CancelScope] = {}
        self.entered: set[str] = set()
        """The machines whose trainers have the job's history: one of them must stay."""
        self.results: dict[int, set[tuple[float, tuple[TrainerId, ...]]]] = defaultdict(set)
        self.sizes: list[int] = []
        self.calling = trio.Event()
        self.completed_at = trio.current_time()
        self.longest_s = 0.0

    async def keep_running(self, machine: Machine) -> None:
        """Restart the script on this machine whenever it ends."""
        while True:
            with trio.CancelScope() as life, contextlib.suppress(*GONE, RefusedError):
                await self.run_script(machine, life)
            await trio.sleep(self.dice.random())

    async def run_script(self, machine: Machine, life: trio.CancelScope) -> None:
        trainer = await TrainerClient.open(machine.settings.home)
        try:
            await trainer.join("digits", 1 if self.results else len(self.here.machines))
            name = machine.settings.name
            self.alive[name] = life
            while True:
                await trio.sleep(0.1 * self.dice.random())  # it computes
                with contextlib.suppress(OpError):
                    await self.step(trainer, name)
        finally:
            self.alive.pop(machine.settings.name, None)
            self.entered.discard(machine.settings.name)
            with trio.CancelScope(shield=True):
                await trainer.die()

    async def step(self, trainer: TrainerClient, name: str) -> None:
        """As `mesh.sync` with `on_superseded="sync"`, and a reduction."""
        try:
            await trainer.sync(1)
            self.entered.add(name)
            self.calling.set()
            result = await trainer.reduce(np.full(COUNT, 2.0**trainer.id, np.float64))
        except OpError as e:
            if e.verdict.error != "HistorySuperseded":
                raise AssertionError(e.verdict) from e
            self.entered.discard(name)
            return
        assert (result == sum(2.0**other for other in trainer.world.trainers)).all()
        self.results[trainer.next_op - 1].add((float(result[0]), trainer.world.trainers))
        self.sizes.append(len(trainer.names))
        now = trio.current_time()
        self.longest_s = max(self.longest_s, now - self.completed_at)
        self.completed_at = now

    async def strike(self) -> None:
        """Kill a trainer, or an agent, which comes back; mostly in the middle of an op."""
        self.calling = trio.Event()
        with trio.move_on_after(1):
            await self.calling.wait()
        for _ in range(self.dice.randrange(200)):  # time stands still while data flows
            await trio.lowlevel.checkpoint()
        if not self.alive:
            return
        name, life = self.dice.choice(sorted(self.alive.items(), key=lambda item: item[0]))
        if not self.entered - {name}:
            return  # who is left would begin the job anew
        machine = next(m for m in self.here.machines if m.settings.name == name)
        if self.dice.random() < 0.3:
            machine.settings = self._to_be_found_again(machine)
            await machine.kill()
            await trio.sleep(self.dice.random())
            await machine.start()
        else:
            life.cancel()

    def _to_be_found_again(self, machine: Machine) -> AgentSettings:
        others = tuple(other.address for other in self.here.machines if other is not machine)
        return replace(machine.settings, listen=Listen("127.0.0.1", machine.port), peers=others)


@pytest.mark.parametrize(
    ("seed", "strikes"),
    [(0, 4), *(pytest.param(seed, 16, marks=pytest.mark.slow) for seed in (1, 2))],
)
async def test_whatever_dies_every_op_has_one_result_and_nothing_hangs(
    clock: MockClock, seed: int, strikes: int
) -> None:
    dice = random.Random(seed)  # noqa: S311 - a test
    async with village(clock, 4) as here:
        storm = Storm(here, dice)
        async with trio.open_nursery() as nursery:
            for machine in here.machines:
                nursery.start_soon(storm.keep_running, machine)
            for _ in range(strikes):
                await trio.sleep(0.2 + dice.random())
                await storm.strike()
            storm.sizes.clear()
            await until(lambda: len(here.machines) in storm.sizes)  # all are in it again
            nursery.cancel_scope.cancel()
        assert len(storm.results) > strikes
        assert {op: found for op, found in storm.results.items() if len(found) > 1} == {}
        assert storm.longest_s < 5
