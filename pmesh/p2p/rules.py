"""Messages between two ranks: each delivered once, in order per pair and tag, across views (O4).

One `send` makes one message. The sender keeps it and announces it repeatedly until it is settled:
delivered or withdrawn. The receiver notes announcements, and requests a message when a receive
waits for it; one at a time from each sender, since they follow each other on the pair's lane.
Announcements, requests and acknowledgements may be lost or repeated. The values of a small message
come with its first announcement (MPI's eager protocol), and need no request if that has come.

The messages of a pair are numbered across all tags, so that the memory of either side does not grow
with the number of tags. Their order within a tag follows from `before`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from pmesh.core.wire.calls import Envelope
from pmesh.ids import TrainerId
from pmesh.p2p.wire import EAGER_BYTES

MAX_KEPT = 256  # messages of a pair not yet received; a receiver notes as many
EAGER_ROOM_BYTES = 64 * 1024  # of a pair, in the link's queue before a heartbeat

K = TypeVar("K")
V = TypeVar("V")


# --- the sender's side


@dataclass(frozen=True, slots=True)
class Outbox:
    """The messages from one rank to another that are not settled."""

    next_sequence: int = 0
    kept: Mapping[int, Envelope] = field(default_factory=dict[int, Envelope])
    """By sequence number, in order."""


def keep(outbox: Outbox, envelope: Envelope) -> tuple[Outbox, int]:
    """Add a message and return its sequence number. Raises ValueError beyond MAX_KEPT."""
    if len(outbox.kept) >= MAX_KEPT:
        raise ValueError(f"{MAX_KEPT} messages wait already")
    sequence = outbox.next_sequence
    return Outbox(sequence + 1, {**outbox.kept, sequence: envelope}), sequence


def settle(outbox: Outbox, sequence: int) -> Outbox:
    """Drop a message that was delivered or withdrawn; a second call changes nothing."""
    return replace(outbox, kept=_without(outbox.kept, sequence))


def standing(outbox: Outbox, sequence: int) -> tuple[int, int]:
    """Return `first` and `before` for an announcement of this message."""
    tag = outbox.kept[sequence].tag
    earlier = (s for s, envelope in outbox.kept.items() if s < sequence and envelope.tag == tag)
    return min(outbox.kept), max(earlier, default=-1)


def must_tell(outbox: Outbox, sequence: int, tag: int) -> bool:
    """Return True if the receiver must be told that a delivered message is settled.

    It learns that from `first`, unless another message waits for so long that it would remember
    many that came later. An earlier one of the same tag may be announced again: while it is kept,
    the receiver must remember this one.
    """
    waits_long = outbox.next_sequence - min(outbox.kept, default=outbox.next_sequence) > MAX_KEPT
    earlier = (s for s, envelope in outbox.kept.items() if s < sequence and envelope.tag == tag)
    return waits_long and not any(True for _ in earlier)


def is_eager(outbox: Outbox, sequence: int) -> bool:
    """Return True if the message's values may go with its first announcement."""
    sizes = [envelope.nbytes for envelope in outbox.kept.values()]
    small = sum(nbytes for nbytes in sizes if nbytes <= EAGER_BYTES)
    return outbox.kept[sequence].nbytes <= EAGER_BYTES and small <= EAGER_ROOM_BYTES


# --- the receiver's side


class Noted(NamedTuple):
    """An announced message."""

    envelope: Envelope
    before: int
    arrival: int
    """Its index among all announcements, so that ANY takes the earliest."""
    values: bytes | None = None
    """None if they are to be requested."""


@dataclass(frozen=True, slots=True)
class Source:
    """The messages of one sender, as far as the receiver knows."""

    noted: Mapping[int, Noted] = field(default_factory=dict[int, Noted])
    delivered: Mapping[int, int] = field(default_factory=dict[int, int])
    """By tag, the last delivered message, while its acknowledgement may have been lost."""
    first: int = 0
    """The sender has settled every message below this."""

    def next_of_each_tag(self) -> Iterator[tuple[int, Noted]]:
        """Yield the next message of each tag, with its sequence number, if it is known to be."""
        heads: dict[int, int] = {}
        for sequence, noted in self.noted.items():
            tag = noted.envelope.tag
            heads[tag] = min(sequence, heads.get(tag, sequence))
        for tag, sequence in heads.items():
            before = self.noted[sequence].before
            if before < self.first or before <= self.delivered.get(tag, -1):
                yield sequence, self.noted[sequence]


class Wanted(NamedTuple):
    """A receive that waits."""

    sources: tuple[TrainerId, ...]
    """The senders that it accepts; empty once all of them are lost."""
    tag: int


class Transfer(NamedTuple):
    """A message that a receive gets."""

    sender: TrainerId
    sequence: int
    envelope: Envelope
    values: bytes | None = None
    """As `Noted.values`."""


@dataclass(frozen=True, slots=True)
class Inbox:
    """The announced messages and the waiting receives of one rank."""

    sources: Mapping[TrainerId, Source] = field(default_factory=dict[TrainerId, Source])
    wanted: Mapping[int, Wanted] = field(default_factory=dict[int, Wanted])
    """By call number, in the order of the calls."""
    under_way: Mapping[int, Transfer] = field(default_factory=dict[int, Transfer])
    """By call number."""
    arrivals: int = 0

    def hopeless(self) -> tuple[int, ...]:
        """Return the receives whose senders are all lost."""
        return tuple(call for call, wanted in self.wanted.items() if not wanted.sources)


