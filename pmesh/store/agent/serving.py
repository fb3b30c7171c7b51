"""Serves the store calls of one trainer's connection; many may wait at a time."""

from collections.abc import Iterator
from dataclasses import dataclass

import trio

from pmesh.agent.grants import SAY_EVERY_S
from pmesh.agent.jobs.ranks import LocalRank
from pmesh.core.values import Verdict
from pmesh.core.wire.session import MessageFailed
from pmesh.errors import ProtocolError
from pmesh.net.sessions.sessions import Session
from pmesh.store.agent.stores import StoreFailed, Stores, describe
from pmesh.store.wire import (
    MAX_COMMAND_BYTES,
    MAX_STORE_DATA_BYTES,
    Command,
    StoreAnswered,
    StoreCall,
    StoreWaits,
    decode_command_untrusted,
    encode,
)

MAX_CALLS = 256  # at a time
_LONGEST_S = 1e9
_CHECK_S = 1.0


@dataclass(slots=True)
class _Waiting:
    """A command that has no answer yet."""

    command: Command
    since: float
    said: int = 1


class StoreCalls:
    """Carries out the commands of one rank."""

    def __init__(
        self, session: Session, stores: Stores, rank: LocalRank, nursery: trio.Nursery
    ) -> None:
        self._session = session
        self._stores = stores
        self._rank = rank
        self._nursery = nursery
        self._parts: dict[int, bytearray] = {}
        self._waiting: dict[int, _Waiting] = {}

    async def begin(self, request: StoreCall) -> None:
        """Take a part of a command; after the last part, carry the command out in a task."""
        call = request.call
        if call in self._waiting:
            raise ProtocolError(f"store call {call} is already running")
        data = self._parts.setdefault(call, bytearray())
        data += request.data
        if len(data) > MAX_COMMAND_BYTES or len(self._parts) > 1:
            raise ProtocolError("a store command that is too long, or has another in its middle")
        if request.more:
            return
        del self._parts[call]
        command = decode_command_untrusted(bytes(data))
        if len(self._waiting) >= MAX_CALLS:
            text = f"at most {MAX_CALLS} store calls at a time: wait for some of them"
            verdict = Verdict("UsageError", text)
            await self._session.send(MessageFailed(call, verdict))
            return
        self._waiting[call] = _Waiting(command, trio.current_time())
        self._nursery.start_soon(self._carry_out, call, command, request.timeout_s)

    async def report_waits(self) -> None:
        """Report calls that wait for long to the trainer (I6)."""
        while True:
            await trio.sleep(_CHECK_S)
            now = trio.current_time()
            for call, waiting in list(self._waiting.items()):
                if now - waiting.since >= waiting.said * SAY_EVERY_S:
                    waiting.said += 1
                    on = describe(waiting.command)
                    await self._session.send(StoreWaits(call, now - waiting.since, on))

    async def _carry_out(self, call: int, command: Command, timeout_s: float) -> None:
        replies: Iterator[StoreAnswered | MessageFailed]
        try:
            answer = await self._stores.call(self._rank, command, min(timeout_s, _LONGEST_S))
            replies = _in_parts(call, encode(answer))
        except StoreFailed as e:
            replies = iter([MessageFailed(call, e.verdict)])
        del self._waiting[call]
        for reply in replies:
            await self._session.send(reply)


def _in_parts(call: int, data: bytes) -> Iterator[StoreAnswered]:
    for begin in range(0, len(data), MAX_STORE_DATA_BYTES):
        end = begin + MAX_STORE_DATA_BYTES
        yield StoreAnswered(call, data[begin:end], more=end < len(data))
