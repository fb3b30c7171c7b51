"""Calls that several trainers make together."""

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from typing import NoReturn, cast

import numpy as np
import pytest
import trio

from pmesh.agent.events import Event
from pmesh.agent.jobs import op_task
from pmesh.agent.jobs.ranks import LocalRank
from pmesh.agent.jobs.regions import Op
from pmesh.agent.lanes.rendezvous import LaneRendezvous
from pmesh.agent.mesh import peers
from pmesh.agent.schema import Status
from pmesh.core.ops.kinds import extent_of
from pmesh.core.ops.plan import RankPlan
from pmesh.core.ops.reductions import WIRE_DTYPES, Values
from pmesh.core.values import OpOutcome, Terms, Verdict
from pmesh.core.wire.calls import Call
from pmesh.core.wire.trainer import OpDone, OpFailed, StartOp
from pmesh.errors import PeerUnreachable
from pmesh.ids import OpNumber
from tests.worlds.faults import Faults, InjectedFault, Real
from tests.worlds.trainer import OpError, TrainerClient, together, until
from tests.worlds.village import Machine, Village

RAISE = Terms(on_loss="raise")


def ones(count: int) -> Values:
    return np.ones(count, np.float32)


async def run(
    trainer: TrainerClient,
    call: Call,
    values: Values,
    parts: tuple[int, ...] = (),
    parts_in: tuple[int, ...] = (),
) -> Values:
    """One op; what this rank gets of it, which may be nothing."""
    arena, name = -1, values.dtype.name
    if values.size:
        arena = await trainer.input_arena(values.nbytes)
        trainer.maps[arena][: values.nbytes] = values.tobytes()
    number = OpNumber(trainer.next_op)
    request = StartOp(number, call, name, values.size, arena, 60.0, parts, parts_in)  # type: ignore[arg-type] # a key of WIRE_DTYPES
    gets = extent_of(request, rank=trainer.rank, size=len(trainer.names)).gets
    reply = await trainer.ask(request)
    assert isinstance(reply, OpDone | OpFailed)
    trainer.has_ended(reply, number)
    if isinstance(reply, OpFailed):
        raise OpError(reply)
    if reply.arena < 0:
        return np.empty(0, WIRE_DTYPES[name])
    return np.frombuffer(trainer.maps[reply.arena], WIRE_DTYPES[name], gets).copy()


def machine_of(here: Village, trainer: TrainerClient) -> Machine:
    """Where it runs."""
    name = trainer.names[trainer.rank]
    return next(m for m in here.machines if m.settings.name == name)


def events_of(machine: Machine) -> tuple[Event, ...]:
    """What its agent has noted, in order."""
    return machine.agent.event_log.since(-1).events


def kinds_of_events(machine: Machine) -> list[str]:
    return [event.kind for event in events_of(machine)]


@asynccontextmanager
async def cut(one: Machine, *others: Machine) -> AsyncGenerator[None]:
    """No link between it and them meanwhile, and none that could come up: nobody reaches anybody.

    All ends are lost at one instant. If a leader learned of one loss before it noticed its own, it
    would keep this machine and leave out one that can no longer hear it (V5).
    """
    sizes = {one.settings.name: 1} | {m.settings.name: len(others) for m in others}
    with InjectedFault(peers, "dial_any", _reach_nobody):
        for other in others:
            other.agent.peers.drop(one.key.node, "the network is cut")
            one.agent.peers.drop(other.key.node, "the network is cut")
        await until(lambda: all(len(m.names) == sizes[m.settings.name] for m in (one, *others)))
        yield


async def _reach_nobody(_: object) -> NoReturn:
    await trio.lowlevel.checkpoint()
    raise PeerUnreachable("the network is cut")


