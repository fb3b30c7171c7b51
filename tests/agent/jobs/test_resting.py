"""Groups whose ranks call nothing for long give back what they can have anew."""

from functools import partial

import numpy as np
import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from pmesh.agent.jobs.ranks import LocalRank
from pmesh.core.wire.calls import Call
from pmesh.core.wire.lanes import RestLane
from pmesh.core.wire.trainer import GroupOf, StartOp
from pmesh.ids import JobName, OpNumber
from pmesh.net.sessions.arena_pools import IDLE_S, InputArenas, OutputArenas
from pmesh.net.sessions.arenas import Arena
from tests.worlds.faults import Faults, Real
from tests.worlds.trainer import TrainerClient, together
from tests.worlds.village import Village, village
from tests.worlds.village_ops import kinds_of_events, machine_of, ones, ranks_of

GROUP = "digits/1"
RESTED_S = IDLE_S + 2.0


async def group_of(here: Village, trainers: list[TrainerClient]) -> list[TrainerClient]:
    """A group of all these trainers, in the order of its ranks."""
    ids = tuple(trainer.id for trainer in trainers)
    made = [await here.trainer(machine_of(here, trainer)) for trainer in trainers]

    async def join(group: TrainerClient, trainer: TrainerClient) -> None:
        of = GroupOf(JobName("digits"), ids, trainer.id)
        await group.join(GROUP, len(made), group_of=of)

    await together(*[partial(join, *pair) for pair in zip(made, trainers, strict=True)])
    return sorted(made, key=lambda trainer: trainer.rank)


def group_ranks(here: Village) -> list[LocalRank]:
    return [rank for rank in ranks_of(here) if rank.roster.job == GROUP]


def held(here: Village) -> list[tuple[int, int]]:
    """For each rank of the group its lanes, and the bytes of its arenas."""
    return [
        (len(rank.lanes.all_open()), rank.arenas.inputs.nbytes + rank.arenas.outputs.nbytes)
        for rank in group_ranks(here)
    ]


async def reduced(trainers: list[TrainerClient]) -> list[float]:
    for trainer in trainers:
        await trainer.drop_input()  # it may be gone
    results = await together(*[partial(trainer.reduce, ones(9)) for trainer in trainers])
    return [float(result[0]) for result in results]


