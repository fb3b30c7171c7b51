"""The short form of the campaigns on `pmesh run --on`: real agents and ranks on a network."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.tools.running import run_tool
from tools.lab.measured import Results
from tools.lab.results import read_results

pytestmark = [pytest.mark.e2e, pytest.mark.netns, pytest.mark.timeout(300), pytest.mark.slow]


def launches(*arguments: str) -> str:
    code, output = run_tool(*arguments, within_s=250)
    # No time is asserted: this machine may be busy. What went wrong is named.
    assert "VIOLATION" not in output, output
    assert code in {0, 1}, output
    return output


@pytest.mark.parametrize(
    "case",
    [
        *("rank-pmesh", "back", "starter", "starter-agent", "starter-machine", "cable-pmesh"),
        pytest.param(
            "machine-mlx-ring",
            marks=pytest.mark.skipif(find_spec("mlx") is None, reason="mlx is not installed"),
        ),
    ],
)
def test_a_blow_leaves_nothing_running_that_must_end(case: str, tmp_path: Path) -> None:
    results = tmp_path / "kills.json"
    launches(case, "--episodes", "1", "--json", str(results))
    (measured,) = read_results(results, Results).measured
    assert measured.ops_checked == 1


def test_no_line_of_a_flood_is_lost_or_torn(tmp_path: Path) -> None:
    results = tmp_path / "flood.json"
    launches("flood", "--short", "--json", str(results))
    (measured,) = read_results(results, Results).measured
    assert measured.ops_checked == 4 * 2000 * 2
    assert measured.facts["lost, torn, or out of order"] == 0


def test_a_terminal_that_does_not_read_holds_nobody_up() -> None:
    output = launches("terminals", "--short")
    assert "is stopped (SIGSTOP): " in output


def test_a_case_that_is_not_there_is_named() -> None:
    output = launches("no-such-case")
    assert "nothing is called 'no-such-case'; 'python -m tools list' shows what there is" in output
