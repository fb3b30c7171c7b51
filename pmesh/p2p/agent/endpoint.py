"""The point-to-point messages of one local rank, and their lanes (O4).

`pmesh.p2p.rules` decides which messages are delivered, and in which order. Each send and each
receive runs in its own task, which messages from the other side wake up.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import trio
import xxhash

from pmesh.agent.jobs.ranks import LocalRank
from pmesh.agent.lanes.rendezvous import LaneEnd, LaneKey, LaneRendezvous
from pmesh.core.ops.moving import plan_broadcast
from pmesh.core.ops.plan import segments
from pmesh.core.values import Roster, Verdict
from pmesh.core.wire.calls import Envelope
from pmesh.core.wire.records import RecordHeader
from pmesh.errors import LaneBroken, PmeshError, UsageError
from pmesh.ids import TrainerId
from pmesh.net.lanes.executor import run_plan
from pmesh.net.lanes.lane import CallsDiffer, Lane
from pmesh.net.sessions.arena_pools import OutputArenas
from pmesh.net.sessions.arenas import Arena
from pmesh.p2p import rules as p2p
from pmesh.p2p.rules import Inbox, Outbox, Transfer, Wanted
from pmesh.p2p.wire import (
    AnnounceMessage,
    MessageAddress,
    MessageDelivered,
    MessageWithdrawn,
    P2PMessage,
    RequestMessage,
)

ASK_AGAIN_S = 0.2  # a request may have been lost, or have arrived before its view
STALL_S = 5.0  # a lane that is silent this long is broken; Wi-Fi may be silent just as long
FEW_BYTES = 1024 * 1024  # up to here, to start a plan takes longer than it saves
_NOTHING = memoryview(b"")
_FIRST_EDGE = -2  # used as op number for the pair's first lane, then -3 and so on


@dataclass(slots=True, eq=False)
class _Lane:
    """A lane of a pair of ranks under the current roster; it may not be open yet."""

    end: LaneEnd
    number: int
    transfers: int = 0
    """The number of messages requested on this lane."""
    lane: Lane | None = None
    closed: bool = False
    turn: trio.Lock = field(default_factory=trio.Lock)


class _Lanes:
    """A rank's lanes in one direction, to or from each peer."""

    def __init__(self, rank: LocalRank, rendezvous: LaneRendezvous) -> None:
        self._rank = rank
        self._rendezvous = rendezvous
        self._lanes: dict[TrainerId, _Lane] = {}
        self._ended_bytes = 0

    @property
    def bytes(self) -> int:
        """Bytes sent or received at the sockets, including headers."""
        return self._ended_bytes + sum(map(_moved, self._lanes.values()))

    def close(self) -> None:
        for entry in self._lanes.values():
            self._end(entry)
        self._lanes.clear()

    def _edge(self, sender: TrainerId, receiver: TrainerId, number: int) -> LaneKey:
        return self._rank.lanes.edge(sender, receiver, _FIRST_EDGE - number)

    async def _open(self, entry: _Lane) -> Lane:
        """Return the entry's lane once it is open. Raises LaneBroken if it is closed first."""
        if entry.lane is None and not entry.closed:
            entry.lane = await self._rendezvous.take(entry.end)
        if entry.closed:
            self._end(entry)
        if entry.lane is None:
            raise LaneBroken("this data connection was given up")
        return entry.lane

    def _end(self, entry: _Lane) -> None:
        entry.closed = True
        if entry.lane is not None:
            self._ended_bytes += _moved(entry)
            entry.lane.close()
            entry.lane = None
        self._rendezvous.give_up(entry.end)


def _moved(entry: _Lane) -> int:
    lane = entry.lane
    return 0 if lane is None else lane.bytes_sent + lane.bytes_received