def use_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between ranks of a job that are all at one agent, which combine in its memory."""
    monkeypatch.setattr(op_task, "is_in_memory", lambda *_: False)
    monkeypatch.setattr(LocalRank, "has_all_here", False)  # nor in the library


def hold_all_reduces(
    monkeypatch: pytest.MonkeyPatch, *, size: int, ranks: Collection[int], complete: bool
) -> list[int]:
    """In rings of this size, these ranks never come to the end of an all-reduce.

    Returns a list that grows by each rank that is held.

    Args:
        monkeypatch: what it is undone by.
        size: of the ring; with fewer ranks all is well.
        ranks: who is held.
        complete: whether they have sent and received everything by then.
    """
    return hold_ops(monkeypatch, size=size, ranks=ranks, complete=complete, reduces=True)


def hold_ops(
    monkeypatch: pytest.MonkeyPatch,
    *,
    size: int,
    ranks: Collection[int],
    complete: bool,
    reduces: bool,
) -> list[int]:
    """As `hold_all_reduces`; or of what does not reduce."""
    real, held = op_task.run_on_lanes, list[int]()

    async def run(rank: LocalRank, op: Op, plan: RankPlan, rendezvous: LaneRendezvous) -> None:
        stays = plan.size == size and rank.rank in ranks and op.kind.reduces == reduces
        if complete or not stays:
            await real(rank, op, plan, rendezvous)
        if stays:
            if not op.result.is_input:
                op.result.memory[:] = b"\xff" * op.result.nbytes  # it must not be believed
            held.append(rank.rank or 0)
            await trio.sleep_forever()

    run_on_lanes_by(monkeypatch, run)
    return held


def run_on_lanes_by(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Awaitable[None]]) -> None:
    """Let each op run by `run`, also one that could end at once, or in memory."""
    use_lanes(monkeypatch)
    monkeypatch.setattr(op_task, "begin_plan", lambda *_, **__: None)
    monkeypatch.setattr(op_task, "run_on_lanes", run)


async def swallow(call: Awaitable[object]) -> None:
    """A call that is under way when its trainer, or its agent, is killed."""
    with contextlib.suppress(trio.ClosedResourceError, OSError, trio.EndOfChannel):
        await call


@asynccontextmanager
async def losing(
    trainer: TrainerClient, call: Awaitable[object], *, once: Callable[[], bool]
) -> AsyncGenerator[None]:
    """Let a trainer call an op, and die in it as soon as this holds."""

    async def lose() -> None:
        await until(once)
        await trainer.die()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lose)
        nursery.start_soon(swallow, call)
        yield


async def verdicts_of_all(*calls: "tuple[TrainerClient, object]") -> list[Verdict]:
    async def one(trainer: TrainerClient, call: object) -> Verdict:
        return await trainer.verdict_of(call)  # type: ignore[arg-type] # a coroutine

    return await together(*[lambda t=t, c=c: one(t, c) for t, c in calls])


def learn(faults: Faults, rank: LocalRank, outcome: OpOutcome) -> None:
    """Let a rank know who holds the result of an op, as a view change would, until the next one."""
    number = rank.roster.number

    def elsewhere(real: Real, op: OpNumber) -> OpOutcome | None:
        if op == outcome.op and rank.roster.number == number:
            return outcome
        return cast("OpOutcome | None", real(op))

    faults.around(rank, "result_elsewhere", elsewhere)


def ranks_of(here: Village) -> list[LocalRank]:
    """The ranks of all machines, by their numbers."""
    ranks = [rank for machine in here.machines for rank in machine.agent.jobs.ranks]
    return sorted(ranks, key=lambda rank: rank.id)


async def syncing_job(here: Village, *machines: Machine) -> list[TrainerClient]:
    """A job that has begun to run, and whose scripts call sync."""
    trainers = await here.job(*machines)
    await together(*[partial(t.sync, t.rank) for t in trainers])
    await trio.sleep(1)  # a few heartbeats tell everyone so
    return trainers


async def enter(
    here: Village, newcomers: list[TrainerClient], inside: list[TrainerClient]
) -> list[list[int]]:
    """A sync in which the newcomers enter: those inside call it when they have heard of them."""

    async def sync_when_they_are_here(trainer: TrainerClient) -> list[int]:
        jobs = [machine.agent.jobs for machine in here.machines]
        here_too = [j for j in jobs if any(rank.rank is not None for rank in j.ranks)]
        await until(lambda: all(j.newcomers(j.ranks[0]) == len(newcomers) for j in here_too))
        return await trainer.sync(trainer.id)

    calls = [partial(sync_when_they_are_here, trainer) for trainer in inside]
    return await together(*calls, *[partial(t.sync, 100 + i) for i, t in enumerate(newcomers)])


async def reduce_all(trainers: list[TrainerClient], values: "Values | None" = None) -> list[Values]:
    x = ones(1000) if values is None else values
    return await together(*[partial(t.reduce, x) for t in trainers])


def snapshot_of(machine: Machine) -> Status:
    return machine.agent.snapshot()


async def send_garbage(message: StartOp, trainer: TrainerClient, *, other: TrainerClient) -> None:
    """Send what no client sends: that ends this trainer alone."""
    await trainer.send(message)
    with pytest.raises(trio.EndOfChannel):
        await trainer.receive()
    verdict = await other.verdict_of(other.barrier())
    assert verdict.error == "RankLost"
    assert "its trainer sent garbage" in verdict.message
    await other.barrier()  # it goes on alone


def turned_away(machine: Machine) -> int:
    """How many programs its agent has turned away, as `pmesh status` shows."""
    return snapshot_of(machine).turned_away.programs
