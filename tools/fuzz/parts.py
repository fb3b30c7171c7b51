"""The parts of messages, and small valid examples of all types that a message may have."""

import re
from functools import partial
from random import Random
from typing import Any

import msgspec
from msgspec import inspect

from pmesh.core.wire.link import Address

HOSTS = ("127.0.0.1", "127.0.0.2", "::1")  # an agent dials what it is told: loopback alone
PORTS = (1, 9, 65535, 0, 65536)
DIGITS = (12, 32, 64)  # of what is written in hexadecimal: a launch, a hash


def children(value: object) -> list[tuple[Any, Any]]:
    """The parts of a value, each with its place in it; an address counts as one."""
    match value:
        case Address():
            return []
        case msgspec.Struct():
            return [(name, getattr(value, name)) for name in value.__struct_fields__]
        case tuple():
            return list(enumerate(value))
        case dict():
            return list(value.items())
        case _:
            return []


def with_child(value: Any, place: Any, part: object) -> Any:  # noqa: ANN401 - of any type
    """The value with another part at this place."""
    match value:
        case msgspec.Struct():
            return msgspec.structs.replace(value, **{place: part})
        case tuple():
            return _like(value, [*value[:place], part, *value[place + 1 :]])
        case _:
            return {**value, place: part}


def _like(value: tuple[Any, ...], parts: list[Any]) -> tuple[Any, ...]:
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def example(  # noqa: C901, PLR0911, PLR0912 - one arm for each kind of type
    info: inspect.Type, dice: Random, *, wide: bool = False, many: int = 0
) -> Any:  # noqa: ANN401
    """A small valid value of a type that msgspec knows.

    Args:
        info: The type.
        dice: Chooses among the values.
        wide: Texts have all the length that they may have, and no two are the same.
        many: How many items tuples have at most, but for those within tuples; 0: a few.
    """
    make = partial(example, dice=dice, wide=wide, many=many)
    match info:
        case inspect.BoolType():
            return dice.random() < 0.5  # noqa: PLR2004
        case inspect.IntType(ge=at_least, le=at_most):
            value = (at_least or 0) + dice.choice((0, 0, 1, 2, 1000))
            return value if at_most is None else min(value, at_most)
        case inspect.FloatType():
            return dice.choice((0.5, 5.0))
        case inspect.StrType(min_length=shortest, max_length=longest, pattern=pattern):
            texts = ["x" * (shortest or dice.randrange(2)), "x", *("0" * n for n in DIGITS), *HOSTS]
            if wide:
                texts.insert(0, f"{dice.getrandbits(64):016x}".ljust(longest or 16, "x")[:longest])
            return next(text for text in texts if re.search(pattern or "", text))
        case inspect.BytesType(min_length=shortest):
            return dice.randbytes(shortest or 0)
        case inspect.LiteralType(values=values):
            return dice.choice(values)
        case inspect.VarTupleType(item_type=item, min_length=shortest, max_length=longest):
            size = min(many, longest or many) if many else dice.randrange(3)
            return tuple(make(item, many=0) for _ in range(max(shortest or 0, size)))
        case inspect.TupleType(item_types=items):
            return tuple(make(item) for item in items)
        case inspect.DictType(key_type=key, value_type=value):
            return {make(key): make(value) for _ in range(dice.randrange(3))}
        case inspect.UnionType(types=types):
            return make(dice.choice(types))
        case inspect.StructType(cls=cls) if cls is Address:
            return Address(dice.choice(HOSTS), dice.choice(PORTS[:2]))
        case inspect.StructType(cls=cls) | inspect.NamedTupleType(cls=cls):
            return cls(**{field.name: make(field.type) for field in info.fields})
        case _:
            return None
