"""Decides what a liar sends in the place of each message that an honest program would send.

It behaves for most of the time, so that it is taken into views, leads, and runs ops; a lie is a
changed, repeated, withheld, delayed, old or invented message.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from random import Random
from typing import Any

from msgspec import inspect

from pmesh.core.wire.link import Address
from pmesh.errors import ProtocolError
from tools.fuzz.mutate import HOSTS, PORTS, Seen, graft, mutate

LIES = (0.03, 0.1, 0.3, 0.8)  # the share, of rare kinds of messages; few: it leads for longer
LIES_OF_COMMON_KINDS = 0.2  # of that: heartbeats would drown what decides
COMMON = 0.3  # the share of all messages from which on a kind is common
GARBAGE = 0.05  # the share of lies that may be undecodable: each ends a link or a session
KNOWN_PARTS = (0.1, 0.5, 0.9)  # of an invented message, how much has occurred in another
PAST = 64  # messages of each kind that may be repeated
KEPT_LIES = 400  # the last, for a report


class Liar:
    """One hostile program; the seed decides all that it does.

    Args:
        seed: Of the dice.
        kinds: The types of the messages that it may invent.
        receive: What the receiver does first: encode and decode. Raises ProtocolError for garbage.
    """

    def __init__(
        self, seed: int, kinds: tuple[type, ...], receive: Callable[[Any], object]
    ) -> None:
        self.dice = Random(seed)  # noqa: S311 - no secret
        self.lies: deque[Any] = deque(maxlen=KEPT_LIES)
        """What it has sent last that was not as it should be."""
        self._lies = self.dice.choice(LIES)
        self._kinds = kinds
        self._receive = receive
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
        common = self._said[type(message)] > COMMON * self._said.total()
        if self.dice.random() > self._lies * (LIES_OF_COMMON_KINDS if common else 1):
            return [message]
        said = [lie for lie in self._lie(message) if self._passes(lie)]
        self.lies += [lie for lie in said if lie is not message]
        return said

    def _passes(self, lie: object) -> bool:
        try:
            self._receive(lie)
        except ProtocolError:
            return self.dice.random() < GARBAGE
        except (OverflowError, TypeError):
            return False  # not even we can encode it
        return True

    def interrupt(self) -> list[Any]:
        """What to send when there is nothing to say."""
        if self.dice.random() > self._lies:
            return []
        lie = self._old()
        for _ in range(self.dice.choice((0, 1, 1, 2))):
            lie = mutate(lie, self.dice, self._seen)
        lie = self.dice.choice((lie, self._invented()))
        self.lies.append(lie)
        return [lie] if self._passes(lie) else []

    def _old(self) -> Any:  # noqa: ANN401 - of any kind
        """A message that has been sent once, of any kind."""
        return self.dice.choice(self._past[self.dice.choice(list(self._past))])

    def _invented(self) -> Any:  # noqa: ANN401 - of any kind
        """A message of any kind: parts that have occurred, in a frame that may be nonsense."""
        kind = self.dice.choice(self._kinds)
        message = example(inspect.type_info(kind), self.dice)
        return graft(message, self.dice, self._seen, share=self.dice.choice(KNOWN_PARTS))

    def _lie(self, message: object) -> list[Any]:
        lie: Any = message
        for _ in range(self.dice.choice((1, 1, 2))):
            lie = mutate(lie, self.dice, self._seen)
        held, self._held = self._held, message
        return self.dice.choice(
            (
                [],  # withheld
                [message if held is None else held],  # delayed
                [message] * self.dice.choice((2, 50)),
                [self._old(), message],
                [mutate(self._old(), self.dice, self._seen), message],
                [message, self._invented()],
                [lie, message],
                [lie],
                [lie],
            )
        )


def example(info: inspect.Type, dice: Random) -> Any:  # noqa: ANN401, C901, PLR0911 - one arm for each kind of type
    """A small valid value of a type that msgspec knows."""
    match info:
        case inspect.BoolType():
            return dice.random() < 0.5  # noqa: PLR2004
        case inspect.IntType(ge=at_least):
            return (at_least or 0) + dice.choice((0, 0, 1, 2, 1000))
        case inspect.FloatType():
            return dice.choice((0.5, 5.0))
        case inspect.StrType(min_length=shortest):
            return "x" * (shortest or dice.randrange(2))
        case inspect.BytesType(min_length=shortest):
            return bytes([dice.randrange(256)]) * (shortest or 0)
        case inspect.LiteralType(values=values):
            return dice.choice(values)
        case inspect.VarTupleType(item_type=item, min_length=shortest):
            return tuple(example(item, dice) for _ in range((shortest or 0) + dice.randrange(3)))
        case inspect.DictType(key_type=key, value_type=value):
            return {example(key, dice): example(value, dice) for _ in range(dice.randrange(3))}
        case inspect.UnionType(types=types):
            return example(dice.choice(types), dice)
        case inspect.StructType(cls=cls) if cls is Address:
            return Address(dice.choice(HOSTS), dice.choice(PORTS[:2]))
        case inspect.StructType(cls=cls) | inspect.NamedTupleType(cls=cls):
            return cls(**{field.name: example(field.type, dice) for field in info.fields})
        case _:
            return None
