"""`pmesh doctor`: prints a line for each check while they are made, or JSON at the end."""

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.text import Text

from pmesh.cli.doctor.looks import Looks
from pmesh.cli.doctor.rules.findings import Finding, Verdict, diagnose, exit_code
from pmesh.terminal.lines import say_json
from pmesh.terminal.rows import output

_MARKS: Final[dict[Verdict, tuple[str, str]]] = {
    "well": ("✓", "green"),
    "remark": ("!", "yellow"),
    "cause": ("✕", "red"),
    "not looked at": ("·", "dim"),
    "failed": ("?", "yellow"),
}
_INDENT: Final = 16  # "! local network "


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What `pmesh doctor --json` prints."""

    schema: int = 1
    exit_code: int
    findings: tuple[Finding, ...]


def run_doctor(home: Path | None, peers: tuple[str, ...], *, as_json: bool) -> int:
    """Make the checks; return 0 if nothing keeps machines apart, 1 if something does, else 2."""
    findings = diagnose(Looks(home, peers).checks())
    if as_json:
        found = tuple(findings)
        code = exit_code(found)
        say_json(msgspec.json.encode(Diagnosis(exit_code=code, findings=found)))
        return code
    return exit_code(show(findings, output()))


def show(findings: Iterator[Finding], console: Console) -> Sequence[Finding]:
    """Print each finding as soon as it is there, and a last line; return them all."""
    found: list[Finding] = []
    for finding in findings:
        found.append(finding)
        if finding.verdict != "not tried":
            _show_one(finding, console)
    untried = [finding.check for finding in found if finding.verdict == "not tried"]
    if untried:
        _say(console, f"· not tried: {', '.join(untried)}", 2, "dim")
    causes = sum(finding.verdict == "cause" for finding in found)
    remarks = sum(finding.verdict == "remark" for finding in found)
    last = "1 cause" if causes == 1 else f"{causes or 'no'} causes"
    rest = f"; {remarks} remark{'s' * (remarks > 1)}" if remarks else ""
    _say(console, f"{last} found{rest}", 0, "red" if causes else "green")
    return found


def _show_one(finding: Finding, console: Console) -> None:
    mark, style = _MARKS[finding.verdict]
    _say(console, f"{mark} {finding.check:<{_INDENT - 3}} {finding.found}", _INDENT, style)
    for text, begin in ((finding.means, ""), (finding.todo, "→ ")):
        if text:
            _say(console, f"{'':{_INDENT}}{begin}{text}", _INDENT + len(begin), "")


def _say(console: Console, text: str, indent: int, style: str) -> None:
    """Print one text in lines that begin below its own beginning; no word is cut."""
    lines = textwrap.wrap(
        text,
        max(console.width, indent + 20),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    for line in lines:
        console.print(Text(line, style), soft_wrap=True)