@pytest.mark.parametrize("machines", [1, 3])
async def test_a_group_that_rests_holds_neither_lanes_nor_memory(
    clock: MockClock, machines: int
) -> None:
    async with village(clock, machines) as here:
        trainers = await here.job(*here.machines * (3 // machines))
        group = await group_of(here, trainers)
        epoch = here.machines[0].agent.membership.view.epoch
        for _ in range(2):
            assert await reduced(group) == [3.0] * 3
            assert all((lanes or machines == 1) and nbytes for lanes, nbytes in held(here))
            await trio.sleep(RESTED_S)
            assert held(here) == [(0, 0)] * 3
        assert await reduced(trainers) == [3.0] * 3
        await trio.sleep(RESTED_S)
        # The job itself keeps them; ranks of one agent have none.
        assert bool(here.machines[0].lanes()) == (machines > 1)
        assert here.machines[0].agent.membership.view.epoch == epoch
        for machine in here.machines:
            assert "lane broken" not in kinds_of_events(machine)


async def test_a_rank_that_waits_in_the_next_op_keeps_its_lanes(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        group = await group_of(here, await here.job(*here.machines))
        assert await reduced(group) == [2.0] * 2
        epoch = here.machines[0].agent.membership.view.epoch

        async def late() -> float:
            await trio.sleep(RESTED_S)
            return float((await group[1].reduce(ones(9)))[0])

        async def early() -> float:
            return float((await group[0].reduce(ones(9)))[0])

        await group[1].drop_input()
        assert await together(early, late) == [2.0] * 2
        assert here.machines[0].agent.membership.view.epoch == epoch


async def test_an_op_whose_input_was_taken_back_begins_once_it_names_another(
    clock: MockClock,
) -> None:
    async with village(clock, 1) as here:
        (rank,) = await group_of(here, await here.job(*here.machines))
        await rank.reduce(ones(9))
        await trio.sleep(RESTED_S)
        arena = await rank.input_arena(4)
        call = Call("all_reduce", "float32", (1,), "sum")
        await rank.send(StartOp(OpNumber(rank.next_op), call, "float32", 1, arena, 10.0))
        with trio.move_on_after(1.0):
            await rank.receive()
        assert arena in rank.gone
        rank.lose_input()
        np.testing.assert_array_equal(await rank.reduce(ones(9)), ones(9))


@pytest.mark.parametrize("asking", [[0], [1], [0, 1]])
async def test_an_op_that_begins_while_its_lanes_are_about_to_rest_gets_others(
    clock: MockClock, asking: list[int]
) -> None:
    async with village(clock, 2) as here:
        group = await group_of(here, await here.job(*here.machines))
        assert await reduced(group) == [2.0] * 2
        await trio.sleep(1.0)  # the op is stable
        before = [set(machine.lanes()) for machine in here.machines]
        epoch = here.machines[0].agent.membership.view.epoch
        for i in asking:
            jobs = here.machines[i].agent.jobs
            jobs.rest(next(rank for rank in jobs.ranks if rank.roster.job == GROUP))
        assert await reduced(group) == [2.0] * 2
        after = [set(machine.lanes()) for machine in here.machines]
        assert before != after
        assert here.machines[0].agent.membership.view.epoch == epoch


async def test_nobody_closes_lanes_on_the_word_of_a_third_member(clock: MockClock) -> None:
    async with village(clock, 3) as here:
        group = await group_of(here, await here.job(*here.machines))
        assert await reduced(group) == [3.0] * 3
        lanes = [set(machine.lanes()) for machine in here.machines]
        sender, receiver, other = (machine_of(here, trainer) for trainer in group)
        roster = group_ranks(here)[0].roster
        asks = RestLane(roster.job, roster.born, roster.number, group[0].id, group[1].id)
        third = other.agent.membership.state.me
        receiver.agent.jobs.rest_lane(third, asks)
        sender.agent.jobs.rest_lane(third, replace(asks, agreed=True))
        assert lanes == [set(machine.lanes()) for machine in here.machines]
        assert await reduced(group) == [3.0] * 3


async def test_an_op_waits_for_the_answer_whether_its_lane_may_rest(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        group = await group_of(here, await here.job(*here.machines))
        assert await reduced(group) == [2.0] * 2
        jobs = here.machines[0].agent.jobs
        lanes = next(rank.lanes for rank in jobs.ranks if rank.roster.job == GROUP)
        (receiver,) = lanes.ask_to_rest(jobs.rendezvous)
        ended = list[bool]()

        async def end() -> None:
            assert await reduced(group) == [2.0] * 2
            ended.append(True)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(end)
            await trio.sleep(1.0)
            assert not ended
            lanes.answered(receiver, agreed=False, rendezvous=jobs.rendezvous)


async def test_an_op_that_begins_while_its_group_gives_memory_back_has_its_result(
    clock: MockClock, faults: Faults
) -> None:
    """To close large arenas takes a thread; the result must not be closed before it is granted."""
    delivered = trio.Event()
    resting = trio.Event()

    async def rest_slowly(rest: Real, inputs: InputArenas) -> None:
        await rest(inputs)
        resting.set()
        await delivered.wait()

    def deliver(real: Real, outputs: OutputArenas, arena: Arena) -> None:
        real(outputs, arena)
        if resting.is_set():
            delivered.set()

    async with village(clock, 1) as here:
        (rank,) = await group_of(here, await here.job(*here.machines))
        await rank.reduce(ones(9))
        await rank.drop_input()
        faults.around(InputArenas, "rest", rest_slowly)
        faults.around(OutputArenas, "deliver", deliver)
        await resting.wait()
        np.testing.assert_array_equal(await rank.reduce(ones(100_000)), ones(100_000))


async def test_a_lane_that_an_answer_to_a_proposal_has_named_is_not_closed_before_the_view(
    clock: MockClock,
) -> None:
    """V4: the view may keep it."""
    async with village(clock, 2) as here:
        group = await group_of(here, await here.job(*here.machines))
        assert await reduced(group) == [2.0] * 2
        sender, receiver = (machine_of(here, trainer).agent.jobs for trainer in group)
        asks, answers = (
            next(rank for rank in jobs.ranks if rank.roster.job == GROUP)
            for jobs in (sender, receiver)
        )
        receiver.fence((JobName(GROUP),))
        _, named = answers.open_lanes()
        assert named
        sender.rest(asks)
        await trio.sleep(1.0)
        assert answers.open_lanes()[1] == named
        answers.lift("view change")
        assert await reduced(group) == [2.0] * 2
