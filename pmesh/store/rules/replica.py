"""One machine's part in a job's store: a primary and its backups, as in Viewstamped Replication.

Every machine with a rank of the job keeps a copy. The machine of the oldest rank coordinates: it
orders all commands, also those that only read, and answers once *every* machine of the roster has
the entry (S1). Rosters come from the agreement on views, and a new roster is a view change of the
store: the coordinator waits for a report of each machine, takes the furthest copy, sends it to each
machine that has another, and only then orders more commands (S2).

See Liskov and Cowling, "Viewstamped Replication Revisited" (2012). Here the quorum is all replicas:
the views already say which machines are present, so one survivor is enough.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, assert_never

from pmesh.core.values import Roster
from pmesh.errors import ProtocolError
from pmesh.ids import Member, TrainerId
from pmesh.store.rules.table import REMEMBERED, StoreCopy
from pmesh.store.rules.waiting import CallId, Waiting, awaited
from pmesh.store.wire import (
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
    Keys,
    Report,
    Set,
    StoreMessage,
    encode,
)

MOST_UNDER_WAY_BYTES = 4 * 1024 * 1024
"""The coordinator orders no more while so many bytes of entries and answers are not at every copy,
or wait to be sent to one machine. This bounds the memory that a slow machine costs the others."""

MOST_ASKED_BYTES = 16 * 1024 * 1024
"""The most bytes that the open calls of one machine's ranks take. A machine asks for no more, so
the coordinator keeps no more for it."""

AT_ONCE = 64  # steps of a coordinator in one turn of the event loop: about 2 ms

_CALL_BYTES = 512  # memory of a call without its keys and values
_WAIT_BYTES = 256  # memory of each key that a call waits for, with its index entry
_NAME_BYTES = 64  # memory of each key in an answer

_WRITES = (Set, Add, CompareSet, Append, Delete)


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer to a call of a local rank."""

    trainer: TrainerId
    call: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class Keepers:
    """The machines that keep the copies under one roster."""

    number: int
    """The number of the roster, which grows from roster to roster of a job."""
    hosts: tuple[Member, ...]
    """The machines of the ranks; the first one coordinates."""
    homes: Mapping[TrainerId, Member]
    is_first: bool
    """True if the job begins with this roster, so that its store is empty."""

    @classmethod
    def of(cls, roster: Roster) -> "Keepers":
        """Return the keepers of a roster, the machine of its oldest rank first."""
        homes = {t.id: t.member for t in sorted(roster.trainers, key=lambda t: t.id)}
        hosts = tuple(dict.fromkeys(homes.values()))
        is_first = roster.number == roster.born.counter
        return cls(roster.number, hosts, homes, is_first=is_first)


class _Outgoing:
    """The messages to send to one other machine under this roster."""

    def __init__(self) -> None:
        self.messages = deque[bytes]()
        self.nbytes = 0
        self.copy: Iterator[StoreMessage] | None = None
        """The rest of a whole copy, whose parts are made when they are sent."""
        self.was_fetched = False

    def put(self, message: bytes) -> None:
        self.messages.append(message)
        self.nbytes += len(message)

    def take(self) -> bytes | None:
        if self.messages:
            message = self.messages.popleft()
            self.nbytes -= len(message)
            return message
        part = None if self.copy is None else next(self.copy)
        if isinstance(part, CopyEnds):
            self.copy = None
        return None if part is None else encode(part)


class _Ordered(NamedTuple):
    """An entry that may not be at every copy yet."""

    entry: Entry
    answer: Answer
    nbytes: int