class LanesOut(_Lanes):
    """The lanes on which a rank sends messages."""

    def is_new(self, to: TrainerId, asked: RequestMessage) -> bool:
        """Register a request. Return False if it is old or belongs to another roster."""
        if asked.number != self._rank.roster.number:
            return False  # the receiver repeats it once both have the same roster
        entry = self._lanes.get(to)
        if entry is not None and asked.lane > entry.number:
            self._end(entry)
            entry = None
        if entry is None:
            edge = self._edge(self._rank.id, to, asked.lane)
            entry = self._lanes[to] = _Lane(LaneEnd(edge, sending=True), asked.lane)
            trainer = self._rank.roster.trainer(to)
            if trainer is not None:
                self._rendezvous.offer(edge, trainer.member)
        elif asked.lane < entry.number or asked.transfer < entry.transfers:
            return False
        entry.transfers = asked.transfer + 1
        return True

    async def transmit(
        self, to: TrainerId, asked: RequestMessage, envelope: Envelope, values: memoryview
    ) -> None:
        """Send the requested values.

        Raises:
            LaneBroken: The connection is lost, or the request is out of date.
        """
        entry = self._lanes.get(to)
        if entry is None or (entry.end.edge.number, entry.number) != (asked.number, asked.lane):
            raise LaneBroken("the request is out of date")
        async with entry.turn:
            try:
                lane = await self._open(entry)
                header = _header(asked, envelope)
                if values.nbytes > FEW_BYTES:
                    plan = plan_broadcast(rank=0, size=2, root=0, nbytes=values.nbytes)
                    await run_plan(plan, {1: lane}, {}, header, source=values, result=_NOTHING)
                    return
                for sent, piece in _records(header, values):
                    await lane.send(sent, piece)
            except BaseException:  # half a message was sent, so nothing may follow it on this lane
                self._end(entry)
                raise


class LanesIn(_Lanes):
    """The lanes on which a rank receives messages. `send` sends a request to the sender."""

    def __init__(
        self,
        rank: LocalRank,
        rendezvous: LaneRendezvous,
        send: Callable[[TrainerId, RequestMessage], None],
    ) -> None:
        super().__init__(rank, rendezvous)
        self._send = send

    async def bring(self, transfer: Transfer, address: MessageAddress, target: memoryview) -> None:
        """Request a message and receive its values.

        Raises:
            LaneBroken: The connection is lost or silent.
        """
        sender, number = transfer.sender, self._rank.roster.number
        entry = self._lanes.get(sender)
        if entry is None or entry.closed:
            following = 0 if entry is None else entry.number + 1
            end = LaneEnd(self._edge(sender, self._rank.id, following), sending=False)
            entry = self._lanes[sender] = _Lane(end, following)
        asked = RequestMessage(address, number, entry.number, entry.transfers)
        entry.transfers += 1
        header = _header(asked, transfer.envelope)
        try:
            self._send(sender, asked)
            lane = await self._await_lane(entry, asked)
            if target.nbytes > FEW_BYTES:
                await self._receive_many(lane, asked, header, target)
                return
            for expected, piece in _records(header, target):
                await self._receive(lane, asked, expected, piece)
        except CallsDiffer as e:
            self._end(entry)
            raise LaneBroken(str(e)) from e
        except BaseException:  # the rest of the message may still arrive on this lane
            self._end(entry)
            raise

    async def _await_lane(self, entry: _Lane, asked: RequestMessage) -> Lane:
        deadline = trio.current_time() + STALL_S
        while trio.current_time() < deadline:
            with trio.move_on_after(ASK_AGAIN_S):
                return await self._open(entry)
            self._send(asked.address.sender, asked)
        raise LaneBroken(f"no data connection was opened within {STALL_S:g} s")

    async def _receive(
        self, lane: Lane, asked: RequestMessage, expected: RecordHeader, into: memoryview
    ) -> None:
        seen = _Seen(lane.bytes_received, trio.current_time())
        while True:
            with trio.move_on_after(ASK_AGAIN_S):
                await lane.receive(expected, into)
                return
            seen = self._look(lane, asked, seen)

    async def _receive_many(
        self, lane: Lane, asked: RequestMessage, header: RecordHeader, target: memoryview
    ) -> None:
        plan = plan_broadcast(rank=1, size=2, root=0, nbytes=target.nbytes)
        failure: LaneBroken | CallsDiffer | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, lane, asked)
            try:
                await run_plan(plan, {}, {0: lane}, header, source=_NOTHING, result=target)
            except (LaneBroken, CallsDiffer) as e:  # a plain error; a nursery would raise a group
                failure = e
            nursery.cancel_scope.cancel()
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # whose traceback has this frame, which would keep the arena's memory

    async def _watch(self, lane: Lane, asked: RequestMessage) -> None:
        seen = _Seen(lane.bytes_received, trio.current_time())
        while True:
            await trio.sleep(ASK_AGAIN_S)
            seen = self._look(lane, asked, seen)

    def _look(self, lane: Lane, asked: RequestMessage, seen: "_Seen") -> "_Seen":
        """Request the message again if nothing has come; close the lane if that lasts too long."""
        now = trio.current_time()
        if lane.bytes_received != seen.nbytes:
            return _Seen(lane.bytes_received, now)
        self._send(asked.address.sender, asked)
        if now - seen.at >= STALL_S:
            lane.close()
        return seen


