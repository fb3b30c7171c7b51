"""Notices that this agent itself stood still: suspended, stopped, or starved of the processor."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import psutil
import trio

TICK_S: Final = 0.1  # half a heartbeat: silence is judged no later than this

# A clock that goes on while the machine sleeps, and one that stands still. Linux: CLOCK_MONOTONIC
# stands still; macOS: CLOCK_MONOTONIC goes on. typeshed knows each name on its own system only.
_ELAPSED: Final[int] = getattr(time, "CLOCK_MONOTONIC" if psutil.MACOS else "CLOCK_BOOTTIME")
_AWAKE: Final[int] = getattr(time, "CLOCK_UPTIME_RAW" if psutil.MACOS else "CLOCK_MONOTONIC")


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Two clocks read together, in seconds."""

    elapsed_s: float
    """Goes on while the machine sleeps."""
    awake_s: float
    """Stands still while the machine sleeps; trio's clock runs like it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """How long this agent could not listen."""

    late_s: float
    """The machine ran and this agent did not: the loop lag of `pmesh status`."""
    slept_s: float
    """The machine slept."""

    @property
    def total_s(self) -> float:
        """Both together."""
        return self.late_s + self.slept_s


def read_clocks() -> Clocks:
    """Both clocks now."""
    return Clocks(elapsed_s=time.clock_gettime(_ELAPSED), awake_s=time.clock_gettime(_AWAKE))


def own_stall(before: Clocks, after: Clocks, *, expected_s: float) -> Stall:
    """What was lost between two readings that should lie `expected_s` apart."""
    awake_s = after.awake_s - before.awake_s
    elapsed_s = after.elapsed_s - before.elapsed_s
    return Stall(late_s=max(0.0, awake_s - expected_s), slept_s=max(0.0, elapsed_s - awake_s))


async def tick(
    judge: Callable[[Stall], None],
    *,
    period_s: float = TICK_S,
    read: Callable[[], Clocks] = read_clocks,
) -> None:
    """Call `judge` every `period_s` with what was lost since the last call, mostly nothing.

    Whoever judges the silence of peers does it there and nowhere else: judged by another task, a
    stall would be held against them before it is known.
    """
    before = read()
    while True:
        await trio.sleep(period_s)
        after = read()
        judge(own_stall(before, after, expected_s=period_s))
        before = after
