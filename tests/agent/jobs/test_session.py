"""How a trainer enters its job, and how it ends."""

from functools import partial

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.jobs.session import MOST_WISHES, PREDECESSOR_S
from pmesh.core.values import OpOutcome, Terms, Verdict
from pmesh.core.wire.calls import Call
from pmesh.core.wire.control import AskStatus, StatusReply
from pmesh.core.wire.link import Address
from pmesh.core.wire.session import SESSION_VERSION, Refused, WantArena
from pmesh.core.wire.trainer import Connect, GroupOf, Leave
from pmesh.ids import JobName, OpNumber, Slot
from pmesh.net.sessions import arena_pools
from tests.worlds.faults import Faults
from tests.worlds.trainer import ANY, RefusedError, TrainerClient, together, until
from tests.worlds.village import Village, training, village
from tests.worlds.village_ops import RAISE, kinds_of_events, machine_of, ranks_of, turned_away


def connect_as(program: str, terms: Terms = ANY) -> Connect:
    return Connect(SESSION_VERSION, JobName("digits"), 2, 30.0, program, terms)


async def refusal_of(trainer: TrainerClient, job: str, wait_for: int, timeout_s: float) -> Verdict:
    with pytest.raises(RefusedError) as raised:
        await trainer.join(job, wait_for, timeout_s=timeout_s)
    return raised.value.verdict


async def end_of(trainer: TrainerClient) -> None:
    with pytest.raises(trio.EndOfChannel):
        await trainer.receive()


async def no_job_is_left(here: Village) -> None:
    await until(lambda: not any(m.agent.membership.view.rosters for m in here.machines))


async def test_too_few_trainers_are_counted_and_the_machines_without_one_named(
    clock: MockClock,
) -> None:
    async with village(clock, 2) as here:
        trainer = await here.trainer(here.machines[0])
        verdict = await refusal_of(trainer, "digits", 3, 25.0)
        assert verdict.error == "NotEnoughRanks"
        assert verdict.message == (
            "1 of 3 trainers of job 'digits' are here after 25 s; machines without one: mac-1"
        )
        facts = ("1 of 3 trainers of job 'digits' are here", "machines without one: mac-1")
        assert [(w.op, w.on) for w in trainer.waits] == [(-1, facts)] * 24  # every second
        await end_of(trainer)


