"""Judges the network: what keeps this machine apart from others, or them from it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pmesh.cli.doctor.rules.findings import Finding, cause, cause_of, not_looked_at, remark, well


def _trouble(found: str, *, stops: bool, means: str = "", todo: str = "") -> Finding:
    """Return a cause if this keeps machines apart now, else a remark."""
    kind = cause if stops else remark
    return kind(found, means=means, todo=todo)


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceFacts:
    """The network interfaces of this machine, and where its agent can be dialled."""

    up: Sequence[str]
    """The names of those that are up and lead to other machines."""
    reachable_at: Sequence[str]
    """HOST:PORT, as the agent announces them."""
    only_loopback: bool
    """None of those is an address for other machines."""
    alone: bool
    """No other machine is in the view."""


def judge_interfaces(facts: InterfaceFacts) -> Iterator[Finding]:
    if not facts.only_loopback or not facts.alone:
        yield well(f"the agent can be dialled at {', '.join(facts.reachable_at) or 'no address'}")
    elif not facts.up:
        yield cause(
            "no network interface is up",
            means="This machine reaches no other one.",
            todo="plug in a cable, or turn on Wi-Fi",
        )
    else:
        yield cause(
            f"the agent uses no interface that others reach; {', '.join(facts.up)} is up",
            means="It was started with --listen, --interface or --not-interface, or not told of a "
            "change.",
            todo="pmesh down, and then pmesh up without these options",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FirewallFacts:
    """What the firewalls of this machine do with packets for the agent."""

    blocks: Sequence[str] = ()
    """A clause for each that lets none through."""
    asks: bool = False
    """One is on that allows programs one by one."""
    unseen: str = ""
    """Why the rules can't be seen; empty if they can."""
    todo: str = ""
    """How to let them through."""
    is_cut_off: bool = False
    """This machine has no link with another one that it should have one with."""


def judge_firewall(facts: FirewallFacts) -> Iterator[Finding]:
    for block in facts.blocks:
        yield _trouble(
            block,
            stops=facts.is_cut_off,
            means="Other machines can't dial this one, or it can't find them.",
            todo=facts.todo,
        )
    if facts.blocks:
        return
    if facts.unseen:
        yield not_looked_at(facts.unseen)
    elif facts.asks and facts.is_cut_off:
        yield remark(
            "the firewall is on, and allows programs one by one",
            means="If python3 is not allowed, others can't dial this machine.",
            todo=facts.todo,
        )
    else:
        yield well("no firewall of this machine keeps packets from the agent")


@dataclass(frozen=True, slots=True, kw_only=True)
class PermissionFacts:
    """Whether macOS lets programs use the local network."""

    denied_here: Sequence[str]
    """Connections of this command that failed as if it did not."""
    denied_agent: Sequence[str]
    """Machines to which connections of the agent failed so."""
    others_heard: bool
    """Something came from another machine, so this command may use the network."""
    tried: int
    """How many connections this command has tried."""


def judge_permission(facts: PermissionFacts) -> Iterator[Finding]:
    pane = "System Settings → Privacy & Security → Local Network"
    if facts.denied_here and not facts.others_heard:
        yield cause(
            f"macOS does not let this program reach {facts.denied_here[0]}",
            means="Without the permission for the local network, neighbours seem to be absent.",
            todo=f"allow your terminal in {pane}; then pmesh down, and pmesh up",
        )
    elif facts.denied_agent:
        yield cause(
            f"macOS does not let the agent reach {facts.denied_agent[0]}, or that is off",
            means="The permission belongs to the program from which the agent was started.",
            todo=f"allow that program in {pane}; then pmesh down, and pmesh up",
        )
    elif facts.tried or facts.others_heard:
        yield well("macOS lets this program use the local network")
    else:
        yield not_looked_at("no other machine is known, so none was dialled")


@dataclass(frozen=True, slots=True, kw_only=True)
class MdnsFacts:
    """What was heard by mDNS, with sockets of our own."""

    agent_listens: bool
    """The agent has a socket at mDNS's port."""
    error: str = ""
    """Why we could not ask; empty if we could."""
    own_heard: bool = True
    """The announcement of this machine's agent."""
    agents_heard: int = 0
    """Other agents, also of other meshes and versions."""
    others_heard: bool = False
    """Anything from another machine, such as a printer."""
    unheard: Sequence[str] = ()
    """Machines that answer by unicast, and were not heard."""
    alone: bool = False
    """No other machine is in the view."""
    knows_others: bool = False
    """The agent has found other machines, or was told of some."""
    named: bool = False
    """The user has named other machines: connections to them say more."""


