"""Draws docs/explanation/diagrams.md and its pictures from what the code itself goes by.

State diagrams come from the transition tables in `pmesh.core`, the layers from `.importlinter`.
Plain SVG: Sphinx and GitHub show it without an extension, a script or the network.

Run after a change in a table: python tools/diagrams.py
"""

import configparser
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from html import escape
from pathlib import Path
from typing import Self, TypeVar

from pmesh.core.links import dialing, health

ROOT = Path(__file__).parents[1]
FOLDER = Path("docs/explanation")  # below ROOT
LINTER = ROOT / ".importlinter"

_BOX_WIDTH, _BOX_HEIGHT, _GAP, _MARGIN = 196, 54, 48, 16
_RISE = 56  # how much higher an arc goes for each box that it passes
_STYLE = """
<style>
  text { font: 14px system-ui, sans-serif; fill: #1b1f24; text-anchor: middle; }
  .name { font-weight: 600; }
  .small { font-size: 11px; fill: #57606a; }
  .label { font-size: 12px; paint-order: stroke; stroke: #ffffff; stroke-width: 4px; }
  rect.page { fill: #ffffff; }
  rect.box { fill: #eef4fb; stroke: #3b6ea5; stroke-width: 1.5; }
  rect.later { stroke-dasharray: 5 4; fill: #ffffff; }
  path.edge { fill: none; stroke: #57606a; stroke-width: 1.5; marker-end: url(#arrow); }
</style>
<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"
  orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#57606a"/></marker></defs>
""".strip()


