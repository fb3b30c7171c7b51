import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worlds.faults import Faults
from tools import check_coverage
from tools.check_coverage import Covered

TOOL = Path(check_coverage.__file__)


def measured(percent: int) -> Covered:
    return Covered(covered=percent, total=100, missing=("a file: 3",))


@pytest.mark.parametrize(
    ("path", "percent", "passes"),
    [
        ("pmesh/core/values.py", 100, True),
        ("pmesh/core/values.py", 99, False),
        ("pmesh/ids.py", 99, False),
        ("pmesh/p2p/rules.py", 99, False),
        ("pmesh/store/rules/table.py", 99, False),
        ("pmesh/store/client.py", 90, True),
        ("pmesh/net/links/acceptor.py", 90, True),
        ("pmesh/net/links/acceptor.py", 89, False),
        ("pmesh/__init__.py", 89, False),
    ],
)
def test_each_package_has_its_floor(
    path: str,
    percent: int,
    passes: bool,  # noqa: FBT001 - a parameter of the table
    faults: Faults,
    capsys: pytest.CaptureFixture[str],
) -> None:
    faults.instead(check_coverage, "read_data", lambda: [(path, measured(percent))])

    assert (check_coverage.main() == 0) == passes
    assert ("a file: 3" in capsys.readouterr().out) != passes


def test_a_good_package_does_not_make_up_for_a_bad_one(faults: Faults) -> None:
    files = [("pmesh/core/a.py", measured(100)), ("pmesh/cli/b.py", measured(50))]
    faults.instead(check_coverage, "read_data", lambda: files)

    assert check_coverage.main() == 1


def run_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Without the settings by which these tests themselves may be measured.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COV")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def measure_one_file(folder: Path, *options: str) -> None:
    package = folder / "pmesh" / "core"
    package.mkdir(parents=True)
    (package / "one.py").write_text("x = 1\nif x:\n    x = 2\n")
    run_in(folder, "-m", "coverage", "run", *options, "--source", "pmesh", "pmesh/core/one.py")


def test_a_branch_that_no_test_takes_is_read_from_real_data(tmp_path: Path) -> None:
    measure_one_file(tmp_path, "--branch")

    checked = run_in(tmp_path, str(TOOL))

    assert checked.returncode == 1, checked.stderr
    assert "BELOW its floor of 100 %" in checked.stdout
    assert "one.py: 2->-1" in checked.stdout


def test_data_without_branches_is_refused(tmp_path: Path) -> None:
    measure_one_file(tmp_path)

    assert "no coverage data with branches" in run_in(tmp_path, str(TOOL)).stderr
