"""The tables of states in docs/explanation/diagrams.md are those that the code goes by."""

import configparser
from collections.abc import Mapping
from enum import Enum
from typing import Any

import pytest

from pmesh.core.links import dialing, health
from tests.docs.pages import DOCS, ROOT, read, sections

PAGE = read(DOCS / "explanation" / "diagrams.md")


def cells(line: str) -> list[str]:
    return [cell.strip("* ") for cell in line.strip("|").split("|")]


@pytest.mark.parametrize(
    ("heading", "signals", "table"),
    [
        ("What is thought of a peer", health.HealthEvent, health.TRANSITIONS),
        ("When a machine is dialled", dialing.DialEvent, dialing.TRANSITIONS),
    ],
)
def test_the_page_has_the_transitions_of_the_code(
    heading: str, signals: type[Enum], table: Mapping[Any, Mapping[Any, Enum]]
) -> None:
    head, _, *rows = (line for line in sections(PAGE)[heading].splitlines() if line[:1] == "|")

    assert cells(head) == ["in", *(signal.value for signal in signals)]
    assert [cells(row) for row in rows] == [
        [state.value, *(moves[s].value if s in moves else "" for s in signals)]
        for state, moves in table.items()
    ]


def test_the_page_has_the_layers_that_the_linter_holds() -> None:
    linter = configparser.ConfigParser()
    linter.read_string(read(ROOT / ".importlinter"))
    layers = linter["importlinter:contract:layers"]["layers"].strip().split("\n")

    assert " → ".join(layers) in PAGE
