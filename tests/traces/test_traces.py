"""Whole agents tell each other what their ranks did lately."""

from functools import partial
from weakref import ref

import msgspec
import numpy as np
import pytest
import trio
from trio.testing import MockClock

from pmesh.core.wire.channels import Message
from pmesh.core.wire.session import Refused
from pmesh.ids import JobName
from pmesh.p2p.wire import MAX_TAG
from pmesh.traces import agent as traces
from pmesh.traces.agent import ANSWERS_BEFORE_POLL, Traces
from pmesh.traces.rules.timeline import find_waits, place_ops
from pmesh.traces.wire import AskOps, AskTrace, RankOps, TellOps, Traced, TracedOps
from tests.p2p.p2p import some
from tests.worlds.faults import Faults, Real
from tests.worlds.kept import kept
from tests.worlds.trainer import TrainerClient, together, until
from tests.worlds.village import Machine, Village, training, village
from tests.worlds.village_ops import ones

DIGITS = AskTrace(JobName("digits"), 60.0)


async def trace(
    here: Village, machine: Machine, request: AskTrace = DIGITS
) -> tuple[list[TracedOps], Traced]:
    visitor = await here.trainer(machine)
    await visitor.send(request)
    found: list[TracedOps] = []
    while True:
        reply = await visitor.receive()
        if isinstance(reply, TracedOps):
            found.append(reply)
        else:
            assert isinstance(reply, Traced), reply
            return found, reply


async def reduce_late(trainer: TrainerClient, after_s: float) -> None:
    await trio.sleep(after_s)
    await trainer.reduce(ones(1000))


async def test_all_ranks_calls_come_on_one_clock_and_show_who_was_late(clock: MockClock) -> None:
    async with training(clock, 3) as (here, trainers):
        for _ in range(2):
            late_s = [5.0 * (trainer.rank == 2) for trainer in trainers]
            await together(
                *[partial(reduce_late, t, s) for t, s in zip(trainers, late_s, strict=True)]
            )

        found, traced = await trace(here, here.machines[0])

        assert [machine.name for machine in traced.machines] == here.machines[0].names
        assert [machine.me for machine in traced.machines].count(True) == 1
        assert not any(machine.why_not for machine in traced.machines)
        since_us = traced.until_us - 60_000_000
        ops = place_ops(found, traced.machines, since_us=since_us, until_us=traced.until_us)
        assert sorted((each.op.op, each.rank) for each in ops) == [
            (op, rank) for op in range(2) for rank in range(3)
        ]
        assert {each.op.nbytes for each in ops} == {4000}
        assert {each.op.kind for each in ops} == {"all_reduce"}
        for wait in find_waits(ops).values():
            assert wait.last.rank == 2
        waited_s = [
            (wait.until_us - ops[place].began_us) / 1e6 for place, wait in find_waits(ops).items()
        ]
        assert waited_s == pytest.approx([5.0] * 4, abs=0.1)
        kinds = {change.kind for change in traced.changes}
        assert {"job began", "peer joined"} <= kinds


async def test_messages_come_with_who_waited_for_whom_and_those_that_failed(
    clock: MockClock,
) -> None:
    async with some(clock, 2) as two:
        one, other = two.envelopes
        sent = await one.begin_send(other.id, np.arange(5.0), tag=3)
        await trio.sleep(4.0)
        await other.receive(one.id, tag=3)
        await one.end(sent)
        service = await other.begin_receive(one.id, tag=MAX_TAG + 1)
        await trio.sleep(4.0)
        await one.send(other.id, np.arange(2.0), tag=MAX_TAG + 1)
        await other.end(service)
        await other.verdict_of(await other.begin_receive(one.id, tag=3, timeout_s=1.0))

        found, traced = await trace(two.here, two.here.machines[0])

        since_us = traced.until_us - 60_000_000
        ops = place_ops(found, traced.machines, since_us=since_us, until_us=traced.until_us)
        ranks: dict[int, int] = {trainer.id: trainer.rank for trainer in two.trainers}
        shown = sorted(
            (each.rank, each.op.kind, each.op.nbytes, each.op.tag, ranks.get(each.op.peer, -1))
            for each in ops
        )
        assert shown == [
            (0, "send", 16, -1, 1),
            (0, "send", 40, 3, 1),
            (1, "recv", 0, 3, -1),
            (1, "recv", 16, -1, 0),
            (1, "recv", 40, 3, 0),
        ]
        assert [each.op.nbytes for each in ops if not each.op.completed] == [0]
        ((place, wait),) = find_waits(ops).items()
        assert (ops[place].op.kind, wait.last.op.kind) == ("send", "recv")
        assert (wait.until_us - ops[place].began_us) / 1e6 == pytest.approx(4.0, abs=0.1)
        durations = [machine.agent.jobs.durations.by_kind for machine in two.here.machines]
        assert durations == [{}, {}]


async def test_the_calls_of_a_job_that_has_ended_are_still_there(clock: MockClock) -> None:
    async with training(clock, 2) as (here, trainers):
        await together(*[partial(trainer.reduce, ones(3)) for trainer in trainers])
        for trainer in trainers:
            await trainer.leave()
        await until(lambda: not any(machine.agent.jobs.ranks for machine in here.machines))

        found, traced = await trace(here, here.machines[1])

        assert len(found) == 2
        assert any(change.kind == "job ended" for change in traced.changes)


