"""Two ranks whose trainers repeat calls that a thread of the native library answers."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import trio

from pmesh import native
from pmesh.core.ops.plan import RankPlan
from pmesh.core.ops.reducing import plan_ring
from pmesh.core.wire.calls import Call
from pmesh.core.wire.framing import FrameReader, frame
from pmesh.core.wire.records import RecordHeader
from pmesh.core.wire.session import DropArena, encode
from pmesh.core.wire.trainer import OpDone, StartOp
from pmesh.ids import OpNumber
from pmesh.native.layout import OWN_SLOTS
from pmesh.net.lanes.executor import run_plan
from pmesh.net.lanes.lane import Lane
from pmesh.net.lanes.persistent import (
    NOTHING,
    Message,
    PersistentCall,
    PersistentCalls,
    around_numbers,
)
from pmesh.net.sessions.arenas import Arena, create_arena
from simulation.wire import decode_reply_untrusted
from tests.worlds.lanes import Web, web

COUNT = 40
ARENA_BYTES = 2**18
BIG = 3_000_000
DROP = around_numbers(encode(DropArena(1)), encode(DropArena(2)))
FOREVER_US = 2**62


def asked(number: int, *, count: int = COUNT, offset: int = 0) -> StartOp:
    """A request of a trainer."""
    call = Call("all_reduce", "float32", (count,), "sum")
    op = OpNumber(number)
    return StartOp(op, call, "float32", count, 0 if count else -1, 60.0, offset=offset)


def request(number: int, *, count: int = COUNT, offset: int = 0) -> bytes:
    return frame(encode(asked(number, count=count, offset=offset)))


def answer(count: int, *, lent: bool = False) -> Message:
    """The reply, around its numbers."""
    arenas = (1, 2) if count else (-1, -1)
    one, other = (OpDone(OpNumber(n), a, lent=lent) for n, a in zip((1, 2), arenas, strict=True))
    return around_numbers(encode(one), encode(other))


class Rank:
    """One rank: the thread that serves its trainer, and what the trainer does."""

    def __init__(self, rank: int, lanes: Web) -> None:
        library = native.library()
        assert library is not None, native.why_missing()
        self.rank, self.lanes = rank, lanes
        self.session, self.trainer = socket.socketpair()
        self.session.setblocking(False)  # noqa: FBT003 - it takes no names
        self.trainer.setblocking(False)  # noqa: FBT003 - it takes no names
        self.source = create_arena("input", 0, ARENA_BYTES)
        self.results = list[Arena]()
        self.calls = PersistentCalls(library, self.session.fileno(), DROP)
        self.calls.vouch(FOREVER_US)
        self._reader = FrameReader(max_bytes=1000)

    def add(
        self, count: int = COUNT, *, lends: bool = False, moves: bool = False, mark: int = 9
    ) -> None:
        """One call more; if it `moves`, each request says where its values begin."""
        plan = plan_of(self.rank, count)
        self.calls.put(
            len(self.calls),
            PersistentCall(
                plan,
                self.lanes_of(plan),
                RecordHeader(0, 1, 0, 0, mark, -1),
                source=self.source.memory[: 4 * count],
                arena=self.source.memory,
                itemsize=4,
                nbytes=4 * count,
                scratch=np.empty(plan.scratch_bytes, np.uint8).data,
                dtype="float32",
                reduction="sum",
                request=around_numbers(
                    *(encode(asked(n, count=count, offset=n * moves)) for n in (1, 2))
                ),
                says_place=moves,
                says_step=False,
                reply=answer(count),
                lending=answer(count, lent=True) if lends else (),
            ),
            self.results[0].memory if count else NOTHING,
        )

    def lanes_of(self, plan: RankPlan) -> list[Lane]:
        receiving = [self.lanes.receiving[peer, self.rank] for peer in plan.receives]
        return receiving + [self.lanes.sending[self.rank, peer] for peer in plan.sends]

    def fill(self, value: float, *, offset: int = 0, count: int = COUNT) -> None:
        """Write the values of the next op."""
        part = self.source.memory[offset : offset + 4 * count]
        np.frombuffer(part, np.float32)[:] = value + self.rank

    def ask(self, *requests: bytes) -> None:
        self.trainer.sendall(b"".join(requests))

    async def reply(self) -> OpDone:
        """What the trainer gets."""
        while (message := self._reader.next_message_untrusted()) is None:
            await trio.lowlevel.wait_readable(self.trainer)
            self._reader.receive_data(self.trainer.recv(4096))
        found = decode_reply_untrusted(message)
        assert isinstance(found, OpDone)
        return found

    def values(self, number: int, count: int = COUNT) -> list[float]:
        """What lies in an arena."""
        (arena,) = (each for each in self.results if each.number == number)
        found: list[float] = np.frombuffer(arena.memory, np.float32, count).tolist()
        return found

    async def left(self) -> bytes:
        """Wait until the thread serves no longer; what it has not answered."""
        await self.calls.stopped()
        self.calls.recall()
        return self.calls.take_unread()

    def make_room(self, count: int) -> None:
        """For a call of so many values, in place of all others."""
        self.source.close()
        self.source = create_arena("input", 0, 4 * count)
        self.calls.clear()
        self.calls.write_into({arena.number: arena.memory for arena in self.results})
        self.add(count)

    async def goes_on(
        self, number: int, *, count: int = COUNT, roster: int = 1, mark: int = 9
    ) -> list[float]:
        """Run an op without that thread; its result."""
        plan, result = plan_of(self.rank, count), bytearray(4 * count)
        lanes = self.lanes_of(plan)
        await run_plan(
            plan,
            dict(zip(plan.sends, lanes[len(plan.receives) :], strict=True)),
            dict(zip(plan.receives, lanes, strict=False)),
            RecordHeader(0, roster, number, 0, mark, number - 1),
            source=self.source.memory[: 4 * count],
            result=memoryview(result),
            dtype="float32",
            reduction="sum",
        )
        found: list[float] = np.frombuffer(result, np.float32).tolist()
        return found

    def close(self) -> None:
        self.calls.close()
        self.session.close()
        self.trainer.close()
        for arena in (self.source, *self.results):
            arena.close()


def plan_of(rank: int, count: int) -> RankPlan:
    return plan_ring(rank=rank, size=2, count=count, itemsize=4)


@contextmanager
def two_ranks(
    *counts: int, slots: int = OWN_SLOTS, lends: bool = False, moves: bool = False
) -> Iterator[tuple[Rank, Rank]]:
    """With these calls each, of so many values; nobody serves yet."""
    with web() as lanes:
        lanes.open([plan_of(rank, COUNT) for rank in range(2)])
        ranks = Rank(0, lanes), Rank(1, lanes)
        try:
            for rank in ranks:
                nbytes = 4 * max(*counts, 1, COUNT)
                rank.results += [create_arena("output", 10 + n, nbytes) for n in range(slots)]
                rank.calls.write_into({arena.number: arena.memory for arena in rank.results})
                for count in counts or (COUNT,):
                    rank.add(count, lends=lends, moves=moves)
            yield ranks
        finally:
            for rank in ranks:
                rank.close()


async def answered(ranks: Sequence[Rank], number: int, *, count: int = COUNT) -> list[OpDone]:
    """An op of all ranks; their replies, with the right results."""
    for rank in ranks:
        rank.fill(number % 100, count=count)
        rank.ask(request(number, count=count))
    replies = [await rank.reply() for rank in ranks]
    for rank, reply in zip(ranks, replies, strict=True):
        assert reply.op == number
        assert (reply.arena < 0) == (not count)
        if count:
            assert rank.values(reply.arena, count) == [2 * (number % 100) + 1] * count
    return replies
