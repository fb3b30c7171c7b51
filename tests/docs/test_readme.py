import re
import sys
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, read
from tests.e2e.harness import Fleet

pytestmark = pytest.mark.slow

README = read(ROOT / "README.md")


@pytest.mark.e2e
def test_the_ten_lines_print_on_both_machines_what_the_readme_shows(
    fleet: Fleet, tmp_path: Path
) -> None:
    (tmp_path / "line.py").write_text(README.split("```python\n")[1].split("```")[0])
    shown = README.split("```console\n")[1].split("```")[0].splitlines()
    commands = [line.partition("$ pmesh ")[2].split() for line in shown if "$ pmesh " in line]
    assert commands[0] == commands[1] == ["allow", "run"]
    agents = fleet.start_ring("mac-1", "mac-2")
    for agent in agents:  # the test may run as root
        assert fleet.pmesh("allow", "run", "--as-root", home=agent.home).returncode == 0

    *options, program, script = commands[2]
    assert (program, script) == ("python", "line.py")
    options.insert(options.index("--"), f"--cwd={tmp_path}")
    done = fleet.pmesh(*options, sys.executable, script, home=agents[0].home)

    assert done.returncode == 0, done.stderr
    printed, expected = sorted(done.stdout.splitlines()), shown[-2:]
    rank = re.compile(r"rank (\d)")  # the ring decides which machine has rank 0
    assert [rank.sub("rank", line).partition(": ")[0] for line in printed] == [
        rank.sub("rank", line).partition(": ")[0] for line in expected
    ]
    assert sorted(rank.findall(done.stdout)) == ["0", "1"]
    weights = {line.partition(": ")[2] for line in printed}
    assert len(weights) == 1
    assert [round(float(w), 3) for w in re.findall(r"[\d.]+", weights.pop())] == [1.0, 2.0, 3.0]


@pytest.mark.e2e
def test_the_script_of_the_how_to_loses_a_rank_and_takes_in_another(fleet: Fleet) -> None:
    page = read(ROOT / "docs" / "how-to" / "machines-that-come-and-go.md")
    script = page.split("```python\n")[1].split("```")[0]
    script = script.replace("STEPS = 64, 1000", "STEPS = 64, 60").replace(
        "wait_for=2,", "wait_for=2, min_ranks=2,"
    )
    assert script.count("min_ranks=2") == script.count("64, 60") == 1
    dies = script.replace(
        "gradients = loss", "import os; mesh.step == 30 and os._exit(9); gradients = loss"
    )
    assert dies.count("os._exit") == 1
    agent = fleet.start_agent("mac-1", "--no-mdns")
    agent.await_status(lambda _: True)

    survivor, dying = fleet.start_trainer(agent, script), fleet.start_trainer(agent, dies)
    dying.await_end(code=9)
    newcomer = fleet.start_trainer(agent, script)  # until it comes, ops wait

    ended = [
        trainer.await_end().splitlines()[-1].partition(": ") for trainer in (survivor, newcomer)
    ]
    assert [rank for rank, _, _ in ended] == ["rank 0 of 2", "rank 1 of 2"]
    assert len({weights for _, _, weights in ended}) == 1


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
