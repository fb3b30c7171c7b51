"""What is measured is judged by its bar, kept in files, and printed as it is."""

from pathlib import Path

import msgspec
import pytest

from tests.docs.pages import DOCS, read
from tools.__main__ import main
from tools.campaigns import CAMPAIGNS, find_campaign, is_met, keep
from tools.chaos.report import render
from tools.lab.measured import Measured, Results
from tools.lab.results import read_results

PAGE = DOCS / "explanation" / "reliability.md"


def measured(fault: str = "kill-node", **more: object) -> Measured:
    known: dict[str, object] = {
        "command": f"python -m tools run {fault}",
        "commit": "0123abc",
        "machine": "2 cores",
        "nodes": 4,
        "op_bytes": 16 << 20,
        "seed": 1,
        "ops_checked": 100,
    }
    return Measured(fault=fault, **(known | more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("recovery_s", "met"),
    [
        ((0.15,) * 20, True),
        ((0.17,) * 20, False),  # its median is more than 60 ms above the clean op's
        ((0.15,) * 19 + (9.0,), True),  # one in twenty is beyond the 95th percentile
        ((0.15,) * 18 + (0.41,) * 2, False),
        ((), False),
    ],
)
def test_a_kill_is_measured_against_the_clean_op_of_its_run(
    recovery_s: tuple[float, ...],
    met: bool,  # noqa: FBT001 - a table of cases
) -> None:
    assert is_met(measured(recovery_s=recovery_s, clean_s=(0.1, 0.1, 0.5))) is met
    assert not is_met(measured(recovery_s=recovery_s))


def test_a_violation_misses_the_bar_whatever_the_times_are() -> None:
    good = measured(recovery_s=(0.1,), clean_s=(0.1,))

    assert is_met(good)
    assert not is_met(msgspec.structs.replace(good, violations=("step 3 is torn",)))


@pytest.mark.parametrize("fault", [campaign.name for campaign in CAMPAIGNS])
def test_a_campaign_that_measured_nothing_has_met_nothing(fault: str) -> None:
    assert not is_met(measured(fault, ops_checked=0))


def test_a_stopped_trainer_must_be_named_soon_and_left_behind_neither_early_nor_late() -> None:
    def met(*, told: float = 1.0, first: float = 4.1, last: float = 6.0) -> bool:
        facts = {
            "straggler_after, s": 4.0,
            "slowest to be told by name, s": told,
            "first to go on, s": first,
        }
        return is_met(measured("stop-trainer", facts=facts, recovery_s=(first, last)))

    assert met()
    assert not met(told=2.6)
    assert not met(first=3.9)
    assert not met(last=6.6)


def test_the_names_of_campaigns_are_unique_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0

    lines = capsys.readouterr().out.splitlines()
    listed = [line.split()[0] for line in lines if line.startswith(" ")]
    assert {campaign.name for campaign in CAMPAIGNS} <= set(listed)
    assert len(set(listed)) == len(listed)
    assert find_campaign("churn").episodes == 20


def test_a_long_campaign_may_be_measured_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    parts = ({"took, s": 2.0, "longest, s": 3.0}, {"took, s": 5.0, "longest, s": 1.0, "ops": 1.0})
    for seed, facts in enumerate(parts):
        part = measured(recovery_s=(0.1 + seed,), clean_s=(0.2,), violations=("v",), facts=facts)
        keep(path, part, add=True)

    (whole,) = read_results(path, Results).measured
    assert whole.recovery_s == (0.1, 1.1)
    assert (whole.ops_checked, whole.violations, whole.clean_s) == (200, ("v", "v"), (0.2, 0.2))
    assert whole.facts == {"took, s": 7.0, "longest, s": 3.0, "ops": 1.0}
    assert whole.command.splitlines() == ["python -m tools run kill-node"] * 2


def test_a_bar_that_was_met_in_fewer_tries_than_it_asks_for_says_so() -> None:
    few = measured("loss", command="python -m tools run loss --episodes 1")
    enough = measured("clocks", command="python -m tools run clocks --episodes 1")
    page = render([Results(measured=(few, enough))])

    assert "| met, in 1 of 3 |" in page
    assert "2 of 2 bars met. In fewer tries than the bar asks for: loss. Not measured" in page


def test_the_page_is_what_the_tool_writes_of_the_results_beside_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["report", "reliability"]) == 0

    assert read(PAGE) == capsys.readouterr().out