class Coordinator:
    """The state that only the coordinator has, under one roster."""

    def __init__(self, keepers: Keepers) -> None:
        self.keepers = keepers
        self.reports: dict[Member, tuple[int, int]] = {}
        self.fetches_from: Member | None = None
        """The machine that sends us the furthest copy; None while we fetch none."""
        self.copy: StoreCopy | None = None
        """Our copy, once all machines have reported and it equals the furthest copy (S2)."""
        self.have: dict[Member, int] = {}
        """The last entry of each other machine; a machine is missing until its copy equals ours."""
        self.queue = OrderedDict[CallId, Ask]()
        self.waiting = Waiting()
        self.asked_bytes = Counter[Member]()
        """The bytes of the calls in `queue` and `waiting`, by the machine that asks."""
        self.unanswered = deque[_Ordered]()
        self.under_way_bytes = 0

    def put_untrusted(self, sender: Member, asked: Ask) -> None:
        """Queue a command. Raises ProtocolError if it is queued already, or exceeds the limit."""
        call = asked.trainer, asked.call
        if call in self.queue or call in self.waiting:
            raise ProtocolError(f"it asks twice for call {asked.call} of a store")
        self.queue[call] = asked
        self.asked_bytes[sender] += _size(asked.command)
        if self.asked_bytes[sender] > MOST_ASKED_BYTES:
            raise ProtocolError(f"store calls of more than {MOST_ASKED_BYTES} bytes at a time")

    def take(self) -> Ask:
        """Return the next command. One whose keys have just been set comes first."""
        calls = self.waiting.ready or self.queue
        return calls.popitem(last=False)[1]

    def remove(self, call: CallId) -> Ask | None:
        """Forget a call that was given up, and return it; None if it has been ordered."""
        return self.queue.pop(call, None) or self.waiting.remove(call)

    def can_answer(self) -> bool:
        """S1: True if every machine has the first entry that is not answered."""
        if not self.unanswered:
            return False
        position = self.unanswered[0].entry.position
        return all(have >= position for have in self.have.values())


