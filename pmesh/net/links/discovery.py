"""Finds agents on the local network by mDNS: the only file that uses zeroconf.

zeroconf needs an asyncio loop. It gets one, in one thread, that ends when `discover` does.

Any machine on the network can announce anything, at any rate. An announcement without our mesh key
does not leave this thread, except for a few of other meshes, which are shown. zeroconf keeps each
record for as long as the record says, so we purge its cache when it grows too large.
"""

import asyncio
import math
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import trio
from zeroconf import DNSQuestionType, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from pmesh.core.identity import advertisement as adverts
from pmesh.core.identity.advertisement import SERVICE_TYPE, Advertisement
from pmesh.core.identity.keys import AdvertisementKey, NodeKey
from pmesh.core.links.addresses import LocalAddress
from pmesh.errors import ProtocolError
from pmesh.ids import NodeId
from pmesh.net.links.interfaces import AddressWatch
from pmesh.net.links.packet_filter import DiscoveryCounters, FilteringLoop, PacketFilter

RESOLVE_MS: Final = 3000
_TXT, _IN = 16, 1  # the type and the class of a TXT record
MAX_RESOLVING: Final = 32  # names without a TXT record; announcements normally include it
NUMBER_TELLS: Final = 3
"""How often a number is announced, `look_s` apart. zeroconf puts off some answers for over a
second, so one that it prepared before may bring the former number after the first of these."""