def judge_mdns(facts: MdnsFacts) -> Iterator[Finding]:
    apart = facts.alone and not facts.knows_others
    name_one = "pmesh down, and then pmesh up --peer HOST, with the host of another machine"
    if not facts.agent_listens:
        if apart:
            yield cause(
                "the agent does not use mDNS: it was started with --no-mdns, or the system refused",
                means="It finds only machines that it was told of.",
                todo=name_one,
            )
        else:
            yield well("the agent does not use mDNS")
    elif facts.error:
        yield _trouble(
            f"no question can be sent by mDNS: {facts.error}",
            stops=apart,
            means="The agent finds no machine that it was not told of.",
            todo=name_one,
        )
    elif not facts.own_heard:
        yield _trouble(
            "this machine does not hear its own agent by mDNS",
            stops=apart,
            means="A firewall or a VPN on this machine drops multicast at UDP port 5353.",
            todo=f"let UDP port 5353 through, or {name_one}",
        )
    elif facts.unheard:
        yield _trouble(
            f"{', '.join(facts.unheard)} answers by unicast, and is not heard by mDNS",
            stops=apart,
            means="A switch or the Wi-Fi between drops multicast, it is in another network, or it "
            "has --no-mdns: machines that start find each other only by --peer.",
            todo=name_one,
        )
    elif not apart or facts.agents_heard:
        yield well(f"this agent and {facts.agents_heard} more are heard by mDNS")
    else:
        yield _nobody(facts)


