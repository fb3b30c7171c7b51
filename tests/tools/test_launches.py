"""The short form of the campaigns on `pmesh run --on`: real agents and ranks on a network."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.tools.running import run_tool
from tools.__main__ import main
from tools.lab.measured import Results
from tools.lab.results import read_results

pytestmark = [pytest.mark.e2e, pytest.mark.netns, pytest.mark.timeout(600), pytest.mark.slow]


def launches(*arguments: str) -> str:
    code, output = run_tool(*arguments, within_s=550)
    # No time is asserted: this machine may be busy. What went wrong is named.
    assert "VIOLATION" not in output, output
    assert code in {0, 1}, output
    return output


def test_a_blow_leaves_nothing_running_that_must_end(tmp_path: Path) -> None:
    cases = ["starter", "starter-machine", "cable-pmesh"]  # tests/e2e/test_launches.py has others
    if find_spec("mlx"):
        cases.append("machine-mlx-ring")
    results = tmp_path / "kills.json"
    # In one process: what it and the agents import is imported once.
    launches(*cases, "--episodes", "1", "--json", str(results))
    struck = {measured.fault: measured for measured in read_results(results, Results).measured}
    assert set(struck) == set(cases)
    assert all(measured.ops_checked == 1 for measured in struck.values())


def test_no_line_of_a_flood_is_lost_or_torn(tmp_path: Path) -> None:
    results = tmp_path / "flood.json"
    launches("flood", "--short", "--json", str(results))
    (measured,) = read_results(results, Results).measured
    assert measured.ops_checked == 4 * 2000 * 2
    assert measured.facts["lost, torn, or out of order"] == 0


def test_a_terminal_that_does_not_read_holds_nobody_up() -> None:
    output = launches("terminals", "--short")
    assert "is stopped (SIGSTOP): " in output


def test_a_case_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "no-such-case"]) == 1
    output = "".join(capsys.readouterr())
    assert "nothing is called 'no-such-case'; 'python -m tools list' shows what there is" in output
