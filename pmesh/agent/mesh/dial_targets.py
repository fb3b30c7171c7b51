"""Dials other agents, and remembers why a link with one is impossible.

`pmesh.core.links.dialing` decides when to dial; this module keeps a target for each machine that
mDNS, a peer or the user named, and runs the dials. Targets and simultaneous dials are limited.
Targets named by a peer have the lowest priority, and are forgotten with the peer.
"""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import structlog
import trio

from pmesh.agent.containment import Tasks
from pmesh.core.links import dialing
from pmesh.core.links.dialing import Target, TargetPhase
from pmesh.core.wire.link import Address
from pmesh.errors import PeerUnreachable, PmeshError
from pmesh.ids import NodeId

MAX_DIALS = 8  # at once; each has two sockets at most
MAX_UNPROVEN_DIALS = 4  # at once, to machines that have never answered
MAX_TARGETS = 128  # beside those of `--peer`; a mesh has 8
MAX_INTRODUCED = 16  # targets that one peer named and that were never linked

MAX_REFUSALS = 64  # the latest, which `pmesh status` shows
DIALS_AGAIN_S = dialing.LONGEST_UNPROVEN_DELAY_S + 60.0  # who still wants a link has come by then

_log = structlog.get_logger()

Introduction: TypeAlias = tuple[NodeId, NodeId]
"""The peer that named a machine, and the machine."""

TargetKey: TypeAlias = NodeId | Address | Introduction | str
"""Identifies a target or a refusal: a node, a `--peer` address, an introduction, or the host of a
stranger."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A machine with which no link is possible, and the reason; for `pmesh status`."""

    error: PmeshError
    address: Address
    node: NodeId | None = None
    at: float = field(default_factory=trio.current_time, compare=False)


