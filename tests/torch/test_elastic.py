"""DDP that goes on when ranks are lost and enter."""

import os
from typing import Any

import pytest
import torch

from pmesh.client.calls.queue import Line
from pmesh.torch.arguments import StagedTensor
from pmesh.torch.data_parallel import Reducer, cut_into_buckets
from tests.torch.conftest import RankPrograms
from tests.torch.elastic import WAYS

pytestmark = [pytest.mark.slow, pytest.mark.measured]


@pytest.fixture
def line() -> Any:
    line = Line()
    yield line
    line.end()


def parameters(**counts: int) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(count) for name, count in counts.items()}


def gradients_of(names: str) -> dict[str, StagedTensor]:
    return {name: StagedTensor(torch.zeros(1)) for name in names}


def test_buckets_follow_the_parameters_from_the_last_to_the_first() -> None:
    many = parameters(a=2, b=3, c=1, d=1)

    assert cut_into_buckets(many, 8) == [["d", "c"], ["b"], ["a"]]
    assert cut_into_buckets(many, 1000) == [["d", "c", "b", "a"]]


def test_a_first_bucket_is_small_so_that_its_op_begins_early() -> None:
    mib = parameters(a=2**18, b=2**18, c=2**18, d=2**18)

    assert cut_into_buckets(mib, 25 * 2**20) == [["d"], ["c", "b", "a"]]


@pytest.mark.parametrize("layout", [["abcd"], ["d", "c", "b", "a"], ["ab", "cd"], ["bd", "ac"]])
def test_ops_are_the_same_whatever_the_buckets_of_ddp(line: Line, layout: list[str]) -> None:
    ops: list[str] = []
    gradients = Reducer(["dc", "b", "a"], lambda bucket: ops.append("".join(bucket)), line)

    for _ in range(2):
        done = [gradients.add(gradients_of(names)) for names in layout]
        for each in done:
            each.result(60)

    assert ops == ["dc", "b", "a"] * 2


def test_after_an_op_that_failed_the_rest_of_its_pass_is_left_out(line: Line) -> None:
    ops: list[str] = []

    def average(bucket: Any) -> None:
        ops.append("".join(bucket))
        if ops == ["d", "b"]:
            raise ValueError("of the second")

    gradients = Reducer(["d", "b", "a"], average, line)

    first, *rest = [gradients.add(gradients_of(name)) for name in "dba"]
    first.result(60)
    for each in rest:
        with pytest.raises(ValueError, match="of the second"):
            each.result(60)
    gradients.add(gradients_of("abd")).result(60)

    assert ops == ["d", "b", "d", "b", "a"]


def test_a_training_in_which_a_rank_is_killed_and_comes_back_learns_as_much(
    programs: RankPrograms,
) -> None:
    losses: list[float] = []
    for kills in ("undisturbed", "killed"):
        folder = programs.folder / kills
        folder.mkdir()
        arguments = ("tests.torch.elastic", "comes_back", str(folder), kills)
        assert programs.run(*arguments, PMESH_JOB=kills) == [0, 0, 0]
        found = [torch.load(folder / f"{rank}.pt") for rank in range(3)]
        assert [each["size"] for each in found] == [3] * 3
        assert len({each["loss"] for each in found}) == 1
        assert [each["late"] for each in found] == [False, kills == "killed", False]
        survivors = [each["sizes"] for each in found if not each["late"]]
        assert survivors == [{2, 3} if kills == "killed" else {3}] * len(survivors)
        losses.append(found[0]["loss"])

    assert losses[1] == pytest.approx(losses[0], rel=0.01)


def test_a_newcomer_gets_everything_however_its_buckets_lie(programs: RankPrograms) -> None:
    folder = programs.folder / "late"
    folder.mkdir()
    for way in WAYS:
        os.mkfifo(folder / f"{way} begun")

    assert programs.run("tests.torch.elastic", "enters_late", str(folder)) == [0, 0, 0]


@pytest.mark.parametrize("program", ["adds_up", "guards", "disagree"])
def test_gradients_are_those_of_all_or_an_error_at_all(
    programs: RankPrograms, program: str
) -> None:
    assert programs.run("tests.torch.elastic", program, PMESH_JOB=program) == [0, 0, 0]


def test_what_can_t_be_elastic_is_refused(programs: RankPrograms) -> None:
    folder = programs.folder / "refused"
    folder.mkdir()

    assert programs.run("tests.torch.elastic", "refuses", str(folder), PMESH_JOB="refuses") == [
        0,
        0,
        0,
    ]