class _Seen(NamedTuple):
    """How much had come on a lane, and since when."""

    nbytes: int
    at: float


def _records(header: RecordHeader, values: memoryview) -> Iterator[tuple[RecordHeader, memoryview]]:
    """Yield the records of a message, as a plan has them; without values it has an empty one."""
    for segment, (begin, nbytes) in enumerate(segments(0, values.nbytes)):
        yield header._replace(body_bytes=nbytes, segment=segment), values[begin : begin + nbytes]


def _header(asked: RequestMessage, envelope: Envelope) -> RecordHeader:
    """Return the header that all records of a message share, except for the segment."""
    digest = xxhash.xxh3_64_intdigest(msgspec.msgpack.encode((asked.address, envelope)))
    return RecordHeader(0, asked.number, asked.transfer, 0, digest, -1)


AGAIN_S = 0.05  # the delay of a lost announcement; it doubles with each further one
SELDOM_S = 1.0  # between announcements while the other side makes no call
BROKEN_S = 0.2  # before another lane is tried, as at the lane rendezvous


class MessageLost(PmeshError):  # noqa: N818 - a state, as in pmesh.errors
    """A send or a receive failed; the verdict has the reason."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.message)
        self.verdict = verdict


@dataclass(slots=True, eq=False)
class Sending:
    """A send whose message has not been received."""

    to: TrainerId
    sequence: int
    envelope: Envelope
    asked: RequestMessage | None = None
    delivered: bool = False
    failure: Verdict | None = None
    news: trio.Event = field(default_factory=trio.Event)


@dataclass(slots=True, eq=False)
class Receiving:
    """A receive that waits for a message."""

    call: int
    failure: Verdict | None = None
    news: trio.Event = field(default_factory=trio.Event)
    known_at: float = 0.0
    """When its message was announced, or this receive was called, whatever was later."""
    bringing: tuple[Transfer, trio.CancelScope] | None = None


@dataclass(frozen=True, slots=True)
class Received:
    """A message that has arrived."""

    source: TrainerId
    sequence: int
    envelope: Envelope
    known_at: float
    arena: Arena | None
    """The caller of `end_receive` must release it; None if the message has no values."""


class P2PEndpoint:
    """The sends and receives of one rank. `send` sends a message to the agent of a trainer."""

    def __init__(
        self,
        rank: LocalRank,
        rendezvous: LaneRendezvous,
        send: Callable[[TrainerId, P2PMessage], None],
    ) -> None:
        self.rank = rank
        self._send_to = send
        self._roster: Roster = rank.roster
        self._outboxes: dict[TrainerId, Outbox] = {}
        self._inbox = Inbox()
        self._sends: dict[tuple[TrainerId, int], Sending] = {}
        self._receives: dict[int, Receiving] = {}
        self._calls = itertools.count()
        self._lanes_in = LanesIn(rank, rendezvous, send)
        self._lanes_out = LanesOut(rank, rendezvous)
        self._names = {trainer: rank.roster.describe(trainer) for trainer in rank.roster.ids}

    def describe(self, trainers: Iterable[TrainerId]) -> tuple[str, ...]:
        """Return the ranks and machine names of trainers for error messages, also of lost ones."""
        return tuple(self._names.get(trainer, "a lost rank") for trainer in trainers)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received at the sockets of the lanes, including headers."""
        return self._lanes_out.bytes, self._lanes_in.bytes

    # --- sends

    def begin_send(self, to: TrainerId, envelope: Envelope, values: memoryview) -> Sending:
        """Announce a message; `end_send` must follow. Messages keep the order of these calls.

        Raises:
            MessageLost: The receiver is lost, or too many messages wait for it.
        """
        failure = self._failure_among((to,))
        if failure is not None:
            raise MessageLost(failure)
        try:
            self._outboxes[to], sequence = p2p.keep(self._outboxes.get(to, Outbox()), envelope)
        except ValueError as e:
            (name,) = self.describe((to,))
            raise MessageLost(Verdict("UsageError", f"{e} for {name} to receive them")) from e
        sending = self._sends[to, sequence] = Sending(to, sequence, envelope)
        eager = p2p.is_eager(self._outboxes[to], sequence) and not self.rank.fences  # V3
        self._announce(sending, bytes(values) if eager else b"")
        return sending

    async def end_send(self, sending: Sending, values: memoryview) -> None:
        """Wait until the message is delivered; withdraw it if cancelled.

        Raises:
            MessageLost: The message can't be delivered.
        """
        try:
            await self._send(sending, values)
        finally:
            del self._sends[sending.to, sending.sequence]
            must_tell = not sending.delivered
            if sending.to in self._outboxes:
                outbox = p2p.settle(self._outboxes[sending.to], sending.sequence)
                self._outboxes[sending.to] = outbox
                tag = sending.envelope.tag
                must_tell = must_tell or p2p.must_tell(outbox, sending.sequence, tag)
            if must_tell:
                address = self._address(self.rank.id, sending.to, sending.sequence)
                self._send_to(sending.to, MessageWithdrawn(address))
        await self.rank.unfenced()  # V3: report the delivery only without a fence
        if self.rank.superseded is not None:
            raise MessageLost(self.rank.superseded)

    async def _send(self, sending: Sending, values: memoryview) -> None:
        pause_s = AGAIN_S
        while not sending.delivered:
            if sending.failure is not None:
                raise MessageLost(sending.failure)
            if sending.asked is not None:
                asked, sending.asked = sending.asked, None
                with contextlib.suppress(LaneBroken):  # the receiver will request it again
                    await self.rank.unfenced()  # V3: nothing is sent behind a fence
                    await self._lanes_out.transmit(sending.to, asked, sending.envelope, values)
                continue
            sending.news = trio.Event()
            with trio.move_on_after(pause_s) as waiting:
                await sending.news.wait()
            if waiting.cancelled_caught and sending.failure is None:
                self._announce(sending)
                pause_s = min(2 * pause_s, SELDOM_S)

    def _announce(self, sending: Sending, values: bytes = b"") -> None:
        first, before = p2p.standing(self._outboxes[sending.to], sending.sequence)
        address = self._address(self.rank.id, sending.to, sending.sequence)
        self._send_to(sending.to, AnnounceMessage(address, sending.envelope, first, before, values))

    # --- receives

    def begin_receive(self, sources: tuple[TrainerId, ...], tag: int) -> Receiving:
        """Register a receive; `end_receive` must follow. Receives keep the order of these calls.

        Raises:
            MessageLost: All sources are lost.
        """
        failure = self._failure_among(sources)
        if failure is not None:
            raise MessageLost(failure)
        ids = self._roster.ids
        present = tuple(source for source in dict.fromkeys(sources) if source in ids)
        receiving = Receiving(next(self._calls))
        self._receives[receiving.call] = receiving
        self._update(p2p.want(self._inbox, receiving.call, Wanted(present, tag)))
        return receiving

    async def end_receive(self, receiving: Receiving, outputs: OutputArenas) -> Received:
        """Wait for the message, and receive it into an arena of this pool.

        Raises:
            MessageLost: No message can arrive.
        """
        try:
            while True:
                if receiving.failure is not None:
                    raise MessageLost(receiving.failure)
                transfer = self._inbox.under_way.get(receiving.call)
                if transfer is None:
                    receiving.news = trio.Event()
                    await receiving.news.wait()
                    continue
                receiving.known_at = receiving.known_at or trio.current_time()
                received = await self._bring(receiving, transfer, outputs)
                if received is not None:
                    return received
        finally:
            del self._receives[receiving.call]
            self._update(p2p.give_up(self._inbox, receiving.call))

    async def _bring(
        self, receiving: Receiving, transfer: Transfer, outputs: OutputArenas
    ) -> Received | None:
        """Request the message if needed, and deliver it; return None if it must be tried again."""
        arena, nbytes = None, transfer.envelope.nbytes
        if nbytes:
            try:
                arena = await outputs.acquire_in_turn(nbytes)
            except (UsageError, OSError) as e:  # OSError: the system has no memory left
                raise MessageLost(Verdict("UsageError", str(e))) from e
        target = memoryview(b"") if arena is None else arena.memory[:nbytes]
        delivered = False
        try:
            address = self._address(transfer.sender, self.rank.id, transfer.sequence)
            with trio.CancelScope() as scope:
                receiving.bringing = transfer, scope
                if self._inbox.under_way.get(receiving.call) != transfer:
                    return None  # it was withdrawn while memory was acquired
                if transfer.values is None:
                    await self._lanes_in.bring(transfer, address, target)
                elif transfer.values:
                    target[:] = transfer.values
                await self.rank.quorum()
                await self.rank.unfenced()  # V3: there is no await between here and the delivery
                receiving.bringing = None
                self._update(p2p.deliver(self._inbox, receiving.call))
                self._send_to(transfer.sender, MessageDelivered(address))
                delivered = True
        except LaneBroken:
            await trio.sleep(BROKEN_S)
        finally:
            receiving.bringing = None
            if arena is not None and not delivered:
                outputs.release(arena)
        message = transfer.sender, transfer.sequence, transfer.envelope
        return Received(*message, receiving.known_at, arena) if delivered else None

    # --- messages from other agents, and views

    def receive(self, peer: TrainerId, message: P2PMessage) -> None:
        """Handle a message from the agent of another rank of the job."""
        sequence = message.address.sequence
        match message:
            case AnnounceMessage(address, envelope, first, before, values):
                inbox, again = p2p.note(
                    self._inbox,
                    peer,
                    sequence,
                    envelope,
                    first=first,
                    before=before,
                    values=values,
                )
                self._update(inbox)
                if again:
                    self._send_to(peer, MessageDelivered(address))
            case MessageWithdrawn():
                self._update(p2p.withdraw(self._inbox, peer, sequence))
            case RequestMessage(address):
                sending = self._sends.get((peer, sequence))
                if sending is None or sending.delivered:
                    self._send_to(peer, MessageWithdrawn(address))
                elif self._lanes_out.is_new(peer, message):
                    sending.asked = message
                    sending.news.set()
            case MessageDelivered():
                sending = self._sends.get((peer, sequence))
                if sending is not None:
                    sending.delivered = True
                    sending.news.set()

    def follow(self) -> None:
        roster, over = self.rank.roster, self.rank.superseded
        if over is not None:
            self._fail_all(over)
        elif roster.number != self._roster.number:
            self._roster = roster
            self._names |= {trainer: roster.describe(trainer) for trainer in roster.ids}
            self.close()  # lanes end with their roster; unfinished messages move to new ones
            self._fail_lost_peers()
            self._stop_bringing()
            # O5: the trainer may name lost ranks until its next call returns.
            known = {*roster.ids, *self.rank.world}
            self._names = {t: name for t, name in self._names.items() if t in known}

    def close(self) -> None:
        self._lanes_in.close()
        self._lanes_out.close()

    def _fail_all(self, verdict: Verdict) -> None:
        every: list[Sending | Receiving] = [*self._sends.values(), *self._receives.values()]
        for waiting in every:
            waiting.failure = waiting.failure or verdict
            waiting.news.set()
        self.close()
        self._stop_bringing()

    def _stop_bringing(self) -> None:
        for receiving in self._receives.values():
            if receiving.bringing is not None:
                receiving.bringing[1].cancel()

    def _fail_lost_peers(self) -> None:
        wanted = {source for w in self._inbox.wanted.values() for source in w.sources}
        lost = (wanted | set(self._inbox.sources) | set(self._outboxes)) - set(self._roster.ids)
        inbox = self._inbox
        for peer in lost:
            self._outboxes.pop(peer, None)
            inbox = p2p.lose(inbox, peer)
            for sending in [s for s in self._sends.values() if s.to == peer]:
                sending.failure = self._failure_among((peer,))
                sending.news.set()
        for call in inbox.hopeless():
            receiving, sources = self._receives[call], self._inbox.wanted[call].sources
            receiving.failure = receiving.failure or self._failure_among(sources)
            receiving.news.set()
        self._update(inbox)

    def _failure_among(self, peers: tuple[TrainerId, ...]) -> Verdict | None:
        """Return why a call with these ranks must fail; None while one of them is left."""
        if self.rank.superseded is not None:
            return self.rank.superseded
        if any(peer in self._roster.ids for peer in peers):
            return None
        reasons = {trainer: v.message for v in self._roster.losses for trainer in v.trainers}
        names = dict(zip(peers, self.describe(peers), strict=True))
        texts = [reasons.get(peer, f"{name} is lost") for peer, name in names.items()]
        return Verdict("RankLost", "; ".join(texts), peers)

    def _update(self, inbox: Inbox) -> None:
        """Wake receives that have a transfer now, and cancel transfers that are obsolete."""
        before, self._inbox = self._inbox, inbox
        for call in before.under_way.keys() | inbox.under_way.keys():  # few, of thousands
            receiving, transfer = self._receives.get(call), inbox.under_way.get(call)
            if receiving is None:
                continue  # it has ended
            if receiving.bringing is not None and receiving.bringing[0] != transfer:
                receiving.bringing[1].cancel()
            if transfer is not None:
                receiving.news.set()

    def _address(self, sender: TrainerId, receiver: TrainerId, sequence: int) -> MessageAddress:
        return MessageAddress(self._roster.job, self._roster.born, sender, receiver, sequence)