StateT = TypeVar("StateT", bound=Enum)
SignalT = TypeVar("SignalT", bound=Enum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A transition table in words."""

    title: str
    module: str
    signals: tuple[str, ...]
    moves: Mapping[str, Mapping[str, str]]
    """For each state, in the table's order, where each signal leads."""

    @classmethod
    def of(
        cls,
        title: str,
        module: str,
        signals: type[SignalT],
        table: Mapping[StateT, Mapping[SignalT, StateT]],
    ) -> Self:
        """The words for a table of enums."""
        moves = {
            state.value: {s.value: row[s].value for s in signals if s in row}
            for state, row in table.items()
        }
        return cls(title=title, module=module, signals=tuple(s.value for s in signals), moves=moves)


MACHINES = {
    "health": Machine.of(
        "What is thought of a peer", "pmesh.core.links.health", health.Signal, health.TRANSITIONS
    ),
    "dialling": Machine.of(
        "When a machine is dialled", "pmesh.core.links.dialing", dialing.Signal, dialing.TRANSITIONS
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """An arrow from the box at one place to the box at another, for all signals that do that."""

    start: int
    end: int
    label: str

    @property
    def span(self) -> int:
        """How many boxes it passes, its last one included."""
        return abs(self.end - self.start)


def edges_of(machine: Machine) -> list[Edge]:
    """The arrows between different states; signals that do the same share one."""
    places = {state: place for place, state in enumerate(machine.moves)}
    labels: dict[tuple[int, int], list[str]] = {}
    for state, moves in machine.moves.items():
        for signal, target in moves.items():
            if target != state:
                labels.setdefault((places[state], places[target]), []).append(signal)
    return [Edge(start=s, end=e, label=", ".join(names)) for (s, e), names in labels.items()]


def draw_machine(machine: Machine) -> str:
    """The states in a row, arrows to the right above it, arrows to the left below it."""
    edges = edges_of(machine)
    above = max((edge.span for edge in edges if edge.end > edge.start), default=0)
    below = max((edge.span for edge in edges if edge.end < edge.start), default=0)
    middle = _MARGIN + 30 + above * _RISE * 3 // 4 + _BOX_HEIGHT // 2
    height = middle + _BOX_HEIGHT // 2 + below * _RISE * 3 // 4 + 30 + _MARGIN
    width = 2 * _MARGIN + len(machine.moves) * (_BOX_WIDTH + _GAP) - _GAP
    parts = [_draw_edge(edge, edges, middle) for edge in edges]
    for place, state in enumerate(machine.moves):
        top = middle - _BOX_HEIGHT // 2
        parts.append(_draw_box(_left_of(place), top, state, _staying(machine, state)))
    return _page(machine.title, width, height, parts)


def _staying(machine: Machine, state: str) -> str:
    moves = machine.moves[state]
    stays = [signal for signal, target in moves.items() if target == state]
    if len(stays) == len(moves):
        return "stays for ever"
    return f"stays: {', '.join(stays)}" if stays else ""


def _left_of(place: int) -> int:
    return _MARGIN + place * (_BOX_WIDTH + _GAP)


def _draw_edge(edge: Edge, edges: list[Edge], middle: int) -> str:
    """A curve over the boxes for an arrow to the right, under them for one to the left."""
    up = 1 if edge.end > edge.start else -1
    alike = [other for other in edges if (other.end > other.start) == (up == 1)]
    leaving = sorted((o for o in alike if o.start == edge.start), key=lambda o: -o.span)
    coming = sorted((o for o in alike if o.end == edge.end), key=lambda o: -o.span)
    start = _port(edge.start, up, leaving.index(edge), len(leaving))
    end = _port(edge.end, -up, coming.index(edge), len(coming))
    y = middle - up * (_BOX_HEIGHT // 2)
    bend = y - up * _RISE * edge.span
    label_y = y - up * _RISE * edge.span * 3 // 4 + (-6 if up == 1 else 16)
    return (
        f'<path class="edge" d="M{start} {y} C{start} {bend} {end} {bend} {end} {y - up}"/>'
        f'<text class="label" x="{(start + end) // 2}" y="{label_y}">{escape(edge.label)}</text>'
    )


def _port(place: int, side: int, index: int, count: int) -> int:
    """Where an arrow meets its box: the longest in the middle, so that arrows don't cross."""
    half = _BOX_WIDTH // 2
    return _left_of(place) + half + side * (half * (index + 1) // (count + 1))


def read_layers(path: Path) -> list[tuple[str, ...]]:
    """The layers of `.importlinter`, top first, beside each other what must not meet."""
    linter = configparser.ConfigParser()
    linter.read_string(path.read_text(encoding="utf-8"))
    lines = linter["importlinter:contract:layers"]["layers"].split("\n")
    return [tuple(name.strip() for name in line.split("|")) for line in lines if line.strip()]


def draw_layers(layers: list[tuple[str, ...]]) -> str:
    """One box above the other; a package may import what stands below it."""
    width, row_height = 560, 44
    parts: list[str] = []
    for row, names in enumerate(layers):
        room = (width - 2 * _MARGIN - 12 * (len(names) - 1)) // len(names)
        for column, name in enumerate(names):
            later = name.startswith("(")
            left, top = _MARGIN + column * (room + 12), _MARGIN + row * row_height
            text = f"{name.strip('()')}, comes later" if later else name
            style = "box later" if later else "box"
            parts.append(
                f'<rect class="{style}" x="{left}" y="{top}" width="{room}" height="34" rx="6"/>'
                f'<text class="name" x="{left + room // 2}" y="{top + 22}">{escape(text)}</text>'
            )
    height = 2 * _MARGIN + row_height * len(layers) - (row_height - 34)
    return _page("Imports point down", width, height, parts)


def _draw_box(left: int, top: int, name: str, note: str) -> str:
    x = left + _BOX_WIDTH // 2
    y = top + (24 if note else 32)
    second = f'<text class="small" x="{x}" y="{top + 43}">{escape(note)}</text>' if note else ""
    return (
        f'<rect class="box" x="{left}" y="{top}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}"'
        f' rx="8"/><text class="name" x="{x}" y="{y}">{escape(name)}</text>{second}'
    )


def _page(title: str, width: int, height: int, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}" role="img">'
    )
    paper = f'<rect class="page" width="{width}" height="{height}" rx="8"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", _STYLE, paper, *parts, "</svg>", ""])


def describe_machine(name: str, machine: Machine) -> Iterator[str]:
    """A section of the page: the picture, and the same as a table of words."""
    yield from (f"## {machine.title}", "", f"`{machine.module}.TRANSITIONS`:", "")
    yield from (f"![The table below, as states and arrows](diagrams/{name}.svg)", "")
    yield f"| in | {' | '.join(machine.signals)} |"
    yield "|---" * (len(machine.signals) + 1) + "|"
    for state, moves in machine.moves.items():
        targets = (moves.get(signal, "") for signal in machine.signals)
        yield f"| **{state}** | {' | '.join(targets)} |"
    yield ""


def write_page(layers: list[tuple[str, ...]]) -> str:
    """The page that shows all pictures."""
    lines = [
        "# Diagrams",
        "",
        "<!-- Written by tools/diagrams.py: change the tables in pmesh/core, then run it. -->",
        "",
        "Drawn by `tools/diagrams.py` from the tables that the code goes by; a test compares them.",
        "",
        "## Layers",
        "",
        "Imports point down; what stands side by side does not meet. From `.importlinter`, which",
        "`make check` holds the code to.",
        "",
        "![The packages of pmesh from testing down to errors](diagrams/layers.svg)",
        "",
        "```text",
        " → ".join(" | ".join(names) for names in layers),
        "```",
        "",
    ]
    for name, machine in MACHINES.items():
        lines += describe_machine(name, machine)
    lines += ["An empty cell: the signal can't come in that state.", ""]
    return "\n".join(lines)


def draw_all(linter: Path = LINTER) -> dict[Path, str]:
    """Each file, by its path below the repository, with what it must hold."""
    layers = read_layers(linter)
    machines = {
        FOLDER / "diagrams" / f"{name}.svg": draw_machine(machine)
        for name, machine in MACHINES.items()
    }
    layers_file = {FOLDER / "diagrams" / "layers.svg": draw_layers(layers)}
    return {FOLDER / "diagrams.md": write_page(layers)} | layers_file | machines


if __name__ == "__main__":
    for path, content in draw_all().items():
        (ROOT / path).parent.mkdir(exist_ok=True)
        (ROOT / path).write_text(content, encoding="utf-8")
        print(f"wrote {path}")
