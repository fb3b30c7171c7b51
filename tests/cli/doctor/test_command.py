"""How findings are printed."""

import io
from collections.abc import Sequence

import pytest

from pmesh.cli.doctor.command import show
from pmesh.cli.doctor.rules.findings import Finding, NamedCheck, cause, diagnose, remark, well
from pmesh.terminal.rows import Output

EVIL = "\x1b[2Jmac\n✓ home"


def shown(width: int, *checks: NamedCheck) -> list[str]:
    console = Output(width=width)
    console.file = io.StringIO()
    show(diagnose(checks), console)
    return console.file.getvalue().splitlines()


def check(name: str, *findings: Finding) -> NamedCheck:
    def run() -> Sequence[Finding]:
        return findings

    return NamedCheck(name, run)


def test_each_finding_has_a_line_and_what_it_means_below() -> None:
    lines = shown(
        200,
        check("home", well("it is yours")),
        check("clocks", remark("a clock is apart", means="Logs differ.", todo="set it")),
        check("links", cause("mac-2 is not linked", todo="pmesh up")),
        check("sleep", well("")),
        check("speed", well("")),
    )
    assert lines == [
        "✓ home          it is yours",
        "! clocks        a clock is apart",
        "                Logs differ.",
        "                → set it",
        "✕ links         mac-2 is not linked",
        "                → pmesh up",
        "· not tried: sleep, speed",
        "1 cause found; 1 remark",
    ]


@pytest.mark.parametrize(
    ("findings", "last"),
    [
        ((), "no causes found"),
        ((remark("a"), remark("b")), "no causes found; 2 remarks"),
        ((cause("a"), cause("b")), "2 causes found"),
    ],
)
def test_the_last_line_counts(findings: tuple[Finding, ...], last: str) -> None:
    assert shown(80, check("x", *findings))[-1] == last


def test_a_narrow_terminal_gets_whole_words_below_each_other() -> None:
    text = "a machine with a rather long name is not linked, as its port does not answer"
    lines = shown(60, check("large packets", cause(text, means=text, todo=text)))
    assert max(map(len, lines)) <= 60
    assert all(line.startswith(" " * 16) for line in lines[1:-1])
    assert " ".join(" ".join(lines).split()).count(text) == 3


def test_what_others_have_written_begins_no_line_and_controls_no_terminal() -> None:
    lines = shown(200, check("links", cause(f"{EVIL} is not linked", todo=EVIL)))
    assert not any("\x1b" in line or line.startswith("✓") for line in lines)
    assert "�[2Jmac ✓ home is not linked" in lines[0]
