"""One machine's part in a job's store: a primary and its backups, as in Viewstamped Replication.

Every machine with a rank of the job keeps a copy. That of the oldest rank coordinates: it orders
all commands, also those that only read, and answers once *every* machine of the roster has the
entry (S1). Rosters come from the agreement on views, and a view change is one of the store, too:
the coordinator of the new roster waits for a report of each machine in it, takes what the furthest
copy has, brings the others there, and only then orders more (S2).

Liskov and Cowling, "Viewstamped Replication Revisited" (2012), with all replicas as the quorum: the
views already say who is there, so one survivor is enough.
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from pmesh.core.store.copy import Copy
from pmesh.core.values import Roster
from pmesh.core.wire.store import (
    NO_COPY,
    Add,
    Answer,
    Answered,
    Append,
    Ask,
    Check,
    Command,
    CompareSet,
    CopyAnswer,
    CopyBegins,
    CopyEnds,
    CopyValue,
    Delete,
    Entry,
    Fetch,
    GiveUp,
    Have,
    Report,
    Set,
    StoreMessage,
    Wait,
)
from pmesh.errors import ProtocolError
from pmesh.ids import Member, TrainerId

MOST_UNDER_WAY_BYTES = 4 * 1024 * 1024
"""The coordinator orders no more while copies lack so much: it bounds what they keep."""

MOST_ASKED_BYTES = 16 * 1024 * 1024
"""The most that commands of one trainer take which wait at the coordinator: twice what its agent
lets it have under way."""

_CALL_BYTES = 512  # of a call without its values

_WRITES = (Set, Add, CompareSet, Append, Delete)

CallId: TypeAlias = tuple[TrainerId, int]


@dataclass(frozen=True, slots=True)
class Send:
    """Send to another machine; messages to one machine keep their order while a roster lasts."""

    to: Member
    message: StoreMessage


@dataclass(frozen=True, slots=True)
class Finished:
    """A call of one of our ranks has its answer."""

    trainer: TrainerId
    call: int
    answer: Answer


Output: TypeAlias = Send | Finished


@dataclass(frozen=True, slots=True)
class Keepers:
    """Who keeps the copies under one roster."""

    hosts: tuple[Member, ...]
    """The machines of its ranks; the first coordinates."""
    homes: Mapping[TrainerId, Member]
    is_first: bool
    """True if the job begins with this roster, so that its store is empty."""

    @classmethod
    def of(cls, roster: Roster) -> "Keepers":
        """Return the keepers of a roster, the machine of its oldest rank first."""
        homes = {t.id: t.member for t in sorted(roster.trainers, key=lambda t: t.id)}
        hosts = tuple(dict.fromkeys(homes.values()))
        return cls(hosts, homes, is_first=roster.number == roster.born.counter)


class _Coordinator:
    """What only the coordinator knows, under one roster."""

    def __init__(self) -> None:
        self.reports: dict[Member, int] = {}
        self.fetches_up_to: int | None = None
        """Where the furthest copy stands, while ours is brought there."""
        self.orders = False
        """True once every copy has reported, and ours has what the furthest one had (S2)."""
        self.have: dict[Member, int] = {}
        """Which entry each other machine has."""
        self.queue = deque[Ask]()
        self.kept_bytes = Counter[TrainerId]()
        """What those in `queue` and `parked` take, by trainer."""
        self.parked: dict[str, dict[CallId, Ask]] = {}
        """Calls that wait for a key to be set, by that key."""
        self.unanswered = deque[tuple[Entry, Answer]]()
        """Ordered, and not yet at every copy."""
        self.under_way_bytes = 0

    def put_untrusted(self, asked: Ask) -> None:
        """Queue a command. Raises ProtocolError if it is one too many for its trainer."""
        self.queue.append(asked)
        self.kept_bytes[asked.trainer] += _size(asked.command)
        if self.kept_bytes[asked.trainer] > MOST_ASKED_BYTES:
            raise ProtocolError(f"too many store calls of trainer {asked.trainer}")

    def take(self) -> Ask:
        """Return the first of the queue."""
        asked = self.queue.popleft()
        self.kept_bytes[asked.trainer] -= _size(asked.command)
        return asked

    def park(self, key: str, asked: Ask) -> None:
        """Let it wait for a key."""
        self.kept_bytes[asked.trainer] += _size(asked.command)
        self.parked.setdefault(key, {})[asked.trainer, asked.call] = asked

    def wake(self, key: str) -> None:
        """The key has been written: look again at those that wait for it."""
        self.queue.extend(self.parked.pop(key, {}).values())

    def give_up(self, call: CallId) -> None:
        found = [asked for asked in self.queue if (asked.trainer, asked.call) == call]
        for asked in found:
            self.queue.remove(asked)
        for key in [key for key, parked in self.parked.items() if call in parked]:
            found.append(self.parked[key].pop(call))
            if not self.parked[key]:
                del self.parked[key]
        for asked in found:
            self.kept_bytes[asked.trainer] -= _size(asked.command)


class Replica:
    """A machine's copy of one job's store, and the calls of its own ranks.

    Each method returns what is to be sent and which calls have ended.
    """

    def __init__(self, me: Member) -> None:
        self.me = me
        self.copy: Copy | None = None
        """None for a machine that has just entered, until the others have sent theirs."""
        self._keepers: Keepers | None = None
        self._coordinator: _Coordinator | None = None
        self._arriving: Copy | None = None
        self._open: dict[CallId, Ask] = {}
        self._may_order = True
        self._outputs: list[Output] = []
        self._to_me = deque[StoreMessage]()

    # --- inputs

    def follow(self, keepers: Keepers) -> tuple[Output, ...]:
        """Another roster is in force, which has a rank here (S2)."""
        self._keepers = keepers
        self._arriving = None
        self._to_me.clear()
        if self.copy is None and keepers.is_first:
            self.copy = Copy()
        if self.copy is not None:
            self.copy.forget_all_but(keepers.homes)
        self._coordinator = _Coordinator() if keepers.hosts[0] == self.me else None
        self._tell_coordinator(Report(NO_COPY if self.copy is None else self.copy.position))
        for asked in self._open.values():
            self._tell_coordinator(asked)
        return self._done()

    def allow(self, *, may_order: bool) -> tuple[Output, ...]:
        """V10: order nothing while this side of a partition has no quorum."""
        self._may_order = may_order
        self._order_more()
        return self._done()

    def ask(self, trainer: TrainerId, call: int, command: Command) -> tuple[Output, ...]:
        """A rank of this machine makes a call; its calls are numbered in order."""
        open_from = min((c for t, c in self._open if t == trainer), default=call)
        asked = self._open[trainer, call] = Ask(trainer, call, open_from, command)
        self._tell_coordinator(asked)
        return self._done()

    def give_up(self, trainer: TrainerId, call: int) -> tuple[Output, ...]:
        """Nobody waits for this call any more; a write may still be carried out."""
        if self._open.pop((trainer, call), None) is not None:
            self._tell_coordinator(GiveUp(trainer, call))
        return self._done()

    def receive_untrusted(self, sender: Member, message: StoreMessage) -> tuple[Output, ...]:
        """Another machine of this roster has sent a message under it.

        Raises ProtocolError for more than an honest machine sends.
        """
        self._handle(sender, message)
        return self._done()

    # --- messages

    def _tell_coordinator(self, message: StoreMessage) -> None:
        if self._keepers is not None:
            self._tell(self._keepers.hosts[0], message)

    def _tell(self, to: Member, message: StoreMessage) -> None:
        if to == self.me:
            self._to_me.append(message)
        else:
            self._outputs.append(Send(to, message))

    def _done(self) -> tuple[Output, ...]:
        while self._to_me:
            self._handle(self.me, self._to_me.popleft())
        outputs, self._outputs = tuple(self._outputs), []
        return outputs

    def _handle(self, sender: Member, message: StoreMessage) -> None:  # noqa: C901 - one arm for each message
        """What no honest machine would send in its place is ignored."""
        match message:
            case Report() | Ask() | GiveUp() | Have():
                if self._coordinator is not None:
                    self._coordinate(self._coordinator, sender, message)
            case Fetch(after):
                self._bring(sender, after)
            case Entry():
                self._append(message)
            case CopyBegins(position):
                self._arriving = Copy(position)
            case CopyValue() | CopyAnswer():
                if self._arriving is not None:
                    self._arriving.receive_untrusted(message)
            case CopyEnds():
                self._take_whole_copy()
            case Answered(trainer, call, answer):
                if self._open.pop((trainer, call), None) is not None:
                    self._outputs.append(Finished(trainer, call, answer))
            case _:
                assert_never(message)

    # --- a copy

    def _append(self, entry: Entry) -> None:
        if self.copy is not None and entry.position == self.copy.position + 1:
            self.copy.apply(entry)
            self._has_come_further(self.copy)

    def _take_whole_copy(self) -> None:
        if self._arriving is not None:
            self.copy, self._arriving = self._arriving, None
            self._has_come_further(self.copy)

    def _has_come_further(self, copy: Copy) -> None:
        lead = self._coordinator
        if lead is None:
            self._tell_coordinator(Have(copy.position))
        elif copy.position == lead.fetches_up_to:
            self._begin_to_order(lead, copy)

    def _bring(self, to: Member, after: int) -> None:
        if self.copy is not None:
            for message in self.copy.what_follows(after):
                self._tell(to, message)

    # --- the coordinator

    def _coordinate(
        self, lead: _Coordinator, sender: Member, message: Report | Ask | GiveUp | Have
    ) -> None:
        match message:
            case Report(position):
                lead.reports[sender] = position
                self._compare_reports(lead)
            case Ask(trainer, call):
                if self._is_at(trainer, sender):
                    lead.put_untrusted(message)
            case GiveUp(trainer, call):
                if self._is_at(trainer, sender):
                    lead.give_up((trainer, call))
            case Have(position):
                lead.have[sender] = position
                self._answer(lead)
            case _:
                assert_never(message)
        self._order_more()

    def _is_at(self, trainer: TrainerId, host: Member) -> bool:
        return self._keepers is not None and self._keepers.homes.get(trainer) == host

    def _compare_reports(self, lead: _Coordinator) -> None:
        """S2: take what the furthest copy has; every answered entry is in it."""
        hosts = () if self._keepers is None else self._keepers.hosts
        if lead.orders or any(host not in lead.reports for host in hosts):
            return
        furthest = max(hosts, key=lambda host: (lead.reports[host], host == self.me))
        if furthest != self.me:
            lead.fetches_up_to = lead.reports[furthest]
            self._tell(furthest, Fetch(lead.reports[self.me]))
            return
        if self.copy is None:  # nobody has one: those who had are all lost
            self.copy = Copy()
        self._begin_to_order(lead, self.copy)

    def _begin_to_order(self, lead: _Coordinator, copy: Copy) -> None:
        lead.orders, lead.fetches_up_to = True, None
        lead.have = {host: have for host, have in lead.reports.items() if host != self.me}
        for host, have in lead.have.items():
            for message in () if have == copy.position else copy.what_follows(have):
                self._tell(host, message)
        self._order_more()

    def _order_more(self) -> None:
        lead, copy = self._coordinator, self.copy
        if lead is None or copy is None or not lead.orders:
            return
        while self._may_order and lead.queue and lead.under_way_bytes < MOST_UNDER_WAY_BYTES:
            self._order(lead, copy, lead.take())

    def _order(self, lead: _Coordinator, copy: Copy, asked: Ask) -> None:
        """Order a command, unless it waits for a key."""
        command = asked.command
        answer = copy.answer_to(asked.trainer, asked.call)
        write = None
        if isinstance(command, _WRITES):
            write = command if answer is None else None
        elif (key := copy.table.missing(command)) is not None:
            lead.park(key, asked)
            return
        else:
            answer = copy.table.read(command)
        stable = min(lead.have.values(), default=copy.position)
        entry = Entry(copy.position + 1, asked.trainer, asked.call, asked.open_from, stable, write)
        answer = copy.apply(entry) or answer or Answer()
        for host in lead.have:
            self._tell(host, entry)
        lead.unanswered.append((entry, answer))
        lead.under_way_bytes += _size(entry.command)
        if write is not None:
            lead.wake(write.key)
        self._answer(lead)

    def _answer(self, lead: _Coordinator) -> None:
        """S1: answer what every machine has."""
        if not lead.orders or self.copy is None or self._keepers is None:
            return
        everywhere = min(lead.have.values(), default=self.copy.position)
        while lead.unanswered and lead.unanswered[0][0].position <= everywhere:
            entry, answer = lead.unanswered.popleft()
            lead.under_way_bytes -= _size(entry.command)
            home = self._keepers.homes[entry.trainer]
            self._tell(home, Answered(entry.trainer, entry.call, answer))
        self.copy.settle(everywhere)


def _size(command: Command | None) -> int:
    """Return about what the command takes in memory."""
    match command:
        case Set(_, value) | Append(_, value):
            return _CALL_BYTES + len(value)
        case CompareSet(_, expected, desired):
            return _CALL_BYTES + len(expected) + len(desired)
        case Wait(keys) | Check(keys):
            return _CALL_BYTES + sum(map(len, keys))
        case _:
            return _CALL_BYTES
