import enum
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tools import diagrams
from tools.diagrams import LINTER, ROOT, Edge, Machine, draw_all, edges_of, read_layers

SVG = "{http://www.w3.org/2000/svg}"


class Light(enum.Enum):
    RED = "red"
    GREEN = "green"


class Button(enum.Enum):
    PRESSED = "pressed"
    HELD = "held"
    RELEASED = "released"


CROSSING = Machine.of(
    "A crossing",
    "street",
    Button,
    {
        Light.RED: {Button.PRESSED: Light.GREEN, Button.HELD: Light.GREEN},
        Light.GREEN: {Button.RELEASED: Light.RED, Button.PRESSED: Light.GREEN},
    },
)


@pytest.mark.parametrize("path", draw_all(), ids=str)
def test_the_committed_diagrams_are_what_the_tables_say(path: Path) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == draw_all()[path], (
        "a table has changed: run 'python tools/diagrams.py'"
    )


def test_signals_that_lead_alike_share_an_arrow_and_staying_is_none() -> None:
    assert edges_of(CROSSING) == [
        Edge(start=0, end=1, label="pressed, held"),
        Edge(start=1, end=0, label="released"),
    ]


def test_a_picture_shows_every_state_and_every_arrow() -> None:
    root = ET.fromstring(diagrams.draw_machine(CROSSING))  # noqa: S314 - our own words

    words = [text.text for text in root.iter(f"{SVG}text")]
    assert words == ["pressed, held", "released", "red", "green", "stays: pressed"]
    assert len([path for path in root.iter(f"{SVG}path") if path.get("class") == "edge"]) == 2


def test_no_picture_reaches_beyond_its_page() -> None:
    for name, machine in diagrams.MACHINES.items():
        root = ET.fromstring(diagrams.draw_machine(machine))  # noqa: S314 - likewise
        height = int(root.attrib["height"])
        rows = [int(text.attrib["y"]) for text in root.iter(f"{SVG}text")]
        assert 0 < min(rows) < max(rows) < height, name


def test_the_table_leaves_a_cell_empty_where_a_signal_cannot_come() -> None:
    lines = list(diagrams.describe_machine("crossing", CROSSING))

    assert "| in | pressed | held | released |" in lines
    assert "| **red** | green | green |  |" in lines


def test_the_layers_are_those_that_the_linter_holds() -> None:
    layers = read_layers(LINTER)

    assert layers[0] == ("testing",)
    assert ("net", "client") in layers
    assert layers[-1] == ("errors",)
