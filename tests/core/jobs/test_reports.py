"""The numbers that a trainer reports of its step."""

import math
from fractions import Fraction

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.jobs.reports import merge_reports, shown_number
from pmesh.core.values import MAX_REPORTS, Reports
from pmesh.errors import UsageError

NAMES = st.from_regex(r"\A[A-Za-z0-9_./-]{1,24}\Z")


@given(st.dictionaries(NAMES, st.floats(allow_nan=False) | st.integers(), max_size=MAX_REPORTS))
def test_what_is_reported_is_what_an_agent_takes(values: dict[str, float]) -> None:
    merged = merge_reports({}, values)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(merged), type=Reports) == merged
    assert list(merged) == list(values)


def test_a_name_that_is_not_reported_again_keeps_its_number() -> None:
    first = merge_reports({}, {"loss": 2, "eval/loss": 1.5})
    second = merge_reports(first, {"loss": np.float32(0.5)})
    assert second == {"loss": 0.5, "eval/loss": 1.5}
    assert first == {"loss": 2.0, "eval/loss": 1.5}
    assert type(second["loss"]) is float


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.25, 0.25),
        (np.int64(3), 3.0),
        (True, 1.0),
        (Fraction(1, 2), 0.5),
        (math.nan, "nan"),
        (np.float16("inf"), "inf"),
        (10**400, "inf"),
        (-(10**400), "-inf"),
    ],
)
def test_a_number_is_finite_or_is_said_not_to_be(value: object, shown: float | str) -> None:
    assert shown_number(merge_reports({}, {"x": value})["x"]) == shown


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"loss": np.ones(1)}, "'loss' is of type ndarray: pass loss=float(…), or .item()"),
        ({"loss": "0.5"}, "'loss' is of type str"),
        ({"loss": 1j}, "'loss' is of type complex"),
        ({"loss": None}, "'loss' is of type NoneType"),
        ({"x" * 25: 1.0}, "can't show the name 'xxx"),
        ({"": 1.0}, "can't show the name ''"),
        ({"loss\n": 1.0}, "can't show the name 'loss\\n': take 1 to 24 of the characters"),
        ({"Verlust €": 1.0}, "can't show the name 'Verlust €'"),
        ({f"x{n}": 1.0 for n in range(9)}, "at most 8 names, not x0, x1, x2, x3, x4, x5, x6, x7"),
    ],
)
def test_what_nobody_could_show_is_refused_where_it_is_reported(
    values: dict[str, object], why: str
) -> None:
    with pytest.raises(UsageError) as raised:
        merge_reports({}, values)
    assert why in str(raised.value)