async def test_a_job_of_which_nothing_is_known_is_an_error_that_names_the_jobs(
    clock: MockClock,
) -> None:
    async with training(clock, 2) as (here, _):
        visitor = await here.trainer(here.machines[0])
        reply = await visitor.ask(AskTrace(JobName("digit"), 60.0))
        assert isinstance(reply, Refused)
        assert reply.verdict.message == (
            "no call of job 'digit' has ended in the last 60 s; the jobs that run are 'digits'"
        )
    async with village(clock, 1) as here:
        visitor = await here.trainer(here.machines[0])
        reply = await visitor.ask(DIGITS)
        assert isinstance(reply, Refused)
        assert reply.verdict.message.endswith("; no job runs now")


async def test_a_machine_that_does_not_answer_is_named_and_the_others_are_there(
    clock: MockClock, faults: Faults
) -> None:
    async with training(clock, 2) as (here, trainers):
        await together(*[partial(trainer.reduce, ones(3)) for trainer in trainers])
        faults.skip(here.machines[1].part(Traces), "_answer")

        found, traced = await trace(here, here.machines[0])

        assert len(found) == 1
        assert {machine.why_not for machine in traced.machines} == {
            "",
            "it has not answered within 5 s",
        }


async def test_a_machine_that_answers_without_end_is_cut_off(
    clock: MockClock, faults: Faults
) -> None:
    async with training(clock, 2) as (here, trainers):
        await together(*[partial(trainer.reduce, ones(3)) for trainer in trainers])
        liar = here.machines[1].part(Traces)
        said = list[object]()

        def say_again(real: Real, asked: AskOps) -> object:
            said.append(said[0] if said else real(asked))
            return said[0]

        faults.around(liar, "_next_ops", say_again)
        faults.limit(traces, "MOST_ANSWERS", 6)

        found, traced = await trace(here, here.machines[0])

        assert len(found) == 1 + 3
        assert any("more than 3072 calls" in machine.why_not for machine in traced.machines)


class Told(RankOps, frozen=True, array_like=True, weakref=True):
    """Ops that a test sees go."""


async def test_the_agent_that_is_asked_keeps_none_of_the_ops_that_it_passes_on(
    clock: MockClock, faults: Faults
) -> None:
    told, held = list[ref[Told]](), list[int]()

    def tell(real: Real, asked: AskOps) -> Told:
        held.append(sum(each() is not None for each in told))
        first = real(AskOps(0, asked.job, 60.0))
        made = Told(first.last, first.rank, first.pid, first.times)
        told.append(ref(made))
        return made

    async with training(clock, 2) as (here, trainers):
        await together(*[partial(trainer.reduce, ones(3)) for trainer in trainers])
        faults.around(here.machines[0].part(Traces), "_next_ops", tell)
        faults.limit(traces, "MOST_ANSWERS", 40)
        await trace(here, here.machines[0])
    assert len(held) == 20
    assert max(held) <= 2  # the one before, and one that is being sent


class SentMessages:
    """What an agent sends, in place of its links."""

    def __init__(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[Message] = []
        monkeypatch.setattr(
            machine.agent.peers.reach, "send", lambda _, message: self.sent.append(message)
        )


async def test_who_asks_all_the_time_is_answered_at_the_pace_of_the_agreement(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with training(clock, 2) as (here, _):
        one, two = here.machines
        part, asks = one.part(Traces), two.agent.membership.state.me
        part.poll()
        post = SentMessages(one, monkeypatch)
        for number in range(ANSWERS_BEFORE_POLL + 3):
            part.receive(asks, AskOps(number, JobName("digits"), 60.0))

        answered = [m.question for m in post.sent if isinstance(m, TellOps)]
        assert answered == list(range(ANSWERS_BEFORE_POLL))
        post.sent.clear()
        part.poll()
        part.poll()

        last = ANSWERS_BEFORE_POLL + 2  # in place of those before
        assert [m.question for m in post.sent if isinstance(m, TellOps)] == [last]


async def test_only_members_of_the_view_are_answered(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with training(clock, 2) as (here, _):
        one, two = here.machines
        part, member = one.part(Traces), two.agent.membership.state.me
        stranger = member._replace(incarnation=member.incarnation + 1)  # type: ignore[arg-type]
        part.poll()
        post = SentMessages(one, monkeypatch)
        part.receive(stranger, AskOps(0, JobName("digits"), 60.0))
        assert post.sent == []

        for number in range(ANSWERS_BEFORE_POLL + 1):
            part.receive(member, AskOps(number, JobName("digits"), 60.0))
        post.sent.clear()
        alone = msgspec.structs.replace(
            one.agent.membership.view, seats=one.agent.membership.view.seats[:0]
        )
        monkeypatch.setattr(type(one.agent.membership), "view", alone)
        part.follow()
        part.poll()
        assert post.sent == []


async def test_answers_that_nobody_waits_for_are_dropped(clock: MockClock, faults: Faults) -> None:
    async with training(clock, 3) as (here, trainers):
        await together(*[partial(trainer.reduce, ones(3)) for trainer in trainers])
        asks, liar, silent = (machine.part(Traces) for machine in here.machines)
        member = here.machines[1].agent.membership.state.me
        of_silent: list[int] = []
        faults.skip(liar, "_answer")
        faults.instead(silent, "_answer", lambda _, asked: of_silent.append(asked.question))
        found: list[str] = []

        async def look() -> None:
            _, traced = await trace(here, here.machines[0])
            found.extend(machine.why_not for machine in traced.machines)

        async def lie() -> None:
            await until(lambda: kept(asks)["open"] == 2 and bool(of_silent))
            for number in (*of_silent, 1234):
                asks.receive(member, TellOps(number, None))

        await together(look, lie)

        assert found.count("it has not answered within 5 s") == 2
