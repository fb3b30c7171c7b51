"""The status as a person reads it."""

import io

import pytest
from rich.console import Console

from pmesh.agent.status import Status
from pmesh.cli.report import bytes_text, render_status
from tests.cli.fake_agent import MINIMAL, PICTURE


def shown(status: Status) -> str:
    console = Console(file=io.StringIO(), width=120, color_system=None, legacy_windows=False)
    console.print(render_status(status, width=120))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    "words",
    [
        "mac-1 aaaaaaaa · 10.0.0.1:24160 · pid 4242, up 62 s · pmesh 0.1.0 · compression auto",
        "compression in�t8: why",
        "View 7, 3 in the ring",
        "╭─▶ ● mac-1 ★ ──▶ ● mac-2",
        "0.50 ms",
        "en0",
        "other mesh key",
        "holds another mesh key",
        "waiting for 3",
        "below min ranks",
        "1 mac-2 stopped",
        "stu�dio enters at the next sync",
        "mac-1 waits",
        "it has 2 of the 3",
        "rank 1 (studio) is lost: silent",
        "data 2.5 MB sent, 0 B received; control 1.5 kB sent, 999 B received",
        "loop lag 1.2 ms; 9 connections came, 6 turned away, 1 pending",
        "also turned away: 2 links of members that broke the protocol",
    ],
)
def test_the_picture_shows(words: str) -> None:
    assert words in shown(PICTURE)


def test_what_a_stranger_calls_itself_does_not_steer_the_terminal() -> None:
    assert "\x1b" not in shown(PICTURE)
    assert "next�[2J-door" in shown(PICTURE)


def test_a_quiet_mesh_has_no_empty_tables() -> None:
    assert "Jobs" not in shown(MINIMAL)
    assert "Not linked" not in shown(MINIMAL)


def test_no_number_of_bytes_lacks_a_unit() -> None:
    assert bytes_text(10**21) == "1000000.0 PB"
