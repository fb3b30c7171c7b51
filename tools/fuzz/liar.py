"""Decides what a liar sends in the place of each message that an honest program would send.

It behaves for most of the time, so that it is taken into views, leads, and runs ops; a lie is a
changed, repeated, withheld, delayed, old or invented message.

Messages are msgspec structs, which check their fields when they are decoded and not when they are
made: so a changed message can break its type too, and only its receiver sees that.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from random import Random
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from pmesh.core.wire.link import Address
from pmesh.errors import ProtocolError
from tools.fuzz.large import grow
from tools.fuzz.parts import HOSTS, PORTS, children, example, with_child

T = TypeVar("T")

INTS = (
    *(0, 1, -1, 2, 63, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63),
    *(2**64 - 1, -(2**31), -(2**63)),
)
FLOATS = (0.0, -1.0, 1e-9, 1e18, 1e308, float("inf"), float("nan"))
TEXTS = (
    *("", "x", "x" * 64, "x" * 65, "x" * 5000, "two\nlines", "\x1b[2J", "\0", "é" * 32),
    *("[/bold] mac", "[link=http://x]", "../../x", "x/../../../../lie", "/lie"),
    *("LD_PRELOAD", "PMESH_HOME", "BASH_ENV"),
)
LENGTHS = (2, 3, 65, 300, 3000)
REMEMBERED = 128  # of each type; more would be older views only
STOP_HERE = 0.3  # how often a value is changed as a whole, rather than something in it


class Seen:
    """The values that have occurred in messages, by type: what is put in the place of others."""

    def __init__(self) -> None:
        self._values: dict[type, deque[Any]] = defaultdict(lambda: deque(maxlen=REMEMBERED))

    def learn(self, value: object) -> None:
        """Remember the value and all its parts."""
        self._values[type(value)].append(value)
        for _, part in children(value):
            self.learn(part)

    def another(self, value: T, dice: Random) -> T:
        """A value of the same type; this one itself if no other is known."""
        known = self._values.get(type(value))
        return dice.choice(known) if known else value

    def anything(self, dice: Random) -> Any:  # noqa: ANN401 - of any type
        """A value of any type; None if none is known."""
        known = self._values.get(dice.choice(list(self._values))) if self._values else None
        return dice.choice(known) if known else None


def mutate(message: Any, dice: Random, seen: Seen) -> Any:  # noqa: ANN401 - of any kind
    """The message with one of its fields changed, at any depth; or one value in all its places."""
    if dice.random() < STOP_HERE:
        old = _somewhere_in(message, dice)
        return substitute(message, old, _changed(old, dice, seen))
    return _mutate(message, dice, seen, whole=0.0)


def _mutate(value: Any, dice: Random, seen: Seen, *, whole: float = STOP_HERE) -> Any:  # noqa: ANN401
    parts = children(value)
    if not parts or dice.random() < whole:
        return _changed(value, dice, seen) if whole else value
    place, part = dice.choice([*parts, *[(p, part) for p, part in parts if children(part)] * 2])
    return with_child(value, place, _mutate(part, dice, seen))


def _somewhere_in(value: object, dice: Random) -> object:
    """A part of the message, never all of it."""
    while parts := children(value):
        _, value = dice.choice(parts)
        if dice.random() < STOP_HERE:
            break
    return value


def substitute(value: Any, old: object, new: object) -> Any:  # noqa: ANN401 - of any type
    """The value with `new` wherever `old` occurs in it: a lie that agrees with itself."""
    for place, part in children(value):
        same = type(part) is type(old) and part == old
        value = with_child(value, place, new if same else substitute(part, old, new))
    return value


def graft(value: Any, dice: Random, seen: Seen, *, share: float) -> Any:  # noqa: ANN401
    """The value with this share of its parts replaced by others of their types that occurred."""
    for place, part in children(value):
        other = seen.another(part, dice) if dice.random() < share else part
        if other is part:
            other = graft(part, dice, seen, share=share)
        value = with_child(value, place, other)
    return value


def _changed(value: Any, dice: Random, seen: Seen) -> Any:  # noqa: ANN401, PLR0911 - one arm for each type
    match value:
        case None:
            return seen.anything(dice)
        case bool():
            return not value
        case int():
            near = (value + 1, value - 1, seen.another(value, dice), seen.another(value, dice))
            return dice.choice((*INTS, *near)) if dice.random() < 0.5 else dice.choice(near)  # noqa: PLR2004
        case float():
            return dice.choice(FLOATS)
        case str():
            return dice.choice((*TEXTS, seen.another(value, dice)))
        case bytes():
            return dice.choice((b"", bytes(len(value)), value + b"x", seen.another(value, dice)))
        case Address():
            return Address(dice.choice(HOSTS), dice.choice((*PORTS, value.port)))
        case dict():
            many = {dice.getrandbits(62) + 1: 1 for _ in range(dice.choice(LENGTHS))}
            return dice.choice(({}, {**value, **many}))
        case tuple() if not hasattr(value, "_fields"):
            return _other_tuple(value, dice, seen)
        case _:
            return None if dice.random() < 0.1 else seen.another(value, dice)  # noqa: PLR2004


def _other_tuple(value: tuple[Any, ...], dice: Random, seen: Seen) -> tuple[Any, ...]:
    if not value:
        return tuple(seen.anything(dice) for _ in range(dice.choice((1, 1, 2, 300))))
    item = dice.choice(value)
    return dice.choice(
        (
            (),
            value[:-1],
            (*value, item),
            (*value, seen.another(item, dice)),
            tuple(dice.sample(value, len(value))),
            value * 2,
            seen.another(value, dice),
            (item,) * dice.choice(LENGTHS),
        )
    )


LIES = (0.03, 0.1, 0.3, 0.8)  # the share, of rare kinds of messages; few: it leads for longer
LIES_OF_COMMON_KINDS = 0.2  # of that: heartbeats would drown what decides
COMMON = 0.3  # the share of all messages from which on a kind is common
GARBAGE = 0.05  # the share of lies that may be undecodable: each ends a link or a session
MANY_TIMES = (2, 50, 2000)
MOST_AT_ONCE_BYTES = 1 << 20  # of one message many times: a link takes 4 MiB that were not read
LARGE, MANY = 0.1, 0.1  # of the lies
STUBBORN_FOR = 60  # messages: what was grown stays, until a view was made of it
KNOWN_PARTS = (0.1, 0.5, 0.9)  # of an invented message, how much has occurred in another
ATTEMPTS = 4  # at one that its receiver takes: of the large kinds, a fifth is so
PAST = 64  # messages of each kind that may be repeated
KEPT_LIES = 400  # the last, for a report


class Liar:
    """One hostile program; the seed decides all that it does.

    Args:
        seed: Of the dice.
        kinds: The types of the messages that it may invent.
        receive: What the receiver does first: encode and decode. Raises ProtocolError for garbage.
        room: The most bytes that it takes in one message.
    """

    def __init__(
        self, seed: int, kinds: tuple[type, ...], receive: Callable[[Any], object], *, room: int
    ) -> None:
        self.dice = Random(seed)  # noqa: S311 - no secret
        self.lies: deque[Any] = deque(maxlen=KEPT_LIES)
        """What it has sent last that was not as it should be."""
        self._lies = self.dice.choice(LIES)
        self._kinds = kinds
        self._receive = receive
        self._room = room
        self._stubborn: dict[str, Any] = {}
        """A field that was grown, which for a while is so in all messages that have it."""
        self._stubborn_for = 0
        self._said = Counter[type]()
        self._seen = Seen()
        self._past: dict[type, deque[Any]] = defaultdict(lambda: deque(maxlen=PAST))
        self._held: Any = None

    def hear(self, message: object) -> None:
        """A message that somebody has sent, and that may be sent again."""
        self.learn(message)
        self._past[type(message)].append(message)

    def learn(self, message: object) -> None:
        """Use parts of this message in others."""
        self._seen.learn(message)

    def say(self, message: object) -> list[Any]:
        """What to send in the place of this message."""
        self.hear(message)
        self._said[type(message)] += 1
        if (insisting := self._insist(message)) is not None:
            return [insisting]
        common = self._said[type(message)] > COMMON * self._said.total()
        if self.dice.random() > self._lies * (LIES_OF_COMMON_KINDS if common else 1):
            return [message]
        said = [lie for lie in self._lie(message) if self._passes(lie)]
        self.lies += [lie for lie in said if lie is not message]
        return said

    def insist(self, fields: dict[str, Any]) -> None:
        """For a while, all messages that have these fields have these values in them."""
        self._stubborn, self._stubborn_for = fields, STUBBORN_FOR

    def _insist(self, message: Any) -> Any:  # noqa: ANN401 - of the same kind
        """The message with the field that was grown last; None if it has none, or not any more."""
        self._stubborn_for -= 1
        if self._stubborn_for < 0 or not self._stubborn.keys() <= dict(children(message)).keys():
            return None
        insisting = msgspec.structs.replace(message, **self._stubborn)
        return insisting if self._accepts(insisting) else None

    def _accepts(self, message: object) -> bool:
        try:
            self._receive(message)
        except ProtocolError:
            return False
        return len(msgspec.msgpack.encode(message)) <= self._room

    def _passes(self, lie: object) -> bool:
        try:
            self._receive(lie)
        except ProtocolError:
            return self.dice.random() < GARBAGE
        except (OverflowError, TypeError, ValueError):
            return False  # not even we can encode it
        return True

    def changed(self, message: Any) -> Any:  # noqa: ANN401 - of the same kind
        """The message with one of its fields changed, or a part of it in all its places."""
        return mutate(message, self.dice, self._seen)

    def interrupt(self) -> list[Any]:
        """What to send when there is nothing to say."""
        return [] if self.dice.random() > self._lies else self.anything()

    def anything(self) -> list[Any]:
        """A lie for its own sake."""
        kinds = (self._another_old, self._invented)
        lie = (self._another_large if self.dice.random() < LARGE else self.dice.choice(kinds))()
        self.lies.append(lie)
        if not self._passes(lie):
            return []
        return self._many(lie) if self.dice.random() < MANY else [lie]

    def _old(self) -> Any:  # noqa: ANN401 - of any kind
        """A message that has been sent once, of any kind."""
        return self.dice.choice(self._past[self.dice.choice(list(self._past))])

    def _another_old(self) -> Any:  # noqa: ANN401 - of any kind
        lie = self._old()
        for _ in range(self.dice.choice((0, 1, 1, 2))):
            lie = self.changed(lie)
        return lie

    def _another_large(self) -> Any:  # noqa: ANN401 - of any kind
        return self._grown(self.dice.choice((self._old, self._invented))())

    def _invented(self) -> Any:  # noqa: ANN401 - of any kind
        """A message of any kind: parts that have occurred, in a frame that may be nonsense."""
        kind = inspect.type_info(self.dice.choice(self._kinds))
        for _ in range(ATTEMPTS):
            share = self.dice.choice(KNOWN_PARTS)
            message = graft(example(kind, self.dice), self.dice, self._seen, share=share)
            if self._accepts(message):
                break
        return message

    def _grown(self, message: Any) -> Any:  # noqa: ANN401 - of the same kind
        """The message, as large as its receiver takes it."""
        if not self._accepts(message):
            return message
        grown = grow(message, self.dice, self._accepts, room=self._room)
        large = {name: part for name, part in children(grown) if part != getattr(message, name)}
        if large and self.dice.random() < 0.5:  # noqa: PLR2004
            self.insist(large)
        return grown

    def _many(self, message: object) -> list[Any]:
        """The message once, or again and again."""
        room = MOST_AT_ONCE_BYTES // len(msgspec.msgpack.encode(message))
        return [message] * max(1, min(self.dice.choice(MANY_TIMES), room))

    def _lie(self, message: object) -> list[Any]:
        lie: Any = message
        for _ in range(self.dice.choice((1, 1, 2))):
            lie = self.changed(lie)
        held, self._held = self._held, message
        if self.dice.random() < LARGE:
            return [self._grown(message)]
        if self.dice.random() < MANY:
            return self._many(self.dice.choice((message, self._old())))
        return self.dice.choice(
            (
                [],  # withheld
                [message if held is None else held],  # delayed
                [self._old(), message],
                [self.changed(self._old()), message],
                [message, self._invented()],
                [lie, message],
                [lie],
                [lie],
            )
        )
