"""A training script without its threads: what it says to its agent, over a real Unix socket."""

import array
import contextlib
import mmap
import os
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
import trio
from msgspec.structs import replace

from pmesh.core.ops.reductions import WIRE_DTYPES, Values
from pmesh.core.values import Terms, Verdict
from pmesh.core.wire.calls import Call
from pmesh.core.wire.framing import FrameReader, frame
from pmesh.core.wire.session import (
    MAX_SESSION_MESSAGE_BYTES,
    SESSION_VERSION,
    ArenaGone,
    ArenaGranted,
    DropArena,
    Refused,
    WantArena,
    encode,
)
from pmesh.core.wire.trainer import (
    ENTERS,
    SYNC_VALUES,
    Connect,
    GroupOf,
    Joined,
    Leave,
    OpDone,
    OpFailed,
    RanksLost,
    StartOp,
    StillWaiting,
    World,
)
from pmesh.home_paths import socket_path
from pmesh.ids import JobName, OpNumber, TrainerId
from simulation.wire import AnyReply, AnyRequest, decode_reply_untrusted

PATIENCE_S = 60.0  # beyond every deadline of ours, on the clock that jumps

ANY = Terms()

T = TypeVar("T")


async def until(condition: Callable[[], bool]) -> None:
    """Look every 20 simulated milliseconds whether it is so at last."""
    with trio.fail_after(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - of agents, which have no event for each fact
            await trio.sleep(0.02)


async def together(*calls: Callable[[], Awaitable[T]]) -> list[T]:
    """Run all of them at once; their results in order."""
    results: dict[int, T] = {}

    async def run(index: int, call: Callable[[], Awaitable[T]]) -> None:
        results[index] = await call()

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            for index, call in enumerate(calls):
                nursery.start_soon(run, index, call)
    return [results[index] for index in range(len(calls))]


class OpError(Exception):
    """The agent's verdict on an op."""

    def __init__(self, failed: OpFailed) -> None:
        super().__init__(failed.verdict.error, failed.verdict.message)
        self.failed = failed
        self.verdict = failed.verdict


class RefusedError(Exception):
    """The agent's verdict on a request."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.error, verdict.message)
        self.verdict = verdict


class TrainerClient:
    """What a training script does, without its threads."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.joined: Joined | None = None
        self.world = World(-1, (), ())
        self.waits: list[StillWaiting] = []
        self.losses: list[str] = []
        self.gone: list[int] = []
        self.lent: list[int] = []
        self.maps: dict[int, mmap.mmap] = {}
        self.next_op = 0
        self.superseded = False
        self._is_dead = False
        self._reader = FrameReader(max_bytes=MAX_SESSION_MESSAGE_BYTES)
        self._descriptors: deque[int] = deque()
        self._input: tuple[int, int] | None = None

    @classmethod
    async def open(cls, home: Path) -> Self:
        return cls(await trio.open_unix_socket(socket_path(home)))

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def id(self) -> TrainerId:
        return self.world.trainers[self.rank]

    @property
    def names(self) -> tuple[str, ...]:
        return self.world.names

    async def send(self, request: AnyRequest) -> None:
        await self.stream.send_all(frame(encode(request)))

    async def receive(self) -> AnyReply:
        """The next reply that is no news; raises trio.EndOfChannel at the end."""
        while True:
            reply = await self._next()
            match reply:
                case StillWaiting():
                    self.waits.append(reply)
                case RanksLost(losses):
                    self.losses += losses
                case ArenaGranted(number, kind, nbytes):
                    prot = mmap.PROT_READ | (mmap.PROT_WRITE if kind == "input" else 0)
                    descriptor = self._descriptors.popleft()
                    self.maps[number] = mmap.mmap(descriptor, nbytes, prot=prot)
                    os.close(descriptor)
                    if kind == "input":
                        return reply
                case ArenaGone(number):
                    self.gone.append(number)
                    if number in self.maps:  # else it was never given: its op took an alias
                        self.maps.pop(number).close()
                case _:
                    return reply

    async def _next(self) -> AnyReply:
        while (message := self._reader.next_message_untrusted()) is None:
            data, ancillary, _, _ = await self.stream.socket.recvmsg(
                65536, socket.CMSG_SPACE(4 * 16)
            )
            for _, _, rights in ancillary:
                descriptors = array.array("i")
                descriptors.frombytes(rights)
                self._descriptors.extend(descriptors)
            if self._is_dead:  # trio has let others run since the data were read
                self._close_descriptors()
                raise trio.ClosedResourceError
            if not data:
                raise trio.EndOfChannel
            self._reader.receive_data(data)
        return decode_reply_untrusted(message)

    async def ask(self, request: AnyRequest) -> AnyReply:
        await self.send(request)
        return await self.receive()

    async def join(
        self,
        job: str,
        wait_for: int,
        *,
        timeout_s: float = 30.0,
        version: int = SESSION_VERSION,
        terms: Terms = ANY,
        straggler_after_s: float = 60.0,
        group_of: GroupOf | None = None,
    ) -> Joined:
        connect = Connect(
            version,
            JobName(job),
            wait_for,
            timeout_s,
            "test.py",
            terms,
            straggler_after_s,
            group_of,
        )
        return self.has_joined(await self.ask(connect))

    def has_joined(self, reply: AnyReply) -> Joined:
        if isinstance(reply, Refused):
            raise RefusedError(reply.verdict)
        assert isinstance(reply, Joined)
        self.joined, self.world = reply, reply.world
        return reply

    async def input_arena(self, nbytes: int) -> int:
        if self._input is None or self._input[1] < nbytes:
            await self.drop_input()
            reply = await self.ask(WantArena(nbytes))
            if isinstance(reply, Refused):
                raise RefusedError(reply.verdict)
            assert isinstance(reply, ArenaGranted)
            self._input = reply.arena, reply.nbytes
        return self._input[0]

    def lose_input(self) -> None:
        """Its agent has taken the arena back, before it was mapped."""
        self._input = None

    async def drop_input(self) -> None:
        if self._input is not None:
            number, self._input = self._input[0], None
            await self.send(DropArena(number))
            self.maps.pop(number).close()

    async def run(
        self,
        call: Call,
        values: "Values | None",
        *,
        count: int = 0,
        dtype: str = "float32",
        timeout_s: float = 1800.0,
        offset: int = 0,
        borrows: bool = False,
        step: int = 0,
        share_percent: int = -1,
    ) -> "Values | None":
        """One op; a copy of its result, None where the agent has none. Raises OpError."""
        arena = -1
        if values is not None:
            arena = await self.input_arena(offset + values.nbytes)
            self.maps[arena][offset : offset + values.nbytes] = values.tobytes()
            count = values.size
        enters = call.kind == "sync" and (self.superseded or self.rank < 0)
        number = OpNumber(ENTERS if enters else self.next_op)
        request = StartOp(number, call, dtype, count, arena, timeout_s)  # type: ignore[arg-type] # a key of WIRE_DTYPES
        request = replace(request, offset=offset, borrows=borrows)
        request = replace(request, step=step, share_percent=share_percent)
        match reply := await self.ask(request):
            case OpDone(op, output):
                self.has_ended(reply, number)
                self.lent += [output] if reply.lent else []
                if call.kind == "sync":
                    count = len(self.names) * SYNC_VALUES
                if output < 0:
                    return None
                return np.frombuffer(self.maps[output], WIRE_DTYPES[dtype], count).copy()
            case OpFailed(op):
                self.superseded |= reply.verdict.error == "HistorySuperseded"
                if op != ENTERS:
                    self.has_ended(reply, number)
                raise OpError(reply)
            case _:
                raise AssertionError(reply)

    def has_ended(self, reply: OpDone | OpFailed, number: OpNumber) -> None:
        assert number in (reply.op, ENTERS)
        self.next_op = reply.op + (not isinstance(reply, OpFailed) or reply.consumed)
        self.world = reply.world or self.world
        if isinstance(reply, OpDone):
            self.superseded = False

    async def reduce(self, values: Values, op: str = "sum", timeout_s: float = 1800.0) -> Values:
        call = Call("all_reduce", values.dtype.name, values.shape, op)
        dtype = values.dtype.name
        result = await self.run(call, values, dtype=dtype, timeout_s=timeout_s)
        assert result is not None
        return result

    async def broadcast(
        self, values: Values, root: int = 0, receivers: tuple[int, ...] = ()
    ) -> Values:
        """The root's values; garbage at a rank that is no receiver."""
        dtype = values.dtype.name
        call = Call("broadcast", dtype, values.shape, root=root, receivers=receivers)
        if root == self.rank:
            await self.run(call, values, dtype=values.dtype.name)
            await self.drop_input()
            return values
        result = await self.run(call, None, count=values.size, dtype=values.dtype.name)
        assert result is not None
        return result

    async def sync(
        self,
        value: int = 0,
        timeout_s: float = 1800.0,
        *,
        step: int = 0,
        share_percent: int = -1,
    ) -> list[int]:
        """What each rank has given, by rank. Enters the job, or comes back, if it must."""
        values = np.full(SYNC_VALUES, value, np.int64)
        call = Call("sync", "int64", (SYNC_VALUES,))
        result = await self.run(
            *(call, values),
            dtype="int64",
            timeout_s=timeout_s,
            step=step,
            share_percent=share_percent,
        )
        assert result is not None
        rows = result.reshape(-1, SYNC_VALUES)
        assert (rows == rows[:, :1]).all()
        return [int(value) for value in rows[:, 0]]

    async def barrier(self, timeout_s: float = 1800.0) -> None:
        await self.run(Call("barrier", "float32", (0,)), None, timeout_s=timeout_s)

    async def verdict_of(self, call: Awaitable[object]) -> Verdict:
        """What the call fails with."""
        try:
            await call
        except OpError as e:
            return e.verdict
        raise AssertionError("it succeeded")

    async def leave(self) -> None:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self.send(Leave())
        await self.die()

    async def die(self) -> None:
        """End without a word, as a killed process does."""
        self._is_dead = True
        for mapped in self.maps.values():
            mapped.close()
        self.maps.clear()
        self._close_descriptors()
        await self.stream.aclose()

    def _close_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popleft())
