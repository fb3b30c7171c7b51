"""Finds the machine that invites by a number, by mDNS, and connects to it.

Whoever answers gets one guess at the code. So `pmesh join` talks to one machine only: it refuses if
several announce the number.
"""

import math
import secrets
from collections.abc import Iterable, Sequence
from typing import Final

import trio

from pmesh.agent.config import AgentSettings
from pmesh.core.identity.advertisement import Advertisement
from pmesh.core.identity.keys import AdvertisementKey, NodeKey
from pmesh.core.links.addresses import LocalAddress
from pmesh.core.wire.link import Address
from pmesh.errors import NetworkError, PeerUnreachable, UsageError
from pmesh.ids import Incarnation, NodeId
from pmesh.net.links.dialer import dial
from pmesh.net.links.discovery import AgentFound, Deaf, Discovered, discover
from pmesh.net.links.interfaces import AddressWatch
from pmesh.net.links.packet_filter import DiscoveryCounters

LOOK_S: Final = 10.0  # mDNS takes about a second, and the inviter announces its code within another
OTHERS_S: Final = 1.0  # after the first was found: another that announces the same number
DIAL_S: Final = 5.0
_LINK_LOCAL: Final = "fe80:"
_ANY_MESH: Final = AdvertisementKey(b"", b"")  # no tag is like it, so only signatures are checked


async def find_inviter(
    number: int, settings: AgentSettings, key: NodeKey, *, look_s: float = LOOK_S
) -> trio.SocketStream:
    """Return a connection to the one machine that announces this number.

    Raises:
        PeerUnreachable: There is none, or it can't be reached; the message says what to check.
        UsageError: There are several.
    """
    watch = AddressWatch(only=settings.interfaces, never=settings.not_interfaces)
    finder = _Finder(number)
    async with trio.open_nursery() as nursery:
        await nursery.start(watch.run)
        send, receive = trio.open_memory_channel[Discovered](16)
        with trio.move_on_after(look_s) as scope:
            nursery.start_soon(_discover, settings, key, watch, send)
            last, ends = scope.deadline, math.inf
            async for event in receive:
                finder.note(event)
                # An answer from before the code may come after it: then the next one is waited for.
                ends = min(ends, trio.current_time() + OTHERS_S) if finder.inviters else math.inf
                scope.deadline = min(last, ends)
        local = watch.announced
        nursery.cancel_scope.cancel()
    inviter = finder.only(look_s)
    errors: list[NetworkError] = []
    for addresses in ways_to(inviter, local):
        stream = await _connect_to_any(addresses, errors)
        if stream is not None:
            return stream
    why = errors[0] if errors else "the cable or network by which it was found is gone"
    raise PeerUnreachable(f"{inviter.name} was found, but can't be reached: {why}")


async def _discover(
    settings: AgentSettings,
    key: NodeKey,
    watch: AddressWatch,
    found: trio.MemorySendChannel[Discovered],
) -> None:
    nobody = Advertisement(
        tag=b"",
        node=key.node,
        incarnation=Incarnation(secrets.randbits(62) + 1),
        port=0,
        name=settings.name,
    )
    await discover(
        nobody,
        node_key=key,
        key=_ANY_MESH,
        watch=watch,
        found=found,
        counters=DiscoveryCounters(),
    )


class _Finder:
    """What mDNS has found so far."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._found: dict[NodeId, Advertisement] = {}
        self._deaf = ""

    def note(self, event: Discovered) -> None:
        match event:
            case AgentFound(advertisement=advertisement):
                self._found[advertisement.node] = advertisement
            case Deaf(reason=reason):
                self._deaf = reason
            case _:
                self._found.pop(event.node, None)

    @property
    def inviters(self) -> list[Advertisement]:
        return [each for each in self._found.values() if each.invitation == self._number]

    def only(self, looked_s: float) -> Advertisement:
        """Return the one that announces the number; raise an error if there is not exactly one."""
        inviters = self.inviters
        if len(inviters) == 1:
            return inviters[0]
        peer = "or name its address: pmesh join CODE --peer HOST:PORT"
        if inviters:
            names = ", ".join(sorted(each.name for each in inviters))
            raise UsageError(
                f"several machines announce the number {self._number}: {names}; make a new code "
                f"with 'pmesh invite', {peer}"
            )
        raise PeerUnreachable(f"{self._why_none(looked_s)}; {peer}")

    def _why_none(self, looked_s: float) -> str:
        if self._deaf:
            return f"can't look for the machine that invites: {self._deaf}"
        none = f"no machine that announces a code with the number {self._number}"
        others = [f"{each.name} has {each.invitation}" for each in self._invite_otherwise()]
        if others:
            return f"{none} was found; {', '.join(others)}: check the code"
        if self._found:
            names = ", ".join(sorted(each.name for each in self._found.values()))
            return (
                f"{none} was found in {looked_s:g} s; pmesh runs on {names}: check that the "
                "code is not older than ten minutes"
            )
        return (
            f"no machine that runs pmesh was found in {looked_s:g} s: check that both machines are "
            "in the same network, that 'pmesh invite' waits on the other, and that no firewall "
            "blocks UDP 5353 or TCP 24160"
        )

    def _invite_otherwise(self) -> Iterable[Advertisement]:
        return (each for each in self._found.values() if each.invitation)


def ways_to(inviter: Advertisement, local: Sequence[LocalAddress]) -> list[list[Address]]:
    """Return where to dial it: first its addresses, then link-local ones by each interface here."""
    if not inviter.hosts:
        raise PeerUnreachable(
            f"{inviter.name} runs another version of pmesh; install the same on both machines"
        )
    interfaces = dict.fromkeys(own.interface for own in local)
    hosts = [host for host in inviter.hosts if not host.startswith(_LINK_LOCAL)]
    scoped = [
        f"{host}%{interface}"
        for host in inviter.hosts
        if host.startswith(_LINK_LOCAL)
        for interface in interfaces
    ]
    ways = [[Address(host, inviter.port) for host in some] for some in (hosts, scoped)]
    return [way for way in ways if way]


async def _connect_to_any(
    addresses: Sequence[Address], errors: list[NetworkError]
) -> trio.SocketStream | None:
    """Return the first connection that one of the addresses accepts; None and errors if none."""
    accepted: list[trio.SocketStream] = []

    async def connect(address: Address, nursery: trio.Nursery) -> None:
        try:
            stream = await dial(address, timeout_s=DIAL_S)
        except NetworkError as e:
            errors.append(e)
            return
        if accepted:
            await trio.aclose_forcefully(stream)
        else:
            accepted.append(stream)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for address in addresses:
            nursery.start_soon(connect, address, nursery)
    return accepted[0] if accepted else None
