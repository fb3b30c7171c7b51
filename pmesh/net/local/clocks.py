"""Detects that this agent stood still: suspended, stopped, or starved of the processor."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import psutil
import trio

TICK_S: Final = 0.1  # half a heartbeat: silence is judged no later than this

# One clock runs while the machine sleeps, the other stops. CLOCK_MONOTONIC stops on Linux and runs
# on macOS. typeshed knows each name only on its own system.
_ELAPSED: Final[int] = getattr(time, "CLOCK_MONOTONIC" if psutil.MACOS else "CLOCK_BOOTTIME")
_AWAKE: Final[int] = getattr(time, "CLOCK_UPTIME_RAW" if psutil.MACOS else "CLOCK_MONOTONIC")


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Two clocks read together, in seconds."""

    elapsed_s: float
    """Runs while the machine sleeps."""
    awake_s: float
    """Stops while the machine sleeps, as trio's clock does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """How long this agent could not receive."""

    late_s: float
    """The machine ran but this agent did not: the loop lag of `pmesh status`."""
    slept_s: float
    """The machine slept."""

    @property
    def total_s(self) -> float:
        return self.late_s + self.slept_s


def read_clocks() -> Clocks:
    return Clocks(elapsed_s=time.clock_gettime(_ELAPSED), awake_s=time.clock_gettime(_AWAKE))


def own_stall(before: Clocks, after: Clocks, *, expected_s: float) -> Stall:
    """Return the stall between two readings that should be `expected_s` apart."""
    awake_s = after.awake_s - before.awake_s
    elapsed_s = after.elapsed_s - before.elapsed_s
    return Stall(late_s=max(0.0, awake_s - expected_s), slept_s=max(0.0, elapsed_s - awake_s))


async def tick(
    judge: Callable[[Stall], None],
    *,
    period_s: float = TICK_S,
    read: Callable[[], Clocks] = read_clocks,
) -> None:
    """Call `judge` every `period_s` with the stall since the last call, which is usually 0.

    The silence of peers must be judged there and nowhere else: another task would count a stall
    against them before it is known.
    """
    before = read()
    while True:
        await trio.sleep(period_s)
        after = read()
        judge(own_stall(before, after, expected_s=period_s))
        before = after
