"""What another machine's clock showed when ours showed something: from heartbeats and their echoes.

A heartbeat says when its sender's clock it was sent. It was sent after our echo had been there, and
before it came: an interval of one round trip, whose middle is wrong by half of that at most (Mills,
RFC 5905, section 8). No assumption on the two ways is needed, so the bound holds on any network.
"""

from collections import deque
from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

WINDOW_S: Final = 2.0
"""The best of some ten heartbeats is kept, so a busy machine spoils no reading."""
KEPT: Final = 64  # two minutes
DRIFT: Final = 1e-4  # two quartz clocks differ by at most 100 µs in each second

_Microseconds = Annotated[int, Meta(ge=-(2**62), le=2**62)]


class Reading(msgspec.Struct, frozen=True, array_like=True):
    """One comparison of two clocks, in microseconds."""

    at_us: _Microseconds
    """By the peer's clock."""
    ours_us: _Microseconds
    """By our clock, at the same moment."""
    error_us: Annotated[int, Meta(ge=0, le=2**62)]
    """How far `ours_us` may be from the truth, to either side."""


class PeerClock:
    """The readings of one peer's clock over the last two minutes."""

    def __init__(self) -> None:
        self._readings: deque[Reading] = deque(maxlen=KEPT)
        self._window_began_us = -(2**62)

    @property
    def readings(self) -> tuple[Reading, ...]:
        """The oldest first."""
        return tuple(self._readings)

    def note_untrusted(self, *, now_us: int, sent_us: int, round_trip_s: float) -> None:
        """Note a heartbeat that has come now, which its sender sent at `sent_us` by its clock.

        Args:
            now_us: our clock.
            sent_us: the peer's clock, as it says.
            round_trip_s: as `pmesh.core.links.health.measure_round_trip_s` returns it.
        """
        half_us = round(round_trip_s * 1e6 / 2) + 1  # both clocks are read in whole microseconds
        reading = Reading(sent_us, now_us - half_us, half_us)
        if now_us - self._window_began_us >= WINDOW_S * 1e6:
            self._window_began_us = now_us
            self._readings.append(reading)
        elif reading.error_us < self._readings[-1].error_us:
            self._readings[-1] = reading


class Moment(NamedTuple):
    """A time by our clock, and how far it may be from the truth; both in microseconds."""

    us: float
    error_us: float


def by_our_clock(readings: Sequence[Reading], peer_us: int) -> Moment:
    """Return what our clock showed when the peer's showed `peer_us`.

    Between two readings the clocks are taken to run evenly; before the first and after the last,
    to drift apart by DRIFT.

    >>> by_our_clock([Reading(1000, 5000, 10), Reading(3000, 7010, 20)], 2000)
    Moment(us=6005.0, error_us=20)

    Raises ValueError if there is no reading.
    """
    if not readings:
        raise ValueError("no reading of the peer's clock")
    after = next((i for i, reading in enumerate(readings) if reading.at_us >= peer_us), None)
    if after is None or after == 0:
        near = readings[-1 if after is None else 0]
        far_us = peer_us - near.at_us
        return Moment(near.ours_us + far_us, near.error_us + DRIFT * abs(far_us))
    one, other = readings[after - 1], readings[after]
    share = (peer_us - one.at_us) / (other.at_us - one.at_us)
    ours_us = one.ours_us + share * (other.ours_us - one.ours_us)
    return Moment(ours_us, max(one.error_us, other.error_us))
