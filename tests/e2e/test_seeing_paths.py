"""What a user sees of two networks between two machines."""

import json
from collections.abc import Callable

import pytest

from pmesh.agent.status.schema import PathStatus, Status
from tests.e2e.harness import Fleet
from tools.lab.net import NetLab

pytestmark = pytest.mark.netns


def paths_in(status: Status) -> dict[str | None, PathStatus]:
    """Return the paths to the other machine, by their interface here."""
    return {path.interface: path for member in status.view.members for path in member.paths}


def test_both_cables_are_shown_and_tried_and_when_one_is_pulled_the_other_is_in_use(
    fleet: Fleet, make_lab: Callable[..., NetLab]
) -> None:
    lab = make_lab(2, networks=2)
    one, two = (
        fleet.start_agent(name, host=host)
        for name, host in zip(("mac-1", "mac-2"), lab.hosts, strict=True)
    )
    fleet.await_view(one, two)
    status = one.await_status(lambda status: paths_in(status).keys() == {"eth0", "eth1"})
    assert {path.kind for path in paths_in(status).values()} == {"wired"}
    assert {path.remote for path in paths_in(status).values()} == {"eth0", "eth1"}
    assert sorted(path.use for path in paths_in(status).values()) == ["in use", "standby"]
    (used,) = [name for name, path in paths_in(status).items() if path.use == "in use"]
    (other,) = {"eth0", "eth1"} - {used}

    screen = fleet.pmesh("status", home=one.home).stdout
    assert [line.split()[:3] for line in screen.splitlines() if "⇄ mac-2" in line] == [
        ["⇄", "mac-2", used]
    ]
    shown = fleet.pmesh("ping", "mac-2", home=one.home)
    assert shown.returncode == 0, shown
    lines = shown.stdout.splitlines()
    assert {line.split()[0] for line in lines[:2]} == {"eth0", "eth1"}
    assert all(line.endswith(" ms") or " ms  " in line for line in lines[:2])
    assert lines[2].startswith(f"{used} is used: ")

    lab.unplug(lab.hosts[0], 0 if used == "eth0" else 1)
    one.await_status(
        lambda status: other in paths_in(status) and paths_in(status)[other].use == "in use"
    )
    report = json.loads(fleet.pmesh("ping", "mac-2", "--json", home=one.home).stdout)
    assert report["used"]["interface"] == other
    (event,) = [
        event
        for event in json.loads(fleet.pmesh("events", "--json", home=one.home).stdout)["events"]
        if event["kind"] == "path changed"
    ]
    assert event["names"] == ["mac-2"]
    assert event["duration_s"] is not None
