"""The largest messages that their receiver takes: one field of a message, grown to its bound."""

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, islice
from random import Random
from typing import Any, TypeAlias

import msgspec
from msgspec import inspect

from tools.fuzz.parts import children, example, with_child

FIELDS = 16  # more than most messages have
MANY = 64  # items of each tuple in an entry
DISTINCT = 256  # entries that are made; more of them are the same again
Growable: TypeAlias = inspect.StrType | inspect.BytesType | inspect.VarTupleType | inspect.DictType


def grow(message: Any, dice: Random, accepts: Callable[[Any], bool], *, room: int) -> Any:  # noqa: ANN401 - of any kind
    """The message with one of its fields, at any depth, as large as its receiver lets it be.

    It is the message itself if none of its fields can grow.

    Args:
        message: That is accepted.
        dice: Chooses the field and what is in it.
        accepts: Whether the receiver takes a message.
        room: How many bytes the receiver takes at most.
    """
    found = list(_growable(message, inspect.type_info(type(message))))
    if not found:
        return message
    places, info = dice.choice(found)
    before = _at(message, places)
    part = _large(before, info, room - _size(message) + _size(before), dice)

    def cut(length: int) -> Any:  # noqa: ANN401 - of that kind
        short = dict(islice(part.items(), length)) if isinstance(part, dict) else part[:length]
        return _put(message, places, short)

    fits = bisect_left(range(len(part)), x=True, key=lambda n: not _fits(cut(n + 1), accepts, room))
    grown = cut(fits)
    return grown if accepts(grown) and _size(grown) > _size(message) else message


def fill(message: Any, dice: Random, accepts: Callable[[Any], bool], *, room: int) -> Any:  # noqa: ANN401 - of any kind
    """As `grow`, of many of its fields one after the other."""
    for _ in range(FIELDS):
        message = grow(message, dice, accepts, room=room)
    return message


def _fits(message: object, accepts: Callable[[Any], bool], room: int) -> bool:
    return _size(message) <= room and accepts(message)


def _size(value: object) -> int:
    return len(msgspec.msgpack.encode(value))


def _growable(
    value: object, info: inspect.Type, places: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], Growable]]:
    """Each part whose size is not fixed, with its place in the message."""
    match info:
        case inspect.UnionType(types=types):
            structs = (t for t in types if isinstance(t, inspect.StructType))
            kind = next((t for t in structs if isinstance(value, t.cls)), types[0])
            yield from _growable(value, kind, places)
        case inspect.StructType(cls=cls, fields=fields) if isinstance(value, cls):
            by_name = {field.name: field.type for field in fields}
            for name, part in children(value):
                yield from _growable(part, by_name[name], (*places, name))
        case inspect.VarTupleType(item_type=item):
            yield places, info
            for place, part in children(value)[-1:]:  # the last one fills what is left
                yield from _growable(part, item, (*places, place))
        case inspect.StrType() | inspect.BytesType() | inspect.DictType():
            if info.min_length is None or info.min_length != info.max_length:
                yield places, info
        case _:
            return


def _put(value: Any, places: tuple[Any, ...], part: object) -> Any:  # noqa: ANN401
    if not places:
        return part
    first, *others = places
    inner = next(p for place, p in children(value) if place == first)
    return with_child(value, first, _put(inner, tuple(others), part))


def _at(value: Any, places: tuple[Any, ...]) -> Any:  # noqa: ANN401
    for wanted in places:
        value = next(part for place, part in children(value) if place == wanted)
    return value


def _large(value: Any, info: Growable, room: int, dice: Random) -> Any:  # noqa: ANN401
    """Too much, beginning with the value where that has items."""
    room = max(room, 1)
    most = min(len(value) + room, info.max_length or sys.maxsize)
    wide = dice.random() < 0.5  # noqa: PLR2004 - many small entries, or fewer that are large
    match info:
        case inspect.StrType():
            return f"{dice.getrandbits(64):x}".ljust(most, "x")[:most]
        case inspect.BytesType():
            return bytes(most)
        case inspect.VarTupleType(item_type=item):
            make = partial(example, item, dice, wide=wide, many=dice.choice((0, MANY)))
            made = [make()]
            while len(made) < min(most, DISTINCT) and _size(made) < room:
                made += [make() for _ in range(16)]
            size = min(map(_size, made))
            kept = dice.choice((value, ()))
            return (*kept, *islice(cycle(made), room // size + 1))[:most]
        case inspect.DictType(value_type=value):
            return {n: example(value, dice, wide=wide) for n in range(1, min(most, DISTINCT) + 1)}
