"""Collects the facts that the checks judge, each when its check is made, and puts them in order."""

import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

import trio

from pmesh import native
from pmesh.agent.config import AgentSettings, load_settings
from pmesh.agent.home import load_node_key
from pmesh.agent.host_port import DEFAULT_PORT, parse_host_port
from pmesh.agent.schema import PeerStatus, Status, decode_status, name_peer
from pmesh.cli.doctor import nearby, tools
from pmesh.cli.doctor.nearby import Heard, Tried
from pmesh.cli.doctor.programs import (
    can_listen,
    find_other_packages,
    holder_of,
    listens_to_mdns,
    program_text,
)
from pmesh.cli.doctor.rules import here, network, slow
from pmesh.cli.doctor.rules.findings import Finding, NamedCheck
from pmesh.cli.keys import find_mesh_key, has_mesh_key
from pmesh.cli.up import check_listen
from pmesh.client.control import ask_status
from pmesh.core.identity.advertisement import Advertisement
from pmesh.core.identity.keys import AdvertisementKey, MeshKey
from pmesh.core.links.addresses import LocalAddress
from pmesh.core.wire.link import PROTOCOL_VERSION, Address
from pmesh.errors import AgentNotRunning, ConfigError, PmeshError
from pmesh.home_paths import (
    LOCK_NAME,
    MESH_KEY_NAME,
    NODE_KEY_NAME,
    check_home,
    home_directory,
    socket_path,
)
from pmesh.ids import NodeId, node_from_text, node_text
from pmesh.installed import installed_version
from pmesh.net.links.interfaces import InterfaceReader

LEAST_S: Final = 0.4  # in a mesh, others may be heard as well
ANSWER_S: Final = 2.0  # an agent that lives answers within milliseconds
_DENIED: Final = "macOS does not let this program talk"  # as the agent's LocalNetworkDenied says


@dataclass(slots=True, kw_only=True)
class OtherMachine:
    """Another machine of this mesh, as far as it is known."""

    name: str
    addresses: tuple[Address, ...]
    linked: bool = False
    heard: bool = False
    named: bool = False
    """By the user."""


class Nearby(NamedTuple):
    """What a look at the network has shown."""

    heard: Heard
    tried: Mapping[str, Tried]
    walls: tools.Walls
    sleep: slow.SleepFacts


