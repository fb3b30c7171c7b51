"""The short form of the campaign that kills machines under torch, Transformers and Lightning."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools.running import run_tool
from tools.kills.campaign import KillTally
from tools.kills.launched import Ended, judge
from tools.lab.measured import Results
from tools.lab.results import read_results

pytestmark = [pytest.mark.e2e, pytest.mark.netns]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_training_with_a_kill_ends_as_one_without(tmp_path: Path) -> None:
    pytest.importorskip("transformers")  # by which the campaign begins
    pytest.importorskip("accelerate")
    results = tmp_path / "kills.json"
    options = ("trainer-kills", "--short", "--steps", "16", "--json", str(results))

    code, output = run_tool(*options, within_s=290)

    assert code == 0, output
    (measured,) = read_results(results, Results).measured
    assert measured.violations == ()
    assert measured.facts["kills"] == 1
    assert measured.ops_checked == 6  # three ranks of the training with a kill, three without


class Weights:
    """A tensor with one value, as far as the judge uses it."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __sub__(self, other: "Weights") -> "Weights":
        return Weights(self.value - other.value)

    def abs(self) -> "Weights":
        return Weights(abs(self.value))

    def max(self) -> float:
        return self.value


WHOLE = Ended(steps=9, loss=0.5, net={"w": Weights(1.0)})


def test_the_same_weights_everywhere_are_no_violation() -> None:
    tally = KillTally()

    judge(tally, "training 1", WHOLE, [replace(WHOLE, net={"w": Weights(1.000001)})] * 3)

    assert tally.violations == []
    assert 0 < tally.facts["weights differ at most"] < 1e-5


@pytest.mark.parametrize(
    ("ended", "says"),
    [
        ([WHOLE, replace(WHOLE, steps=8)], "[9, 8] steps, undisturbed 9"),
        ([WHOLE, replace(WHOLE, net={"w": Weights(1.000001)})], "different weights"),
        ([replace(WHOLE, net={"w": Weights(1.1)})], "differs by 1.0e-01 from the undisturbed"),
        ([replace(WHOLE, net={"w": Weights(float("nan"))})], "differs by nan"),
        ([replace(WHOLE, loss=0.51)], "loss 0.51, undisturbed 0.5"),
    ],
)
def test_another_end_is_a_violation(ended: list[Ended], says: str) -> None:
    tally = KillTally()

    judge(tally, "training 1", WHOLE, ended)

    assert any(says in violation for violation in tally.violations)