class Targets:
    """All machines with which this agent wants a link."""

    def __init__(
        self,
        dial: Callable[[tuple[Address, ...]], Awaitable[NodeId]],
        *,
        nursery: Tasks,
        jitter: Callable[[], float],
    ) -> None:
        self._dial = dial
        self._nursery = nursery
        self._jitter = jitter
        self._targets: dict[TargetKey, Target] = {}
        self._node_of: dict[TargetKey, NodeId] = {}
        self._changed = trio.Event()
        self._dials: set[TargetKey] = set()
        self._refusals: dict[TargetKey, Refusal] = {}

    @property
    def refusals(self) -> dict[TargetKey, Refusal]:
        """Why there is no link, and with whom: a machine that dialled this one may have ended."""
        since = trio.current_time() - DIALS_AGAIN_S
        return {k: r for k, r in self._refusals.items() if k in self._targets or r.at > since}

    @property
    def wanted(self) -> dict[TargetKey, tuple[Address, ...]]:
        """The targets that are being dialled or wait for their next dial."""
        return {
            key: target.addresses
            for key, target in self._targets.items()
            if target.phase in {TargetPhase.WAITING, TargetPhase.DIALLING}
        }

    def node_of(self, key: TargetKey) -> NodeId | None:
        """Return the node of a target; None if the node at an address is not known yet."""
        return self._node_of.get(key) or (NodeId(key) if isinstance(key, bytes) else None)

    def knows(self, node: NodeId) -> bool:
        """True if mDNS has named the node."""
        return node in self._targets

    def aim_at(self, address: Address) -> None:
        """Add an address from `--peer`, which is dialled for ever."""
        self._set(address, dialing.aim_at((address,), forever=True, now=trio.current_time()))

    def name(self, node: NodeId, addresses: tuple[Address, ...], *, linked: bool) -> None:
        """Add a node of this mesh that mDNS named."""
        now, target = trio.current_time(), self._targets.get(node)
        if target is not None:
            self._set(node, dialing.name_again(target, addresses, now=now))
            return
        if not self._make_room(invented=False):
            return
        self._node_of[node] = node
        target = dialing.aim_at(addresses, forever=False, now=now)
        self._set(node, dialing.link_up(target, now=now) if linked else target)

    def introduce(self, by: NodeId, node: NodeId, addresses: tuple[Address, ...]) -> None:
        """Add a node of this mesh that a peer named, unless mDNS has named it."""
        key, now = (by, node), trio.current_time()
        if node in self._targets:
            return
        if key in self._targets:
            self._set(key, dialing.name_again(self._targets[key], addresses, now=now))
        elif len(self._introduced(by)) < MAX_INTRODUCED and self._make_room(invented=True):
            self._node_of[key] = node
            target = dialing.aim_at(addresses, forever=False, introduced=True, now=now)
            self._set(key, target)

    def forget(self, introducer: NodeId) -> None:
        """Remove the machines that only this peer had named."""
        for key in self._introduced(introducer):
            self._remove(key)

    def withdraw(self, node: NodeId) -> None:
        """Handle the end of a node's mDNS advertisement."""
        if node in self._targets:
            self._set(node, dialing.withdraw(self._targets[node], now=trio.current_time()))

    def link_up(self, node: NodeId) -> None:
        now = trio.current_time()
        for key, target in self._targets_of(node):
            self._set(key, dialing.link_up(target, now=now))
        for key in [key for key, refusal in self._refusals.items() if refusal.node == node]:
            del self._refusals[key]

    def link_lost(self, node: NodeId) -> None:
        now = trio.current_time()
        for key, target in self._targets_of(node):
            if target.phase is TargetPhase.LINKED:
                self._set(key, dialing.link_lost(target, now=now, jitter=self._jitter()))

    def refuse(self, key: TargetKey, error: PmeshError, address: Address) -> None:
        """Remember why there is no link, and log it once."""
        before = self._refusals.pop(key, None)
        self._refusals[key] = Refusal(error, address, self.node_of(key))
        if len(self._refusals) > MAX_REFUSALS:
            del self._refusals[next(iter(self._refusals))]
        if before is None or type(before.error) is not type(error):
            # A discovered machine that is off is no news; one that the user named is.
            asked_for = isinstance(key, Address) or not isinstance(error, PeerUnreachable)
            say = _log.warning if asked_for else _log.debug
            say("no link", error=type(error).__name__, reason=str(error))

    async def run(self) -> None:
        """Dial all due targets, until cancelled."""
        while True:
            now = trio.current_time()
            waiting = [
                (_worth(target), due, key)
                for key, target in self._targets.items()
                if (due := dialing.next_deadline(target)) is not None
            ]
            for _, due, key in sorted(waiting, key=lambda entry: entry[:2]):
                if due <= now and self._has_turn(self._targets[key]):
                    self._targets[key] = dialing.begin_dial(self._targets[key])
                    self._dials.add(key)
                    self._nursery.start_soon(self._dial_one, key, self._targets[key].addresses)
            # A target that is due but has no turn gets one when a dial ends.
            deadlines = (due for _, due, key in waiting if self._has_turn(self._targets[key]))
            with trio.move_on_at(min((due for due in deadlines if due > now), default=math.inf)):
                await self._changed.wait()
            self._changed = trio.Event()

    def _has_turn(self, target: Target) -> bool:
        others = [self._targets[key] for key in self._dials if key in self._targets]
        inventions = sum(_may_be_invented(other) for other in others)
        room = not _may_be_invented(target) or inventions < MAX_UNPROVEN_DIALS
        return len(self._dials) < MAX_DIALS and room

    async def _dial_one(self, key: TargetKey, addresses: tuple[Address, ...]) -> None:
        try:
            node = await self._dial(addresses)
            if not isinstance(key, Address) and node != self.node_of(key):
                raise PeerUnreachable("another agent answers at the addresses of this one")
        except PmeshError as e:
            self._fail(key, e, addresses[0])
        else:
            self._refusals.pop(key, None)
            if key in self._targets:  # else it was removed meanwhile
                self._node_of[key] = node
                self._set(key, dialing.link_up(self._targets[key], now=trio.current_time()))
        finally:
            self._dials.discard(key)
            self._changed.set()

    def _fail(self, key: TargetKey, error: PmeshError, address: Address) -> None:
        target = self._targets.get(key)
        if target is None:
            return  # the target was removed meanwhile
        self.refuse(key, error, address)
        if (
            target.phase is TargetPhase.DIALLING
        ):  # else a link that the peer dialled has ended since
            now, jitter = trio.current_time(), self._jitter()
            self._set(key, dialing.dial_failed(target, now=now, jitter=jitter))

    def _make_room(self, *, invented: bool) -> bool:
        """Return True if there is room for a target; a better target replaces the worst one."""
        others = {k: t for k, t in self._targets.items() if not isinstance(k, Address)}
        if len(others) < MAX_TARGETS:
            return True
        targets = {k: t for k, t in others.items() if t.phase is TargetPhase.WAITING}
        if not targets:
            return False
        worst = max(targets, key=lambda key: (*_worth(targets[key]), targets[key].failures))
        if invented and not _may_be_invented(targets[worst]):
            return False
        self._remove(worst)
        return True

    def _introduced(self, by: NodeId) -> list[TargetKey]:
        """Return the targets that only this peer has named and that were never linked."""
        return [
            key
            for key, target in self._targets.items()
            if isinstance(key, tuple) and key[0] == by and _may_be_invented(target)
        ]

    def _targets_of(self, node: NodeId) -> list[tuple[TargetKey, Target]]:
        return [(k, target) for k, target in self._targets.items() if self._node_of.get(k) == node]

    def _set(self, key: TargetKey, target: Target) -> None:
        self._targets[key] = target
        if target.phase is TargetPhase.OVER:
            self._remove(key)
        self._changed.set()

    def _remove(self, key: TargetKey) -> None:
        del self._targets[key]
        self._node_of.pop(key, None)
        self._refusals.pop(key, None)


def _may_be_invented(target: Target) -> bool:
    return target.introduced and not target.proven


def _worth(target: Target) -> tuple[bool, bool]:
    """Sort key: first the targets that answered before, last those a peer may have invented."""
    return _may_be_invented(target), not (target.proven or target.forever)
