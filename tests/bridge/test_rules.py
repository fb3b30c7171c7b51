"""What a step consists of, and what is refused of a worker."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.bridge import rules
from pmesh.bridge.rules import (
    Announcement,
    BlockLayout,
    BlockPart,
    Component,
    Layout,
    Part,
    WholeLayout,
    WholePart,
    answer_to,
    check,
    deal,
    mean_of,
    parts_of,
    read_announcements,
)
from pmesh.bridge.wire import (
    AveragedBlockGradient,
    AveragedGradient,
    AveragedNonBlockGradient,
    BlockGradientPayload,
    Floats,
    GradientPayload,
    Heartbeat,
    Message,
    NonBlockGradientPayload,
)
from pmesh.errors import ProtocolError, UsageError
from tests.worlds.faults import Faults

LAYOUT = BlockLayout(((2, 1), (3,)), (5, 1, 4))
BLOCK = BlockPart(index=1, num_blocks=2, sizes=(2, 1))
NORM = Component(index=1, size=3)
WHOLE = WholePart(size=3)


def values(*of: float) -> Floats:
    return np.array(of, np.float32)


THREE = values(1, 2, 3)


def test_a_step_goes_from_the_last_block_to_the_first_then_head_norm_embedding() -> None:
    shown = [(str(part), part.size) for part in parts_of(LAYOUT)]
    assert shown == [
        ("block 1", 3),
        ("block 0", 3),
        ("component 0 (head)", 5),
        ("component 1 (final norm)", 1),
        ("component 2 (embedding)", 4),
    ]
    assert list(map(str, parts_of(WholeLayout(7)))) == ["the gradient"]


@given(st.integers(0, 10**6), st.integers(1, 50))
def test_rows_are_dealt_once_each_and_the_last_worker_takes_the_remainder(
    rows: int, workers: int
) -> None:
    dealt = deal(rows, workers)
    assert [start for start, _ in dealt] == [0, *(end for _, end in dealt[:-1])]
    assert dealt[-1][1] == rows
    assert {end - start for start, end in dealt[:-1]} <= {rows // workers}


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (BLOCK, BlockGradientPayload(4, 7, 1, 2, (2, 1), THREE)),
        (NORM, NonBlockGradientPayload(4, 7, 1, THREE)),
        (WHOLE, GradientPayload(4, 7, THREE, 0.5, 2, 3)),
    ],
)
def test_what_is_due_is_taken(part: Part, message: Message) -> None:
    found = check(message, part, step=4, worker_id=7)
    assert found.values is THREE
    assert (found.loss, found.rows) == ((0.5, 3) if part is WHOLE else (0, 0))


@pytest.mark.parametrize(
    ("part", "message", "why"),
    [
        (
            BLOCK,
            BlockGradientPayload(4, 7, 0, 2, (2, 1), THREE),
            "sends block 0 of 2, and block 1 of 2 is due",
        ),
        (
            BLOCK,
            BlockGradientPayload(4, 7, 1, 2, (1, 2), THREE),
            "has components of 1, 2 values in block 1, and the ranks have 2, 1",
        ),
        (
            BLOCK,
            BlockGradientPayload(4, 7, 1, 2, (1,) * 17, THREE),
            f"has components of {'1, ' * 16}… values in block 1, and the ranks have 2, 1",
        ),
        (
            BLOCK,
            BlockGradientPayload(4, 7, 1, 2, (2, 1), values(1)),
            "has 1 values in block 1, and the ranks have 3",
        ),
        (
            BLOCK,
            BlockGradientPayload(4, 7, 1, 2, (2, 1), values(1, math.nan, math.inf)),
            "has NaN in block 1 of step 4, at value 1",
        ),
        (BLOCK, BlockGradientPayload(5, 7, 1, 2, (2, 1), THREE), "is in step 5, and step 4 is due"),
        (BLOCK, BlockGradientPayload(4, 6, 1, 2, (2, 1), THREE), "calls itself worker 6"),
        (BLOCK, Heartbeat("x", 1), "sends a Heartbeat, and block 1 is due"),
        (
            NORM,
            NonBlockGradientPayload(4, 7, 2, THREE),
            "sends component 2, and component 1 (final norm) is due",
        ),
        (
            NORM,
            NonBlockGradientPayload(4, 7, 1, values(1, 2, -math.inf)),
            "has infinity in component 1 (final norm) of step 4, at value 2",
        ),
        (WHOLE, GradientPayload(4, 7, THREE, math.inf, 2, 3), "has a loss of inf in step 4"),
        (WHOLE, GradientPayload(4, 7, THREE, 1, 4, 3), "says that 4 of 3 are correct"),
    ],
)
def test_what_is_not_due_or_not_finite_is_named(part: Part, message: Message, why: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        check(message, part, step=4, worker_id=7)
    assert str(caught.value) == why


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=6))
def test_a_mean_is_rounded_once(xs: list[float]) -> None:
    (mean,) = mean_of([values(x) for x in xs])
    assert mean == np.float32(math.fsum(xs) / len(xs)) or mean == pytest.approx(
        np.mean(xs), rel=1e-6, abs=1e-38
    )


def test_a_mean_of_large_values_does_not_overflow_and_of_many_is_taken_in_pieces(
    faults: Faults,
) -> None:
    faults.limit(rules, "_AT_ONCE", 2)
    large = float(np.finfo(np.float32).max)
    assert mean_of([values(large, 1, 2), values(large, 3, 5)]).tolist() == [large, 2, 3.5]


def test_the_answer_to_a_part_has_its_place() -> None:
    assert answer_to(BLOCK, THREE, step=4, loss=0) == AveragedBlockGradient(4, 1, (2, 1), THREE)
    assert answer_to(NORM, THREE, step=4, loss=0) == AveragedNonBlockGradient(4, 1, THREE)
    assert answer_to(WHOLE, THREE, step=4, loss=0.5) == AveragedGradient(4, THREE, 0.5)


def announced(*layouts: Layout | None) -> list[Any]:
    return [
        msgspec.msgpack.decode(msgspec.msgpack.encode(Announcement(layout))) for layout in layouts
    ]


def test_the_ranks_say_the_layout_and_the_bridge_says_none() -> None:
    assert read_announcements(announced(None, LAYOUT, LAYOUT)) == LAYOUT
    assert read_announcements(announced(None)) is None


@pytest.mark.parametrize(
    ("untrusted", "why"),
    [
        (
            announced(LAYOUT, None, BlockLayout(((2,),) * 9, (1, 2, 3))),
            "rank 2 averages 9 blocks (2, 2, 2, 2, 2, 2, 2, 2, … values) and 1, 2, 3 values, and",
        ),
        (
            announced(WholeLayout(1), WholeLayout(2)),
            "rank 1 averages a whole gradient of 2 values, and rank 0 a whole gradient of 1 values",
        ),
        ([{"layout": {"type": "whole", "size": -1}}], "a rank has announced no gradient"),
        (["other"], "a rank has announced no gradient"),
    ],
)
def test_announcements_that_do_not_fit_together_are_refused(
    untrusted: list[object], why: str
) -> None:
    with pytest.raises(UsageError) as caught:
        read_announcements(untrusted)
    assert why in str(caught.value)
