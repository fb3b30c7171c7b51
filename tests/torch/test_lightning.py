"""Lightning's Trainer and Fabric have over pmesh the numbers of gloo."""

import os
import tomllib
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from pmesh.torch.lightning import callbacks
from tests.torch.conftest import RankPrograms

if find_spec("lightning") is None and not os.environ.get("CI"):
    pytest.skip("needs: pip install --group lightning", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.measured]

MODULE = "tests.torch.with_lightning"
WAYS = "launched", "by_hand", "answered"
"""The three ways to pmesh: `pmesh run` of a script for pmesh; by hand; of a script for gloo."""


def found_by(programs: RankPrograms, program: str, way: str) -> list[dict[str, Any]]:
    folder = programs.folder / f"lightning-{program}-{way}"
    folder.mkdir()
    assert programs.run(MODULE, program, str(folder), way) == [0, 0, 0]
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(3)]


@pytest.fixture(scope="module", params=["trainer", "fabric"])
def over_gloo(
    programs: RankPrograms, request: pytest.FixtureRequest
) -> tuple[str, list[dict[str, Any]]]:
    return request.param, found_by(programs, request.param, "gloo")


@pytest.mark.parametrize("way", WAYS)
def test_trainer_and_fabric_have_the_numbers_of_gloo(
    programs: RankPrograms, over_gloo: tuple[str, list[dict[str, Any]]], way: str
) -> None:
    program, theirs = over_gloo
    ours = found_by(programs, program, way)
    for rank in range(3):
        torch.testing.assert_close(ours[rank].pop("net"), theirs[rank]["net"], rtol=1e-5, atol=1e-5)
        for name, value in ours[rank].items():
            if name in {"saved", "csv", "path"}:
                assert value == theirs[rank][name]
            else:
                torch.testing.assert_close(value, theirs[rank][name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "program",
    ["refusals", "alone", "beside_gloo", "of_other_checkpoints", "odd_reports", "on_mps"],
)
def test_what_lightning_would_do_otherwise_is_refused_or_done(
    programs: RankPrograms, program: str
) -> None:
    folder = programs.folder / f"lightning-{program}"
    folder.mkdir()
    assert programs.run(MODULE, program, str(folder)) == [0, 0, 0]


def test_lightning_finds_the_callback_by_its_entry_points() -> None:
    """Whatever is installed here: those of pyproject.toml, in the groups that Lightning reads."""
    project = Path(__file__).parents[2] / "pyproject.toml"
    points = tomllib.loads(project.read_text())["project"]["entry-points"]
    for place in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        group = f"{place}.callbacks_factory"
        assert EntryPoint("pmesh", points[group]["pmesh"], group).load() is callbacks
        owner = find_spec(place)
        if owner is not None and owner.origin is not None:
            sources = Path(owner.origin).parent.rglob("*.py")
            assert any(f'"{group}"' in source.read_text() for source in sources), group
