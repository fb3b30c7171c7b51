"""Draws the members of the mesh as a ring.

╭─▶ ● mac-1 ★ ──▶ ● mac-2   ──╮
│                             │
╰────────────── ● mac-3   ◀───╯
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from pmesh.agent.schema import MemberHealth, Status
from pmesh.texts import printable

# Both shape and colour show the health, for terminals and eyes without colours.
HEALTH_MARKS: Final[Mapping[MemberHealth, tuple[str, str]]] = MappingProxyType(
    {
        "self": ("●", "green"),
        "healthy": ("●", "green"),
        "degraded": ("◐", "yellow"),
        "suspect": ("○", "red"),
        "gone": ("✕", "red"),
    }
)
_EDGE_CELLS = 5
_SIDES_CELLS = 8
_READABLE_LABEL_CELLS = 9  # "● mac-12 ★"
_SHORTEST_LABEL_CELLS = 7  # "● mac …": a narrower terminal wraps the drawing


class RingNode(NamedTuple):
    """One member of the drawn ring."""

    name: str
    health: MemberHealth = "healthy"
    leader: bool = False
    here: bool = False
    """True for the machine that shows the status."""


def nodes_of(status: Status) -> list[RingNode]:
    """Return the members of the view as the ring shows them."""
    leader, me = status.view.leader, status.node.id
    return [
        RingNode(m.name, m.health, leader=m.id == leader, here=m.id == me)
        for m in status.view.members
    ]


def draw_ring(
    nodes: Sequence[RingNode],
    *,
    width: int = 80,
    beat: int | None = None,
    speeds: Sequence[str] = (),
    unit: str = "",
) -> Text:
    """Draw the members in ring order, clockwise.

    Args:
        nodes: At least one.
        width: Cells of the terminal; names are shortened to fit.
        beat: Lights up one edge; a caller that counts it up moves the light around the ring.
        speeds: What stands at each edge, the first at that from the first node to the second.
        unit: Of the speeds; it stands inside the ring, if there is room.
    """
    if len(nodes) == 1:
        return Text.assemble(_label(nodes[0], width), (" alone", "dim"))
    columns, edge_cells = (len(nodes) + 1) // 2, max(map(cell_len, speeds), default=0)
    room = (width - _SIDES_CELLS - (_EDGE_CELLS + edge_cells) * (columns - 1)) // columns
    cells = min(max(_label(node, width).cell_len for node in nodes), room)
    labels = [_label(node, max(cells, _SHORTEST_LABEL_CELLS)) for node in nodes]
    # In a ring of two, both speeds stand inside, beside each other.
    label_cells = max(2 * edge_cells - 3, *(label.cell_len for label in labels))
    for label in labels:
        label.pad_right(label_cells - label.cell_len)
    lit = None if beat is None else beat % len(nodes)
    styles = ["bold cyan" if edge == lit else "dim" for edge in range(len(nodes))]
    turn, back = styles[columns - 1], styles[-1]  # the edges down the right and up the left side
    at = [speed.ljust(edge_cells, "─") for speed in speeds] or [""] * len(nodes)
    top = _top_row(labels[:columns], styles, at)
    left, right = (f" {speeds[-1]}", f"{speeds[columns - 1]} ") if speeds else ("", "")
    between = top.cell_len - 2 - cell_len(left + right)
    inside = (unit if cell_len(unit) + 2 <= between else "").center(between)
    middle = Text.assemble(("│", back), left, (inside, "dim"), right, ("│", turn))
    rest = labels[columns:], styles[columns:], at[columns:]
    longer = (label_cells + _EDGE_CELLS + edge_cells) * (len(nodes) % 2)
    return Text("\n").join([top, middle, _bottom_row(*rest, turn, longer)])


def has_room(count: int, speeds: Sequence[str], width: int) -> bool:
    """Return whether so many members, and the speeds at their edges, can be told apart."""
    columns, edge_cells = (count + 1) // 2, max(map(cell_len, speeds), default=0)
    edges = _SIDES_CELLS + (_EDGE_CELLS + edge_cells) * (columns - 1)
    return edges + columns * _READABLE_LABEL_CELLS <= width


def _top_row(labels: Sequence[Text], styles: Sequence[str], at: Sequence[str]) -> Text:
    row = Text.assemble(("╭─▶ ", styles[-1]))
    for index, label in enumerate(labels):
        last = index == len(labels) - 1
        row.append_text(label).append(" ──╮" if last else f" ─{at[index]}─▶ ", styles[index])
    return row


def _bottom_row(
    labels: Sequence[Text], styles: Sequence[str], at: Sequence[str], turn: str, longer: int
) -> Text:
    """Draw from right to left; an odd ring has one label fewer here, and a longer edge."""
    row = Text.assemble(("╰── ", styles[-1]))
    for index in reversed(range(len(labels))):
        row.append_text(labels[index])
        if index > 0:
            row.append(f" ◀─{at[index - 1]}─ ", styles[index - 1])
    return row.append(f" ◀{'─' * longer}─╯", turn)


def _label(node: RingNode, cells: int) -> Text:
    mark, color = HEALTH_MARKS[node.health]
    star = " ★" if node.leader else ""
    name = printable(node.name)
    room = cells - cell_len(f"{mark} {star}")
    if cell_len(name) > room:
        name = f"{set_cell_size(name, room - 1).rstrip()}…"
    return Text.assemble((mark, color), " ", (name, "bold" if node.here else ""), star)