def minute_of_now() -> int:
    return int(time.time() // 60)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoverySettings:
    """How often `discover` does what, how much it keeps, and what it uses; times in seconds."""

    retry_s: float = 5.0  # after the system has refused us port 5353 or multicast
    browse_again_s: float = 60.0  # a repaired switch gives no sign, and zeroconf soon asks hourly
    move_again_s: float = 1.0  # between two changes of addresses: each costs a goodbye, a greeting
    settle_s: float = 10.0  # after a change of addresses, known agents may take this long to answer
    renew_s: float = 240.0  # an advertisement contains its minute, and counts as fresh for ten
    look_s: float = 1.0  # at a changed number, and at how much zeroconf keeps
    max_found: int = 64  # agents of our mesh, and as many others; a mesh has 8
    new_found_s: float = 60.0  # at most max_found new ones in this time
    max_cached_names: int = 512  # a home with 8 agents and 50 printers and televisions has 150
    minute: Callable[[], int] = minute_of_now
    open_zeroconf: Callable[..., AsyncZeroconf] = AsyncZeroconf


DEFAULTS: Final = DiscoverySettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFound:
    """An agent with a verified advertisement; reported again when the advertisement changes.

    It may be of another mesh (tag), speak another protocol version, or hold a copy of our own node
    key; only this agent itself is never reported.
    """

    advertisement: Advertisement


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """A node withdrew its advertisement, or it expired. This is a hint: links decide."""

    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Deaf:
    """mDNS can't be used now, for this reason; it is tried again every 5 s."""

    reason: str


Discovered: TypeAlias = AgentFound | Gone | Deaf


class Nameplate:
    """The number of the invitation that an agent announces; 0 for none."""

    def __init__(self) -> None:
        self.number = 0
        self._changed = trio.Event()

    def show(self, number: int) -> None:
        self.number = number
        self._changed.set()
        self._changed = trio.Event()

    async def changed_from(self, seen: int) -> int:
        """Return the number as soon as it differs from that."""
        while self.number == seen:
            await self._changed.wait()
        return self.number


async def discover(
    own: Advertisement,
    *,
    node_key: NodeKey,
    key: AdvertisementKey,
    watch: AddressWatch,
    found: trio.MemorySendChannel[Discovered],
    counters: DiscoveryCounters,
    nameplate: Nameplate | None = None,
    settings: DiscoverySettings = DEFAULTS,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Announce this agent on all its addresses and report the others, until cancelled.

    It has started when the first announcement was sent or has failed, and takes a quarter of a
    second to say goodbye when cancelled. It adds the addresses and the minute to `own`, and within
    a second the number on the `nameplate`; it counts in `counters` what it does not report. With
    port 0 there is no agent to announce, and it only reports.
    """
    latest = _LatestEvents()
    token = trio.lowlevel.current_trio_token()
    ready = trio.Event()

    # The loop is made here, so that it can be called before its thread runs.
    packets = PacketFilter(SERVICE_TYPE, own.node, key, counters, clock=time.monotonic)
    with asyncio.Runner(loop_factory=lambda: FilteringLoop(packets.passes)) as runner:
        loop = runner.get_loop()
        conversation = _Conversation(
            own,
            node_key=node_key,
            key=key,
            counters=counters,
            settings=settings,
            report=lambda key, event: token.run_sync_soon(latest.put, key, event),
            ready=lambda: token.run_sync_soon(ready.set, idempotent=True),
        )

        async def forward_addresses() -> None:
            addresses: tuple[LocalAddress, ...] = ()
            try:
                while True:
                    addresses = await watch.changed_from(addresses)
                    loop.call_soon_threadsafe(conversation.move_to, watch.announced)
            finally:
                loop.call_soon_threadsafe(conversation.stop)

        async def forward_number(nameplate: Nameplate) -> None:
            number = 0
            while True:
                number = await nameplate.changed_from(number)
                loop.call_soon_threadsafe(conversation.invite, number)

        async with found, trio.open_nursery() as nursery:
            nursery.start_soon(forward_addresses)
            if nameplate is not None:
                nursery.start_soon(forward_number, nameplate)
            nursery.start_soon(latest.deliver, found)
            nursery.start_soon(_start_when, ready, task_status)
            await trio.to_thread.run_sync(
                runner.run, conversation.run(), limiter=trio.CapacityLimiter(1)
            )


async def _start_when(ready: trio.Event, task_status: trio.TaskStatus[None]) -> None:
    await ready.wait()
    task_status.started()


class _LatestEvents:
    """The latest event of each instance; a slow reader costs memory for at most 256 of them."""

    def __init__(self) -> None:
        self._events: dict[str, Discovered] = {}
        self._filled = trio.Event()

    def put(self, key: str, event: Discovered) -> None:
        self._events[key] = event
        self._filled.set()

    async def deliver(self, found: trio.MemorySendChannel[Discovered]) -> None:
        while True:
            await self._filled.wait()
            self._filled = trio.Event()
            while self._events:
                await found.send(self._events.pop(next(iter(self._events))))


class _Conversation:
    """Everything that runs on the asyncio loop."""

    def __init__(
        self,
        own: Advertisement,
        *,
        node_key: NodeKey,
        key: AdvertisementKey,
        counters: DiscoveryCounters,
        settings: DiscoverySettings,
        report: Callable[[str, Discovered], None],
        ready: Callable[[], None],
    ) -> None:
        self._own = own
        self._node_key = node_key
        self._key = key
        self._counters = counters
        self._settings = settings
        self._report = report
        self._ready = ready
        self._addresses: tuple[LocalAddress, ...] = ()
        self._stopped = False
        self._moved = asyncio.Event()
        self._began = -math.inf
        self._known: dict[str, AgentFound] = {}
        self._confirmed: set[str] = set()
        self._texts: dict[str, bytes] = {}
        """The TXT record of each known name that was judged last."""
        self._resolving: dict[str, asyncio.Task[None]] = {}
        self._new_at = deque[float](maxlen=settings.max_found)

    def move_to(self, addresses: tuple[LocalAddress, ...]) -> None:
        changed = _hosts(addresses) != _hosts(self._addresses)
        self._addresses = addresses
        loop, then = asyncio.get_running_loop(), self._began + self._settings.move_again_s
        if changed and loop.time() < then:
            loop.call_at(then, self._moved.set)
        elif changed:
            self._moved.set()

    def invite(self, number: int) -> None:
        self._own = replace(self._own, invitation=number)

    def stop(self) -> None:
        self._stopped = True
        self._moved.set()

    async def run(self) -> None:
        """Run zeroconf until the addresses change, which its sockets don't survive."""
        while not self._stopped:
            self._moved.clear()
            timeout_s = None
            if self._addresses:
                self._began = asyncio.get_running_loop().time()
                try:
                    async with asyncio.TaskGroup() as group:
                        for sockets in _sockets_for(self._addresses):
                            group.create_task(self._converse(sockets))
                except* OSError as e:
                    self._report("", Deaf(reason=f"no mDNS: {e.exceptions[0]}; use --peer"))
                    timeout_s = self._settings.retry_s
            self._ready()
            await self._wait_for_move(timeout_s)

    async def _converse(self, sockets: list[str] | list[int]) -> None:
        zeroconf = self._settings.open_zeroconf(interfaces=sockets)
        number = self._own.invitation  # it may change while the service is registered
        try:
            if self._own.port:
                # zeroconf sends the other two announcements by itself within half a second.
                await zeroconf.async_register_service(  # pyright: ignore[reportUnknownMemberType] - an Awaitable of nothing
                    self._service(),
                    cooperating_responders=True,  # the name is a public key: no probing
                )
            self._ready()
            self._confirmed.clear()
            settled = asyncio.get_running_loop().call_later(
                self._settings.settle_s, self._forget_unconfirmed
            )
            try:
                await self._browse(zeroconf, announced=number)
            finally:
                settled.cancel()
                await self._end_resolving()
        finally:
            await zeroconf.async_close()

    async def _browse(self, zeroconf: AsyncZeroconf, *, announced: int) -> None:
        """Ask for agents repeatedly; purge the cache after a flood of records."""
        loop = asyncio.get_running_loop()
        renewed_at, tells = loop.time(), 0
        while not self._moved.is_set():
            browser = AsyncServiceBrowser(
                zeroconf.zeroconf,
                SERVICE_TYPE,
                handlers=[self._on_change],
                # Unicast answers get lost if several programs share port 5353.
                question_type=DNSQuestionType.QM,
            )
            again_at = loop.time() + self._settings.browse_again_s
            while not self._moved.is_set() and loop.time() < again_at:
                await self._wait_for_move(min(self._settings.look_s, self._settings.browse_again_s))
                self._look_again(zeroconf.zeroconf)
                if announced != self._own.invitation:
                    announced, tells = self._own.invitation, NUMBER_TELLS
                if tells:
                    tells -= 1
                    await self._announce_again(zeroconf)
                if self._keeps_much(zeroconf.zeroconf):
                    break
            await browser.async_cancel()
            if self._keeps_much(zeroconf.zeroconf):
                self._purge(zeroconf.zeroconf)
            if loop.time() - renewed_at >= self._settings.renew_s:
                renewed_at = loop.time()
                await self._announce_again(zeroconf)

    async def _announce_again(self, zeroconf: AsyncZeroconf) -> None:
        if self._own.port:
            await zeroconf.async_update_service(self._service())  # pyright: ignore[reportUnknownMemberType] - as above

    def _purge(self, zeroconf: Zeroconf) -> None:
        """Remove all of zeroconf's records except those of known agents."""
        cache = zeroconf.cache
        self._counters.purges += 1
        nodes = [found.advertisement.node for found in self._known.values()]
        kept = {name.lower() for name in self._known} | {adverts.host_name(n) for n in nodes}
        cache.async_remove_records(
            [
                record
                for name in cache.names()
                if name not in kept
                for record in cache.async_entries_with_name(name)
                if getattr(record, "alias", "").lower() not in kept  # the target of a pointer
            ]
        )

    def _keeps_much(self, zeroconf: Zeroconf) -> bool:
        cache = zeroconf.cache
        kept = len(cache.names()) + len(cache.async_entries_with_name(SERVICE_TYPE))
        return kept > self._settings.max_cached_names

    async def _wait_for_move(self, timeout_s: float | None) -> None:
        try:
            await asyncio.wait_for(self._moved.wait(), timeout_s)
        except TimeoutError:
            return

    def _on_change(
        self,
        zeroconf: Zeroconf,
        service_type: str,  # noqa: ARG002 - zeroconf calls by these names
        name: str,
        state_change: ServiceStateChange,
    ) -> None:
        earlier = self._resolving.pop(name, None)
        if earlier is not None:
            earlier.cancel()
        if state_change is ServiceStateChange.Removed:
            self._forget(name)
        else:
            self._look_up(zeroconf, name)

    def _look_up(self, zeroconf: Zeroconf, name: str) -> None:
        """Read the TXT record, which is normally included; otherwise ask for it."""
        text = _latest_text(zeroconf, name)
        if text:
            self._judge(name, text)
        elif len(self._resolving) < MAX_RESOLVING:
            # Not in a task group: if a packet makes zeroconf raise, asyncio logs it and only that
            # name is not resolved; a stranger's packet must not end the discovery.
            self._resolving[name] = asyncio.ensure_future(self._resolve(zeroconf, name))

    def _look_again(self, zeroconf: Zeroconf) -> None:
        """Judge records that have changed without a word of zeroconf.

        An old record and a new one may be kept beside each other for a second. Of one that comes
        again, zeroconf says nothing.
        """
        for name in tuple(self._known):
            text = _latest_text(zeroconf, name)
            if text and text != self._texts.get(name):
                self._judge(name, text)

    async def _resolve(self, zeroconf: Zeroconf, name: str) -> None:
        info = AsyncServiceInfo(SERVICE_TYPE, name)
        try:
            await info.async_request(zeroconf, RESOLVE_MS, question_type=DNSQuestionType.QM)
        finally:
            if self._resolving.get(name) is asyncio.current_task():
                del self._resolving[name]
        self._judge(name, _latest_text(zeroconf, name))

    def _judge(self, name: str, text: bytes) -> None:
        if name in self._known:
            self._texts[name] = text
        properties = AsyncServiceInfo(SERVICE_TYPE, name, properties=text).properties
        try:
            theirs = adverts.decode_untrusted(properties, instance=name, key=self._key)
        except adverts.ForgedAdvertisement:
            self._counters.forged += 1
            return
        except ProtocolError:
            return  # another program's service with this name
        if theirs.member == self._own.member:
            return
        found = AgentFound(advertisement=theirs)
        self._confirmed.add(name)
        if found == self._known.get(name) or not self._has_room_for(name, theirs):
            return
        self._known[name], self._texts[name] = found, text
        self._report(name, found)

    def _has_room_for(self, name: str, theirs: Advertisement) -> bool:
        """A new agent of our mesh may replace the oldest; one of another mesh may not."""
        ours = theirs.tag == self._key.tag
        alike = [
            n for n, f in self._known.items() if (f.advertisement.tag == self._key.tag) == ours
        ]
        if name in self._known:
            return True
        if ours:
            return self._has_time_for_one() and (
                len(alike) < self._settings.max_found or self._drop(alike[0])
            )
        if len(alike) >= self._settings.max_found:
            self._counters.not_shown += 1
            return False
        return True

    def _has_time_for_one(self) -> bool:
        """Limit the rate, so that a member that invents nodes can't keep the agents busy."""
        now = asyncio.get_running_loop().time()
        if (
            len(self._new_at) == self._settings.max_found
            and now - self._new_at[0] < self._settings.new_found_s
        ):
            return False
        self._new_at.append(now)
        return True

    def _drop(self, name: str) -> bool:
        del self._known[name], self._texts[name]
        return True

    def _forget(self, name: str) -> None:
        self._texts.pop(name, None)
        known = self._known.pop(name, None)
        if known is not None:
            self._report(name, Gone(node=known.advertisement.node))

    def _forget_unconfirmed(self) -> None:
        for name in self._known.keys() - self._confirmed:
            self._forget(name)

    def _service(self) -> AsyncServiceInfo:
        hosts = tuple(dict.fromkeys(address.host for address in self._addresses))
        own = replace(self._own, hosts=hosts, minute=self._settings.minute())
        return AsyncServiceInfo(
            SERVICE_TYPE,
            adverts.instance_name(own.node),
            port=own.port,
            properties=adverts.encode(own, self._node_key, self._key),
            server=adverts.host_name(own.node),
            parsed_addresses=list(hosts),
        )

    async def _end_resolving(self) -> None:
        tasks = list(self._resolving.values())
        self._resolving.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _latest_text(zeroconf: Zeroconf, name: str) -> bytes:
    """Return the TXT record that came last; empty if there is none."""
    records = zeroconf.cache.get_all_by_details(name, _TXT, _IN)
    latest = max(records, key=lambda record: (record.created, record.ttl), default=None)
    text: bytes = getattr(latest, "text", b"")
    return text


def _hosts(addresses: tuple[LocalAddress, ...]) -> list[tuple[str, str]]:
    return [(address.interface, address.host) for address in addresses]


def _sockets_for(addresses: tuple[LocalAddress, ...]) -> list[list[str] | list[int]]:
    """Return where each zeroconf opens sockets: at v4 addresses, and where there are none, at v6.

    The answers contain v6 addresses too. They are two, as on macOS a socket for both kinds can't
    join a v4 group. Each socket sends by its own interface, whatever the routes say. A v6 group is
    joined by the interface's number; raises OSError if the interface is gone.
    """
    v4 = {address.host: address.interface for address in addresses if ":" not in address.host}
    v6 = {address.interface for address in addresses} - set(v4.values())
    numbers = sorted(socket.if_nametoindex(interface) for interface in v6)
    return [sockets for sockets in (list(v4), numbers) if sockets]
