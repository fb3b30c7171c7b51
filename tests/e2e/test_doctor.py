"""Faults that are made for real, each on a machine of its own: `pmesh doctor` names it first.

`tests/cli/doctor/` has those that need no network, and those of macOS.
"""

import json
import re
import shutil
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pmesh.core.wire.link import PROTOCOL_VERSION
from pmesh.home_paths import MESH_KEY_NAME
from tests.e2e.harness import Fleet, Running, StartedAgent
from tests.e2e.odd_agents import OTHER_VERSION, compile_clock
from tools.lab.mesh import new_key
from tools.lab.net import LabHost, NetLab, clean, run_system

pytestmark = [pytest.mark.netns, pytest.mark.slow]

MEMBERS = 3
TRAIN = """
import pmesh, numpy
mesh = pmesh.connect('slow', 2, timeout_s=30)
while True:
    mesh.all_reduce(numpy.ones(250_000))
"""


class MeshWithDoctors:
    """A mesh of three, four other hosts on its network, and doctors."""

    def __init__(self, lab: NetLab, fleet: Fleet) -> None:
        self.lab, self.fleet = lab, fleet
        self.members = [self.start(host) for host in lab.hosts[:MEMBERS]]
        self.spare = lab.hosts[MEMBERS:]
        fleet.await_view(*self.members)

    def start(
        self,
        host: LabHost,
        *options: str,
        mesh_key: str | None = None,
        patch: str = "",
        **variables: str,
    ) -> StartedAgent:
        return self.fleet.start_agent(
            f"mac-{host.number}",
            *options,
            host=host,
            mesh_key=mesh_key,
            patch=patch,
            **variables,
        )

    def call_doctor(self, agent: StartedAgent, *options: str) -> Running:
        """`pmesh doctor` on the machine of this agent, not yet ended."""
        return self.fleet.start_command(
            "doctor", "--json", *options, home=agent.home, host=agent.host
        )

    def in_host(self, host: LabHost, *commands: str) -> None:
        for command in commands:
            run_system(host.command(command.split()))

    def drop(self, name: str, rule: str, host: LabHost | None = None) -> None:
        """Drop what the rule of nftables matches: in a host's input, or at the switch."""
        family, hook = ("bridge", "forward") if host is None else ("inet", "input")
        chain = f"chain {hook} {{\n type filter hook {hook} priority -1\n {rule} drop\n }}\n"
        table = f"table {family} {name} {{\n {chain} }}\n"
        where = f"{self.lab.name}-switch" if host is None else host.namespace
        run_system(["ip", "netns", "exec", where, "nft", "-f", "-"], stdin=table)

    def let_through(self, name: str, host: LabHost | None = None) -> None:
        """Undo `drop`."""
        family = "bridge" if host is None else "inet"
        where = f"{self.lab.name}-switch" if host is None else host.namespace
        run_system(["ip", "netns", "exec", where, "nft", "delete", "table", family, name])


def diagnosis(doctor: Running) -> tuple[str, str, str, int]:
    """What it named first, how, in which words, and its exit code; empty texts if nothing.

    A link that has been silent for half a second is left out: this machine may be busy.
    """
    doctor.join(within_s=30)
    (line,) = [line for line in doctor.printed() if line.startswith("{")]
    report: Mapping[str, Any] = json.loads(line)
    alarms = [
        finding
        for finding in report["findings"]
        if finding["verdict"] in {"remark", "cause", "failed"}
        and not re.fullmatch(r"the link to \S+ was silent for \S+ s lately", finding["found"])
    ]
    first = alarms[0] if alarms else {"check": "", "verdict": "", "found": ""}
    return first["check"], first["verdict"], first["found"], report["exit_code"]


@pytest.fixture(scope="module")
def world() -> Iterator[MeshWithDoctors]:
    clean()  # what a run that was killed has left
    with NetLab(MEMBERS + 4) as lab, Fleet() as fleet:
        yield MeshWithDoctors(lab, fleet)


