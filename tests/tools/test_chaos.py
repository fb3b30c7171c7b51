"""The campaigns' short form: a few kills of each kind, on real agents and real trainers."""

import signal
import subprocess
from pathlib import Path

import pytest

from tests.tools.running import run_tool, start_tool
from tools.lab.measured import Results
from tools.lab.net import PREFIX, labs
from tools.lab.results import read_results

pytestmark = [pytest.mark.e2e, pytest.mark.netns, pytest.mark.timeout(300), pytest.mark.slow]


def labs_of(owner: subprocess.Popen[str]) -> set[str]:
    """Its own, and not the namespace in which it or another tries whether it can make one."""
    return {name for name in labs() if name.startswith(f"{PREFIX}-{owner.pid}-")}


def test_a_few_kills_of_each_kind_tear_nothing(tmp_path: Path) -> None:
    results = tmp_path / "short.json"
    _, output = run_tool("chaos", "--short", "--json", str(results), within_s=200)

    # Nothing wrong is asserted; how long it took is printed: this machine may be busy.
    measured = {m.fault: m for m in read_results(results, Results).measured}
    assert [m.violations for m in measured.values() if m.violations] == [], output
    assert all(m.ops_checked > 0 for m in measured.values()), output
    assert {"kill-agent", "kill-trainer", "kill-node", "kill-leader", "torn"} < set(measured)


def test_cables_that_are_pulled_and_plugged_in_lose_nobody(tmp_path: Path) -> None:
    results = tmp_path / "cables.json"
    names = ["cable", "vanish", "plug", "flap"]
    options = ["--episodes", "1", "--size-mb", "1", "--json", str(results)]
    _, output = run_tool(*names, *options, within_s=200)

    measured = {m.fault: m for m in read_results(results, Results).measured}
    assert [m.violations for m in measured.values() if m.violations] == [], output
    assert set(measured) == set(names)
    assert all(m.ops_checked > 0 for m in measured.values()), output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_behind(number: signal.Signals) -> None:
    with start_tool("kill-node", "--episodes", "1000", "--size-mb", "1") as process:
        assert process.stdout is not None
        process.stdout.readline()  # it says what it does, then begins
        while not (started := labs_of(process)):
            assert process.poll() is None
        process.send_signal(number)
        process.communicate(timeout=60)

    assert process.returncode in {130, 143}
    assert not started & set(labs())
