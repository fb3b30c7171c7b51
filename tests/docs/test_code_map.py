"""The maps of the code name what is there, and nothing else."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

import pmesh.core
from tests.docs.pages import DOCS, ROOT, code_in, read, sections, table_rows
from tools.bench.cases import CASES
from tools.chaos.bars import CAMPAIGNS
from tools.chaos.results import Results
from tools.hostile.rows import ROWS
from tools.lab.results import read_results

CONTRIBUTING = ROOT / "CONTRIBUTING.md"
HOW_WE_TEST = DOCS / "explanation" / "how-we-test.md"
MAPPED = ("pmesh", "simulation", "tools", "tests/worlds")
ENTRY = re.compile(r"^(\w+) {2,}", re.MULTILINE)


def modules_in(folder: Path) -> set[str]:
    """Its modules and subpackages."""
    files = {path.stem for path in folder.glob("*.py")}
    return (files | {path.parent.name for path in folder.glob("*/__init__.py")}) - {"__init__"}


def entries_of(docstring: str) -> dict[str, set[str]]:
    """Each name at the start of a line, and the words beside it that stand in no parentheses."""
    _, *pieces = ENTRY.split(re.sub(r"\([^)]*\)", "", docstring))
    lists = (text.partition("\n\n")[0] for text in pieces[1::2])
    words = (set(re.findall(r"\w+", text)) - {"and"} for text in lists)
    return dict(zip(pieces[::2], words, strict=True))


def test_the_docstring_of_the_core_names_all_its_modules_and_no_others() -> None:
    core = Path(pmesh.core.__path__[0])
    named = entries_of(pmesh.core.__doc__ or "")

    assert set(named) == modules_in(core)
    for package in named:
        if (core / package).is_dir():
            assert named[package] == modules_in(core / package), package


def test_the_code_map_has_a_line_for_each_package_and_no_other() -> None:
    listed = re.findall(r"^- `([^`]+/)`: ", sections(read(CONTRIBUTING))["Code map"], re.MULTILINE)
    packages = (path.parent for top in MAPPED for path in (ROOT / top).rglob("__init__.py"))

    assert sorted(listed) == sorted(f"{package.relative_to(ROOT)}/" for package in packages)


@pytest.mark.parametrize("page", [CONTRIBUTING, HOW_WE_TEST], ids=lambda path: path.name)
def test_every_path_and_test_in_backticks_exists(page: Path) -> None:
    words = [code.partition("::") for code in code_in(read(page)) if " " not in code]
    named = [(ROOT / path, test) for path, _, test in words if "/" in path or path[-3:] == ".md"]

    assert [path for path, _ in named if not path.exists()] == []
    assert [test for path, test in named if test and f"def {test}(" not in read(path)] == []
    assert len(named) > 20


def is_program(path: Path) -> bool:
    return path.name == "__main__.py" or 'if __name__ == "__main__":' in read(path)


def test_the_page_on_tests_names_every_program_of_the_tools() -> None:
    page = read(HOW_WE_TEST)
    commands = set(re.findall(r"python -m (tools[.\w]*\w)", page))
    files = {path.relative_to(ROOT) for path in (ROOT / "tools").rglob("*.py") if is_program(path)}
    unnamed = {
        path
        for path in files
        if ".".join(path.with_suffix("").parts).removesuffix(".__main__") not in commands
        and f"`{path}`" not in page
    }

    assert unnamed == set()
    assert len(files) > 30


def test_the_page_on_tests_has_each_campaign_with_its_bar_and_the_commit_of_its_result() -> None:
    files = (DOCS / "explanation" / "reliability").glob("*.json")
    stored: dict[str, set[str]] = defaultdict(set)
    for measured in (each for file in files for each in read_results(file, Results).measured):
        stored[measured.fault].add(f"`{measured.commit}`")
    rows = {row[0].strip("`"): row for row in table_rows(read(HOW_WE_TEST))}

    for campaign in CAMPAIGNS:
        _, _, bar, took, _, last = rows[campaign.name]
        assert bar == campaign.bar
        if campaign.name in stored:
            assert any(commit in last for commit in stored[campaign.name])
        else:
            assert took == last == "not stored"


def test_the_page_on_tests_names_all_that_the_bench_and_the_attacks_can_run() -> None:
    named = set(code_in(read(HOW_WE_TEST)))

    assert {case.name for case in CASES} | {row.name for row in ROWS} <= named
