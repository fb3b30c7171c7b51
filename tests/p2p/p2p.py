"""Trainers' connections for messages, and what they send and receive on them."""

import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from pmesh.core.ops.reductions import Values
from pmesh.core.values import Verdict
from pmesh.core.wire.calls import Envelope
from pmesh.core.wire.channels import Channels, Message
from pmesh.core.wire.session import (
    SESSION_VERSION,
    ArenaGranted,
    DropArena,
    MessageFailed,
    Refused,
    WantArena,
)
from pmesh.ids import JobName, Member, TrainerId
from pmesh.p2p.wire import (
    Attach,
    Attached,
    MessageReceived,
    MessageSent,
    MessageWaits,
    P2PMessage,
    ReceiveMessage,
    SendMessage,
)
from simulation.wire import AnyReply
from tests.worlds.control import change_received
from tests.worlds.trainer import TrainerClient, until
from tests.worlds.village import Machine, Village, training
from tests.worlds.village_ops import machine_of


class MessageError(Exception):
    """The agent's verdict on a message."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.error, verdict.message)
        self.verdict = verdict


@dataclass
class Got:
    """A message that has come."""

    source: TrainerId
    envelope: Envelope
    values: Values


@dataclass(eq=False)
class P2PConnection:
    """One attached connection. `reader` must run while calls are under way."""

    trainer: TrainerClient
    """Its socket, and no rank."""
    id: TrainerId
    answers: dict[int, AnyReply] = field(default_factory=dict)
    waits: list[MessageWaits] = field(default_factory=list)
    granted: list[ArenaGranted | Refused] = field(default_factory=list)
    calls: "itertools.count[int]" = field(default_factory=itertools.count)
    arenas: trio.Lock = field(default_factory=trio.Lock)

    async def reader(self) -> None:
        while True:
            try:
                reply = await self.trainer.receive()
            except (trio.EndOfChannel, trio.ClosedResourceError, OSError):
                return
            match reply:
                case MessageSent(call) | MessageReceived(call) | MessageFailed(call):
                    self.answers[call] = reply
                case MessageWaits():
                    self.waits.append(reply)
                case ArenaGranted() | Refused():
                    self.granted.append(reply)
                case _:
                    raise AssertionError(reply)

    async def begin_send(
        self, to: TrainerId, values: Values, *, tag: int = 0, timeout_s: float = 50.0
    ) -> int:
        arena = -1
        if values.nbytes:
            async with self.arenas:
                count = len(self.granted)
                await self.trainer.send(WantArena(values.nbytes))
                await until(lambda: len(self.granted) > count)
                granted = self.granted[-1]
                assert isinstance(granted, ArenaGranted), granted.verdict.message
                arena = granted.arena
            self.trainer.maps[arena][: values.nbytes] = values.tobytes()
        call = next(self.calls)
        envelope = Envelope(tag, values.dtype.name, values.shape, values.nbytes)
        await self.trainer.send(SendMessage(call, to, envelope, arena, timeout_s))
        return call

    async def drop_input(self) -> None:
        """Let go of the arena that was granted last."""
        granted = self.granted[-1]
        assert isinstance(granted, ArenaGranted)
        await self.trainer.send(DropArena(granted.arena))

    async def begin_receive(
        self, *sources: TrainerId, tag: int = 0, timeout_s: float = 50.0
    ) -> int:
        call = next(self.calls)
        await self.trainer.send(ReceiveMessage(call, sources, tag, timeout_s))
        return call

    async def end(self, call: int) -> Got | None:
        """What has come; nothing for a send. Raises MessageError."""
        await until(lambda: call in self.answers)
        reply = self.answers.pop(call)
        if isinstance(reply, MessageFailed):
            raise MessageError(reply.verdict)
        if isinstance(reply, MessageSent):
            return None
        assert isinstance(reply, MessageReceived)
        envelope = reply.envelope
        data = b""
        if reply.arena >= 0:
            data = self.trainer.maps[reply.arena][: envelope.nbytes]
            await self.trainer.send(DropArena(reply.arena))
        values = np.frombuffer(data, envelope.dtype).reshape(envelope.shape)
        return Got(reply.source, envelope, values)

    async def send(
        self, to: TrainerId, values: Values, *, tag: int = 0, timeout_s: float = 50.0
    ) -> None:
        await self.end(await self.begin_send(to, values, tag=tag, timeout_s=timeout_s))

    async def receive(self, *sources: TrainerId, tag: int = 0, timeout_s: float = 50.0) -> Got:
        got = await self.end(await self.begin_receive(*sources, tag=tag, timeout_s=timeout_s))
        assert got is not None
        return got

    async def verdict_of(self, call: int) -> Verdict:
        try:
            await self.end(call)
        except MessageError as e:
            return e.verdict
        raise AssertionError("it succeeded")


async def attach(
    here: Village, machine: Machine, trainer: TrainerClient, job: str = "digits"
) -> P2PConnection:
    """Another connection of the trainer, for messages."""
    connection = await here.trainer(machine)
    request = Attach(SESSION_VERSION, JobName(job), trainer.id)
    assert await connection.ask(request) == Attached()
    envelopes = P2PConnection(connection, trainer.id)
    here.nursery.start_soon(envelopes.reader)
    return envelopes


X = np.arange(300_000.0)  # five records


@dataclass
class Some:
    """Ranks on as many machines, with their connections for messages."""

    here: Village
    trainers: list[TrainerClient]
    envelopes: list[P2PConnection]

    async def deliver(self, values: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]") -> None:
        """From rank 0 to rank 1, which gets it once."""
        one, other = self.envelopes[:2]
        sent = await one.begin_send(other.id, values)
        got = await other.receive(one.id)
        assert got.values.tobytes() == values.tobytes()
        assert await one.end(sent) is None

    async def check_that_nothing_is_left(self) -> None:
        """No message of before is delivered again."""
        await self.deliver(np.array([-1.0]))


@asynccontextmanager
async def some(clock: MockClock, count: int = 2) -> AsyncGenerator[Some]:
    async with training(clock, count) as (here, trainers):
        yield Some(here, trainers, [await attach(here, machine_of(here, t), t) for t in trainers])


def lose_first(
    monkeypatch: pytest.MonkeyPatch, kind: type[P2PMessage], count: int
) -> list[P2PMessage]:
    """The first messages of a kind don't arrive; returns those."""
    lost = list[P2PMessage]()

    def lose(_: Channels, __: Member, message: Message) -> Message | None:
        if not isinstance(message, kind) or len(lost) == count:
            return message
        lost.append(message)
        return None

    change_received(monkeypatch, lose)
    return lost


def told(monkeypatch: pytest.MonkeyPatch) -> list[P2PMessage]:
    """What agents tell each other from now on."""
    heard = list[P2PMessage]()

    def hear(_: Channels, __: Member, message: Message) -> Message:
        if isinstance(message, P2PMessage):
            heard.append(message)
        return message

    change_received(monkeypatch, hear)
    return heard
