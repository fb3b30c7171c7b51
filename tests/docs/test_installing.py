"""What the pages and messages say of installing, and of versions."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT, read

FOLDERS = ("pmesh", "docs", "tools", "examples", "simulation", "tests")
ENDS = {".py", ".md", ".in", ".toml"}
FILES = sorted(
    path
    for path in (
        *ROOT.glob("*"),
        *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*")),
    )
    if path.suffix in ENDS and "_build" not in path.parts and path != Path(__file__)
)
FROM_PYPI = re.compile(r"pip install (?:-\S+ )*['\"]?pmesh\b|(?<![\w.])pmesh\[[a-z]")


def test_nothing_says_to_install_the_project_that_has_this_name_on_pypi() -> None:
    said = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in FILES
        for line in read(path).splitlines()
        if FROM_PYPI.search(line)
    ]
    assert said == []


@pytest.mark.parametrize(
    "line", ["pip install pmesh", "pip install -U 'pmesh[mlx]'", 'add "pmesh[torch]" to it']
)
def test_the_ways_to_say_so_are_noticed(line: str) -> None:
    assert FROM_PYPI.search(line)


def test_no_page_repeats_the_number_of_the_protocol() -> None:
    pages = [page for page in PAGES if page.parent != DOCS / "notes"]
    assert [page.name for page in pages if re.search(r"\bprotocol 1\d\b", read(page))] == []
