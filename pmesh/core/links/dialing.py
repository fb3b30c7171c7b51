"""When to dial whom: one `Target` for each machine that mDNS, a peer or the user has named."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from pmesh.core.wire.link import Address

FIRST_DELAY_S: Final = 0.1
LONGEST_DELAY_S: Final = 10.0  # how long a machine that comes back may have to wait for us
LONGEST_UNPROVEN_DELAY_S: Final = 300.0  # what has never answered may be an invention
UNPROVEN_S: Final = 120.0  # how long a peer's word for a machine counts: it may dial us, too
STEADY_AFTER_S: Final = 1.0  # a link that ends sooner has been refused rather than lost
GRACE_S: Final = 60.0  # a machine that withdraws its advertisement may be restarting or waking


class Phase(Enum):
    """Where a target stands."""

    WAITING = "waiting"
    DIALLING = "dialling"
    LINKED = "linked"
    OVER = "over"
    """It was withdrawn and can't be reached any more."""


class Signal(Enum):
    """What can happen to a target."""

    DIALLED = "dialled"
    FAILED = "failed"
    LINKED = "linked"
    """A link is up, whoever dialled it."""
    LOST = "lost"
    ABANDONED = "abandoned"
    """It failed, and was withdrawn long ago."""
    NAMED = "named"
    """Somebody names it (again)."""


_W, _D, _L, _O = Phase.WAITING, Phase.DIALLING, Phase.LINKED, Phase.OVER

TRANSITIONS: Final[Mapping[Phase, Mapping[Signal, Phase]]] = {
    _W: {Signal.DIALLED: _D, Signal.LINKED: _L, Signal.NAMED: _W},
    # The link may be the one that the peer has dialled meanwhile.
    _D: {Signal.FAILED: _W, Signal.ABANDONED: _O, Signal.LINKED: _L, Signal.NAMED: _D},
    # A dial of ours that ends after the peer's own has succeeded changes nothing.
    _L: {Signal.FAILED: _L, Signal.ABANDONED: _L, Signal.LOST: _W, Signal.NAMED: _L},
    _O: {Signal.LINKED: _L, Signal.NAMED: _W},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A machine to be linked with. Times are of one monotonic clock, in seconds."""

    addresses: tuple[Address, ...]
    forever: bool
    """Named by `--peer`: it is never given up."""
    introduced: bool = False
    """Named by a peer, which may have invented it."""
    named_at: float = 0.0
    proven: bool = False
    """There has been a link with it."""
    phase: Phase = Phase.WAITING
    due: float
    """When to dial, while WAITING."""
    failures: int = 0
    """In a row."""
    linked_since: float = 0.0
    give_up_at: float | None = None
    """Set when it was withdrawn."""


def aim_at(
    addresses: tuple[Address, ...], *, forever: bool, now: float, introduced: bool = False
) -> Target:
    """A new target, to be dialled at once."""
    return Target(
        addresses=addresses, forever=forever, introduced=introduced, named_at=now, due=now
    )


def next_deadline(target: Target) -> float | None:
    """When to dial; None while there is nothing to wait for."""
    return target.due if target.phase is Phase.WAITING else None


def begin_dial(target: Target) -> Target:
    """Its addresses are being dialled, all of them, the best first."""
    return _apply(target, Signal.DIALLED)


def dial_failed(target: Target, *, now: float, jitter: float) -> Target:
    """No address answered, or the handshake failed.

    Args:
        target: The target.
        now: The monotonic clock.
        jitter: From 0 up to 1, drawn anew each time: machines that lost one another together
            must not dial in step for ever.
    """
    end = _end_of(target)
    if now >= end:
        return _apply(target, Signal.ABANDONED)
    steady = target.proven or target.forever
    limit_s = LONGEST_DELAY_S if steady else LONGEST_UNPROVEN_DELAY_S
    longest_s = min(FIRST_DELAY_S * 2.0 ** min(target.failures, 20), limit_s)
    due = min(now + longest_s * (1 + jitter) / 2, end)  # the last one is worth a dial
    failed = replace(target, failures=target.failures + 1, due=due)
    return _apply(failed, Signal.FAILED)


def _end_of(target: Target) -> float:
    """When a failure is its last."""
    if target.give_up_at is not None:
        return target.give_up_at
    invented = target.introduced and not target.proven
    return target.named_at + UNPROVEN_S if invented else math.inf


def link_up(target: Target, *, now: float) -> Target:
    """A link with it is up, whoever dialled."""
    if target.phase is Phase.LINKED:
        return target
    return _apply(replace(target, linked_since=now, proven=True), Signal.LINKED)


def link_lost(target: Target, *, now: float, jitter: float) -> Target:
    """The link has ended: redial at once (V6), but once, and not if it never held."""
    lost = _apply(target, Signal.LOST)
    if now - target.linked_since >= STEADY_AFTER_S:
        return replace(lost, due=now, failures=0)
    return dial_failed(begin_dial(lost), now=now, jitter=jitter)


def name_again(target: Target, addresses: tuple[Address, ...], *, now: float) -> Target:
    """Somebody names it: other addresses are worth a dial at once, the same ones are no news."""
    named_at = now if target.introduced else target.named_at
    named = replace(target, addresses=addresses, give_up_at=None, named_at=named_at)
    named = _apply(named, Signal.NAMED)
    if addresses == target.addresses and target.phase is not Phase.OVER:
        return named
    return replace(named, due=now, failures=0)


def withdraw(target: Target, *, now: float) -> Target:
    """Its advertisement has ended. Links decide who is here: it is only given up when it fails."""
    if target.forever or target.give_up_at is not None:
        return target
    return replace(target, give_up_at=now + GRACE_S)


def _apply(target: Target, signal: Signal) -> Target:
    return replace(target, phase=TRANSITIONS[target.phase][signal])