def test_a_mesh_that_is_well_gives_no_alarm(world: MeshWithDoctors) -> None:
    for doctor in [world.call_doctor(agent) for agent in world.members]:
        assert diagnosis(doctor) == ("", "", "", 0)


def test_packets_that_vanish_on_one_machine_or_between_two_are_named(
    world: MeshWithDoctors,
) -> None:
    one, two, three = world.members
    world.drop("wall", "udp dport 5353", world.lab.hosts[0])
    world.drop("multicast", 'oifname "h2" udp dport 5353')
    world.drop("syn", 'iifname "h3" oifname "h1" tcp flags & (syn | ack) == syn')
    doctors = [world.call_doctor(agent) for agent in (one, two, three)]
    wall, multicast, one_way = map(diagnosis, doctors)
    for name in ("multicast", "syn"):
        world.let_through(name)
    world.let_through("wall", world.lab.hosts[0])

    assert wall[0] == "firewall"
    assert "nftables drops mDNS" in wall[2]
    assert multicast[:2] == ("mDNS", "remark")
    assert "mac-1, mac-3" in multicast[2] or "mac-3, mac-1" in multicast[2]
    assert one_way[:2] == ("connections", "remark")
    assert "mac-1 accepts no connection from here" in one_way[2]
    assert wall[3] == multicast[3] == one_way[3] == 0  # the mesh is whole


def test_a_hole_for_large_packets_and_the_route_of_a_vpn_are_named(world: MeshWithDoctors) -> None:
    one, _, three = world.members
    world.drop("hole", 'iifname "h1" oifname "h2" meta length > 1300')
    world.in_host(
        world.lab.hosts[2],
        "ip link add tun0 type veth peer name tun0-end",
        "ip addr add 10.8.0.1/24 dev tun0",
        "ip link set tun0-end up",
        "ip link set tun0 up",
        "ip route add 10.77.0.2/32 dev tun0",
    )
    hole, vpn = map(diagnosis, [world.call_doctor(one), world.call_doctor(three)])
    world.let_through("hole")
    world.in_host(world.lab.hosts[2], "ip link del tun0")

    assert hole[:2] == ("large packets", "cause")
    assert "small packets reach mac-2 (10.77.0.2:24160), and large ones vanish" in hole[2]
    assert hole[3] == 1
    assert vpn[0] == "routes"
    assert "the route to mac-2 (10.77.0.2) leads through tun0" in vpn[2]


