"""Whom this agent dials and when, and who can't be linked with and why.

When is `pmesh.core.dialling`'s decision; this keeps one target for each machine that mDNS, a peer
or the user has named, and runs the dials.
"""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

import structlog
import trio

from pmesh.core import dialling
from pmesh.core.dialling import Phase, Target
from pmesh.core.messages import Address
from pmesh.errors import PeerUnreachable, PmeshError
from pmesh.ids import NodeId

MAX_REFUSALS = 64  # the latest; what `pmesh status` shows of those who are turned away

_log = structlog.get_logger()

Key: TypeAlias = NodeId | Address | str
"""What a target or a refusal is known by: its node, a `--peer` address, or a stranger's host."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Somebody with whom no link is possible, and why; for `pmesh status`."""

    error: PmeshError
    address: Address
    node: NodeId | None = None


class Targets:
    """All machines that are to be linked with."""

    def __init__(
        self,
        dial: Callable[[tuple[Address, ...]], Awaitable[NodeId]],
        *,
        nursery: trio.Nursery,
        jitter: Callable[[], float],
    ) -> None:
        self._dial = dial
        self._nursery = nursery
        self._jitter = jitter
        self._targets: dict[Key, Target] = {}
        self._node_of: dict[Key, NodeId] = {}
        self._changed = trio.Event()
        self.refusals: dict[Key, Refusal] = {}

    @property
    def wanted(self) -> dict[Key, tuple[Address, ...]]:
        """Who is being dialled, or will be."""
        return {
            key: target.addresses
            for key, target in self._targets.items()
            if target.phase in {Phase.WAITING, Phase.DIALLING}
        }

    def aim_at(self, address: Address) -> None:
        """`--peer`: an address that is dialled for ever."""
        self._set(address, dialling.aim_at((address,), forever=True, now=trio.current_time()))

    def name(self, node: NodeId, addresses: tuple[Address, ...], *, linked: bool) -> None:
        """MDNS or a peer names a node of this mesh."""
        now, target = trio.current_time(), self._targets.get(node)
        self._node_of[node] = node
        if target is not None:
            self._set(node, dialling.name_again(target, addresses, now=now))
            return
        target = dialling.aim_at(addresses, forever=False, now=now)
        self._set(node, dialling.link_up(target, now=now) if linked else target)

    def withdraw(self, node: NodeId) -> None:
        """Its mDNS advertisement has ended."""
        if node in self._targets:
            self._set(node, dialling.withdraw(self._targets[node], now=trio.current_time()))

    def link_up(self, node: NodeId) -> None:
        """A link with the node is up, whoever dialled."""
        now = trio.current_time()
        for key, target in self._targets_of(node):
            self._set(key, dialling.link_up(target, now=now))
        for key in [key for key, refusal in self.refusals.items() if refusal.node == node]:
            del self.refusals[key]

    def link_lost(self, node: NodeId) -> None:
        """The link with the node has ended."""
        now = trio.current_time()
        for key, target in self._targets_of(node):
            if target.phase is Phase.LINKED:
                self._set(key, dialling.link_lost(target, now=now, jitter=self._jitter()))

    def refuse(self, key: Key, error: PmeshError, address: Address) -> None:
        """Remember why there is no link, and say it once."""
        before = self.refusals.pop(key, None)
        node = self._node_of.get(key) or (NodeId(key) if isinstance(key, bytes) else None)
        self.refusals[key] = Refusal(error, address, node)
        if len(self.refusals) > MAX_REFUSALS:
            del self.refusals[next(iter(self.refusals))]
        if before is None or type(before.error) is not type(error):
            # Who was found but is off is no news; who was asked for by name is.
            asked_for = isinstance(key, Address) or not isinstance(error, PeerUnreachable)
            say = _log.warning if asked_for else _log.debug
            say("no link", error=type(error).__name__, reason=str(error))

    async def run(self) -> None:
        """Dial whoever is due, until cancelled."""
        while True:
            deadlines = [dialling.next_deadline(target) for target in self._targets.values()]
            with trio.move_on_at(min((d for d in deadlines if d is not None), default=math.inf)):
                await self._changed.wait()
            self._changed = trio.Event()
            now = trio.current_time()
            for key, target in list(self._targets.items()):
                due = dialling.next_deadline(target)
                if due is not None and due <= now:
                    self._targets[key] = dialling.begin_dial(target)
                    self._nursery.start_soon(self._dial_one, key)

    async def _dial_one(self, key: Key) -> None:
        addresses = self._targets[key].addresses
        try:
            node = await self._dial(addresses)
        except PmeshError as e:
            self.refuse(key, e, addresses[0])
            target = self._targets[key]
            if target.phase is Phase.DIALLING:  # else the peer's own dial has come and gone since
                now, jitter = trio.current_time(), self._jitter()
                self._set(key, dialling.dial_failed(target, now=now, jitter=jitter))
            return
        self._node_of[key] = node
        self.refusals.pop(key, None)
        self._set(key, dialling.link_up(self._targets[key], now=trio.current_time()))

    def _targets_of(self, node: NodeId) -> list[tuple[Key, Target]]:
        return [(k, target) for k, target in self._targets.items() if self._node_of.get(k) == node]

    def _set(self, key: Key, target: Target) -> None:
        self._targets[key] = target
        self._changed.set()