def _nobody(facts: MdnsFacts) -> Finding:
    if facts.others_heard:
        return _trouble(
            "other devices are heard by mDNS, and no agent is",
            stops=not facts.named,
            means="Multicast works here: no other machine of this network runs pmesh, or its "
            "firewall keeps it silent.",
            todo="pmesh up and pmesh doctor on the other machine",
        )
    return _trouble(
        "nobody answers by mDNS",
        stops=not facts.named,
        means="No other machine runs pmesh, it is in another network, or multicast is dropped.",
        todo=""
        if facts.named
        else "pmesh up on the other machine, then here: pmesh doctor --peer HOST, with its host",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshFacts:
    """The meshes whose agents were heard."""

    others: Sequence[str] = ()
    """What to call each machine of another mesh."""
    key_changed: bool = False
    """The agent announces another mesh key than the one that is in the home now."""
    alone: bool = False


def judge_mesh(facts: MeshFacts) -> Iterator[Finding]:
    if facts.key_changed:
        yield _trouble(
            "the agent has another mesh key than the home",
            stops=facts.alone,
            means="It took its key when it started, before 'pmesh key set', or from PMESH_KEY.",
            todo="pmesh down, and then pmesh up",
        )
    for other in facts.others:
        yield _trouble(
            f"{other} is here, and holds another mesh key",
            stops=facts.alone,
            means="Machines with different keys are different meshes.",
            todo=f"to join {other}, type there: pmesh invite; and here: pmesh down, then "
            "pmesh join --replace --up with the code",
        )
    if not facts.others and not facts.key_changed:
        yield well("no other mesh is here")


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherVersion:
    """A machine that speaks another version of the protocol."""

    name: str
    reason: str
    """With what to do."""


def judge_protocols(others: Sequence[OtherVersion]) -> Iterator[Finding]:
    for other in others:
        yield cause_of(f"{other.name}: {other.reason}", means="Such machines can't be linked.")
    if not others:
        yield well("all machines that were found speak the same protocol")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteFacts:
    """By which interface the system would send to a machine."""

    name: str
    address: str
    interface: str
    is_vpn: bool
    linked: bool


def judge_routes(routes: Sequence[RouteFacts]) -> Iterator[Finding]:
    led_away = [route for route in routes if route.is_vpn]
    for route in led_away:
        yield _trouble(
            f"the route to {route.name} ({route.address}) leads through {route.interface}, a VPN",
            stops=not route.linked,
            means="The VPN takes packets that belong to the local network.",
            todo="let the VPN leave out the local network (often 'allow LAN access'), or turn it "
            "off",
        )
    if routes and not led_away:
        yield well("no VPN has the route to another machine")
    if not routes:
        yield not_looked_at(
            "no other machine is known that has an address in a network of this one"
        )


Outcome: TypeAlias = Literal["answers", "large packets vanish", "is silent", "unreachable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WayFacts:
    """What came of dialling a machine from here."""

    name: str
    address: str
    """That was dialled; all of them, if none answered."""
    outcome: Outcome
    linked: bool
    """The agents have a link, whoever dialled."""
    heard: bool
    """By mDNS."""
    error: str = ""
    """Why it is unreachable."""
    named: bool = False
    """The user has named it."""


def judge_ways(ways: Sequence[WayFacts], *, alone: bool) -> Iterator[Finding]:
    """Judge whether connections from here arrive; one that may be off is left to the links."""
    failed = [
        way
        for way in ways
        if way.outcome == "is silent"
        or (way.outcome == "unreachable" and (way.linked or way.heard or way.named or alone))
    ]
    for way in failed:
        yield _unreachable(way) if way.outcome == "unreachable" else _silent(way)
    accepted = [way.name for way in ways if way.outcome in {"answers", "large packets vanish"}]
    if accepted and not failed:
        yield well(f"connections from here are accepted by {', '.join(accepted)}")
    elif not failed:
        yield not_looked_at("no other machine is known, but such as may be off")


def _unreachable(way: WayFacts) -> Finding:
    if way.linked:
        return remark(
            f"{way.name} accepts no connection from here, though there is a link: {way.error}",
            means="It has dialled this machine, or a third one forwards. A firewall or the like "
            "there lets no connections in; another such machine could not be linked to it.",
            todo=f"on {way.name}: pmesh doctor, and let TCP {way.address} through",
        )
    if way.heard:
        return cause(
            f"{way.name} is heard by mDNS, and accepts no connection: {way.error}",
            means="Packets pass in one direction only: a firewall there, or between.",
            todo=f"on {way.name}: pmesh doctor, and let TCP {way.address} through",
        )
    return cause(
        f"{way.name} can't be dialled: {way.error}",
        means="It is off or asleep, its agent does not run, or it has another address.",
        todo=f"on {way.name}: pmesh up, and then pmesh doctor",
    )


def _silent(way: WayFacts) -> Finding:
    return _trouble(
        f"{way.name} accepts connections at {way.address}, and its agent does not react",
        stops=not way.linked,
        means="The agent there is stopped or hangs, or another program has the port.",
        todo=f"on {way.name}: pmesh doctor",
    )


def judge_large_packets(ways: Sequence[WayFacts]) -> Iterator[Finding]:
    tried = [way for way in ways if way.outcome in {"answers", "large packets vanish"}]
    holes = [way for way in tried if way.outcome == "large packets vanish"]
    for way in holes:
        yield cause(
            f"small packets reach {way.name} ({way.address}), and large ones vanish",
            means="Something between has a smaller MTU than the interface here, and does not say "
            "so; tensors would never arrive.",
            todo="give all interfaces of this network the MTU 1500 (jumbo frames off), or the VPN's"
            " own; Linux: sudo ip link set INTERFACE mtu 1500; macOS: sudo networksetup -setMTU "
            "INTERFACE 1500",
        )
    if tried and not holes:
        yield well(f"large packets reach {', '.join(way.name for way in tried)}")
    if not tried:
        yield not_looked_at("no other machine accepts connections from here")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlinked:
    """A machine with which the agent has no link."""

    name: str
    reason: str
    may_be_off: bool
    """The agent does not reach it, and nobody heard it."""


def judge_links(unlinked: Sequence[Unlinked], *, members: int) -> Iterator[Finding]:
    for one in unlinked:
        yield _trouble(
            f"{one.name} is not linked: {one.reason}",
            stops=members == 1 or not one.may_be_off,
            todo=f"on {one.name}: pmesh doctor",
        )
    if not unlinked:
        yield well(f"machines in the view of the agent: {members}; none is left out")