class Replica:
    """A machine's copy of one job's store, and the calls of its own ranks.

    Each input returns the calls that have ended. After it, send the messages that `take` returns,
    and call `go_on` while `has_work`.
    """

    def __init__(self, me: Member) -> None:
        self.me = me
        self.copy: StoreCopy | None = None
        """None on a machine that has just entered, until it has received a copy."""
        self._keepers: Keepers | None = None
        self._coordinator: Coordinator | None = None
        self._outgoing: dict[Member, _Outgoing] = {}
        self._arriving: StoreCopy | None = None
        self._is_synced = False
        """True once our copy equals that of the coordinator, if that is another machine."""
        self._have: int | None = None
        """The last entry that we have to report; None if there is nothing to report."""
        self._open: dict[CallId, Ask] = {}
        self._open_bytes = 0
        self._unasked = OrderedDict[CallId, None]()
        """Open calls that were not sent to the coordinator of this roster yet."""
        self._writes = OrderedDict[CallId, None]()
        """Writes that were sent to it, starting with the oldest open one (S3)."""
        self._may_order = True
        self._finished: list[Finished] = []

    # --- inputs

    def follow(self, keepers: Keepers) -> tuple[Finished, ...]:
        """Follow another roster, which has a rank on this machine (S2)."""
        self._keepers = keepers
        self._outgoing = {host: _Outgoing() for host in keepers.hosts if host != self.me}
        self._arriving, self._is_synced, self._have = None, False, None
        if self.copy is None and keepers.is_first:
            self.copy = StoreCopy()
        if self.copy is not None:
            self.copy.forget_all_but(keepers.homes)
        self._coordinator = Coordinator(keepers) if keepers.hosts[0] == self.me else None
        self._unasked = OrderedDict.fromkeys(self._open)
        report = Report(NO_COPY, 0)
        if self.copy is not None:
            report = Report(self.copy.roster, self.copy.position)
        self._tell(keepers.hosts[0], report)
        return self.go_on()

    def allow(self, *, may_order: bool) -> tuple[Finished, ...]:
        """V10: order nothing while this side of a partition has no quorum."""
        self._may_order = may_order
        return self.go_on()

    def has_room(self, command: Command) -> bool:
        """Return True if the command fits beside the open calls of our ranks."""
        return self._open_bytes + _size(command) <= MOST_ASKED_BYTES

    def ask(self, trainer: TrainerId, call: int, command: Command) -> tuple[Finished, ...]:
        """Begin a call of a local rank, for which there must be room."""
        self._open[trainer, call] = Ask(trainer, call, command)
        self._open_bytes += _size(command)
        self._unasked[trainer, call] = None
        return self.go_on()

    def give_up(self, trainer: TrainerId, call: int) -> tuple[Finished, ...]:
        """Give up a call. If it is a write, it may still be carried out."""
        was_asked = (trainer, call) not in self._unasked
        if self._close((trainer, call)) and was_asked and self._keepers is not None:
            self._tell(self._keepers.hosts[0], GiveUp(trainer, call))
        return self.go_on()

    def receive_untrusted(self, sender: Member, message: StoreMessage) -> tuple[Finished, ...]:
        """Handle a message that another machine of this roster has sent under it.

        Raises ProtocolError for a message that no honest machine sends, even if others deceive it.
        """
        self._handle_untrusted(sender, message)
        return self.go_on()

    @property
    def has_work(self) -> bool:
        """True if `go_on` has more to do, in a later turn of the event loop."""
        lead = self._coordinator
        return lead is not None and (self._can_ask() or lead.can_answer() or self._can_order(lead))

    def go_on(self) -> tuple[Finished, ...]:
        """Do a bounded part of the coordinator's work."""
        for _ in range(AT_ONCE):
            if self._coordinator is None or not self._do_step(self._coordinator):
                break
        finished, self._finished = tuple(self._finished), []
        return finished

    def _do_step(self, lead: Coordinator) -> bool:
        """Do one step. Return False if there was none, or if it took as long as many."""
        if self._can_ask():
            self._coordinate_untrusted(lead, self.me, self._next_ask())
        elif lead.can_answer():
            self._answer(lead)
        elif self._can_order(lead):
            asked = lead.take()
            self._order(lead, asked)
            return not isinstance(asked.command, Keys)  # 64,000 names, which are found and sized
        else:
            return False
        return True

    def take(self, host: Member) -> bytes | None:
        """Return the next encoded message to another machine; None if there is none now."""
        outgoing = self._outgoing.get(host)
        if outgoing is None or self._keepers is None:
            return None
        message = outgoing.take()
        if message is not None or host != self._keepers.hosts[0]:
            return message
        if self._have is not None:
            have, self._have = Have(self._have), None
            return encode(have)
        return encode(self._next_ask()) if self._can_ask() else None

    # --- messages

    def _tell(self, to: Member, message: StoreMessage) -> None:
        if to == self.me:
            self._handle_untrusted(self.me, message)
        else:
            self._outgoing[to].put(encode(message))

    def _handle_untrusted(self, sender: Member, message: StoreMessage) -> None:
        """Handle a message. One that is out of place is ignored if it costs nothing."""
        match message:
            case Report() | Ask() | GiveUp() | Have():
                if self._coordinator is not None:
                    self._coordinate_untrusted(self._coordinator, sender, message)
            case Fetch():
                self._give_copy_untrusted(sender)
            case Entry():
                self._append_untrusted(sender, message)
            case CopyBegins() | CopyValue() | CopyAnswer() | CopyEnds():
                if self._takes_copy_of(sender):
                    self._take_part_untrusted(message)
            case Answered(trainer, call, answer):
                if self._leads(sender) and self._close((trainer, call)):
                    self._finished.append(Finished(trainer, call, answer))
            case _:
                assert_never(message)

    def _leads(self, host: Member) -> bool:
        return self._keepers is not None and self._keepers.hosts[0] == host

    # --- the calls of our ranks

    def _can_ask(self) -> bool:
        """S3: ask for at most as many writes as the copies remember answers."""
        if not self._unasked or self._keepers is None:
            return False
        call = next(iter(self._unasked))
        is_write = isinstance(self._open[call].command, _WRITES)
        return not is_write or call in self._writes or len(self._writes) < REMEMBERED

    def _next_ask(self) -> Ask:
        call, _ = self._unasked.popitem(last=False)
        asked = self._open[call]
        if isinstance(asked.command, _WRITES):
            self._writes[call] = None
        return asked

    def _close(self, call: CallId) -> bool:
        """End a call. Return False if it is not open."""
        asked = self._open.pop(call, None)
        if asked is None:
            return False
        self._open_bytes -= _size(asked.command)
        self._unasked.pop(call, None)
        while self._writes and next(iter(self._writes)) not in self._open:
            self._writes.popitem(last=False)
        return True

    # --- a copy

    def _takes_copy_of(self, sender: Member) -> bool:
        if self._coordinator is not None:
            return sender == self._coordinator.fetches_from
        return self._leads(sender) and not self._is_synced

    def _take_part_untrusted(self, part: CopyBegins | CopyValue | CopyAnswer | CopyEnds) -> None:
        match part:
            case CopyBegins():
                self._arriving = self._arriving or StoreCopy()
            case CopyEnds():
                self._take_copy_untrusted()
            case _:
                if self._arriving is not None:
                    self._arriving.receive_untrusted(part)

    def _take_copy_untrusted(self) -> None:
        copy = self._arriving or self.copy
        if copy is None or self._keepers is None:
            return
        if any(outgoing.copy is not None for outgoing in self._outgoing.values()):
            raise ProtocolError("it has fetched a copy of a store, and does not wait for its end")
        self.copy, self._arriving = copy, None
        if self._coordinator is not None:
            self._begin_to_order(self._coordinator, copy)
        else:
            copy.begin(self._keepers.number)
            self._is_synced, self._have = True, 0

    def _append_untrusted(self, sender: Member, entry: Entry) -> None:
        copy, keepers = self.copy, self._keepers
        if copy is None or keepers is None or not self._is_synced or not self._leads(sender):
            return
        if entry.position != copy.position + 1 or entry.trainer not in keepers.homes:
            raise ProtocolError("an entry of a store that is not the next, or of no rank")
        copy.apply(entry, answers=False)
        self._have = copy.position

    def _give_copy_untrusted(self, to: Member) -> None:
        outgoing = self._outgoing.get(to)
        if outgoing is None or self.copy is None or self._is_synced or not self._leads(to):
            return
        if outgoing.was_fetched:
            raise ProtocolError("it fetches a copy of a store twice")
        outgoing.copy, outgoing.was_fetched = self.copy.parts(), True

    # --- the coordinator

    def _coordinate_untrusted(
        self, lead: Coordinator, sender: Member, message: Report | Ask | GiveUp | Have
    ) -> None:
        match message:
            case Report(roster, position):
                if sender in lead.reports:
                    raise ProtocolError("it reports twice on its copy of a store")
                lead.reports[sender] = roster, position
                self._compare_reports(lead)
            case Ask(trainer):
                if self._is_at(trainer, sender):
                    lead.put_untrusted(sender, message)
            case GiveUp(trainer, call):
                if self._is_at(trainer, sender) and (asked := lead.remove((trainer, call))):
                    lead.asked_bytes[sender] -= _size(asked.command)
            case Have(position):
                self._note_copy_untrusted(lead, sender, position)
            case _:
                assert_never(message)

    def _is_at(self, trainer: TrainerId, host: Member) -> bool:
        return self._keepers is not None and self._keepers.homes.get(trainer) == host

    def _compare_reports(self, lead: Coordinator) -> None:
        """S2: take the furthest copy; every answered entry is in it."""
        hosts = lead.keepers.hosts
        if any(host not in lead.reports for host in hosts):
            return
        furthest = max(hosts, key=lambda host: (lead.reports[host], host == self.me))
        if furthest != self.me:
            lead.fetches_from = furthest
            self._tell(furthest, Fetch())
            return
        if self.copy is None:  # no machine has a copy: all that had one are lost
            self.copy = StoreCopy()
        self._begin_to_order(lead, self.copy)

    def _begin_to_order(self, lead: Coordinator, copy: StoreCopy) -> None:
        """Make all copies equal. Until then nothing is ordered, so our copy does not change."""
        lead.copy, lead.fetches_from = copy, None
        furthest = max(lead.reports.values())
        for host, outgoing in self._outgoing.items():
            if lead.reports[host] == furthest != (NO_COPY, 0):
                lead.have[host] = 0
                outgoing.put(encode(CopyEnds()))
            else:
                outgoing.copy = copy.parts()
        copy.begin(lead.keepers.number)

    def _note_copy_untrusted(self, lead: Coordinator, sender: Member, position: int) -> None:
        sent = -1
        if lead.copy is not None and self._outgoing[sender].copy is None:
            sent = lead.copy.position
        if position > sent:
            raise ProtocolError(f"it has entry {position} of a store, of which it was sent {sent}")
        lead.have[sender] = max(position, lead.have.get(sender, 0))

    def _can_order(self, lead: Coordinator) -> bool:
        """V10: also, order only while all copies are equal except for a few entries."""
        return (
            bool(lead.waiting.ready or lead.queue)
            and self._may_order
            and lead.copy is not None
            and len(lead.have) == len(self._outgoing)
            and lead.under_way_bytes < MOST_UNDER_WAY_BYTES
            and all(out.nbytes < MOST_UNDER_WAY_BYTES for out in self._outgoing.values())
        )

    def _order(self, lead: Coordinator, asked: Ask) -> None:
        """Order a command, unless it waits for a key."""
        copy, command, home = lead.copy, asked.command, lead.keepers.homes[asked.trainer]
        if copy is None or lead.waiting.add(asked, copy.table.values):
            return
        lead.asked_bytes[home] -= _size(command)
        write = answer = None
        if not isinstance(command, _WRITES):
            answer = copy.table.read(command)
        elif (answer := copy.answer_to(asked.trainer, asked.call)) is None:
            write = command
        was_set = write is not None and write.key in copy.table.values
        entry = Entry(copy.position + 1, asked.trainer, asked.call, write)
        answer = copy.apply(entry, answers=True) or answer or Answer()
        message = encode(entry)
        for outgoing in self._outgoing.values():
            outgoing.put(message)
        nbytes = len(message) + _answer_size(answer)
        lead.unanswered.append(_Ordered(entry, answer, nbytes))
        lead.under_way_bytes += nbytes
        if write is not None and (is_set := write.key in copy.table.values) != was_set:
            lead.waiting.note(write.key, is_set=is_set)

    def _answer(self, lead: Coordinator) -> None:
        entry, answer, nbytes = lead.unanswered.popleft()
        lead.under_way_bytes -= nbytes
        answered = Answered(entry.trainer, entry.call, answer)
        self._tell(lead.keepers.homes[entry.trainer], answered)


def _size(command: Command) -> int:
    """Estimate the memory of a command while it waits."""
    keys = awaited(command)
    nbytes = _CALL_BYTES + _WAIT_BYTES * len(keys) + sum(map(len, keys))
    match command:
        case Set(_, value) | Append(_, value):
            return nbytes + len(value)
        case CompareSet(_, expected, desired):
            return nbytes + len(expected) + len(desired)
        case Check(names):
            return nbytes + _WAIT_BYTES * len(names) + sum(map(len, names))
        case _:
            return nbytes


def _answer_size(answer: Answer) -> int:
    match answer.value:
        case bytes(value):
            return _CALL_BYTES + len(value)
        case tuple(names):
            return _CALL_BYTES + _NAME_BYTES * len(names) + sum(map(len, names))
        case _:
            return _CALL_BYTES
