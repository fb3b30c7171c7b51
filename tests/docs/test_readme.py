import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, read
from tests.e2e.harness import Fleet

README = read(ROOT / "README.md")


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    try:
        yield fleet
    finally:
        fleet.close()


@pytest.mark.e2e
def test_the_ten_lines_print_on_both_ranks_what_the_readme_shows(fleet: Fleet) -> None:
    script = README.split("```python\n")[1].split("```")[0]
    shown = README.split("```text\n")[1].split("```")[0].split("\n")
    agent = fleet.start_agent("mac-1", "--no-mdns")
    agent.await_status(lambda _: True)

    trainers = [fleet.start_trainer(agent, script) for _ in range(2)]

    printed = sorted(trainer.await_end() for trainer in trainers)
    assert [line.partition(": ")[0] for line in printed] == [
        line.partition(": ")[0] for line in shown if line
    ]
    weights = {line.partition(": ")[2] for line in printed}
    assert len(weights) == 1
    assert [round(float(w), 3) for w in re.findall(r"[\d.]+", weights.pop())] == [1.0, 2.0, 3.0]


def test_the_ten_lines_are_ten() -> None:
    script = README.split("```python\n")[1].split("```")[0]

    assert len([line for line in script.splitlines() if line]) == 10


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_to_a_file_leads_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", read(path)):
        assert (path.parent / link).exists(), link


def test_every_make_target_that_is_named_exists() -> None:
    named = {
        target
        for path in PAGES
        for target in re.findall(r"(?:`|^ {4})make (\w+)", read(path), re.MULTILINE)
    }
    makefile = read(ROOT / "Makefile")

    assert {"demo", "docs"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
