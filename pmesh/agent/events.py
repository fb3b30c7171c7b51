"""The last events of an agent's life, which `pmesh events` shows.

`python tools/status_schema.py` writes docs/reference/events.schema.json from these structs. Fields
may be added under one version; a reader ignores unknown fields. A new kind of event, or a field
that is removed or changes its meaning, needs a new version.
"""

from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import islice
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from pmesh.agent.schema import decode_as
from pmesh.ids import JobName, Member, OpNumber, node_text
from pmesh.texts import printable

EVENTS_SCHEMA_VERSION: Literal[8] = 8

KEPT = 1000  # a day of a quiet mesh, an hour of one whose machines join and leave all the time
PAGE_BYTES = 512 * 1024  # with the last event, half of the largest message of a session
MAX_TEXT = 500  # a ring of 64 machines with the longest names would be 4,000 characters
MAX_NAMES = 64

EventKind: TypeAlias = Literal[
    # this agent and its peers
    "agent started",
    "agent stalled",
    "internal error",
    "turned away",
    "peer joined",
    "peer silent",
    "loss noticed",
    "peer lost",
    "path changed",
    "name refused",
    "machine removed",
    "key changed",
    "key refused",
    "network loop",
    "invitation",
    "view",
    # commands that other machines have run here
    "command started",
    "command ended",
    "command refused",
    # jobs and their ranks
    "job began",
    "job found",
    "job waits",
    "job goes on",
    "job ended",
    "rank entered",
    "rank left",
    "rank lost",
    "trainer stopped",
    "trainer continued",
    "quorum lost",
    "quorum regained",
    "superseded",
    "states differ",
    # ops
    "ring stood still",
    "op rerun",
    "op fetched",
    "op failed",
    "lane broken",
]

# `pmesh up` does not print these: they are frequent, or precede an event that it does print.
_UNPRINTED: frozenset[EventKind] = frozenset(
    {"agent started", "peer silent", "loss noticed", "op rerun", "op fetched", "lane broken"}
)


class News(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened, before it has a number and a time."""

    kind: EventKind
    text: Annotated[str, Meta(description="The same for a person.")]
    job: JobName | None = None
    op: Annotated[
        OpNumber | None, Meta(description="The op concerned, or the one that ended a wait.")
    ] = None
    names: Annotated[tuple[str, ...], Meta(description="The machines concerned.")] = ()
    duration_s: Annotated[
        float | None, Meta(description="How long it took, by the monotonic clock.")
    ] = None

    @property
    def is_announced(self) -> bool:
        return self.kind not in _UNPRINTED


class Event(News, frozen=True, kw_only=True):
    """One event, as this agent has seen it."""

    number: Annotated[int, Meta(description="From 0, since the agent started.")]
    time: Annotated[
        datetime,
        Meta(tz=True, description="By the machine's clock, which may be wrong: only for display."),
    ]
    uptime_s: Annotated[
        float, Meta(description="Since the agent started, by a clock that never jumps.")
    ]


class EventPage(msgspec.Struct, frozen=True, kw_only=True):
    """What `pmesh events --json` prints."""

    schema: Literal[8]
    node: Annotated[str, Meta(description="The node id of the agent that was asked.")]
    name: Annotated[str, Meta(description="Of its machine.")]
    incarnation: Annotated[
        str, Meta(description="16 hexadecimal digits; after a restart others, and numbers anew.")
    ]
    next: Annotated[int, Meta(description="The number that the next event will have.")]
    events: Annotated[tuple[Event, ...], Meta(description="In the order of their numbers.")]


class EventLog:
    """Notes the events of one agent, and keeps the last thousand.

    Args:
        me: This agent, with its incarnation.
        name: The name of its machine.
        clock: A monotonic clock, in seconds.
        wall_clock: The machine's local time, with its zone; for display only.
        listener: Receives each event.
    """

    def __init__(
        self,
        me: Member,
        name: str,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], datetime],
        listener: Callable[[Event], None],
    ) -> None:
        self._me = me
        self._name = name
        self._clock = clock
        self._wall_clock = wall_clock
        self._listener = listener
        self._began = clock()
        self._next = 0
        self._events: deque[Event] = deque(maxlen=KEPT)

    def note(
        self,
        kind: EventKind,
        text: str,
        *,
        job: JobName | None = None,
        op: OpNumber | None = None,
        names: tuple[str, ...] = (),
        duration_s: float | None = None,
    ) -> None:
        """Add an event that happened just now.

        Args:
            kind: The kind of event, for programs.
            text: A sentence for people, without a full stop.
            job: The job concerned.
            op: The op concerned, or the one that ended a wait.
            names: The machines concerned.
            duration_s: How long it took, by a monotonic clock.
        """
        self.add(
            News(kind=kind, text=text, job=job, op=op, names=names, duration_s=duration_s),
        )

    def add(self, news: News) -> None:
        text = printable(news.text)
        event = Event(
            kind=news.kind,
            text=text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…",
            job=news.job,
            op=news.op,
            names=news.names[:MAX_NAMES],
            duration_s=news.duration_s,
            number=self._next,
            time=self._wall_clock(),
            uptime_s=self._clock() - self._began,
        )
        self._next += 1
        self._events.append(event)
        self._listener(event)

    def since(self, after: int) -> EventPage:
        """Return the kept events after this number, oldest first, as many as fit in a message."""
        first = self._next - len(self._events)
        events: list[Event] = []
        room = PAGE_BYTES
        skipped = min(max(0, after + 1 - first), len(self._events))
        for event in islice(self._events, skipped, None):
            if room < 0:
                break
            events.append(event)
            room -= len(msgspec.json.encode(event))
        return EventPage(
            schema=EVENTS_SCHEMA_VERSION,
            node=node_text(self._me.node),
            name=self._name,
            incarnation=f"{self._me.incarnation:016x}",
            next=self._next,
            events=tuple(events),
        )

    def lately(self, seconds: float) -> Iterator[tuple[float, Event]]:
        """Yield the kept events of the last seconds with their times by `clock`, oldest first."""
        since = self._clock() - seconds
        for event in self._events:
            at = self._began + event.uptime_s
            if at >= since:
                yield at, event


def encode_events(page: EventPage) -> bytes:
    return msgspec.json.encode(page)


def decode_events(data: bytes) -> EventPage:
    """The inverse of `encode_events`. Raises UsageError if the schema differs."""
    return decode_as(EventPage, data, "the agent's events have", EVENTS_SCHEMA_VERSION)
