"""What prose names exists: modules, classes and functions of ours, and the design's rules."""

import re
from importlib.util import find_spec
from pkgutil import resolve_name

from tests.docs.pages import DOCS, PAGES, ROOT, read

SOURCES = sorted(
    path for top in ("pmesh", "simulation", "tools", "tests") for path in (ROOT / top).rglob("*.py")
)
NAME = re.compile(r"`((?:pmesh|simulation|tools)(?:\.\w+)+)(?:\(\))?`")
RULE = re.compile(r"(?<![\w.-])([VO]\d{1,2}|I[1-8])\b(?![.-]\w)")


def exists(name: str) -> bool:
    if name.startswith("pmesh.torch") and find_spec("torch") is None:  # torch is optional
        return True
    try:
        resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_every_name_of_ours_that_prose_mentions_exists() -> None:
    named = {(path, name) for path in (*SOURCES, *PAGES) for name in NAME.findall(read(path))}
    known = {name: exists(name) for _, name in named}
    assert [f"{path}: {name}" for path, name in sorted(named) if not known[name]] == []


def test_every_rule_that_is_named_is_among_the_rules() -> None:
    rules = read(DOCS / "explanation" / "rules.md")
    defined = set(re.findall(r"^(?:- \*\*|\| )([VOI]\d+)(?: \||,|\.|:)", rules, re.MULTILINE))
    assert {"V1", "V10", "O9", "I8"} <= defined
    named = {(path, rule) for path in (*SOURCES, *PAGES) for rule in RULE.findall(read(path))}
    assert [f"{path}: {rule}" for path, rule in sorted(named) if rule not in defined] == []
