"""Connects the endpoints of the local ranks with other agents and with the trainers (O4).

A trainer has a second connection for its messages, on which several sends and receives run at a
time.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import trio

from pmesh.agent.features import Feature
from pmesh.agent.grants import SAY_EVERY_S, Grants
from pmesh.agent.jobs.driver import EndedOp
from pmesh.agent.jobs.ranks import LocalRank, sum_of
from pmesh.agent.jobs.session import other_version
from pmesh.agent.lanes.rendezvous import LaneRendezvous
from pmesh.agent.limits import Admission
from pmesh.core.jobs.op_times import EndedMessage
from pmesh.core.jobs.rank import COME_BACK
from pmesh.core.values import Verdict
from pmesh.core.wire.session import SESSION_VERSION, DropArena, MessageFailed, WantArena
from pmesh.errors import ProtocolError
from pmesh.ids import JobName, Member, TrainerId
from pmesh.net.sessions.arena_pools import ArenaShare, SessionArenas
from pmesh.net.sessions.sessions import Session, refuse
from pmesh.p2p.agent.endpoint import MessageLost, P2PEndpoint, Received
from pmesh.p2p.wire import (
    ATTACHED_REQUESTS,
    MAX_MESSAGES,
    MAX_TAG,
    P2P,
    AnnounceMessage,
    Attach,
    Attached,
    MessageReceived,
    MessageSent,
    MessageWaits,
    MessageWithdrawn,
    P2PMessage,
    ReceiveMessage,
    SendMessage,
)
from pmesh.store.agent.serving import StoreCalls
from pmesh.store.agent.stores import Stores
from pmesh.store.wire import StoreCall


class P2PRouter(Feature[P2PMessage, Attach]):
    """The endpoints of one agent's ranks, each created on first use."""

    channel = P2P
    openings = (Attach,)

    def __init__(
        self,
        me: Member,
        ranks: Sequence[LocalRank],
        rendezvous: LaneRendezvous,
        send: Callable[[Member, P2PMessage], None],
        *,
        stores: Stores,
        admission: Callable[[], Admission],
        note: Callable[[EndedOp], None],
    ) -> None:
        """`ranks` are the local ranks, a list that its owner changes; `send` uses the links.

        `note` gets each message that has ended.
        """
        self._me = me
        self._ranks = ranks
        self._rendezvous = rendezvous
        self._send = send
        self._stores = stores
        self._admission = admission
        self._note = note
        self._endpoints: dict[LocalRank, P2PEndpoint] = {}
        self._ended_traffic = (0, 0)

    async def serve(self, session: Session, request: Attach) -> None:
        """Serve a trainer's messages and store calls until it disconnects."""
        with self._admission().admit(session.pid) as share:
            session.stay()
            rank = self.rank_of(request.job, request.trainer, pid=session.pid)
            if request.version != SESSION_VERSION:
                text = other_version(request.version)
                await refuse(session, "ProtocolVersionMismatch", text)
            elif rank is None:
                text = f"this trainer is not in job {request.job!r}; {COME_BACK}"
                await refuse(session, "HistorySuperseded", text)
            else:
                await self._serve_rank(session, rank, share)

    async def _serve_rank(self, session: Session, rank: LocalRank, share: ArenaShare) -> None:
        await session.send(Attached())
        arenas, endpoint = SessionArenas(share), self.endpoint_of(rank)
        try:
            async with trio.open_nursery() as nursery:
                calls = StoreCalls(session, self._stores, rank, nursery)
                serving = _Connection(session, endpoint, arenas, calls, nursery, note=self._note)
                nursery.start_soon(serving.report_waits)
                nursery.start_soon(calls.report_waits)
                # A task of its own: if the body of a nursery raised, trio's frames would keep all
                # cancelled calls, with their arenas, until the garbage collector runs.
                nursery.start_soon(serving.run)
        finally:
            with trio.CancelScope(shield=True):
                await arenas.aclose()

    def rank_of(self, job: JobName, trainer: TrainerId, *, pid: int) -> LocalRank | None:
        """Return the rank of a local trainer; None unless `pid` is its process."""
        for rank in self._ranks:
            if (rank.roster.job, rank.id, rank.pid) == (job, trainer, pid):
                return rank
        return None

    def endpoint_of(self, rank: LocalRank) -> P2PEndpoint:
        if rank not in self._endpoints:

            def send(peer: TrainerId, message: P2PMessage) -> None:
                trainer = rank.roster.trainer(peer)
                if trainer is None:
                    return  # the rank is lost
                if trainer.member == self._me:
                    self.receive(self._me, message)
                else:
                    self._send(trainer.member, message)

            self._endpoints[rank] = P2PEndpoint(rank, self._rendezvous, send)
        return self._endpoints[rank]

    def receive(self, member: Member, message: P2PMessage) -> None:
        """Handle a message from another agent. That agent repeats one that precedes our view."""
        address = message.address
        own, peer = address.sender, address.receiver
        if isinstance(message, AnnounceMessage | MessageWithdrawn):
            own, peer = peer, own
        for rank in self._ranks:
            roster = rank.roster
            if (roster.job, roster.born, rank.id) != (address.job, address.born, own):
                continue
            trainer = roster.trainer(peer)
            if peer in roster.ids and trainer is not None and trainer.member == member:
                self.endpoint_of(rank).receive(peer, message)

    def follow(self) -> None:
        for rank, endpoint in list(self._endpoints.items()):
            endpoint.follow()
            if rank not in self._ranks:
                del self._endpoints[rank]
                self._ended_traffic = sum_of(self._ended_traffic, endpoint.traffic)

    def close(self) -> None:
        for endpoint in self._endpoints.values():
            endpoint.close()

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of messages sent and received at the sockets since the agent's start."""
        total = self._ended_traffic
        for endpoint in self._endpoints.values():
            total = sum_of(total, endpoint.traffic)
        return total


_CHECK_S = 1.0


@dataclass(slots=True)
class _Pending:
    """A send or receive that has not ended."""

    since: float
    on: tuple[str, ...]
    message: EndedMessage
    """What is known of the message so far."""
    said: int = 1


class _Connection:
    """Serves the sends and receives of one trainer's connection."""

    def __init__(
        self,
        session: Session,
        endpoint: P2PEndpoint,
        arenas: SessionArenas,
        store_calls: StoreCalls,
        nursery: trio.Nursery,
        *,
        note: Callable[[EndedOp], None],
    ) -> None:
        self._session = session
        self._store_calls = store_calls
        self._endpoint = endpoint
        self._arenas = arenas
        self._nursery = nursery
        self._note = note
        self._grants = Grants(session, arenas)
        self._waiting: dict[int, _Pending] = {}

    async def run(self) -> None:
        """Serve requests in order, which decides the order of messages."""
        while True:
            await self._session.all_sent()  # else unread replies would pile up without limit
            match request := await self._session.receive(ATTACHED_REQUESTS):
                case SendMessage() | ReceiveMessage():
                    await self._begin(request)
                case StoreCall():
                    await self._store_calls.begin(request)
                case WantArena(nbytes):
                    await self._grants.grant_input(nbytes)
                case DropArena(number):
                    self._arenas.drop(number)
                case _:
                    raise ProtocolError(f"a trainer's messages can't use {type(request).__name__}")

    async def report_waits(self) -> None:
        while True:
            await trio.sleep(_CHECK_S)
            now = trio.current_time()
            due = [
                (call, waiting)
                for call, waiting in self._waiting.items()
                if now - waiting.since >= waiting.said * SAY_EVERY_S
                and not _is_service(waiting.message)
            ]
            longest: dict[tuple[str, ...], tuple[int, _Pending]] = {}
            for call, waiting in due:
                waiting.said += 1
                longest.setdefault(waiting.on, (call, waiting))  # one report for each set of peers
            for call, waiting in longest.values():
                await self._session.send(MessageWaits(call, now - waiting.since, waiting.on))

    # --- calls

    async def _begin(self, request: "_MessageCall") -> None:
        """Register the call at once, which fixes its order, and await its end in a task."""
        if request.call in self._waiting:
            raise ProtocolError(f"call {request.call} is already running")
        on: tuple[TrainerId, ...]
        try:
            self._check_room()
            if isinstance(request, SendMessage):
                (ending, message), on = self._begin_send(request), (request.to,)
            else:
                ending, on = self._begin_receive(request), request.sources
                message = EndedMessage("recv", 0, tag=_users_tag(request.tag))
        except MessageLost as e:
            await self._session.send(MessageFailed(request.call, e.verdict))
            return
        waiting = _Pending(trio.current_time(), self._endpoint.describe(on), message)
        self._waiting[request.call] = waiting
        self._nursery.start_soon(self._end, request, ending, waiting)

    async def _end(self, request: "_MessageCall", ending: "_Ending", waiting: _Pending) -> None:
        call = request.call
        reply: MessageSent | MessageFailed | Received | None = None
        try:
            with trio.move_on_after(min(request.timeout_s, 1e9)):
                reply = await ending()
        except MessageLost as e:
            reply = MessageFailed(call, e.verdict)
        del self._waiting[call]
        if reply is None:
            reply = MessageFailed(call, _timed_out(request, waiting.on))
        self._note_end(waiting, reply)
        if isinstance(reply, Received):
            borrows = isinstance(request, ReceiveMessage) and request.borrows
            await self._report_received(call, reply, borrows=borrows)
        else:
            await self._session.send(reply)

    def _note_end(self, waiting: _Pending, reply: MessageSent | MessageFailed | Received) -> None:
        """Note the message, unless nothing has come for a service that waits for anything."""
        began, message = waiting.since, waiting.message
        known_at = now = trio.current_time()
        if isinstance(reply, Received):
            known_at = reply.known_at
            message = message._replace(
                nbytes=reply.envelope.nbytes, op=reply.sequence, peer=reply.source
            )
            if _is_service(message):
                began = known_at
        elif _is_service(message):
            return
        failed = isinstance(reply, MessageFailed)
        self._note((self._endpoint.rank, message, began, now, now - known_at, failed))

    def _check_room(self) -> None:
        if len(self._waiting) >= MAX_MESSAGES:
            text = f"at most {MAX_MESSAGES} sends and receives at a time: wait for some of them"
            raise MessageLost(Verdict("UsageError", text))

    def _begin_send(self, request: SendMessage) -> tuple["_Ending", EndedMessage]:
        nbytes = request.envelope.nbytes
        if (nbytes > 0) != (request.arena >= 0):
            raise ProtocolError(f"a message of {nbytes} bytes with arena {request.arena}")
        inputs = self._arenas.inputs
        arena = inputs.hold(request.arena, nbytes) if nbytes else None
        values = memoryview(b"") if arena is None else arena.memory[:nbytes].toreadonly()
        try:
            sending = self._endpoint.begin_send(request.to, request.envelope, values)
        except MessageLost:
            if arena is not None:
                inputs.release(arena)
            raise

        async def end() -> MessageSent:
            try:
                await self._endpoint.end_send(sending, values)
            finally:
                if arena is not None:
                    inputs.release(arena)
            return MessageSent(request.call)

        tag = _users_tag(request.envelope.tag)
        return end, EndedMessage("send", nbytes, sending.sequence, request.to, tag)

    def _begin_receive(self, request: ReceiveMessage) -> "_Ending":
        receiving = self._endpoint.begin_receive(request.sources, request.tag)

        async def end() -> Received:
            return await self._endpoint.end_receive(receiving, self._arenas.outputs)

        return end

    async def _report_received(self, call: int, received: Received, *, borrows: bool) -> None:
        arena, lent = received.arena, False
        await self._grants.report_gone()
        if arena is not None:
            lent = borrows and self._arenas.outputs.lend(arena)
            if not lent:
                self._arenas.outputs.give(arena)
            self._arenas.outputs.release(arena)
            await self._grants.grant_output(arena)
        number = -1 if arena is None else arena.number
        await self._session.send(
            MessageReceived(call, received.source, received.envelope, number, lent)
        )


def _users_tag(tag: int) -> int:
    return tag if tag <= MAX_TAG else -1


def _is_service(message: EndedMessage) -> bool:
    """Return whether this is a receive of a service, which waits for whatever comes."""
    return message.kind == "recv" and message.tag < 0


_MessageCall = SendMessage | ReceiveMessage
_Ending = Callable[[], Awaitable[MessageSent | Received]]


def _timed_out(request: _MessageCall, on: tuple[str, ...]) -> Verdict:
    names = " or ".join(on)
    if isinstance(request, SendMessage):
        tag = request.envelope.tag
        text = f"{names} did not receive a message with tag {tag} within {request.timeout_s:g} s"
        return Verdict("OpTimedOut", text, (request.to,))
    text = f"no message with tag {request.tag} came from {names} within {request.timeout_s:g} s"
    return Verdict("OpTimedOut", text, request.sources)
