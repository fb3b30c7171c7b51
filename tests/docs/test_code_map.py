"""The maps of the code name what is there, and nothing else."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

import pmesh.core
from tests.docs.pages import DOCS, PAGES, ROOT, code_in, flat, read, sections, table_rows
from tools.__main__ import TOOLS, find
from tools.chaos.bars import CAMPAIGNS as CHAOS
from tools.lab.measured import Results
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
    commands = set(re.findall(r"python -m (tools[.\w]*)", page))
    files = {path.relative_to(ROOT) for path in (ROOT / "tools").rglob("*.py") if is_program(path)}
    unnamed = {
        path
        for path in files
        if ".".join(path.with_suffix("").parts).removesuffix(".__main__") not in commands
        and f"`{path}`" not in page
    }

    assert unnamed == set()
    assert len(files) > 10


def test_the_page_on_tests_has_each_campaign_with_its_bar_and_the_commit_of_its_result() -> None:
    files = (DOCS / "explanation" / "reliability").glob("*.json")
    stored: dict[str, set[str]] = defaultdict(set)
    for measured in (each for file in files for each in read_results(file, Results).measured):
        stored[measured.fault].add(f"`{measured.commit}`")
    rows = {row[0].strip("`"): row for row in table_rows(read(HOW_WE_TEST))}

    for campaign in CHAOS:
        _, _, bar, took, _, last = rows[campaign.name]
        assert bar == campaign.bar
        if campaign.name in stored:
            assert any(commit in last for commit in stored[campaign.name])
        else:
            assert took == last == "not stored"


def test_the_page_on_tests_names_every_tool_and_every_row() -> None:
    named = {word for code in code_in(read(HOW_WE_TEST)) for word in code.split()}

    assert {tool.name for tool in TOOLS} - {"chaos"} <= named
    assert {row.name for tool in TOOLS for row in tool.rows()} <= named


def test_every_tool_has_its_function() -> None:
    for tool in TOOLS:  # not imported: some need torch or MLX
        module, _, function = tool.function.partition(":")
        assert f"def {function}(" in read(ROOT / f"{module.replace('.', '/')}.py"), tool.name


COMMAND = re.compile(r"python -m tools(?P<module>[.\w]*)(?P<words>(?: (?:[\w/.-]+))*)")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda path: path.name)
def test_every_command_of_the_tools_that_a_page_shows_is_there(page: Path) -> None:
    for found in COMMAND.finditer(flat(read(page))):
        module, words = found["module"].rstrip("."), found["words"].split()
        if module:
            path = ROOT / f"tools{module.replace('.', '/')}.py"
            assert path.exists(), found[0]
            assert is_program(path), found[0]
        elif words[:1] == ["run"] and words[1:] and words[1] != "NAME":
            assert find(words[1])
        elif words[:1] == ["report"] and words[1:2] != ["PAGE"]:
            assert (DOCS / "explanation" / f"{words[1]}.md.in").exists(), found[0]
        else:
            assert words[:1] in ([], ["list"], ["run"], ["report"]), found[0]
