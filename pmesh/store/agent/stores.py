"""The stores of all jobs of one agent: runs `pmesh.store.rules` over the links (S1)."""

import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Never, TypeAlias

import msgspec
import trio
import xxhash

from pmesh.agent.features import Feature
from pmesh.agent.jobs.ranks import LocalRank
from pmesh.core.values import MAX_MEMBERS, Roster, Verdict
from pmesh.core.wire.stream import PART_BYTES, WINDOW_BYTES, Part
from pmesh.errors import PmeshError, ProtocolError
from pmesh.ids import Epoch, JobName, Member, NodeId, TrainerId
from pmesh.store.rules.pipe import Pipe
from pmesh.store.rules.replica import MOST_ASKED_BYTES, Finished, Keepers, Replica
from pmesh.store.wire import STORES, Answer, Command, Get, StorePart, Wait

MAX_EARLY = WINDOW_BYTES // PART_BYTES  # an honest peer sends no more unacknowledged
EARLY_S = 2.0  # until our view follows that of the sender; later the sender repeats it


class StoreFailed(PmeshError):  # noqa: N818 - a state, as in pmesh.errors
    """A command has no answer; the verdict has the reason."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.message)
        self.verdict = verdict


@dataclass(slots=True, eq=False)
class _Call:
    """A call of a local rank that has no answer yet."""

    rank: LocalRank
    answer: Answer | None = None
    failure: Verdict | None = None
    ended: trio.Event = field(default_factory=trio.Event)


class _Store:
    """This agent's part of one job's store."""

    def __init__(
        self,
        me: Member,
        send: Callable[[Member, StorePart], None],
        wake: Callable[["_Store"], None],
    ) -> None:
        """`wake` is called if there is more work than fits into one turn of the event loop."""
        self.ranks: tuple[LocalRank, ...] = ()
        self.number = 0
        """The hash of the roster that the store follows."""
        self.numbers = itertools.count()
        self._job = JobName("")
        self._send = send
        self._wake = wake
        self._replica = Replica(me)
        self._pipes: dict[Member, Pipe] = {}
        self._calls: dict[tuple[TrainerId, int], _Call] = {}

    def follow(self, ranks: tuple[LocalRank, ...]) -> None:
        """Follow a new view, in which these local ranks are in the job."""
        self.ranks = ranks
        self._fail_superseded()
        roster = ranks[0].roster
        number = _hash(roster)
        if number != self.number:
            keepers = Keepers.of(roster)
            self._job, self.number = roster.job, number
            take = self._replica.take
            self._pipes = {host: Pipe(functools.partial(take, host)) for host in keepers.hosts}
            self._carry_out(self._replica.follow(keepers))
        self.poll()

    def poll(self) -> None:
        """Check for a quorum, and repeat messages that may be lost."""
        may_order = any(rank.may_run for rank in self.ranks)
        self._carry_out(self._replica.allow(may_order=may_order))

    def receive(self, member: Member, part: StorePart) -> None:
        pipe = self._pipes.get(member)
        if pipe is None:
            return
        came = Part(part.offset, part.read, part.data)
        for message in pipe.receive_untrusted(came, now=trio.current_time()):
            self._finish(self._replica.receive_untrusted(member, message))
        self.go_on()  # the peer may have read so much that more may be ordered

    def go_on(self) -> None:
        self._carry_out(self._replica.go_on())

    async def call(self, rank: LocalRank, command: Command, timeout_s: float) -> Answer | None:
        """Return the answer; None if there is none in time. Raises StoreFailed."""
        if not self._replica.has_room(command):
            text = f"at most {MOST_ASKED_BYTES} bytes of store calls of a machine's ranks at a time"
            raise StoreFailed(Verdict("UsageError", f"{text}: wait for some of them"))
        key, call = (rank.id, next(self.numbers)), _Call(rank)
        self._calls[key] = call
        try:
            self._carry_out(self._replica.ask(*key, command))
            with trio.move_on_after(timeout_s):
                await call.ended.wait()
        finally:
            del self._calls[key]
            self._carry_out(self._replica.give_up(*key))
        if call.failure is not None:
            raise StoreFailed(call.failure)
        return call.answer

    def end(self) -> None:
        """End the store: no local rank is in the job any more."""
        self.ranks = ()
        self._pipes.clear()
        self._fail_superseded()

    def _fail_superseded(self) -> None:
        for call in self._calls.values():
            if call.rank not in self.ranks:
                call.failure = call.rank.superseded or call.rank.why_superseded
                call.ended.set()

    def _carry_out(self, finished: tuple[Finished, ...]) -> None:
        self._finish(finished)
        now = trio.current_time()
        for host, pipe in self._pipes.items():
            for offset, read, data, _ in pipe.parts(now=now):
                self._send(host, StorePart(self._job, self.number, offset, read, data))
        if self._replica.has_work or any(pipe.has_more for pipe in self._pipes.values()):
            self._wake(self)

    def _finish(self, finished: tuple[Finished, ...]) -> None:
        for ended in finished:
            if (call := self._calls.get((ended.trainer, ended.call))) is not None:
                call.answer = ended.answer
                call.ended.set()


_Run: TypeAlias = tuple[JobName, Epoch]


class Stores(Feature[StorePart, Never]):
    """The stores of one agent's jobs."""

    channel = STORES

    def __init__(
        self,
        me: Member,
        ranks: Sequence[LocalRank],
        send: Callable[[Member, StorePart], None],
        ban: Callable[[NodeId, str], None],
    ) -> None:
        """Make the stores of an agent.

        Args:
            me: This agent.
            ranks: The local ranks, a list that its owner changes.
            send: Sends over the links.
            ban: Ends the link with a machine that has said what no honest one says, for a reason.
        """
        self._me = me
        self._ranks = ranks
        self._send = send
        self._ban = ban
        self._stores: dict[_Run, _Store] = {}
        self._early: dict[Member, deque[StorePart]] = {}
        self._early_until = math.inf
        self._busy = dict[_Store, None]()
        self._has_busy = trio.Event()

    async def run(self) -> None:
        """Do long work in parts, one in each turn of the event loop, so that it blocks nothing."""
        while True:
            busy, self._busy = self._busy, dict[_Store, None]()
            for store in busy:
                store.go_on()
            if not self._busy:
                self._has_busy = trio.Event()
            await self._has_busy.wait()

    def follow(self) -> None:
        """Follow a new view, after the ranks have followed it (S2, S4)."""
        present: dict[_Run, tuple[LocalRank, ...]] = {}
        for rank in self._ranks:
            if rank.superseded is None:
                run = rank.roster.job, rank.roster.born
                present[run] = (*present.get(run, ()), rank)
        for run, store in list(self._stores.items()):
            # S4: no rank stayed in the job, so the copy may contradict what the others did since.
            if not set(store.ranks).intersection(present.get(run, ())):
                store.end()
                del self._stores[run]
        for run, ranks in present.items():
            if run not in self._stores:
                self._stores[run] = _Store(self._me, self._send, self._wake)
            self._stores[run].follow(ranks)
        early, self._early, self._early_until = self._early, {}, math.inf
        for member, parts in early.items():
            try:
                for part in parts:
                    self._deliver(member, part)
            except ProtocolError as e:  # and not of the member whose view we follow
                self._ban(member.node, str(e))

    def poll(self) -> None:
        """Poll the stores, and drop early messages that are too old. Call it at each heartbeat."""
        for store in self._stores.values():
            store.poll()
        if trio.current_time() >= self._early_until:
            self._early, self._early_until = {}, math.inf

    def receive(self, member: Member, part: StorePart) -> None:
        """Handle a message of another agent; keep it for a while if our view does not fit yet."""
        if self._deliver(member, part):
            return
        if member in self._early or len(self._early) < MAX_MEMBERS:
            self._early.setdefault(member, deque(maxlen=MAX_EARLY)).append(part)
            self._early_until = min(self._early_until, trio.current_time() + EARLY_S)

    def _deliver(self, member: Member, part: StorePart) -> bool:
        """Return False if no store here follows the part's roster."""
        for (job, _), store in self._stores.items():
            if (job, store.number) == (part.job, part.roster):
                store.receive(member, part)
                return True
        return False

    async def call(self, rank: LocalRank, command: Command, timeout_s: float) -> Answer:
        """Carry out a command of a local rank.

        Raises:
            StoreFailed: The rank is no longer in its job, its machine has too many open calls, or
                there was no answer in time.
        """
        store = self._stores.get((rank.roster.job, rank.roster.born))
        if store is None or rank not in store.ranks:
            raise StoreFailed(rank.superseded or rank.why_superseded)
        answer = await store.call(rank, command, timeout_s)
        if answer is None:
            text = f"{describe(command)} within {timeout_s:g} s"
            raise StoreFailed(Verdict("OpTimedOut", text))
        return answer

    def _wake(self, store: _Store) -> None:
        self._busy[store] = None
        self._has_busy.set()


def describe(command: Command) -> str:
    """Return what has not happened yet while a command waits."""
    match command:
        case Get(key):
            return f"key {key!r} of the job's store was not set"
        case Wait(keys):
            return f"not all of the keys {', '.join(map(repr, keys[:8]))} were set in the store"
        case _:
            name = type(command).__name__.lower()
            return f"the other machines of the job did not acknowledge a {name} in its store"


def _hash(roster: Roster) -> int:
    named = (roster.job, roster.born, roster.number, roster.trainers)
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(named)) >> 2
