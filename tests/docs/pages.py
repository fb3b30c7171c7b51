"""The written pages, cut into sections, tables and commands."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    [
        *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
        *(p for p in DOCS.rglob("*.md") if "_build" not in p.parts),
    ]
)

_COMMAND = re.compile(r"^ *(?:\S*\$ +)?(?:PMESH_\w+=\S+ +)?(pmesh [a-z-][^#|&'`]*)")


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def flat(text: str) -> str:
    """The text on one line."""
    return " ".join(text.split())


def sections(text: str, level: int = 2) -> dict[str, str]:
    """Each heading of the level, without its backticks, and what stands below it."""
    hashes = "#" * level
    pieces = re.split(rf"^{hashes} (.+)$", text, flags=re.MULTILINE)
    return {
        heading.replace("`", ""): body
        for heading, body in zip(pieces[1::2], pieces[2::2], strict=True)
    }


def table_rows(text: str) -> Iterator[list[str]]:
    """The cells of all tables' rows, without the heads."""
    body = False
    for line in text.splitlines():
        if not line.startswith("|"):
            body = False
        elif set(line) <= set("|-"):
            body = True
        elif body:
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def code_in(cell: str) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`]+)`", cell)


def shown_commands(text: str) -> Iterator[str]:
    """Each pmesh command in an indented block, cut where the shell would."""
    for line in text.splitlines():
        found = _COMMAND.match(line) if line.startswith("    ") else None
        if found is not None:
            yield found.group(1).strip()
