"""TRL's trainers over pmesh: as they are with the numbers of gloo, and elastic with their own."""

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.torch.conftest import RankPrograms

if find_spec("trl") is None and not os.environ.get("CI"):
    pytest.skip("needs: pip install --group trl", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.measured]
KINDS = pytest.mark.parametrize("kind", ["sft", "dpo"])


@KINDS
def test_an_unchanged_script_has_the_numbers_of_gloo(programs: RankPrograms, kind: str) -> None:
    found = {}
    for backend in ("pmesh", "gloo"):
        folder = programs.folder / f"trl-{kind}-{backend}"
        folder.mkdir()
        called = ("tests.torch.trl_trainers", "unchanged", str(folder), kind, backend)
        assert programs.run(*called) == [0, 0, 0]
        found[backend] = [torch.load(folder / f"rank-{rank}.pt") for rank in range(3)]
    for ours, theirs in zip(found["pmesh"], found["gloo"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours["net"], found["pmesh"][0]["net"], rtol=0, atol=0)


@KINDS
def test_elastic_ranks_have_the_weights_of_one_process_with_their_batches(
    programs: RankPrograms, kind: str
) -> None:
    folder = programs.folder / f"trl-{kind}"
    folder.mkdir()
    assert programs.run("tests.torch.trl_trainers", "alone", str(folder), kind, ranks=1) == [0]
    alone = torch.load(folder / "alone.pt")
    found = {}
    for kills in ("undisturbed", "killed"):
        called = ("tests.torch.trl_trainers", "elastic", str(folder), kind, kills)
        assert programs.run(*called, PMESH_JOB=f"{folder.name}-{kills}") == [0, 0, 0]
        found[kills] = [torch.load(folder / f"{rank}.pt") for rank in range(3)]
        for each in found[kills]:
            assert each["steps"] == alone["steps"] == 10
            torch.testing.assert_close(each["weights"], found[kills][0]["weights"], rtol=0, atol=0)
    for each in found["undisturbed"]:
        torch.testing.assert_close(each, alone, rtol=1e-5, atol=1e-5)
    assert learned(found["killed"][0]) == pytest.approx(learned(alone), rel=0.1)


def learned(training: dict[str, Any]) -> float:
    """By how much the loss has fallen from the first steps, when nobody was lost yet."""
    losses = [loss for _, loss, *_ in training["logs"]]
    return float(losses[0] - losses[-1])