class Looks:
    """The facts of this machine; those of the network are collected at once, when first used."""

    def __init__(self, home: Path | None, peers: Sequence[str]) -> None:
        """`peers` are HOST:PORT of machines that should be in the mesh. Raises ConfigError."""
        self._chosen = home
        self._named = {_parse_peer(text): tuple[Address, ...]() for text in peers}
        """Their IP addresses, once they were looked up."""

    def checks(self) -> tuple[NamedCheck, ...]:
        """Return all checks, in the order in which causes hide others."""
        return (
            NamedCheck("home", lambda: here.judge_home(self._look_at_home())),
            NamedCheck("settings", lambda: here.judge_settings(self._look_at_settings())),
            NamedCheck("key", lambda: here.judge_key(self._look_at_key())),
            NamedCheck("packages", lambda: here.judge_packages(tuple(find_other_packages()))),
            NamedCheck("port", lambda: here.judge_port(self._look_at_port())),
            NamedCheck("agent", lambda: here.judge_agent(self._agent)),
            NamedCheck("versions", lambda: here.judge_versions(self._look_at_versions())),
            NamedCheck("interfaces", lambda: network.judge_interfaces(self._look_at_interfaces())),
            NamedCheck("firewall", lambda: network.judge_firewall(self._look_at_firewall())),
            *(
                [NamedCheck("local network", self._judge_permission)]
                if sys.platform == "darwin"
                else []
            ),
            NamedCheck("mDNS", lambda: network.judge_mdns(self._look_at_mdns())),
            NamedCheck("mesh keys", lambda: network.judge_mesh(self._look_at_meshes())),
            NamedCheck("protocols", lambda: network.judge_protocols(self._look_at_protocols())),
            NamedCheck("routes", lambda: network.judge_routes(tuple(self._look_at_routes()))),
            NamedCheck("connections", lambda: network.judge_ways(self._ways, alone=self._alone)),
            NamedCheck("large packets", lambda: network.judge_large_packets(self._ways)),
            NamedCheck("links", self._judge_links),
            NamedCheck("speed", self._judge_speed),
            NamedCheck("native", lambda: slow.judge_native(self._look_at_native())),
            NamedCheck("clocks", lambda: slow.judge_clocks(tuple(self._look_at_clocks()))),
            NamedCheck("sleep", lambda: slow.judge_sleep(self._nearby.sleep)),
        )

    # --- this machine

    @cached_property
    def _home(self) -> Path:
        return home_directory(self._chosen)

    def _look_at_home(self) -> here.HomeFacts:
        try:
            check_home(self._home, holds_keys=True)
        except ConfigError as e:
            return here.HomeFacts(path=str(self._chosen), error=str(e))
        return here.HomeFacts(path=str(self._home), exists=self._home.exists())

    @cached_property
    def _settings(self) -> AgentSettings:
        host_name = socket.gethostname()
        return load_settings(self._home, flags={}, environment=os.environ, host_name=host_name)

    def _look_at_settings(self) -> here.SettingsFacts:
        try:
            self._settings  # noqa: B018 - it is read now
        except ConfigError as e:
            return here.SettingsFacts(error=str(e))
        return here.SettingsFacts()

    @cached_property
    def _mesh_key(self) -> MeshKey | None:
        return find_mesh_key(self._settings) if has_mesh_key(self._settings) else None

    def _look_at_key(self) -> here.KeyFacts:
        settings, runs = self._settings, self._agent.state != "not running"
        source = str(settings.key_file or self._home / MESH_KEY_NAME)
        if settings.key_text is not None:
            source = "PMESH_KEY"
        try:
            present = self._mesh_key is not None
            if os.path.lexists(self._home / NODE_KEY_NAME):
                load_node_key(self._home, entropy=secrets.token_bytes(32))
        except PmeshError as e:
            return here.KeyFacts(source=source, error=str(e), agent_runs=runs)
        return here.KeyFacts(source=source, present=present, agent_runs=runs)

    @cached_property
    def _asked(self) -> tuple[here.AgentFacts, Status | None]:
        try:
            status = decode_status(ask_status(self._home, timeout_s=ANSWER_S))
        except AgentNotRunning:
            left = socket_path(self._home).exists()
            return here.AgentFacts(state="not running", socket_left=left), None
        except PmeshError as e:
            return here.AgentFacts(state="in trouble", error=str(e)), None
        return here.AgentFacts(state="answers", pid=status.pid), status

    @property
    def _agent(self) -> here.AgentFacts:
        return self._asked[0]

    @property
    def _status(self) -> Status:
        """Of the agent; the check of the agent has found that it answers."""
        status = self._asked[1]
        if status is None:
            raise OSError("the agent does not answer")
        return status

    def _look_at_port(self) -> here.PortFacts:
        if self._agent.state == "answers":
            addresses = self._status.node.addresses
            port = parse_host_port(addresses[0])[1] if addresses else self._settings.listen.port
            return here.PortFacts(port=port, holder="agent")
        host, port = self._settings.listen
        try:
            check_listen(self._settings.listen)
        except ConfigError as e:
            return here.PortFacts(port=port, holder="nobody", error=str(e))
        if not port or can_listen(host, port):
            return here.PortFacts(port=port, holder="nobody")
        pid = holder_of(port)
        if pid is not None and pid == self._pid_in_lock():
            return here.PortFacts(port=port, holder="agent")
        return here.PortFacts(port=port, host=host, holder="other", program=program_text(pid))

    def _pid_in_lock(self) -> int | None:
        """Return the pid of an agent that has this home, though it does not answer."""
        try:
            return int((self._home / LOCK_NAME).read_text())
        except (OSError, ValueError):
            return None

    def _look_at_versions(self) -> here.VersionFacts:
        status = self._status
        return here.VersionFacts(
            command=(installed_version(), PROTOCOL_VERSION),
            agent=(status.version, status.protocol),
        )

    def _look_at_native(self) -> slow.NativeFacts:
        node = self._status.node
        return slow.NativeFacts(
            agent=node.without_native or "",
            command=native.why_missing(),
            encryption=node.slow_encryption or "",
        )

    # --- the network

    @cached_property
    def _local(self) -> tuple[LocalAddress, ...]:
        return InterfaceReader().read()

    @property
    def _used(self) -> tuple[LocalAddress, ...]:
        """The addresses at which the agent can be dialled, so those that it announces."""
        hosts = {parse_host_port(text)[0] for text in self._status.node.addresses}
        return tuple(own for own in self._local if own.host in hosts)

    @property
    def _alone(self) -> bool:
        return len(self._status.view.members) == 1

    def _look_at_interfaces(self) -> network.InterfaceFacts:
        up = dict.fromkeys(own.interface for own in self._local if own.kind != "loopback")
        return network.InterfaceFacts(
            up=tuple(up),
            reachable_at=self._status.node.addresses,
            only_loopback=all(own.kind == "loopback" for own in self._used),
            alone=self._alone,
        )

    @cached_property
    def _nearby(self) -> Nearby:
        return trio.run(self._look_around)

    async def _look_around(self) -> Nearby:
        walls, sleep = tools.Walls(), slow.SleepFacts()
        begun, tried, looked_up = set[str](), dict[str, Tried](), trio.Event()
        port = self._look_at_port().port or DEFAULT_PORT

        async def ask_tools() -> None:
            nonlocal walls, sleep
            walls = await tools.look_at_firewalls(port)
            sleep = await tools.look_at_sleep()

        async def dial(heard: Heard) -> None:
            """Try all machines that are known with what was heard, and were not tried yet."""
            targets = {
                key: one.addresses for key, one in self._machines(heard).items() if key not in begun
            }
            begun.update(targets)
            tried.update(await nearby.try_machines(targets, self._local))

        async def look_up_and_dial() -> None:
            for address in self._named:
                self._named[address] = await nearby.look_up(address)
            looked_up.set()
            await dial(Heard())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_tools)
            nursery.start_soon(look_up_and_dial)
            linked = {node for node in map(_node_of, self._status.peers) if node is not None}
            heard = await nearby.listen(
                self._advertisement_key,
                self._used,
                {node_from_text(self._status.node.id), *linked} if self._uses_mdns else linked,
                least_s=LEAST_S if linked else nearby.STRANGERS_S,
            )
            await looked_up.wait()
            await dial(heard)
        return Nearby(heard, tried, walls, sleep)

    @property
    def _advertisement_key(self) -> AdvertisementKey | None:
        return None if self._mesh_key is None else AdvertisementKey.of(self._mesh_key)

    @cached_property
    def _uses_mdns(self) -> bool:
        return listens_to_mdns(self._status.pid)

    def _own(self, heard: Heard) -> Advertisement | None:
        """Return what the agent here announces; None if it was not heard."""
        own = self._status.node.id
        return next((ad for node, ad in heard.agents.items() if node_text(node) == own), None)

    def _members_heard(self, heard: Heard) -> Iterator[Advertisement]:
        """Yield the announcements of other machines of this mesh and version."""
        own, key = self._own(heard), self._advertisement_key
        tag = key.tag if own is None and key is not None else None if own is None else own.tag
        for ad in heard.agents.values():
            if ad.tag == tag and ad.protocol == PROTOCOL_VERSION and ad is not own:
                yield ad

    def _machines(self, heard: Heard) -> dict[str, OtherMachine]:
        """Return all machines that are or should be in this mesh, by id or address."""
        found: dict[str, OtherMachine] = {}
        for peer in self._status.peers:
            if peer.state not in {"other_mesh_key", "other_version"}:
                addresses = tuple(Address(*parse_host_port(text)) for text in peer.addresses)
                found[_key_of(peer)] = OtherMachine(
                    name=name_peer(peer, self._status.node.name),
                    addresses=addresses,
                    linked=peer.state == "linked",
                )
        for ad in self._members_heard(heard):
            known = found.setdefault(node_text(ad.node), OtherMachine(name=ad.name, addresses=()))
            known.heard = True
            if not known.linked:  # then the agent may know its address alone
                known.name = ad.name
            known.addresses = tuple(dict.fromkeys((*known.addresses, *ad.addresses)))
        for address, at in self._named.items():
            if all(map(self._is_here, at)):
                continue
            known_as = next((one for one in found.values() if {*at} & {*one.addresses}), None)
            if known_as is None:
                known_as = found[str(address)] = OtherMachine(name=str(address), addresses=at)
            known_as.named = True
        return found

    def _is_here(self, address: Address) -> bool:
        """Return True for an address of the agent here: users name all machines on each of them."""
        at_ours = any(
            own.host == address.host or (own.kind == "loopback" and own.reaches(address.host))
            for own in self._local
        )
        return at_ours and address.port == self._look_at_port().port

    @cached_property
    def _others(self) -> dict[str, OtherMachine]:
        return self._machines(self._nearby.heard)

    def _look_at_firewall(self) -> network.FirewallFacts:
        walls = self._nearby.walls
        return network.FirewallFacts(
            blocks=walls.blocks,
            asks=walls.asks,
            unseen=walls.unseen,
            todo=walls.todo,
            is_cut_off=self._alone or any(not one.linked for one in self._others.values()),
        )

    def _judge_permission(self) -> Iterator[Finding]:
        tried, heard = self._nearby.tried, self._nearby.heard
        reasons = [peer for peer in self._status.peers if _DENIED in (peer.reason or "")]
        yield from network.judge_permission(
            network.PermissionFacts(
                denied_here=tuple(one.address for one in tried.values() if one.state == "denied"),
                denied_agent=tuple(name_peer(peer, self._status.node.name) for peer in reasons),
                others_heard=bool(heard.hosts) or any(_arrived(one) for one in tried.values()),
                tried=len(tried),
            )
        )

    def _look_at_mdns(self) -> network.MdnsFacts:
        heard = self._nearby.heard
        others = self._others.items()
        return network.MdnsFacts(
            agent_listens=self._uses_mdns,
            error=heard.error,
            own_heard=self._own(heard) is not None,
            agents_heard=len(heard.agents) - (self._own(heard) is not None),
            others_heard=bool(heard.hosts),
            unheard=tuple(one.name for key, one in others if self._should_be_heard(key, one)),
            alone=self._alone,
            knows_others=any(not one.named for _, one in others) or bool(self._status.peers),
            named=any(one.named for _, one in others),
        )

    def _should_be_heard(self, key: str, one: OtherMachine) -> bool:
        """Return True for a machine that was not heard, though it answers and should be near."""
        neighbour = any(own.reaches(a.host) for own in self._used for a in one.addresses)
        from_it = {address.host for address in one.addresses} & self._nearby.heard.hosts
        expected = neighbour or (one.named and self._alone)
        return not one.heard and not from_it and expected and _arrived(self._nearby.tried[key])

    def _look_at_meshes(self) -> network.MeshFacts:
        own, key = self._own(self._nearby.heard), self._advertisement_key
        members = {node_text(ad.node) for ad in self._members_heard(self._nearby.heard)}
        others = {
            node_text(node): ad.name
            for node, ad in self._nearby.heard.agents.items()
            if ad is not own and node_text(node) not in members and own and ad.tag != own.tag
        }
        for peer in self._peers_in("other_mesh_key"):
            others[peer.id or peer.addresses[0]] = name_peer(peer, self._status.node.name)
        return network.MeshFacts(
            others=tuple(others.values()),
            key_changed=own is not None and key is not None and own.tag != key.tag,
            alone=self._alone,
        )

    def _peers_in(self, *states: str) -> Iterator[PeerStatus]:
        return (peer for peer in self._status.peers if peer.state in states)

    def _look_at_protocols(self) -> tuple[network.OtherVersion, ...]:
        own = self._status.node.name
        return tuple(
            network.OtherVersion(name=name_peer(peer, own), reason=peer.reason or "")
            for peer in self._peers_in("other_version")
        )

    def _look_at_routes(self) -> Iterator[network.RouteFacts]:
        """Yield a route to each address that is on a network of ours, so needs no VPN."""
        usual = [own for own in self._local if own.kind != "vpn"]
        for one in self._others.values():
            for address in one.addresses:
                if address.host.startswith("fe80") or not any(
                    own.reaches(address.host) for own in usual
                ):
                    continue
                own = nearby.interface_to(address.host, self._local)
                if own is not None:
                    yield network.RouteFacts(
                        name=one.name,
                        address=address.host,
                        interface=own.interface,
                        is_vpn=own.kind == "vpn",
                        linked=one.linked,
                    )

    @cached_property
    def _ways(self) -> tuple[network.WayFacts, ...]:
        return tuple(_way_facts(one, self._nearby.tried[key]) for key, one in self._others.items())

    def _judge_links(self) -> Iterator[Finding]:
        unlinked = [
            network.Unlinked(
                name=one.name,
                reason=peer.reason or peer.state.replace("_", " "),
                may_be_off=peer.state in {"connecting", "unreachable"} and not one.heard,
            )
            for peer in self._peers_in("connecting", "unreachable", "refused", "node_key_copied")
            for one in [self._others[_key_of(peer)]]
        ]
        yield from network.judge_links(unlinked, members=len(self._status.view.members))

    def _judge_speed(self) -> Iterator[Finding]:
        yield from slow.judge_speed(self._status.view.members, self._status.held_off)

    def _look_at_clocks(self) -> Iterator[slow.ClockFacts]:
        now = int(time.time() // 60)
        for ad in self._members_heard(self._nearby.heard):
            yield slow.ClockFacts(name=ad.name, ahead_minutes=ad.minute - now)


def _parse_peer(text: str) -> Address:
    try:
        host, port = parse_host_port(text)
    except ValueError as e:
        raise ConfigError(f"--peer {text!r}: {e}") from e
    if not host or not port:
        raise ConfigError(f"--peer {text!r}: it must be HOST or HOST:PORT")
    return Address(host, port)


def _key_of(peer: PeerStatus) -> str:
    return peer.id or ", ".join(peer.addresses)


def _node_of(peer: PeerStatus) -> NodeId | None:
    """Return the node of a machine with which there is a link; None if there is none."""
    return None if peer.id is None or peer.state != "linked" else node_from_text(peer.id)


def _arrived(tried: Tried) -> bool:
    return tried.state not in {"unreachable", "denied"}


def _way_facts(machine: OtherMachine, tried: Tried) -> network.WayFacts:
    return network.WayFacts(
        name=machine.name,
        address=tried.address,
        outcome="unreachable" if tried.state == "denied" else tried.state,
        linked=machine.linked,
        heard=machine.heard,
        error=tried.error,
        named=machine.named,
    )
