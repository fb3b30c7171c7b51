"""Jobs of several machines of which some have several ranks, and how they are held up."""

from typing import Any

import trio

from pmesh.agent.jobs import op_task
from tests.worlds.faults import Faults, Real
from tests.worlds.trainer import TrainerClient
from tests.worlds.village import Machine, Village
from tests.worlds.village_ops import machine_of

KILLED = ("the first", "the second", "the third", "the agent")


async def job_of(here: Village, *counts: int) -> list[TrainerClient]:
    """So many trainers on each machine."""
    at = [m for m, count in zip(here.machines, counts, strict=True) for _ in range(count)]
    return await here.job(*at)


async def placed(here: Village, placement: str) -> list[TrainerClient]:
    """A job whose ranks are at these machines."""
    at = [machine_at(here, letter) for letter in placement]
    trainers = await here.job(*at)
    assert [machine_of(here, trainer) for trainer in trainers] == at
    return trainers


def machine_at(here: Village, letter: str) -> Machine:
    """One of the machines, whose letters are in the order of their ranks."""
    ring = here.machines[0].agent.jobs.membership.view.members
    return sorted(here.machines, key=lambda machine: ring.index(machine.me))["abc".index(letter)]


def hold_at_network(faults: Faults) -> list[int]:
    """The first ranks never come to the end of a plan under the first roster.

    Returns a list that grows with each of them that has come to its beginning.
    """
    at_network, numbers = list[int](), set[int]()

    async def hold(real: Real, *args: Any, **settings: Any) -> None:  # noqa: ANN401 - as `run_plan`'s
        header = args[3]
        numbers.add(header.roster)
        if header.roster == min(numbers):
            at_network.append(header.op)
            await trio.sleep_forever()
        await real(*args, **settings)

    faults.around(op_task, "run_plan", hold)
    return at_network
