"""When to dial: one `Target` for each machine that mDNS, a peer or the user has named."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from pmesh.core.wire.link import Address

FIRST_DELAY_S: Final = 0.1
LONGEST_DELAY_S: Final = 10.0  # the longest that a machine which comes back waits for us
LONGEST_UNPROVEN_DELAY_S: Final = 300.0  # a target that never answered may be invented
UNPROVEN_S: Final = 120.0  # how long we try a machine that a peer named: it may dial us, too
STEADY_AFTER_S: Final = 1.0  # a link that ends sooner has been refused rather than lost
GRACE_S: Final = 60.0  # a machine that withdraws its advertisement may be restarting or waking


class TargetPhase(Enum):
    """The phase of a target."""

    WAITING = "waiting"
    DIALLING = "dialling"
    LINKED = "linked"
    OVER = "over"
    """It was withdrawn and cannot be reached any more."""


class DialEvent(Enum):
    """An event that can change the phase of a target."""

    DIALLED = "dialled"
    FAILED = "failed"
    LINKED = "linked"
    """A link is up; either side may have dialled it."""
    LOST = "lost"
    ABANDONED = "abandoned"
    """A dial failed, and the target was withdrawn long ago."""
    NAMED = "named"
    """mDNS or a peer named it again."""


_W, _D, _L, _O = TargetPhase.WAITING, TargetPhase.DIALLING, TargetPhase.LINKED, TargetPhase.OVER

TRANSITIONS: Final[Mapping[TargetPhase, Mapping[DialEvent, TargetPhase]]] = {
    _W: {DialEvent.DIALLED: _D, DialEvent.LINKED: _L, DialEvent.NAMED: _W},
    # The link may be one that the peer dialled meanwhile.
    _D: {DialEvent.FAILED: _W, DialEvent.ABANDONED: _O, DialEvent.LINKED: _L, DialEvent.NAMED: _D},
    # A dial of ours that ends after the peer's dial succeeded changes nothing.
    _L: {DialEvent.FAILED: _L, DialEvent.ABANDONED: _L, DialEvent.LOST: _W, DialEvent.NAMED: _L},
    _O: {DialEvent.LINKED: _L, DialEvent.NAMED: _W},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A machine to link with. Times are seconds of one monotonic clock."""

    addresses: tuple[Address, ...]
    forever: bool
    """True if `--peer` named it: it is never given up."""
    introduced: bool = False
    """True if a peer named it: the peer may have invented it."""
    named_at: float = 0.0
    proven: bool = False
    """True once there was a link with it."""
    phase: TargetPhase = TargetPhase.WAITING
    due: float
    """When to dial, while WAITING."""
    failures: int = 0
    """The number of failures in a row."""
    linked_since: float = 0.0
    give_up_at: float | None = None
    """Set when it is withdrawn."""


def aim_at(
    addresses: tuple[Address, ...], *, forever: bool, now: float, introduced: bool = False
) -> Target:
    """Return a new target, due at once."""
    return Target(
        addresses=addresses, forever=forever, introduced=introduced, named_at=now, due=now
    )


def next_deadline(target: Target) -> float | None:
    """Return when to dial; None unless it is WAITING."""
    return target.due if target.phase is TargetPhase.WAITING else None


def begin_dial(target: Target) -> Target:
    return _apply(target, DialEvent.DIALLED)


def dial_failed(target: Target, *, now: float, jitter: float) -> Target:
    """Handle a dial that no address answered, or whose handshake failed.

    `jitter` is a new random number from 0 to 1: machines that lost each other at the same time must
    not dial in step forever.
    """
    end = _end_of(target)
    if now >= end:
        return _apply(target, DialEvent.ABANDONED)
    steady = target.proven or target.forever
    limit_s = LONGEST_DELAY_S if steady else LONGEST_UNPROVEN_DELAY_S
    longest_s = min(FIRST_DELAY_S * 2.0 ** min(target.failures, 20), limit_s)
    due = min(now + longest_s * (1 + jitter) / 2, end)  # the last dial happens at the end
    failed = replace(target, failures=target.failures + 1, due=due)
    return _apply(failed, DialEvent.FAILED)


def _end_of(target: Target) -> float:
    """Return the time from which a failure is final."""
    if target.give_up_at is not None:
        return target.give_up_at
    invented = target.introduced and not target.proven
    return target.named_at + UNPROVEN_S if invented else math.inf


def link_up(target: Target, *, now: float) -> Target:
    """Handle a link with the target; either side may have dialled it."""
    if target.phase is TargetPhase.LINKED:
        return target
    return _apply(replace(target, linked_since=now, proven=True), DialEvent.LINKED)


def link_lost(target: Target, *, now: float, jitter: float) -> Target:
    """Handle the end of the link: redial at once (V6), but only once, and only if it was steady."""
    lost = _apply(target, DialEvent.LOST)
    if now - target.linked_since >= STEADY_AFTER_S:
        return replace(lost, due=now, failures=0)
    return dial_failed(begin_dial(lost), now=now, jitter=jitter)


def name_again(target: Target, addresses: tuple[Address, ...], *, now: float) -> Target:
    """Handle a target that is named again: dial it at once if its addresses are new."""
    named_at = now if target.introduced else target.named_at
    named = replace(target, addresses=addresses, give_up_at=None, named_at=named_at)
    named = _apply(named, DialEvent.NAMED)
    if addresses == target.addresses and target.phase is not TargetPhase.OVER:
        return named
    return replace(named, due=now, failures=0)


def withdraw(target: Target, *, now: float) -> Target:
    """Handle the end of its advertisement: give it up after GRACE_S, and only if a dial fails."""
    if target.forever or target.give_up_at is not None:
        return target
    return replace(target, give_up_at=now + GRACE_S)


def _apply(target: Target, event: DialEvent) -> Target:
    return replace(target, phase=TRANSITIONS[target.phase][event])
