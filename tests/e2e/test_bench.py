"""`pmesh bench` on two machines, as a user runs it."""

import json

import pytest

from pmesh.cli.bench_calls import COLLECTIVES
from tests.e2e.harness import Fleet

pytestmark = pytest.mark.slow

TINY = ("--min-size", "4", "--max-size", "4KiB", "--seconds", "0.001")


def test_every_collective_is_right_on_two_machines(fleet: Fleet) -> None:
    one, other = fleet.start_ring("mac-1", "mac-2")
    command = fleet.start_command("bench", *TINY, home=one.home)
    command.await_line("^waiting until 'pmesh bench' runs on ")
    asked = fleet.pmesh("bench", *TINY, "--json", home=other.home)

    assert asked.returncode == 0, asked.stderr
    report = json.loads(asked.stdout)
    assert report["names"] == ["mac-1", "mac-2"] or report["names"] == ["mac-2", "mac-1"]
    assert all(row["correct"] for row in report["rows"])
    assert {row["collective"] for row in report["rows"]} == {c.name for c in COLLECTIVES}

    printed = command.await_end()
    first, second = report["names"]
    if first == "mac-1":  # rank 0 shows the table
        assert f"2 ranks: {first}, {second}; bandwidth in MB/s" in printed
        assert printed.count("yes") == len(report["rows"])
    else:
        assert f"measured; rank 0, on {first}, shows the table" in printed


def test_machines_that_were_told_different_sizes_say_so_and_the_agents_go_on(
    fleet: Fleet,
) -> None:
    one, other = fleet.start_ring("mac-1", "mac-2")
    command = fleet.start_command("bench", *TINY, home=one.home)
    asked = fleet.pmesh("bench", *TINY, "--collective", "barrier", home=other.home)

    assert asked.returncode == 1
    assert "UsageError: the machines were given different sizes, " in asked.stderr
    assert "UsageError: the machines were given different sizes, " in command.await_end(code=1)
    assert len(one.status().view.members) == 2
