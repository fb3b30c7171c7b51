"""Facts in, findings out: a row for each thing that can be found."""

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from pmesh.agent.schema import HeldOffStatus
from pmesh.cli.doctor.rules import here, network, slow
from pmesh.cli.doctor.rules.findings import Finding
from tests.worlds.fake_status_agent import SNAPSHOT

OTHER_PACKAGE = here.OtherPackage(
    name="pmesh", version="0.1.56", summary="Particle Mesh in Python", folder="/venv"
)
LET = "let them"


def way(**changed: Any) -> network.WayFacts:  # noqa: ANN401 - fields
    facts: dict[str, Any] = {
        "name": "mac-2",
        "address": "10.0.0.2:24160",
        "outcome": "answers",
        "linked": True,
        "heard": True,
    }
    return network.WayFacts(**facts | changed)


def interfaces(**changed: Any) -> Iterable[Finding]:  # noqa: ANN401 - fields
    facts: dict[str, Any] = {
        "up": ("en0",),
        "reachable_at": ("10.0.0.1:24160",),
        "only_loopback": False,
        "alone": False,
    }
    return network.judge_interfaces(network.InterfaceFacts(**facts | changed))


def mdns(**changed: Any) -> Iterable[Finding]:  # noqa: ANN401 - fields
    return network.judge_mdns(network.MdnsFacts(**{"agent_listens": True} | changed))


def firewall(**changed: Any) -> Iterable[Finding]:  # noqa: ANN401 - fields
    return network.judge_firewall(network.FirewallFacts(todo=LET, **changed))


def permission(**changed: Any) -> Iterable[Finding]:  # noqa: ANN401 - fields
    facts: dict[str, Any] = {
        "denied_here": (),
        "denied_agent": (),
        "others_heard": False,
        "tried": 0,
    }
    return network.judge_permission(network.PermissionFacts(**facts | changed))


def route(**changed: Any) -> network.RouteFacts:  # noqa: ANN401 - fields
    facts: dict[str, Any] = {
        "name": "mac-2",
        "address": "10.0.0.2",
        "interface": "en0",
        "is_vpn": False,
        "linked": True,
    }
    return network.RouteFacts(**facts | changed)


def key(**changed: Any) -> Iterable[Finding]:  # noqa: ANN401 - fields
    return here.judge_key(here.KeyFacts(source="/h/mesh_key", **changed))


def clocks(*minutes: int) -> Iterable[Finding]:
    return slow.judge_clocks(
        [slow.ClockFacts(name=f"mac-{n}", ahead_minutes=m) for n, m in enumerate(minutes, 2)]
    )


def versions(agent: tuple[str, int]) -> Iterable[Finding]:
    return here.judge_versions(here.VersionFacts(command=("0.2.0", 17), agent=agent))


def port(holder: Any, program: str = "") -> Iterable[Finding]:  # noqa: ANN401 - a literal
    return here.judge_port(here.PortFacts(port=24160, holder=holder, program=program))


def agent(state: Any, **changed: Any) -> Iterable[Finding]:  # noqa: ANN401 - a literal
    return here.judge_agent(here.AgentFacts(state=state, **changed))


def unlinked(*, members: int, may_be_off: bool) -> Iterable[Finding]:
    one = network.Unlinked(name="mac-2", reason="it is off", may_be_off=may_be_off)
    return network.judge_links([one], members=members)


def held_off() -> Iterable[Finding]:
    one = HeldOffStatus(id="e" * 52, name="air", losses=3, back_in_s=7.2)
    return slow.judge_speed((), (one,))


AIR = SNAPSHOT.view.members[0]
CLASHING = (
    msgspec.structs.replace(AIR, id="a" * 52, name="mac (aaaa)"),
    msgspec.structs.replace(AIR, id="b" * 52, name="mac (bbbb)"),
)

FOUND = [
    # home, settings, key
    (here.judge_home(here.HomeFacts(path="/h")), "well", "only you can enter /h"),
    (here.judge_home(here.HomeFacts(path="/h", exists=False)), "cause", "no home directory /h"),
    (here.judge_home(here.HomeFacts(path="/h", error="bad; run: x")), "cause", "bad"),
    (here.judge_settings(here.SettingsFacts()), "well", "are valid"),
    (here.judge_settings(here.SettingsFacts(error="bad; did you mean y?")), "cause", "bad"),
    (key(), "well", "the mesh key is in /h/mesh_key"),
    (key(error="bad; run: x"), "cause", "bad"),
    (key(error="bad; run: x", agent_runs=False), "cause", "bad"),
    (key(present=False), "well", "was given its mesh key by PMESH_KEY"),
    (key(present=False, agent_runs=False), "cause", "there is no mesh key in /h/mesh_key"),
    # packages, port, agent, versions
    (here.judge_packages(()), "well", "no other package"),
    (here.judge_packages([OTHER_PACKAGE]), "cause", "(Particle Mesh in Python)"),
    (port("agent"), "well", "listens at port 24160"),
    (port("nobody"), "well", "is free"),
    (port("other", "pid 7 (nc -l)"), "cause", "is held by pid 7 (nc -l)"),
    (port("other"), "cause", "by a program of another user"),
    (agent("answers", pid=4), "well", "(pid 4)"),
    (agent("not running"), "cause", "no agent runs with this home"),
    (agent("not running", socket_left=True), "cause", "has left its socket"),
    (agent("in trouble", error="is stopped; run 'kill -CONT 1'"), "cause", "is stopped"),
    (versions(("0.2.0", 17)), "well", "pmesh 0.2.0, protocol 17"),
    (versions(("0.1.0", 17)), "remark", "the agent is pmesh 0.1.0, installed is 0.2.0"),
    (versions(("0.2.0", 16)), "cause", "speaks protocol 16, the installed pmesh 17"),
    # interfaces, firewall, permission
    (interfaces(), "well", "can be dialled at 10.0.0.1:24160"),
    (interfaces(only_loopback=True, reachable_at=()), "well", "at no address"),
    (interfaces(only_loopback=True, alone=True), "cause", "uses no interface that others reach"),
    (interfaces(only_loopback=True, alone=True, up=()), "cause", "no network interface is up"),
    (firewall(), "well", "no firewall"),
    (firewall(blocks=("it drops",)), "remark", "it drops"),
    (firewall(blocks=("it drops",), is_cut_off=True), "cause", "it drops"),
    (firewall(unseen="needs root"), "not looked at", "needs root"),
    (firewall(asks=True), "well", "no firewall"),
    (firewall(asks=True, is_cut_off=True), "remark", "one by one"),
    (permission(), "not looked at", "none was dialled"),
    (permission(tried=1), "well", "lets this program use"),
    (permission(others_heard=True), "well", "lets this program use"),
    (permission(denied_here=("10.0.0.2:1",)), "cause", "let this program reach 10.0.0.2:1"),
    (permission(denied_here=("10.0.0.2:1",), others_heard=True), "well", "lets this program"),
    (permission(denied_agent=("mac-2",), others_heard=True), "cause", "the agent reach mac-2"),
    # mDNS, meshes, protocols
    (mdns(agents_heard=2), "well", "this agent and 2 more"),
    (mdns(agent_listens=False), "well", "does not use mDNS"),
    (mdns(agent_listens=False, alone=True), "cause", "--no-mdns"),
    (mdns(error="no route"), "remark", "by mDNS: no route"),
    (mdns(error="no route", alone=True), "cause", "by mDNS: no route"),
    (mdns(error="no route", alone=True, knows_others=True), "remark", "no route"),
    (mdns(own_heard=False), "remark", "does not hear its own agent"),
    (mdns(own_heard=False, alone=True), "cause", "does not hear its own agent"),
    (mdns(unheard=("mac-2",)), "remark", "mac-2 answers by unicast"),
    (mdns(unheard=("mac-2",), alone=True), "cause", "mac-2 answers by unicast"),
    (mdns(alone=True), "cause", "nobody answers by mDNS"),
    (mdns(alone=True, others_heard=True), "cause", "and no agent is"),
    (mdns(alone=True, agents_heard=1), "well", "this agent and 1 more"),
    (network.judge_mesh(network.MeshFacts()), "well", "no other mesh"),
    (network.judge_mesh(network.MeshFacts(others=("x",))), "remark", "x is here, and holds"),
    (network.judge_mesh(network.MeshFacts(others=("x",), alone=True)), "cause", "x is here"),
    (network.judge_mesh(network.MeshFacts(key_changed=True)), "remark", "than the home"),
    (network.judge_mesh(network.MeshFacts(key_changed=True, alone=True)), "cause", "the home"),
    (network.judge_protocols(()), "well", "the same protocol"),
    (
        network.judge_protocols([network.OtherVersion(name="x", reason="it speaks 9; install")]),
        "cause",
        "x: it speaks 9",
    ),
    # routes, connections, large packets, links
    (network.judge_routes(()), "not looked at", "no other machine"),
    (network.judge_routes([route()]), "well", "no VPN"),
    (network.judge_routes([route(is_vpn=True, interface="utun4")]), "remark", "through utun4"),
    (network.judge_routes([route(is_vpn=True, linked=False)]), "cause", "(10.0.0.2) leads"),
    (network.judge_ways((), alone=True), "not looked at", "no other machine"),
    (network.judge_ways([way()], alone=False), "well", "accepted by mac-2"),
    (
        network.judge_ways([way(outcome="unreachable")], alone=False),
        "remark",
        "though there is a link",
    ),
    (
        network.judge_ways([way(outcome="unreachable", linked=False, error="e")], alone=False),
        "cause",
        "is heard by mDNS, and accepts no connection: e",
    ),
    (
        network.judge_ways(
            [way(outcome="unreachable", linked=False, heard=False, error="off")], alone=True
        ),
        "cause",
        "mac-2 can't be dialled: off",
    ),
    (
        network.judge_ways(
            [way(outcome="unreachable", linked=False, heard=False, named=True)], alone=False
        ),
        "cause",
        "mac-2 can't be dialled",
    ),
    (
        network.judge_ways([way(outcome="unreachable", linked=False, heard=False)], alone=False),
        "not looked at",
        "but such as may be off",
    ),
    (network.judge_ways([way(outcome="is silent")], alone=False), "remark", "does not react"),
    (
        network.judge_ways([way(outcome="is silent", linked=False)], alone=False),
        "cause",
        "does not react",
    ),
    (network.judge_large_packets([way()]), "well", "large packets reach mac-2"),
    (
        network.judge_large_packets([way(outcome="large packets vanish"), way()]),
        "cause",
        "small packets reach mac-2 (10.0.0.2:24160), and large ones vanish",
    ),
    (
        network.judge_large_packets([way(outcome="unreachable")]),
        "not looked at",
        "no other machine accepts",
    ),
    (network.judge_links((), members=3), "well", "view of the agent: 3"),
    (unlinked(members=3, may_be_off=True), "remark", "mac-2 is not linked: it is off"),
    (unlinked(members=1, may_be_off=True), "cause", "mac-2 is not linked: it is off"),
    (unlinked(members=3, may_be_off=False), "cause", "mac-2 is not linked: it is off"),
    # slow
    (slow.judge_native(slow.NativeFacts()), "well", "are used"),
    (slow.judge_native(slow.NativeFacts(agent="x is set; unset it")), "remark", "the agent works"),
    (slow.judge_native(slow.NativeFacts(command="x is set; unset it")), "remark", "a script"),
    (slow.judge_native(slow.NativeFacts(encryption="none; install")), "remark", "AES instr"),
    (clocks(), "not looked at", "no other machine"),
    (clocks(0, 10, -10), "well", "agrees with that of mac-2, mac-3, mac-4"),
    (clocks(11, 0), "remark", "the clock of mac-2 is 11 minutes ahead"),
    (clocks(-3 * 24 * 60), "remark", "the clock of mac-2 is 3 days behind"),
    (slow.judge_sleep(slow.SleepFacts()), "well", "does not fall asleep"),
    (slow.judge_sleep(slow.SleepFacts(after="a minute")), "remark", "asleep after a minute"),
    (slow.judge_sleep(slow.SleepFacts(low_power=True)), "remark", "Low Power Mode"),
    (slow.judge_sleep(slow.SleepFacts(unseen="no systemd")), "not looked at", "no systemd"),
    (slow.judge_speed((), ()), "well", "no link is slower"),
    (held_off(), "remark", "air was lost 3 times lately"),
    (slow.judge_speed(SNAPSHOT.view.members[1:2], ()), "remark", "mac-2: en0 here runs at"),
    (slow.judge_speed(CLASHING, ()), "remark", "2 machines are called 'mac'"),
]


@pytest.mark.parametrize(
    ("findings", "verdict", "words"),
    [([*found], verdict, words) for found, verdict, words in FOUND],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_thing_is_called_what_it_is(findings: list[Finding], verdict: str, words: str) -> None:
    first = findings[0]
    assert first.verdict == verdict
    assert words in first.found
    if verdict == "cause":
        assert first.todo, "a cause says what to do"
    if verdict in {"well", "not looked at"}:
        assert len(findings) == 1


def test_the_clock_that_differs_from_all_others_is_this_machine_s() -> None:
    for finding in clocks(60, 60):
        assert "The wrong clock is that of this machine." in finding.means
    for finding in [*clocks(60, 0), *clocks(60)]:
        if finding.verdict == "remark":
            assert "one of the two" in finding.means


def test_a_command_for_a_name_ends_as_it_must_be_typed() -> None:
    one = msgspec.structs.replace(AIR, id="a" * 52, name="mac (aaaa)")
    for members, command in (((one,), "pmesh forget mac"), (CLASHING, "'pmesh up --name OTHER'")):
        (found,) = slow.judge_speed(members, ())
        assert found.todo.endswith(command)


def test_a_command_that_only_root_may_type_begins_with_sudo() -> None:
    (found,) = network.judge_large_packets([way(outcome="large packets vanish")])
    assert "sudo ip link set INTERFACE mtu 1500" in found.todo
    assert "sudo networksetup -setMTU INTERFACE 1500" in found.todo


def test_a_key_that_can_no_longer_be_used_does_not_stop_the_agent_that_runs() -> None:
    (runs,), (does_not,) = key(error="bad; run: x"), key(error="bad; run: x", agent_runs=False)
    assert runs.means == "The agent that runs does not start again."
    assert does_not.means == "No agent starts with this key."


@pytest.mark.parametrize(
    ("taken", "named"),
    [(("", 24160), ":24161"), (("::1", 7), "[::1]:8"), (("10.0.0.1", 65535), "10.0.0.1:65534")],
)
def test_another_port_of_the_same_address_is_named(taken: tuple[str, int], named: str) -> None:
    host, number = taken
    (found,) = here.judge_port(here.PortFacts(host=host, port=number, holder="other"))
    assert found.todo.endswith(f"pmesh up --listen {named}")
