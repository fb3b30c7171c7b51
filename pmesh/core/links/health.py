"""The health of a peer, from the messages received from it and the local monotonic clock.

One `Health` belongs to one link. GONE is final: the peer can only be heard again on a new link,
which begins with what was measured on the last one.

A silence counts as much as it is unusual on its link, as in Hayashibara et al., "The phi accrual
failure detector" (2004): a link whose silences have ended by themselves before gets longer. And two
ideas of SWIM with Lifeguard (arXiv 1707.00788): a peer that another member hears is not given up so
soon, and an agent that suddenly hears nobody doubts itself first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import sqrt
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

ROUND_TRIP_ALPHA: Final = 0.2  # five heartbeats, one second: steady, and follows a change
MAX_ROUND_TRIP_S: Final = 60.0  # a longer echo is nonsense: the link would be gone by then
UNUSUAL: Final = 2.0
"""V12: a silence is unusual if it is this many times as long as the longest one lately."""
UNUSUAL_ROUND_TRIPS: Final = 5
"""V12: a silence of fewer round trips is no sign: a closed link takes four to be dialled again."""
LATELY_S: Final = 60.0
"""The weight of a silence halves in this time."""
DEAF: Final = 2.5
"""V12: how many times as long the others may be silent while this agent hears nobody."""
LONGEST_SILENCE_S: Final = 10.0
"""V12: no peer is silent for longer than this without being given up."""


class Condition(Enum):
    """The condition of a peer."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    """Late: only shown, without any effect."""
    SUSPECT = "suspect"
    GONE = "gone"


class HealthEvent(Enum):
    """An event that can change a condition."""

    HEARD = "heard"
    LATE = "late"
    """Silent for `degraded_after_s`."""
    SILENT = "silent"
    """Silent for `suspect_after_s`."""
    LOST = "lost"
    """Silent for `gone_after_s`."""


_H, _D, _S, _G = Condition.HEALTHY, Condition.DEGRADED, Condition.SUSPECT, Condition.GONE

TRANSITIONS: Final[Mapping[Condition, Mapping[HealthEvent, Condition]]] = {
    _H: {HealthEvent.HEARD: _H, HealthEvent.LATE: _D, HealthEvent.SILENT: _S, HealthEvent.LOST: _G},
    _D: {HealthEvent.HEARD: _H, HealthEvent.LATE: _D, HealthEvent.SILENT: _S, HealthEvent.LOST: _G},
    # Only a message from the peer improves it: forgiving our own stall shortens the silence, but
    # proves nothing.
    _S: {HealthEvent.HEARD: _H, HealthEvent.LATE: _S, HealthEvent.SILENT: _S, HealthEvent.LOST: _G},
    _G: dict.fromkeys(HealthEvent, _G),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The silence for each condition, in seconds; heartbeats come every 0.2 s."""

    degraded_after_s: float
    suspect_after_s: float
    gone_after_s: float


WIRED: Final = Thresholds(degraded_after_s=0.5, suspect_after_s=1.0, gone_after_s=2.0)
WIFI: Final = Thresholds(  # its radios rest for hundreds of milliseconds at a time
    degraded_after_s=1.0, suspect_after_s=2.5, gone_after_s=5.0
)


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The health of the peer at the other end of one link."""

    thresholds: Thresholds
    last_heard: float
    """Seconds of this machine's monotonic clock."""
    condition: Condition = Condition.HEALTHY
    round_trip_s: float | None = None
    """Exponential moving average; None until an echo has come back."""
    round_trip_variance_s2: float = 0.0
    least_round_trip_s: float = 0.0
    """Without what waited in a queue, or for the end of a cut."""
    silence_s: float = 0.0
    """The present silence, as it was last judged."""
    explained: bool = False
    """V12: another member heard the peer meanwhile, or we heard nobody."""
    longest_silence_s: float = 0.0
    """Of those lately that have ended by themselves, weighted by age."""
    longest_unexplained_s: float = 0.0
    """The same, of those that the link itself has to answer for."""

    @property
    def patience(self) -> float:
        """V12: How many times as long as usual the peer may be silent."""
        redial_s = UNUSUAL_ROUND_TRIPS * self.least_round_trip_s
        usual_s = max(UNUSUAL * self.longest_unexplained_s, redial_s)
        return max(1.0, min(usual_s, LONGEST_SILENCE_S) / self.thresholds.gone_after_s)

    @property
    def gone_after_s(self) -> float:
        """V12: Silence after which the peer is gone if nothing speaks for it."""
        return self.patience * self.thresholds.gone_after_s

    @property
    def timeout_s(self) -> float:
        """The retransmission timeout of RFC 6298, with our average; 0 until it is measured."""
        return (self.round_trip_s or 0.0) + 4 * sqrt(self.round_trip_variance_s2)


class HealthStep(NamedTuple):
    """The next state, and the condition if it has changed."""

    health: Health
    changed_to: Condition | None = None


