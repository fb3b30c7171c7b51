"""How busy this machine is: each heartbeat says it, for `pmesh status` and `pmesh top`."""

import contextlib
from collections.abc import Callable
from typing import Final, NamedTuple

import psutil

MEASURE_EVERY_S: Final = 2.0  # it takes 60 us, and a person looks once a second


class MachineLoad(NamedTuple):
    """Shares in percent; -1 while unknown."""

    cpu_percent: int = -1
    """Of all its processors together, since it was measured before."""
    memory_percent: int = -1
    """Of its memory, what programs can't get."""


class LoadMeter:
    """Measures the load of this machine now and then."""

    def __init__(
        self,
        cpu_percent: Callable[[], float] = psutil.cpu_percent,
        memory_percent: Callable[[], float] = lambda: psutil.virtual_memory().percent,
    ) -> None:
        self._cpu_percent = cpu_percent
        self._memory_percent = memory_percent
        self._due: float | None = None
        self.load = MachineLoad()

    def measure(self, now: float) -> MachineLoad:
        """Return the load of the last two seconds; the first time there is none to compare with."""
        if self._due is None or now >= self._due:
            with contextlib.suppress(OSError, psutil.Error):  # no descriptor is left: the last one
                cpu, memory = round(self._cpu_percent()), round(self._memory_percent())
                self.load = MachineLoad(
                    -1 if self._due is None else _bounded(cpu), _bounded(memory)
                )
            self._due = now + MEASURE_EVERY_S
        return self.load


def _bounded(percent: int) -> int:
    return min(max(percent, 0), 100)
