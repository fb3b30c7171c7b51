"""The picture of the ring."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from pmesh.cli.ring import RingNode, draw_ring


def test_three_members_stand_clockwise() -> None:
    nodes = [RingNode("mac-1", "self", leader=True, here=True), RingNode("mac-2")]
    nodes.append(RingNode("studio", "suspect"))
    assert draw_ring(nodes).plain.splitlines() == [
        "╭─▶ ● mac-1 ★ ──▶ ● mac-2   ──╮",
        "│                             │",
        "╰── ○ studio  ◀───────────────╯",
    ]


def test_one_member_is_alone() -> None:
    assert draw_ring([RingNode("mac-1", leader=True)]).plain == "● mac-1 ★ alone"


@given(
    names=st.lists(st.text(min_size=1, max_size=63), min_size=2, max_size=8),
    width=st.integers(64, 200),
)
def test_any_ring_is_a_rectangle_that_fits(names: list[str], width: int) -> None:
    lines = draw_ring([RingNode(name) for name in names], width=width).plain.split("\n")
    assert len(lines) == 3
    assert len({cell_len(line) for line in lines}) == 1
    assert cell_len(lines[0]) <= width


@pytest.mark.parametrize("size", range(2, 9))
def test_the_light_visits_every_edge_in_turn(size: int) -> None:
    def lit(beat: int) -> frozenset[tuple[int, int]]:
        picture = draw_ring([RingNode(f"n{i}") for i in range(size)], beat=beat)
        return frozenset((s.start, s.end) for s in picture.spans if s.style == "bold cyan")

    seen = [lit(beat) for beat in range(size)]
    assert len(set(seen)) == size
    assert all(seen)
    assert lit(size) == lit(0)
