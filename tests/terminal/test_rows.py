"""Tables in terminals of every width, and in pipes."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from pmesh.terminal import rows
from pmesh.terminal.rows import Rows

ADDRESS = "[fd77:1234:5678:9abc:def0::1]:24160"
WHY = "PeerUnreachable: it does not answer; check that the machine is awake and runs 'pmesh up'"
NOT_LINKED = Rows(
    ("peer", "id", "addresses", "why"),
    [("mac-2", "v4abqb5x", f"{ADDRESS}\n10.0.0.2:24160", Text(WHY)), ("mac-3", "xyz", "", "")],
    title="Not linked",
)


def shown(width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(NOT_LINKED)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_address_and_no_name_of_an_error_is_cut(width: int) -> None:
    text = shown(width)
    assert ADDRESS in text
    assert "PeerUnreachable: " in text
    assert " ".join(text.split()).count("…") == 0
    assert all(word in text for word in WHY.split())
    assert all(len(line) <= width for line in text.splitlines())


def test_a_wide_terminal_has_one_line_for_each_row() -> None:
    lines = [line.split() for line in shown(200).splitlines()]
    assert ["peer", "id", "addresses", "why"] in lines
    assert ["mac-3", "xyz"] in lines


def test_a_narrow_terminal_has_one_line_for_each_cell() -> None:
    lines = [line.split() for line in shown(60).splitlines()]
    assert ["id", "v4abqb5x"] in lines
    assert ["addresses", ADDRESS] in lines
    assert ["peer", "mac-3"] in lines
    assert ["why"] not in lines  # of mac-3, which has none


@pytest.mark.parametrize("width", [30, 60, 70, 80, 100])
def test_no_word_of_a_cell_with_spaces_is_cut(width: int) -> None:
    cells = ("2026-11-22 17:30:00.000", "30.0 ± 60.7 ms", f"{ADDRESS}\nring: mac-1 → mac-2")
    rows = Rows(("time", "round trip", "what happened"), [cells])
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(rows)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    joined = "".join("".join(lines).split())
    assert all(word in joined for cell in cells for word in cell.split())


def test_what_is_longer_than_the_terminal_continues_on_the_next_line() -> None:
    assert ADDRESS in "".join(
        line.removeprefix("addresses").strip() for line in shown(30).split("\n")
    )


def test_a_pipe_has_no_right_margin(capsys: pytest.CaptureFixture[str]) -> None:
    rows.output().print("x" * 500)
    assert capsys.readouterr().out == "x" * 500 + "\n"
