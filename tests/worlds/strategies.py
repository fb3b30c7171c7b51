"""Hypothesis strategies for whatever msgspec decodes, read off the types with their limits."""

from typing import Any

from hypothesis import strategies as st
from msgspec import inspect

from pmesh.ids import PRINTABLE

Strategy = st.SearchStrategy[Any]

LONGEST_TUPLE = 2  # enough for none, one and several
LONGEST_TEXT = 40  # limits of length have tests of their own
ANY_TEXT = st.characters(exclude_categories=["Cs"])
PRINTED_TEXT = st.characters(exclude_categories=["Cs", "Cc", "Cf", "Zl", "Zp"])  # `ids.PRINTABLE`


def values_of(type_: object) -> Strategy:
    """Every value that msgspec would take for the type."""
    return _strategy(inspect.type_info(type_))


def _strategy(info: inspect.Type) -> Strategy:  # noqa: C901, PLR0911, PLR0912 - one arm for each kind of type
    match info:
        case inspect.NoneType():
            return st.none()
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType(ge=ge, le=le):
            return st.integers(-(2**63) if ge is None else ge, 2**64 - 1 if le is None else le)
        case inspect.FloatType(gt=gt, ge=ge, le=le):
            least = gt if ge is None else ge
            return st.floats(least, le, exclude_min=gt is not None, allow_nan=False)
        case inspect.StrType(pattern=str(pattern), max_length=longest) if pattern != PRINTABLE:
            return st.from_regex(pattern, alphabet=ANY_TEXT).filter(
                lambda text: len(text) <= (longest or LONGEST_TEXT)
            )
        case inspect.StrType(min_length=shortest, max_length=longest, pattern=pattern):
            return st.text(
                ANY_TEXT if pattern is None else PRINTED_TEXT,
                min_size=shortest or 0,
                max_size=min(longest or LONGEST_TEXT, LONGEST_TEXT),
            )
        case inspect.BytesType(min_length=shortest, max_length=longest):
            return st.binary(min_size=shortest or 0, max_size=longest or LONGEST_TEXT)
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.VarTupleType(item_type=item, min_length=shortest):
            items = st.lists(_strategy(item), min_size=shortest or 0, max_size=LONGEST_TUPLE)
            return items.map(tuple)
        case inspect.TupleType(item_types=types):
            return st.tuples(*map(_strategy, types))
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(_strategy(key), _strategy(value), max_size=LONGEST_TUPLE)
        case inspect.UnionType(types=types):
            return st.one_of(*map(_strategy, types))
        case (
            inspect.StructType(cls=cls, fields=fields)
            | inspect.NamedTupleType(cls=cls, fields=fields)
        ):
            return st.builds(cls, **{field.name: _strategy(field.type) for field in fields})
        case _:
            raise NotImplementedError(info)


def garbled(valid: Strategy) -> Strategy:
    """Bytes of the strategy with a few of them changed, cut off, or put in."""
    return st.builds(_garble, valid, st.integers(0), st.integers(0, 5), st.binary(max_size=6))


def _garble(valid: bytes, at: int, removed: int, inserted: bytes) -> bytes:
    start = at % (len(valid) + 1)
    return valid[:start] + inserted + valid[start + removed :]
