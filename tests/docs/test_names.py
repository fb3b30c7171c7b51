"""What prose names exists: modules, classes and functions of ours, and the design's rules."""

import re
from importlib.util import find_spec
from pkgutil import resolve_name

from tests.docs.pages import DOCS, PAGES, ROOT, flat, read, sections, table_rows
from tests.simulation.mutations import MUTATIONS

SOURCES = sorted(
    path for top in ("pmesh", "simulation", "tools", "tests") for path in (ROOT / top).rglob("*.py")
)
NAME = re.compile(r"`((?:pmesh|simulation|tools)(?:\.\w+)+)(?:\(\))?`")
RULE = re.compile(r"(?<![\w.-])([VO]\d{1,2}|I[1-8]|S[1-9])\b(?![.-]\w)")
RULES = read(DOCS / "explanation" / "rules.md")


def exists(name: str) -> bool:
    if name.startswith("pmesh.torch") and find_spec("torch") is None:  # torch is optional
        return True
    try:
        resolve_name(name)
    except (ImportError, AttributeError):
        return is_module(name)
    return True


def is_module(name: str) -> bool:
    """Also one that imports a library which is not there."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_every_name_of_ours_that_prose_mentions_exists() -> None:
    named = {(path, name) for path in (*SOURCES, *PAGES) for name in NAME.findall(read(path))}
    known = {name: exists(name) for _, name in named}
    assert [f"{path}: {name}" for path, name in sorted(named) if not known[name]] == []


def test_every_rule_that_is_named_is_among_the_rules() -> None:
    defined = set(re.findall(r"^(?:### |\| )([VOIS]\d+)(?:,| \|)", RULES, re.MULTILINE))
    assert {"V1", "V10", "O9", "I8", "S4"} <= defined
    named = {(path, rule) for path in (*SOURCES, *PAGES) for rule in RULE.findall(read(path))}
    assert [f"{path}: {rule}" for path, rule in sorted(named) if rule not in defined] == []


def test_each_rule_says_where_it_is_enforced_and_what_breaks_without_it() -> None:
    rules = {name: body for name, body in sections(RULES, 3).items() if re.match("[VOS]\\d", name)}
    assert len(rules) >= 27
    assert [n for n, body in rules.items() if "*Enforced in* `pmesh." not in flat(body)] == []
    assert [
        n for n, body in rules.items() if not re.search(r"\*Without it\*: [*`]", flat(body))
    ] == []


def test_each_mutation_is_named_at_its_rules() -> None:
    bodies = {name.split(",")[0]: body for name, body in sections(RULES, 3).items()}
    rows = {row[0]: row[-1] for row in table_rows(RULES)}
    for name, mutation in MUTATIONS.items():
        for rule in RULE.findall(mutation.rule):
            assert f"*{name}*" in (bodies | rows)[rule], f"{name} is missing at {rule}"


def test_every_test_that_the_rules_name_exists() -> None:
    paths = re.findall(r"`((?:tests|simulation)/[\w/.]+)`", RULES)
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []
