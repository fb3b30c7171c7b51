"""Serves a trainer's second connection, on which several sends and receives run at a time."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from pmesh.agent.grants import SAY_EVERY_S, Grants
from pmesh.agent.p2p.endpoint import MessageLost, P2PEndpoint, Received
from pmesh.agent.p2p.router import P2PRouter
from pmesh.agent.refusals import refuse
from pmesh.core.jobs.rank import COME_BACK
from pmesh.core.values import Verdict
from pmesh.core.wire.local import (
    SESSION_VERSION,
    Attach,
    Attached,
    DropArena,
    MessageFailed,
    MessageReceived,
    MessageSent,
    MessageWaits,
    ReceiveMessage,
    SendMessage,
    WantArena,
)
from pmesh.errors import ProtocolError
from pmesh.ids import TrainerId
from pmesh.net.local.arena_pools import ArenaShare, SessionArenas
from pmesh.net.local.sessions import Session

MAX_CALLS = 48  # at a time: a session may have 64 arenas of a kind, some of them idle
_LOOK_S = 1.0


async def serve_p2p(session: Session, request: Attach, room: P2PRouter, share: ArenaShare) -> None:
    """Serve one trainer's messages, in its program's share of memory, until it disconnects."""
    rank = room.rank_of(request.job, request.trainer, pid=session.pid)
    if request.version != SESSION_VERSION:
        text = f"the trainer speaks session version {request.version}, the agent {SESSION_VERSION}"
        await refuse(session, "ProtocolVersionMismatch", text)
        return
    if rank is None:
        text = f"this trainer is not in job {request.job!r}; {COME_BACK}"
        await refuse(session, "HistorySuperseded", text)
        return
    await session.send(Attached())
    arenas = SessionArenas(share)
    try:
        async with trio.open_nursery() as nursery:
            serving = _Envelopes(session, room.box_of(rank), arenas, nursery)
            nursery.start_soon(serving.say_on_whom)
            await serving.run()
    finally:
        with trio.CancelScope(shield=True):
            await arenas.aclose()


@dataclass(slots=True)
class _Waiting:
    """A call that has not ended."""

    since: float
    said: int
    on: tuple[str, ...]


class _Envelopes:
    """The calls of one connection."""

    def __init__(
        self, session: Session, box: P2PEndpoint, arenas: SessionArenas, nursery: trio.Nursery
    ) -> None:
        self._session = session
        self._box = box
        self._arenas = arenas
        self._nursery = nursery
        self._grants = Grants(session, arenas)
        self._waiting: dict[int, _Waiting] = {}

    async def run(self) -> None:
        """Serve requests in order, as their order decides which message is received first."""
        while True:
            await self._session.all_sent()  # else unread replies would pile up without limit
            match request := await self._session.receive():
                case SendMessage() | ReceiveMessage():
                    await self._begin(request)
                case WantArena(nbytes):
                    await self._grants.grant_input(nbytes)
                case DropArena(number):
                    self._arenas.drop(number)
                case _:
                    raise ProtocolError(f"a trainer's messages can't use {type(request).__name__}")

    async def say_on_whom(self) -> None:
        while True:
            await trio.sleep(_LOOK_S)
            now = trio.current_time()
            for call, waiting in list(self._waiting.items()):
                if now - waiting.since >= waiting.said * SAY_EVERY_S:
                    waiting.said += 1
                    await self._session.send(MessageWaits(call, now - waiting.since, waiting.on))

    # --- calls

    async def _begin(self, request: "_Call") -> None:
        """Register the call at once, which fixes its order, and await its end in a task."""
        if request.call in self._waiting:
            raise ProtocolError(f"call {request.call} is already running")
        on: tuple[TrainerId, ...]
        try:
            self._check_room()
            if isinstance(request, SendMessage):
                ending, on = self._begin_send(request), (request.to,)
            else:
                ending, on = self._begin_receive(request), request.sources
        except MessageLost as e:
            await self._session.send(MessageFailed(request.call, e.verdict))
            return
        waiting = _Waiting(trio.current_time(), 1, self._box.describe(on))
        self._waiting[request.call] = waiting
        self._nursery.start_soon(self._end, request, ending, waiting)

    async def _end(self, request: "_Call", ending: "_Ending", waiting: _Waiting) -> None:
        call = request.call
        reply: MessageSent | MessageFailed | Received
        reply = MessageFailed(call, _timed_out(request, waiting.on))
        try:
            with trio.move_on_after(min(request.timeout_s, 1e9)):
                reply = await ending()
        except MessageLost as e:
            reply = MessageFailed(call, e.verdict)
        del self._waiting[call]
        if isinstance(reply, Received):
            await self._tell_received(call, reply)
        else:
            await self._session.send(reply)

    def _check_room(self) -> None:
        if len(self._waiting) >= MAX_CALLS:
            text = f"at most {MAX_CALLS} sends and receives at a time: wait for some of them"
            raise MessageLost(Verdict("UsageError", text))

    def _begin_send(self, request: SendMessage) -> "_Ending":
        nbytes = request.envelope.nbytes
        if (nbytes > 0) != (request.arena >= 0):
            raise ProtocolError(f"a message of {nbytes} bytes with arena {request.arena}")
        inputs = self._arenas.inputs
        arena = inputs.hold(request.arena, nbytes) if nbytes else None
        try:
            sending = self._box.begin_send(request.to, request.envelope)
        except MessageLost:
            if arena is not None:
                inputs.release(arena)
            raise

        async def end() -> MessageSent:
            values = memoryview(b"") if arena is None else arena.memory[:nbytes].toreadonly()
            try:
                await self._box.end_send(sending, values)
            finally:
                if arena is not None:
                    inputs.release(arena)
            return MessageSent(request.call)

        return end

    def _begin_receive(self, request: ReceiveMessage) -> "_Ending":
        receiving = self._box.begin_receive(request.sources, request.tag)

        async def end() -> Received:
            return await self._box.end_receive(receiving, self._arenas.outputs)

        return end

    async def _tell_received(self, call: int, received: Received) -> None:
        arena = received.arena
        await self._grants.report_gone()
        if arena is not None:
            self._arenas.outputs.give(arena)
            self._arenas.outputs.release(arena)
            await self._grants.grant_output(arena)
        number = -1 if arena is None else arena.number
        await self._session.send(MessageReceived(call, received.source, received.envelope, number))


_Call = SendMessage | ReceiveMessage
_Ending = Callable[[], Awaitable[MessageSent | Received]]


def _timed_out(request: _Call, on: tuple[str, ...]) -> Verdict:
    names = " or ".join(on)
    if isinstance(request, SendMessage):
        tag = request.envelope.tag
        text = f"{names} did not receive a message with tag {tag} within {request.timeout_s:g} s"
        return Verdict("OpTimedOut", text, (request.to,))
    text = f"no message with tag {request.tag} came from {names} within {request.timeout_s:g} s"
    return Verdict("OpTimedOut", text, request.sources)