def note(
    inbox: Inbox,
    sender: TrainerId,
    sequence: int,
    envelope: Envelope,
    *,
    first: int,
    before: int,
    values: bytes = b"",
) -> tuple[Inbox, bool]:
    """Note an announcement. Returns True if it is already delivered: the sender must learn that."""
    source = inbox.sources.get(sender, Source())
    source = _settle_below(source, max(first, source.first))
    if sequence <= source.delivered.get(envelope.tag, -1):
        return _with_source(inbox, sender, source), True
    noted = source.noted.get(sequence)
    if sequence >= source.first and (noted or len(source.noted) < MAX_KEPT):
        arrival = inbox.arrivals if noted is None else noted.arrival
        held = sum(len(each.values or b"") for each in source.noted.values())
        fits = len(values) == envelope.nbytes and held + len(values) <= EAGER_ROOM_BYTES
        came = noted.values if noted and noted.values is not None else values if fits else None
        heard = Noted(envelope, before, arrival, came)
        source = replace(source, noted={**source.noted, sequence: heard})
    inbox = replace(_with_source(inbox, sender, source), arrivals=inbox.arrivals + 1)
    return _choose(inbox), False


def want(inbox: Inbox, call: int, wanted: Wanted) -> Inbox:
    """Add a receive."""
    return _choose(replace(inbox, wanted={**inbox.wanted, call: wanted}))


def deliver(inbox: Inbox, call: int) -> Inbox:
    """End the receive: its message has arrived."""
    transfer = inbox.under_way[call]
    source = inbox.sources[transfer.sender]
    source = replace(
        source,
        noted=_without(source.noted, transfer.sequence),
        delivered={**source.delivered, transfer.envelope.tag: transfer.sequence},
    )
    return give_up(_with_source(inbox, transfer.sender, source), call)


def give_up(inbox: Inbox, call: int) -> Inbox:
    """End the receive; another one may get the message requested for it."""
    wanted, under_way = _without(inbox.wanted, call), _without(inbox.under_way, call)
    return _choose(replace(inbox, wanted=wanted, under_way=under_way))


def withdraw(inbox: Inbox, sender: TrainerId, sequence: int) -> Inbox:
    """Forget a message that the sender no longer keeps; the next of its tag follows."""
    source = inbox.sources.get(sender, Source())
    gone = source.noted.get(sequence)
    delivered = {tag: last for tag, last in source.delivered.items() if last != sequence}
    if gone is None and len(delivered) == len(source.delivered):
        return inbox
    before = -1 if gone is None else gone.before  # before a delivered one, none is left
    others = {
        s: noted._replace(before=before) if noted.before == sequence else noted
        for s, noted in _without(source.noted, sequence).items()
    }
    source = replace(source, noted=others, delivered=delivered)
    return _choose(_with_source(inbox, sender, source))


def lose(inbox: Inbox, sender: TrainerId) -> Inbox:
    """Forget a lost sender: it sends nothing any more."""
    wanted = {
        call: w._replace(sources=tuple(source for source in w.sources if source != sender))
        for call, w in inbox.wanted.items()
    }
    return _choose(replace(inbox, sources=_without(inbox.sources, sender), wanted=wanted))


def _choose(inbox: Inbox) -> Inbox:
    """Drop transfers whose message is gone; start those that can, the earliest receive first."""
    under_way = {
        call: transfer
        for call, transfer in inbox.under_way.items()
        if transfer.sequence in inbox.sources.get(transfer.sender, Source()).noted
    }
    busy = {transfer.sender for transfer in under_way.values()}
    ready = {
        sender: found
        for sender, source in inbox.sources.items()
        if sender not in busy and (found := tuple(_ready(sender, source)))
    }
    for call, wanted in inbox.wanted.items():
        if not ready:  # thousands of receives may wait: mostly for messages that have not come
            break
        if call in under_way:
            continue
        fitting = (
            (arrival, transfer)
            for sender in wanted.sources
            for arrival, transfer in ready.get(sender, ())
            if transfer.envelope.tag == wanted.tag
        )
        earliest = min(fitting, key=lambda found: found[0], default=None)
        if earliest is not None:
            under_way[call] = earliest[1]
            del ready[earliest[1].sender]
    return replace(inbox, under_way=under_way)


def _ready(sender: TrainerId, source: Source) -> Iterator[tuple[int, Transfer]]:
    """Yield what could be received now, with its arrival."""
    for sequence, noted in source.next_of_each_tag():
        yield noted.arrival, Transfer(sender, sequence, noted.envelope, noted.values)


def _settle_below(source: Source, first: int) -> Source:
    return Source(
        noted={s: noted for s, noted in source.noted.items() if s >= first},
        delivered={tag: last for tag, last in source.delivered.items() if last >= first},
        first=first,
    )


def _with_source(inbox: Inbox, sender: TrainerId, source: Source) -> Inbox:
    return replace(inbox, sources={**inbox.sources, sender: source})


def _without(mapping: Mapping[K, V], key: K) -> Mapping[K, V]:
    return {k: v for k, v in mapping.items() if k != key}
