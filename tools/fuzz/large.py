"""The largest messages that their receiver takes: one field of a message, grown to its bound."""

from collections.abc import Callable, Iterator
from itertools import cycle, islice
from random import Random
from typing import Any, TypeAlias

import msgspec
from msgspec import inspect

from tools.fuzz.parts import children, example, with_child

DISTINCT = 1024  # entries that are made; more of them are the same again
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
    part = _largest(info, room - len(msgspec.msgpack.encode(message)), dice)
    while part and not accepts(_put(message, places, part)):
        part = _shorter(part)
    grown = _put(message, places, part)
    return grown if accepts(grown) else message


def _growable(
    value: object, info: inspect.Type, places: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], Growable]]:
    """Each part whose size is not fixed, with its place in the message."""
    match info:
        case inspect.UnionType(types=types):
            kind = next((t for t in types if isinstance(t, inspect.StructType)), types[0])
            yield from _growable(value, kind, places)
        case inspect.StructType(fields=fields) if isinstance(value, msgspec.Struct):
            by_name = {field.name: field.type for field in fields}
            for name, part in children(value):
                yield from _growable(part, by_name[name], (*places, name))
        case inspect.VarTupleType(item_type=item):
            yield places, info
            for place, part in children(value)[:1]:
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


def _largest(info: Growable, room: int, dice: Random) -> Any:  # noqa: ANN401
    room = max(room, 1)
    most = min(room, info.max_length or room)
    wide = dice.random() < 0.5  # noqa: PLR2004 - many small entries, or fewer that are large
    match info:
        case inspect.StrType():
            return f"{dice.getrandbits(64):x}".ljust(most, "x")[:most]
        case inspect.BytesType():
            return bytes(most)
        case inspect.VarTupleType(item_type=item):
            made = [example(item, dice, wide=wide) for _ in range(min(most, DISTINCT))]
            size = sum(len(msgspec.msgpack.encode(entry)) for entry in made) / len(made)
            return tuple(islice(cycle(made), min(most, round(room / size))))
        case inspect.DictType(value_type=value):
            return {n: example(value, dice, wide=wide) for n in range(1, min(most, DISTINCT) + 1)}


def _shorter(part: Any) -> Any:  # noqa: ANN401
    fewer = len(part) * 7 // 8
    return dict(islice(part.items(), fewer)) if isinstance(part, dict) else part[:fewer]
