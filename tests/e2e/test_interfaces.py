"""Machines with two cables between them, whose routes name only one."""

from collections.abc import Callable

import pytest

from tests.e2e.harness import Fleet, StartedAgent
from tools.lab.net import NetLab, run_system

pytestmark = [pytest.mark.netns, pytest.mark.slow]

CABLES = ("cable0", "cable1")
NEVER_POLL = "from pmesh.net.links import interfaces; interfaces.POLL_S = 1e6"


def connect(lab: NetLab, cable: str, *, v4: bool = True) -> None:
    """A cable of their own, with self-assigned addresses in the same network as every other."""
    one, other = lab.hosts
    subnet = 1 + CABLES.index(cable)
    cable_ends = f"link add {cable} type veth peer name {cable} netns {other.namespace}\n"
    for host, first in ((one, cable_ends), (other, "")):
        address = f"169.254.{subnet}.{host.number}/16"
        if not v4:
            address = f"fe80::{subnet}:{host.number}/64"
        commands = f"""{first}
            link set {cable} addrgenmode none
            link set {cable} up
            addr add {address} dev {cable} {"" if v4 else "nodad"}
        """
        run_system(["ip", "-netns", host.namespace, "-batch", "-"], stdin=commands)


def interface_between(one: StartedAgent, other: StartedAgent) -> str | None:
    """Over which interface the first one's link with the other runs."""
    (member,) = [m for m in one.status().view.members if m.name == other.name]
    return member.interface


@pytest.mark.parametrize("cable", CABLES)
@pytest.mark.parametrize("v4", [True, False])
def test_each_of_two_cables_in_one_network_is_used_if_the_user_names_it(
    fleet: Fleet, make_lab: Callable[[int], NetLab], cable: str, *, v4: bool
) -> None:
    """By mDNS alone: questions, answers and links all keep to the cable."""
    lab = make_lab(2)
    for each in CABLES:
        connect(lab, each, v4=v4)
    one, two = fleet.start_in(lab, "--interface", cable)
    assert interface_between(one, two) == interface_between(two, one) == cable
    number = 1 + CABLES.index(cable)
    host = f"169.254.{number}.1" if v4 else f"[fe80::{number}:1]"
    assert [address.rpartition(":")[0] for address in one.status().node.addresses] == [host]


def test_an_interface_that_is_not_to_be_used_is_not(
    fleet: Fleet, make_lab: Callable[[int], NetLab]
) -> None:
    lab = make_lab(2)
    for cable in CABLES:
        connect(lab, cable)
    one, two = fleet.start_in(lab, "--not-interface", "cable0", "--not-interface", "eth0")
    assert interface_between(one, two) == "cable1"


def test_a_cable_is_used_if_only_one_side_names_it(
    fleet: Fleet, make_lab: Callable[[int], NetLab]
) -> None:
    lab = make_lab(2)
    for cable in CABLES:
        connect(lab, cable)
    one = fleet.start_agent("mac-1", host=lab.hosts[0])
    two = fleet.start_agent("mac-2", "--interface", "cable1", host=lab.hosts[1])
    fleet.await_view(one, two)
    for near, far in ((one, two), (two, one)):  # both dial, and a first link may be replaced
        near.await_status(lambda _, ends=(near, far): interface_between(*ends) == "cable1")  # type: ignore[misc]


def test_a_connection_over_an_interface_that_is_not_used_is_refused(
    fleet: Fleet, make_lab: Callable[[int], NetLab]
) -> None:
    lab = make_lab(2)
    connect(lab, "cable0")
    one = fleet.start_agent("mac-1", "--interface", "cable0", host=lab.hosts[0])
    two = fleet.start_agent("mac-2", "--no-mdns", "--peer", lab.hosts[0].ipv4, host=lab.hosts[1])
    one.await_status(lambda status: status.door.refused > 0)
    assert len(two.status().view.members) == 1


def test_a_cable_without_ipv4_is_used_beside_a_network_that_has_it(
    fleet: Fleet, make_lab: Callable[[int], NetLab]
) -> None:
    lab = make_lab(2)
    connect(lab, "cable0", v4=False)
    lab.cut(*lab.hosts)
    one, two = fleet.start_in(lab)
    assert interface_between(one, two) == "cable0"


def test_a_cable_that_is_pulled_or_plugged_in_is_noticed_without_polling(
    fleet: Fleet, make_lab: Callable[[int], NetLab]
) -> None:
    lab = make_lab(2)
    here, there = lab.hosts
    agent = fleet.start_agent("mac-1", host=here, patch=NEVER_POLL)

    def has_cable(*, yes: bool) -> None:
        agent.await_status(lambda status: any("169." in a for a in status.node.addresses) is yes)

    has_cable(yes=False)
    connect(lab, "cable0")
    has_cable(yes=True)
    for state, yes in (("down", False), ("up", True)):  # the carrier comes from the other end
        run_system(["ip", "-netns", there.namespace, "link", "set", "cable0", state])
        has_cable(yes=yes)
