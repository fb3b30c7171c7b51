import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, read
from tests.e2e.harness import Fleet

pytestmark = pytest.mark.slow

SCRIPTS = [
    *(("slow-links", 0), ("models-that-do-not-fit", 0), ("models-that-do-not-fit", 1)),
    ("unequal-machines", 0),
]


@pytest.mark.e2e
@pytest.mark.parametrize(("page", "number"), SCRIPTS)
def test_the_scripts_of_the_pages_train_on_two_ranks(fleet: Fleet, page: str, number: int) -> None:
    text = read(DOCS / "how-to" / f"{page}.md")
    script = text.split("```python\n")[number + 1].split("```")[0]
    agent = fleet.start_agent("mac-1", "--no-mdns")
    agent.await_status(lambda _: True)

    trainers = [fleet.start_trainer(agent, script) for _ in range(2)]

    printed = sorted(trainer.await_end() for trainer in trainers)
    assert [line.partition(": ")[0] for line in printed] == ["rank 0", "rank 1"]
    if page == "slow-links":
        assert len({line.partition(": ")[2] for line in printed}) == 1


@pytest.mark.e2e
def test_the_script_on_saving_saves_its_last_step(fleet: Fleet, tmp_path: Path) -> None:
    text = read(DOCS / "how-to" / "saving-and-resuming.md")
    folder = tmp_path / "saves"
    script = text.split("```python\n")[1].split("```")[0].replace("~/line-checkpoints", str(folder))
    agent = fleet.start_agent("mac-1", "--no-mdns")
    agent.await_status(lambda _: True)

    trainers = [fleet.start_trainer(agent, script) for _ in range(2)]
    for trainer in trainers:
        trainer.await_end()

    listed = fleet.pmesh("checkpoint", "list", str(folder), home=agent.home).stdout
    assert "2 of 2" in listed
    assert "300" in listed


@pytest.mark.e2e
def test_the_script_for_machines_of_two_makers_trains_on_two_ranks(fleet: Fleet) -> None:
    pytest.importorskip("torch")
    text = read(DOCS / "how-to" / "mac-and-nvidia.md")
    script = text.split("```python\n")[1].split("```")[0]
    agent = fleet.start_agent("mac-1", "--no-mdns")
    agent.await_status(lambda _: True)
    command = [sys.executable, "-c", script]

    ranks = [
        fleet.start_program(f"rank {n}", command, host=None, home=agent.home, PMESH_WAIT_FOR="2")
        for n in range(2)
    ]

    weights = "[[1. 2. 3.]]"
    assert sorted(rank.await_end() for rank in ranks) == [f"rank {n}: {weights}" for n in range(2)]
