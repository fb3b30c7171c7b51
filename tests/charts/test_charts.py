"""Whole agents keep an hour of the numbers of a job."""

from functools import partial

import pytest
import trio
from trio.testing import MockClock

from pmesh.charts.rules.readings import OPS, STEPS, readings_of_job
from pmesh.charts.wire import AskCharts, JobCharts
from pmesh.core.wire.session import Refused
from pmesh.core.wire.trainer import ReportsNumbers
from pmesh.ids import JobName
from simulation.wire import AnyReply
from tests.worlds.trainer import TrainerClient, together
from tests.worlds.village import Village, training
from tests.worlds.village_ops import ones


async def ask(here: Village, job: str, machine: int = 0) -> AnyReply:
    visitor = await here.trainer(here.machines[machine])
    return await visitor.ask(AskCharts(JobName(job)))


async def test_every_machine_knows_how_a_job_went_also_once_it_has_ended(clock: MockClock) -> None:
    async def train(trainer: TrainerClient, step: int) -> None:
        await trainer.send(ReportsNumbers({"loss": 1.0 / step + trainer.rank, "bad": float("nan")}))
        await trio.sleep(6.0)
        await trainer.reduce(ones(3))

    async with training(clock, 2) as (here, trainers):
        for step in range(1, 5):
            await together(*[partial(train, trainer, step) for trainer in trainers])
        for trainer in trainers:
            await trainer.leave()
        await trio.sleep(20.0)

        for machine in range(2):
            known = await ask(here, "digits", machine)
            assert isinstance(known, JobCharts), known
            assert set(known.charts) == {OPS, "loss"}
            slots, losses = known.charts["loss"]
            assert [*dict.fromkeys(losses)] == pytest.approx([1.5, 1.0, 1 / 3 + 0.5, 0.75])
            assert slots == tuple(range(slots[0], slots[0] + len(slots)))
            assert known.slot >= slots[-1] + 3


async def test_a_job_of_which_nothing_is_known_is_an_error_that_names_the_jobs(
    clock: MockClock,
) -> None:
    async with training(clock, 2) as (here, _):
        for job, why in (
            ("digit", "no job 'digit' ran in the last hour; jobs of the last hour: 'digits'"),
            (
                "digits",
                "job 'digits' has no numbers yet; try again in some seconds",
            ),
        ):
            refused = await ask(here, job)
            assert isinstance(refused, Refused)
            assert refused.verdict.message == why


def test_what_is_not_finite_and_means_beyond_all_numbers_are_left_out() -> None:
    largest, inf = 1.7e308, float("inf")
    found = readings_of_job("j", 2.0, inf, [{"a": largest, "b": inf}] * 3)
    assert [(each.name, each.value) for each in found if each.name != "a"] == [(STEPS, 2.0)]
