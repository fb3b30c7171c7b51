"""The settled bandwidth of an edge between two agents: what is measured, without its noise.

A ring is planned from settled values, so they must not follow each measurement. A value changes
only if all measurements differ from it by more than 30 %, in one direction, for 10 s. There is one
exception. A probe is short, so a busy machine makes it slow, and nothing makes it fast: as soon as
tensors move faster, they count.
"""

from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

SpeedSource: TypeAlias = Literal["nominal", "probe", "data"]
"""Where a value comes from: what the interface claims, a short probe, or the tensors of lanes."""

CHANGED: Final = 1.3
"""A measurement that differs from the settled value by a smaller factor is noise."""

STEADY_S: Final = 10.0
"""How long measurements must differ before the settled value follows them."""

RECENT: Final = 0.25
"""The weight of a measurement among those that differ: the last few count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """The bandwidth of one edge in one direction."""

    settled_mbit_s: int = 0
    """0: unknown."""
    source: SpeedSource = "nominal"
    other_mbit_s: float = 0.0
    """The average of the last measurements, while they differ from the settled value; else 0."""
    differs_since: float = 0.0
    """When the first of those was made, on the caller's monotonic clock."""

    @property
    def is_changing(self) -> bool:
        """True if the last measurement differed, so that another one should follow soon."""
        return self.other_mbit_s > 0


def measured(bandwidth: Bandwidth, mbit_s: float, source: SpeedSource, *, now: float) -> Bandwidth:
    """Add a measurement. The first one counts at once, and a nominal value only before it."""
    settled, is_faster = bandwidth.settled_mbit_s, mbit_s > bandwidth.settled_mbit_s
    is_alike = max(mbit_s, settled) <= CHANGED * min(mbit_s, settled)
    is_first = bandwidth.source == "nominal"
    was_probed = (bandwidth.source, source) == ("probe", "data")
    if is_first or (was_probed and is_faster and not is_alike):
        return Bandwidth(settled_mbit_s=max(1, round(mbit_s)), source=source)
    if source == "nominal":
        return bandwidth
    if is_alike:
        return Bandwidth(settled_mbit_s=settled, source=source)
    if not bandwidth.is_changing or is_faster != (bandwidth.other_mbit_s > settled):
        return replace(bandwidth, other_mbit_s=mbit_s, differs_since=now)
    other = bandwidth.other_mbit_s + RECENT * (mbit_s - bandwidth.other_mbit_s)
    if now - bandwidth.differs_since < STEADY_S:
        return replace(bandwidth, other_mbit_s=other)
    return Bandwidth(settled_mbit_s=max(1, round(other)), source=source)
