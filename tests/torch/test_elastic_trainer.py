"""Transformers' Trainer goes on when ranks are lost, and ranks enter it."""

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from pmesh.client.mesh import order_of
from tests.torch.conftest import RankPrograms
from tests.torch.elastic_trainer import ALL_AGAIN_AT, KILLED_AT, STEPS

if find_spec("accelerate") is None and not os.environ.get("CI"):
    pytest.skip("needs: pip install --group hugging-face", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.measured]
OF_EPOCH = 9  # steps, of 24 of 200 rows


@pytest.mark.parametrize("accumulated", ["1", "2"])
@pytest.mark.parametrize("kind", ["digits", "texts"])
def test_ranks_have_the_weights_of_one_process_with_their_batches(
    programs: RankPrograms, kind: str, accumulated: str
) -> None:
    folder = programs.folder / f"{kind}-{accumulated}"
    folder.mkdir()
    called = ("tests.torch.elastic_trainer", "alone", str(folder), kind, accumulated)
    assert programs.run(*called, ranks=1) == [0]
    called = ("tests.torch.elastic_trainer", "together", str(folder), kind, accumulated)
    assert programs.run(*called, PMESH_JOB=folder.name, PMESH_SHARES="even") == [0, 0, 0]

    alone = torch.load(folder / "alone.pt")
    ranks = [torch.load(folder / f"{rank}.pt") for rank in range(3)]
    assert len(alone["logs"]) == alone["steps"] // 2 == 8
    for each in ranks:
        assert same_bits(each["weights"], ranks[0]["weights"])
        torch.testing.assert_close(each["weights"], alone["weights"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(each["logs"], alone["logs"], rtol=1e-5, atol=1e-5)
        for name in ("steps", "epoch", "loss"):
            assert each[name] == pytest.approx(alone[name], rel=1e-5), name


def same_bits(weights: dict[str, Any], others: dict[str, Any]) -> bool:
    return all(torch.equal(weights[name], others[name]) for name in weights)


def test_the_others_go_on_without_a_rank_and_it_comes_back(programs: RankPrograms) -> None:
    losses: list[float] = []
    for kills in ("undisturbed", "killed"):
        folder = programs.folder / f"trainer-{kills}"
        folder.mkdir()
        called = ("tests.torch.elastic_trainer", "comes_back", str(folder), kills)
        assert programs.run(*called, PMESH_JOB=folder.name) == [0, 0, 0]
        ranks = [torch.load(folder / f"{rank}.pt") for rank in range(3)]
        assert [each["late"] for each in ranks] == [False, kills == "killed", False]
        for name in ("steps", "epoch", "last", "loss", "best", "eval"):
            assert len({str(each[name]) for each in ranks}) == 1, name
        assert ranks[0]["steps"] == STEPS
        assert same_bits(ranks[1]["weights"], ranks[0]["weights"])
        assert same_bits(ranks[2]["weights"], ranks[0]["weights"])
        for each in ranks:
            assert (
                ("trainer_state.json" in each["saved"])
                == (each["rank"] == 0)
                == bool(each["saved"])
            )
        for step in range(STEPS):
            check_rows(step, [each["taken"].get(step, []) for each in ranks], kills)
        losses.append(ranks[0]["eval"])
        assert ranks[0]["sizes"] == ({2, 3} if kills == "killed" else {3})
    assert ranks[1]["taken"].keys() == set(range(min(ranks[1]["taken"]), STEPS))
    assert KILLED_AT < min(ranks[1]["taken"]) <= ALL_AGAIN_AT
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


def check_rows(step: int, taken: list[list[int]], kills: str) -> None:
    """All ranks that are there take the rows of the step, each of them once."""
    epoch, number = divmod(step, OF_EPOCH)
    rows = order_of(200, epoch=epoch, seed=3)[24 * number :][:24].tolist()
    found = sorted(row for each in taken for row in each)
    if kills == "killed" and step <= KILLED_AT:
        assert set(found) < set(rows)  # what the killed one took is not known
    else:
        assert found == sorted(rows)


@pytest.mark.parametrize("program", ["refuses", "imports_late", "resumes"])
def test_what_can_t_be_elastic_is_refused_and_checkpoints_are_compared(
    programs: RankPrograms, program: str
) -> None:
    folder = programs.folder / f"trainer-{program}"
    folder.mkdir()
    called = ("tests.torch.elastic_trainer", program, str(folder))
    assert programs.run(*called, PMESH_JOB=folder.name) == [0, 0, 0]