def test_what_keeps_one_machine_alone_is_named(world: MeshWithDoctors) -> None:
    stranger_at, unplugged_at, untold_at, unheard_at = world.spare
    world.lab.unplug(unplugged_at)
    world.drop("multicast", 'iifname "h7" udp dport 5353')
    world.drop("multicast-back", 'oifname "h7" udp dport 5353')
    stranger = world.start(stranger_at, mesh_key=new_key())
    unplugged = world.start(unplugged_at)
    untold = world.start(untold_at, "--no-mdns")
    unheard = world.start(unheard_at)
    lone = (stranger, unplugged, untold, unheard)
    for agent in lone:
        agent.await_status(lambda _: True)
    world.members[0].await_status(lambda s: any(p.state == "other_mesh_key" for p in s.peers))
    doctors = [world.call_doctor(agent) for agent in (*lone, world.members[0])]
    doctors.append(world.call_doctor(unheard, "--peer", world.lab.hosts[0].ipv4))
    *found, there, named = map(diagnosis, doctors)
    for agent in lone:
        agent.process.reap()
    for name in ("multicast", "multicast-back"):
        world.let_through(name)
    world.lab.plug(unplugged_at)

    assert [each[:2] for each in found] == [
        ("mesh keys", "cause"),
        ("interfaces", "cause"),
        ("mDNS", "cause"),
        ("mDNS", "cause"),
    ]
    assert {each[3] for each in found} == {1}
    assert "holds another mesh key" in found[0][2]
    assert found[1][2] == "no network interface is up"
    assert "does not use mDNS" in found[2][2]
    assert found[3][2] == "nobody answers by mDNS"
    assert there[:2] == ("mesh keys", "remark")
    assert named[:2] == ("mDNS", "cause")
    assert "answers by unicast, and is not heard by mDNS" in named[2]


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_what_makes_a_member_slow_or_unwise_is_named_and_is_no_cause(
    world: MeshWithDoctors, tmp_path: Path
) -> None:
    plain_at, key_at, clock_at, slow_at = world.spare
    world.lab.shape(slow_at, bits_per_s=30_000_000)
    key_file = world.fleet.home(f"mac-{key_at.number}") / MESH_KEY_NAME
    key_file.parent.mkdir(mode=0o700, exist_ok=True)
    key_file.touch(mode=0o600)
    key_file.write_text(world.fleet.mesh_key)
    plain = world.start(plain_at, PMESH_NATIVE="0")
    rekeyed = world.start(key_at, mesh_key="")
    dreamer = world.start(clock_at, LD_PRELOAD=str(compile_clock(tmp_path)))
    joined = [plain, rekeyed, dreamer]
    world.fleet.await_view(*world.members, *joined)
    key_file.write_text(new_key())
    doctors = [world.call_doctor(agent) for agent in (plain, rekeyed, world.members[0])]
    native, key, clock = map(diagnosis, doctors)
    slow = world.start(slow_at)  # not before: they would name its edges first
    joined.append(slow)
    world.fleet.await_view(*world.members, *joined)
    trainers = [world.fleet.start_trainer(agent, TRAIN) for agent in (world.members[1], slow)]
    slow.await_status(lambda s: any(p.slow for m in s.view.members for p in m.paths))
    for trainer in trainers:
        trainer.reap()
    speed = diagnosis(world.call_doctor(slow))
    key_file.unlink()
    for agent in joined:
        agent.process.reap()

    assert native[:2] == ("native", "remark")
    assert "PMESH_NATIVE=0 is set" in native[2]
    assert key[:2] == ("mesh keys", "remark")
    assert key[2] == "the agent has another mesh key than the home"
    assert clock[:2] == ("clocks", "remark")
    # 40 years, less the minute that may have begun meanwhile.
    assert re.match(rf"the clock of mac-{clock_at.number} is (14600|14599) days ahead", clock[2])
    assert speed[:2] == ("speed", "remark")
    assert "eth0 carries" in speed[2]
    assert native[3] == key[3] == clock[3] == speed[3] == 0


def test_another_version_a_port_that_nobody_reaches_and_a_stopped_agent_are_named(
    world: MeshWithDoctors,
) -> None:
    other_at, walled_at, *_ = world.spare
    old = world.start(other_at, patch=OTHER_VERSION)
    world.members[0].await_status(lambda s: any(p.state == "other_version" for p in s.peers))
    here, there = map(diagnosis, [world.call_doctor(agent) for agent in (old, world.members[0])])
    old.process.send_signal(signal.SIGSTOP)
    ends = [f'{end} "h{walled_at.number}" tcp dport 24160' for end in ("iifname", "oifname")]
    for number, rule in enumerate(ends):
        world.drop(f"tcp{number}", rule)
    walled = world.start(walled_at)
    walled.await_status(lambda s: len(s.peers) >= MEMBERS)
    apart, frozen = map(diagnosis, [world.call_doctor(agent) for agent in (walled, old)])
    for agent in (old, walled):
        agent.process.reap()
    for number, _ in enumerate(ends):
        world.let_through(f"tcp{number}")

    assert here[:2] == ("versions", "cause")
    assert f"the agent speaks protocol {PROTOCOL_VERSION + 41}" in here[2]
    assert there[:2] == ("protocols", "cause")
    assert f"mac-{other_at.number}: it speaks protocol" in there[2]
    assert apart[:2] == ("connections", "cause")
    assert apart[2].startswith("mac-")
    assert " is heard by mDNS, and accepts no connection" in apart[2]
    assert frozen[:2] == ("agent", "cause")
    assert "is stopped" in frozen[2]