def begin(thresholds: Thresholds, *, now: float, before: Health | None = None) -> Health:
    """Return the health of a new link: its handshake was the first sign of life.

    Args:
        thresholds: Of the kind of network.
        now: The monotonic clock.
        before: V12: of the last link with the same incarnation of the peer; its measurements stay.
            If that was given up for a silence and the peer is back soon, it was given up too early.
    """
    if before is None:
        return Health(thresholds=thresholds, last_heard=now)
    away_s = now - before.last_heard
    fading = 0.5 ** (away_s / LATELY_S)
    was_alive = before.condition is Condition.GONE and away_s <= UNUSUAL * before.silence_s
    silence_s = before.silence_s if was_alive else 0.0
    unexplained_s = 0.0 if before.explained else silence_s
    return replace(
        before,
        thresholds=thresholds,
        last_heard=now,
        condition=Condition.HEALTHY,
        silence_s=0.0,
        longest_silence_s=max(fading * before.longest_silence_s, silence_s),
        longest_unexplained_s=max(fading * before.longest_unexplained_s, unexplained_s),
    )


def heard_from(health: Health, *, now: float, round_trip_s: float | None = None) -> HealthStep:
    """Handle any message on the link; a heartbeat may bring a measured round trip."""
    fading = 0.5 ** (max(0.0, now - health.last_heard) / LATELY_S)
    unexplained_s = 0.0 if health.explained else health.silence_s
    heard = replace(
        health,
        last_heard=max(now, health.last_heard),
        silence_s=0.0,
        longest_silence_s=max(fading * health.longest_silence_s, health.silence_s),
        longest_unexplained_s=max(fading * health.longest_unexplained_s, unexplained_s),
    )
    if round_trip_s is not None:
        heard = _average_in(heard, round_trip_s)
    return _apply(heard, HealthEvent.HEARD)


def pass_time(
    health: Health, *, now: float, vouched: bool = False, deaf: bool = False
) -> HealthStep:
    """Judge the silence. First read all waiting messages and forgive stalls.

    Args:
        health: Of the peer.
        now: The monotonic clock.
        vouched: V12: another member hears the peer, so only the way between it and us is bad.
        deaf: V12: all peers are silent, so the fault is probably ours.
    """
    silence_s = max(0.0, now - health.last_heard)
    health = replace(health, silence_s=silence_s, explained=vouched or deaf)
    limits, patience = health.thresholds, health.patience
    if deaf:
        patience = max(patience, DEAF)
    gone_after_s = min(patience * limits.gone_after_s, max(LONGEST_SILENCE_S, limits.gone_after_s))
    if vouched:
        gone_after_s = max(LONGEST_SILENCE_S, gone_after_s)
    event = None
    for limit_s, meaning in (
        (health.patience * limits.degraded_after_s, HealthEvent.LATE),
        (health.patience * limits.suspect_after_s, HealthEvent.SILENT),
        (gone_after_s, HealthEvent.LOST),
    ):
        if health.silence_s >= limit_s:
            event = meaning
    return HealthStep(health=health) if event is None else _apply(health, event)


def forgive_stall(health: Health, *, stalled_s: float, now: float) -> Health:
    """Discount a stall or sleep of this agent, in which it could receive nothing."""
    return replace(
        health, last_heard=max(health.last_heard, min(now, health.last_heard + stalled_s))
    )


def measure_round_trip_s(*, now_us: int, echo_us: int, held_us: int) -> float | None:
    """Return the round trip that a heartbeat's echo shows; None if it shows none.

    A peer can lie about `echo_us` and `held_us`: impossible values give None.

    Args:
        now_us: This machine's monotonic clock, in microseconds.
        echo_us: Our `sent_us` that came back; 0 if there is none yet.
        held_us: How long the peer says it held it.
    """
    round_trip_s = (now_us - echo_us - held_us) / 1e6
    possible = echo_us > 0 and held_us >= 0 and 0 <= round_trip_s <= MAX_ROUND_TRIP_S
    return round_trip_s if possible else None


def _apply(health: Health, event: HealthEvent) -> HealthStep:
    condition = TRANSITIONS[health.condition][event]
    if condition is health.condition:
        return HealthStep(health=health)
    return HealthStep(health=replace(health, condition=condition), changed_to=condition)


def _average_in(health: Health, round_trip_s: float) -> Health:
    """Add a measurement: Finch, Incremental calculation of weighted mean and variance, §9."""
    if health.round_trip_s is None:
        return replace(health, round_trip_s=round_trip_s, least_round_trip_s=round_trip_s)
    difference = round_trip_s - health.round_trip_s
    increment = ROUND_TRIP_ALPHA * difference
    variance = (1 - ROUND_TRIP_ALPHA) * (health.round_trip_variance_s2 + difference * increment)
    return replace(
        health,
        round_trip_s=health.round_trip_s + increment,
        round_trip_variance_s2=variance,
        least_round_trip_s=min(health.least_round_trip_s, round_trip_s),
    )
