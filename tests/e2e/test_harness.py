"""The harness itself: it waits for what is said, and leaves nothing behind."""

import contextlib
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.harness import Fleet, Running, StartedAgent
from tools.lab.net import NetLab

pytestmark = pytest.mark.slow


def run(fleet: Fleet, source: str) -> Running:
    """A program at an agent of which only the home is there."""
    return fleet.start_trainer(nobody(fleet), source)


def nobody(fleet: Fleet) -> StartedAgent:
    """An agent that has ended already."""
    process = fleet.start_program("none", ["true"], host=None, home=Path("/nonexistent"))
    process.await_end()
    return StartedAgent(process, Path("/nonexistent"), None)


def test_lines_are_found_in_order_and_each_once(fleet: Fleet) -> None:
    program = run(fleet, "for n in range(4): print('step', n)")

    assert program.await_line(r"step (\d)")[1] == "0"
    assert program.await_line(r"step [23]")[0] == "step 2"
    assert program.await_line(r"step (\d)")[1] == "3"


def test_standard_error_is_part_of_the_output(fleet: Fleet) -> None:
    program = run(fleet, "import sys; sys.stderr.write('to stderr\\n')")

    assert program.await_end() == "to stderr"


def test_a_line_that_never_comes_fails_as_soon_as_the_program_ends(fleet: Fleet) -> None:
    program = run(fleet, "print('something else')")

    with pytest.raises(AssertionError, match="something else"):
        program.await_line("awaited", timeout_s=1000)


def test_a_line_that_does_not_come_in_time_fails_and_shows_what_came(fleet: Fleet) -> None:
    program = run(fleet, "print('waiting'); import time; time.sleep(1000)")
    program.await_line("waiting")

    with pytest.raises(AssertionError, match="waiting"):
        program.await_line("awaited", timeout_s=0.01)


def test_another_exit_code_than_the_awaited_one_fails(fleet: Fleet) -> None:
    program = run(fleet, "print('bye'); raise SystemExit(3)")

    with pytest.raises(AssertionError, match=r"ended with 3, not 0(?s:.*)bye"):
        program.await_end()
    program.await_end(code=3)


def test_an_agent_that_has_ended_fails_the_wait_for_its_status_at_once(fleet: Fleet) -> None:
    with pytest.raises(AssertionError, match="it has ended"):
        nobody(fleet).await_status(lambda _: True, timeout_s=1000)


def test_what_a_program_has_started_is_reaped_with_it_even_if_stopped() -> None:
    fleet = Fleet()
    program = run(
        fleet,
        """
        import subprocess, time
        print(subprocess.Popen(["sleep", "1000"]).pid)
        time.sleep(1000)
        """,
    )
    grandchild = int(program.await_line(r"^\d+$")[0])
    program.send_signal(signal.SIGSTOP)

    fleet.close()

    assert not program.alive
    with contextlib.suppress(psutil.NoSuchProcess):
        # Whoever inherits it may take a moment to collect it.
        psutil.Process(grandchild).wait(10)


def test_a_fleet_leaves_no_files(fleet: Fleet) -> None:
    other = Fleet()
    home = other.home("mac-1")
    home.mkdir()
    other.close()

    assert not home.parent.exists()
    assert fleet.home("mac-1") != home


def test_settings_of_a_developer_do_not_reach_the_processes(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMESH_NAME", "mine")
    program = run(fleet, "import os; print({k for k in os.environ if k.startswith('PMESH_')})")

    assert program.await_end() == "{'PMESH_HOME'}"


def test_commands_know_the_home(fleet: Fleet) -> None:
    home = fleet.home("mac-1")

    taken = fleet.pmesh("key", "set", home=home, piped=fleet.mesh_key)
    shown = fleet.pmesh("key", "show", home=home)

    assert taken.returncode == 0, taken.stderr
    assert shown.stdout.splitlines()[-1] == fleet.mesh_key


@pytest.mark.netns
def test_a_program_runs_in_the_host_of_its_agent(
    fleet: Fleet, make_lab: Callable[[int], NetLab]
) -> None:
    host = make_lab(2).hosts[1]
    agent = StartedAgent(nobody(fleet).process, Path("/nonexistent"), host)
    source = "import psutil; print(*(a.address for a in psutil.net_if_addrs()['eth0']))"

    assert host.ipv4 in fleet.start_trainer(agent, source).await_end()


def test_every_test_of_this_folder_is_marked(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("e2e") is not None


def test_a_signal_goes_to_the_program(fleet: Fleet) -> None:
    program = run(
        fleet,
        """
        import signal
        signal.signal(signal.SIGTERM, lambda *_: print("leaving") or exit(0))
        print("ready")
        signal.pause()
        """,
    )
    program.await_line("ready")

    program.send_signal(signal.SIGTERM)

    assert program.await_end().endswith("leaving")
