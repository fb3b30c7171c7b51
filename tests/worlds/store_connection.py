"""A trainer's second connection, as far as its job's store goes."""

import itertools
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio
from trio.testing import MockClock

from pmesh.core.values import Terms, Verdict
from pmesh.core.wire.session import SESSION_VERSION, MessageFailed
from pmesh.ids import JobName
from pmesh.p2p.wire import Attach, Attached
from pmesh.store.agent.stores import Stores
from pmesh.store.wire import (
    MAX_STORE_DATA_BYTES,
    Answer,
    Command,
    StoreAnswered,
    StoreCall,
    StoreWaits,
    decode_answer_untrusted,
    encode,
)
from tests.worlds.trainer import ANY, TrainerClient, until
from tests.worlds.village import Machine, Village, village
from tests.worlds.village_ops import machine_of


@dataclass(eq=False)
class StoreConnection:
    """One attached connection. `reader` must run while calls are under way."""

    trainer: TrainerClient
    """Its socket, and no rank."""
    answers: dict[int, Answer | Verdict] = field(default_factory=dict)
    waits: list[StoreWaits] = field(default_factory=list)
    calls: "itertools.count[int]" = field(default_factory=itertools.count)

    @classmethod
    async def attach(
        cls, here: Village, machine: Machine, trainer: TrainerClient, job: str = "digits"
    ) -> "StoreConnection":
        connection = await here.trainer(machine)
        request = Attach(SESSION_VERSION, JobName(job), trainer.id)
        assert await connection.ask(request) == Attached()
        store = cls(connection)
        here.nursery.start_soon(store.reader)
        return store

    async def reader(self) -> None:
        parts: dict[int, bytes] = {}
        while True:
            try:
                reply = await self.trainer.receive()
            except (trio.EndOfChannel, trio.ClosedResourceError, OSError):
                return
            match reply:
                case StoreAnswered(call, data, more):
                    parts[call] = parts.get(call, b"") + data
                    if not more:
                        self.answers[call] = decode_answer_untrusted(parts.pop(call))
                case MessageFailed(call, verdict):
                    self.answers[call] = verdict
                case StoreWaits():
                    self.waits.append(reply)
                case _:
                    raise AssertionError(reply)

    async def begin(self, command: Command, timeout_s: float = 50.0) -> int:
        call, data = next(self.calls), encode(command)
        for begin in range(0, len(data), MAX_STORE_DATA_BYTES):
            end = begin + MAX_STORE_DATA_BYTES
            await self.trainer.send(StoreCall(call, data[begin:end], end < len(data), timeout_s))
        return call

    async def end(self, call: int) -> object:
        """The value that has come."""
        await until(lambda: call in self.answers)
        answer = self.answers.pop(call)
        assert isinstance(answer, Answer), answer
        assert not answer.refused, answer.refused
        return answer.value

    async def ask(self, command: Command, timeout_s: float = 50.0) -> object:
        return await self.end(await self.begin(command, timeout_s))

    async def verdict_of(self, call: int) -> Verdict:
        await until(lambda: call in self.answers)
        verdict = self.answers.pop(call)
        assert isinstance(verdict, Verdict), verdict
        return verdict


def stores_of(machine: Machine) -> list[Any]:
    """The stores that an agent keeps copies of."""
    return [*machine.part(Stores)._stores.values()]  # noqa: SLF001


@dataclass
class RanksWithStores:
    """Ranks on as many machines, with their connections to the store."""

    here: Village
    trainers: list[TrainerClient]
    stores: list[StoreConnection]

    def machine_of(self, rank: int) -> Machine:
        """Where the rank of then runs."""
        return machine_of(self.here, self.trainers[rank])

    def tables(self, ranks: Collection[int]) -> list[dict[str, bytes | bytearray]]:
        """The copies on the machines of these ranks."""
        found = list[dict[str, bytes | bytearray]]()
        for rank in ranks:
            (store,) = stores_of(self.machine_of(rank))
            copy = store._replica.copy  # noqa: SLF001
            assert copy is not None
            found.append(copy.table.values)
        return found


@asynccontextmanager
async def sharing(
    clock: MockClock, count: int = 3, *, terms: Terms = ANY
) -> AsyncGenerator[RanksWithStores]:
    async with village(clock, count) as here:
        trainers = await here.job(*here.machines, terms=terms)
        stores = [await StoreConnection.attach(here, machine_of(here, t), t) for t in trainers]
        yield RanksWithStores(here, trainers, stores)