async def test_a_machine_that_is_alone_says_so_and_whom_it_finds(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        other = here.new_machine("other", peers=(Address("127.0.0.1", 1),))
        await other.start()
        verdict = await refusal_of(await here.trainer(other), "digits", 2, 1.0)
        assert "1 of 2 trainers" in verdict.message
        assert "this machine is alone in its mesh: run 'pmesh up' on the others" in verdict.message


async def test_too_few_on_every_machine_says_so(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = [await here.trainer(machine) for machine in here.machines]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(refusal_of, one, "digits", 3, 1.0)
            verdict = await refusal_of(two, "digits", 3, 1.0)
        assert "2 of 3 trainers" in verdict.message
        assert "every machine has one" in verdict.message


async def test_another_name_and_another_count_are_named(clock: MockClock) -> None:
    async with village(clock, 3) as here:
        one, two, three = [await here.trainer(machine) for machine in here.machines]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(refusal_of, one, "line", 3, 3.0)
            nursery.start_soon(refusal_of, two, "lnie", 2, 4.0)
            await trio.sleep(0.5)
            verdict = await refusal_of(three, "line", 4, 2.0)
        assert "mac-0 asks for wait_for=3, this rank for 4" in verdict.message
        assert "mac-1 waits in job 'lnie'" in verdict.message


async def test_of_a_machine_with_many_trainers_a_few_are_named(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        here_waits = await here.trainer(one)
        async with trio.open_nursery() as nursery:
            for number in range(MOST_WISHES + 4):
                there = await here.trainer(two)
                nursery.start_soon(there.join, f"other-{number}", 2)
            await trio.sleep(0.5)
            verdict = await refusal_of(here_waits, "digits", 2, 1.0)
            nursery.cancel_scope.cancel()
        assert verdict.message.count("mac-1 waits in job") == MOST_WISHES


async def test_a_job_whose_name_takes_too_many_bytes_is_refused(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        verdict = await refusal_of(
            await here.trainer(here.machines[0]), "\N{CAT FACE}" * 17, 1, 1.0
        )
        assert "takes 68 bytes in UTF-8, 64 are allowed" in verdict.message


async def test_a_machine_without_a_trainer_is_not_named_when_enough_have_come(
    clock: MockClock,
) -> None:
    async with village(clock, 3) as here:
        one, two = [await here.trainer(machine) for machine in here.machines[:2]]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(refusal_of, one, "line", 3, 3.0)
            await trio.sleep(0.5)
            verdict = await refusal_of(two, "line", 2, 2.0)
        assert verdict.message == (
            "2 of 2 trainers of job 'line' are here after 2 s; "
            "mac-0 asks for wait_for=3, this rank for 2"
        )


async def test_trainers_wait_for_peers_where_the_user_wants_some(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        lonely = here.new_machine("lonely", min_peers=1)
        await lonely.start()
        verdict = await refusal_of(await here.trainer(lonely), "digits", 1, 1.0)
        assert verdict.error == "NotEnoughRanks"
        friend = here.new_machine("friend", peers=[lonely.address])
        trainer = await here.trainer(lonely)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.join, "digits", 1)
            await friend.start()
        assert trainer.rank == 0
        assert any("jobs begin when 1 peers are present" in line for line in lonely.lines)


async def test_a_job_that_never_syncs_refuses_who_comes_late(clock: MockClock) -> None:
    async with training(clock, 2) as (here, trainers):
        await together(*[t.barrier for t in trainers])
        began = trio.current_time()
        verdict = await refusal_of(await here.trainer(here.machines[1]), "digits", 1, 30.0)
        assert verdict.error == "JobRunning"
        assert "never calls mesh.sync()" in verdict.message
        assert PREDECESSOR_S <= trio.current_time() - began < PREDECESSOR_S + 1


async def test_who_misses_the_view_that_begins_the_job_is_told_too(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        machine = here.machines[0]
        late = await here.trainer(machine)
        await late.send(connect_as("late.py"))
        await until(lambda: len(machine.agent.jobs.waiters) == 1)
        (waiter,) = machine.agent.jobs.waiters.values()
        waiter.job = JobName("hidden")  # as one of whom the leader hears a moment later
        trainers = await here.job(machine, machine)
        await together(*[t.barrier for t in trainers])
        waiter.job = JobName("digits")
        reply = await late.receive()
        assert isinstance(reply, Refused)
        assert reply.verdict.error == "JobRunning"


@pytest.mark.parametrize("ends", [False, True])
async def test_a_group_one_of_whose_ranks_is_lost_never_begins(
    clock: MockClock, *, ends: bool
) -> None:
    """Nor does it wait for its timeout; also if nothing is left of the job that it is of."""
    async with training(clock, 3) as (here, trainers):
        group = GroupOf(JobName("digits"), tuple(t.id for t in trainers[:2]), trainers[0].id)
        verdicts: list[Verdict] = []

        async def make() -> None:
            waiting = await here.trainer(machine_of(here, trainers[0]))
            with pytest.raises(RefusedError) as raised:
                await waiting.join("digits/1", 2, timeout_s=1000.0, group_of=group)
            verdicts.append(raised.value.verdict)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(make)
            await trio.sleep(1.0)
            assert not verdicts
            await trainers[1].die()
            if ends:
                await trainers[0].die()
                await trainers[2].die()
        (verdict,) = verdicts
        assert verdict.error == "RankLost"
        assert verdict.message.endswith("; not all of its ranks had come")
        assert verdict.trainers[-1] == trainers[1].id


async def test_a_group_never_begins_whose_ranks_did_not_all_end_the_call_before(
    clock: MockClock,
) -> None:
    """I5: the others have been told that it failed, and don't come; this one is about to be."""
    async with training(clock, 2) as (here, trainers):
        (rank,) = machine_of(here, trainers[0]).agent.jobs.ranks
        group = GroupOf(JobName("digits"), rank.roster.ids, rank.id)
        verdict = Verdict("RosterChanged", "op 3 of job 'digits' did not end at all")
        waiting = await here.trainer(machine_of(here, trainers[0]))

        async def owe() -> None:
            await trio.sleep(1.0)
            rank.late_failure = OpOutcome(OpNumber(3), rank.roster.ids, verdict=verdict)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(owe)
            with pytest.raises(RefusedError) as raised:
                await waiting.join("digits/1", 2, timeout_s=1000.0, group_of=group)
        assert raised.value.verdict == verdict


async def test_the_name_of_a_job_that_has_ended_can_be_used_again(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        for _ in range(3):
            trainers = await here.job(*here.machines)
            x = np.ones(5, np.float32)
            results = await together(*[partial(t.reduce, x) for t in trainers])
            assert [r[0] for r in results] == [2.0, 2.0]
            for trainer in trainers:  # and its end is not waited for
                await trainer.leave()
        await no_job_is_left(here)
        assert not any(machine.agent.jobs.ranks for machine in here.machines)


async def test_a_run_goes_on_when_one_of_its_scripts_dies_and_is_in_the_way_of_the_next(
    clock: MockClock,
) -> None:
    async with training(clock, 2) as (here, (a, b)):
        await b.die()
        await a.barrier()
        assert len(a.names) == 1
        verdict = await refusal_of(await here.trainer(here.machines[1]), "digits", 2, 5.0)
        assert verdict.error == "JobRunning"


async def test_a_leave_is_told_as_a_leave(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        a, b = await here.job(*here.machines, terms=RAISE)
        await b.leave()
        verdict = await a.verdict_of(a.barrier())
        assert verdict.error == "RankLost"
        assert verdict.message.endswith("has left the job")
        kinds = [kind for machine in here.machines for kind in kinds_of_events(machine)]
        assert "rank left" in kinds
        assert "loss noticed" not in kinds


async def test_a_trainer_that_dies_is_told_as_a_loss(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        a, b = await here.job(*here.machines, terms=RAISE)
        await b.die()
        await a.verdict_of(a.barrier())
        kinds = [kind for machine in here.machines for kind in kinds_of_events(machine)]
        assert {"loss noticed", "rank lost"} <= set(kinds)
        assert "rank left" not in kinds


async def test_a_trainer_that_gives_up_waiting_is_forgotten(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        gone = await here.trainer(here.machines[0])
        await gone.send(connect_as("gone.py"))
        await until(lambda: len(here.machines[0].agent.jobs.waiters) == 1)
        await gone.die()
        await until(lambda: not here.machines[0].agent.jobs.waiters)
        await here.job(*here.machines)


async def test_a_trainer_that_dies_as_its_job_begins_is_a_lost_rank(
    clock: MockClock, faults: Faults
) -> None:
    async with village(clock, 2) as here:
        gone, stays = await here.trainer(here.machines[0]), await here.trainer(here.machines[1])
        await gone.send(connect_as("gone.py"))
        jobs = here.machines[0].agent.jobs
        await until(lambda: len(jobs.waiters) == 1)
        # It is withdrawn between its agent's flush answer, which counts it, and the view.
        faults.instead(jobs, "fence", lambda _: jobs.waiters.pop(Slot(0), None))
        await stays.send(connect_as("stays.py", RAISE))
        stays.has_joined(await stays.receive())
        verdict = await stays.verdict_of(stays.barrier())
        assert verdict.error == "RankLost"
        assert "its trainer left before it had entered" in verdict.message
        await stays.barrier()
        assert stays.names == ("mac-1",)


async def test_a_waiting_trainer_whose_session_breaks_as_it_joins_is_a_lost_rank(
    clock: MockClock,
) -> None:
    async with village(clock, 2) as here:
        a, b = await here.job(*here.machines, terms=RAISE)
        jobs = here.machines[0].agent.jobs
        (rank,) = jobs.ranks
        waiter = jobs.enlist(connect_as("x.py"), rank.arenas)
        waiter.rank = rank
        jobs.withdraw(waiter)
        left = b if rank.rank == a.rank else a
        assert (await left.verdict_of(left.barrier())).error == "RankLost"


async def test_another_version_of_the_client_is_refused_with_both(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        trainer = await here.trainer(here.machines[0])
        with pytest.raises(RefusedError) as raised:
            await trainer.join("digits", 1, version=SESSION_VERSION + 1)
        assert raised.value.verdict.error == "ProtocolVersionMismatch"
        versions = f"version {SESSION_VERSION + 1}, the agent {SESSION_VERSION}"
        assert versions in raised.value.verdict.message


async def test_a_waiting_call_says_every_ten_seconds_on_whom_it_waits(clock: MockClock) -> None:
    async with training(clock, 2) as (_, (a, _)):
        await a.verdict_of(a.barrier(timeout_s=35.0))
        assert [round(w.waited_s) for w in a.waits] == [10, 20, 30]
        assert {(w.op, w.on) for w in a.waits} == {(0, (f"missing: rank 1 ({a.names[1]})",))}


async def test_each_of_two_calls_in_a_row_says_so_from_its_own_beginning(
    clock: MockClock,
) -> None:
    async with training(clock, 2) as (_, (a, b)):

        async def call_late() -> None:
            for _ in range(2):
                await trio.sleep(25)
                await b.barrier()

        async def call_at_once() -> None:
            for _ in range(2):
                await a.barrier()

        await together(call_late, call_at_once)
        assert [(w.op, round(w.waited_s)) for w in a.waits] == [(0, 10), (0, 20), (1, 10), (1, 20)]


async def test_an_arena_too_large_is_refused_and_the_session_goes_on(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        (trainer,) = await here.job(here.machines[0])
        reply = await trainer.ask(WantArena(2**60))
        assert isinstance(reply, Refused)
        assert reply.verdict.error == "UsageError"
        assert (await trainer.reduce(np.ones(4, np.float32)))[0] == 1.0


async def test_a_system_without_memory_is_the_trainers_problem_not_the_agents(
    clock: MockClock, faults: Faults
) -> None:
    async with village(clock, 1) as here:
        (trainer,) = await here.job(here.machines[0])
        with faults.fail(arena_pools, "create_arena", OSError(24, "Too many open files")):
            reply = await trainer.ask(WantArena(10))
        assert isinstance(reply, Refused)
        assert "Too many open files" in reply.verdict.message
        assert (await trainer.reduce(np.ones(4, np.float32)))[0] == 1.0


async def test_arenas_that_nobody_uses_any_more_are_taken_back(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        (trainer,) = await here.job(here.machines[0])
        await trainer.reduce(np.ones(4, np.float32))
        await trio.sleep(60)
        await trainer.reduce(np.ones(10**5, np.float32))
        assert len(trainer.gone) == 1


@pytest.mark.parametrize("request_", [AskStatus(), connect_as("")], ids=str)
async def test_a_trainer_that_asks_for_something_else_is_garbage(
    clock: MockClock, request_: AskStatus | Connect
) -> None:
    async with village(clock, 2) as here:
        a, b = await here.job(*here.machines, terms=RAISE)
        await b.send(request_)
        await end_of(b)
        assert "sent garbage" in (await a.verdict_of(a.barrier())).message
        await a.leave()
        await no_job_is_left(here)
        await until(lambda: sum(map(turned_away, here.machines)) == 1)


async def test_a_session_that_begins_with_an_op_is_closed(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        trainer = await here.trainer(here.machines[0])
        await trainer.send(Leave())
        await end_of(trainer)
        other = await here.trainer(here.machines[0])
        assert isinstance(await other.ask(AskStatus()), StatusReply)


@pytest.mark.parametrize("end", ["leaves", "dies", "sends garbage"])
async def test_results_outlive_their_trainer_for_those_who_missed_the_end(
    clock: MockClock, end: str
) -> None:
    """O2: a node whose trainer is gone still serves."""
    async with training(clock, 2) as (here, (a, b)):
        x = np.arange(9, dtype=np.float32)
        await a.run(Call("broadcast", "float32", (9,), root=0), x)
        if end == "leaves":
            await a.leave()
        elif end == "dies":
            await a.die()
        else:
            await a.send(AskStatus())
        left = ranks_of(here)[1]
        await until(lambda: left.size == 1)  # the ring's lanes are gone
        assert left.roster.lost_holders
        assert np.array_equal(await b.broadcast(x, 0), x)
        assert b.rank == 1  # whose values it has: so the world is as it was
        await until(lambda: ranks_of(here) == [left])  # nobody needs the lost holder any more
        await b.barrier()
        assert b.rank == 0
