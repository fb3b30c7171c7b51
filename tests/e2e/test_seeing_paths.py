"""What a user sees of two networks between two machines."""

import json
from collections.abc import Callable

import pytest

from pmesh.agent.schema import PathStatus, Status
from tests.e2e.harness import Fleet
from tools.lab.net import NetLab

pytestmark = [pytest.mark.netns, pytest.mark.slow]


def paths_in(status: Status) -> dict[str | None, PathStatus]:
    """Return the paths to the other machine, by their interface here."""
    return {path.interface: path for member in status.view.members for path in member.paths}


def test_both_cables_are_shown_and_tried_and_when_one_is_pulled_the_other_is_in_use(
    fleet: Fleet, make_lab: Callable[..., NetLab]
) -> None:
    lab = make_lab(2, networks=2)
    one, _ = fleet.start_in(lab)
    both = {"eth0", "eth1"}
    status = one.await_status(
        lambda status: (
            paths_in(status).keys() == both
            and {path.use for path in paths_in(status).values()} == {"in use", "standby"}
        )
    )
    assert {path.kind for path in paths_in(status).values()} == {"wired"}
    assert {path.remote for path in paths_in(status).values()} == both
    screen = fleet.pmesh("status", "--all", home=one.home).stdout
    (line,) = [line.split() for line in screen.splitlines() if "⇄ mac-2" in line]
    assert line[2] in both

    shown = fleet.pmesh("ping", "mac-2", home=one.home)
    assert shown.returncode == 0, shown
    *ways, last = shown.stdout.splitlines()
    assert {line.split()[0] for line in ways} == both
    assert all(" ms" in line for line in ways)
    used, _, why = last.partition(" is used: ")
    assert why

    lab.unplug(lab.hosts[0], 0 if used == "eth0" else 1)
    (other,) = both - {used}
    one.await_status(
        lambda status: other in paths_in(status) and paths_in(status)[other].use == "in use"
    )
    report = json.loads(fleet.pmesh("ping", "mac-2", "--json", home=one.home).stdout)
    assert report["used"]["interface"] == other
    page = json.loads(fleet.pmesh("events", "--json", home=one.home).stdout)
    switches = [event for event in page["events"] if event["kind"] == "path changed"]
    assert switches
    assert all(event["names"] == ["mac-2"] for event in switches)
    assert all(event["duration_s"] is not None for event in switches)
