"""How often an event says that a machine with another mesh key was refused.

Anyone in the network can cause such an event, from as many addresses as they like. An event log
keeps a thousand events, so these must stay few: at most four in ten minutes, one for each address.
"""

from typing import Final

WINDOW_S: Final = 600.0
MOST: Final = 4  # in a window: alone, they would fill an event log of 1,000 in 42 hours
CURE: Final = "if it is yours, type here: pmesh invite; and there: pmesh join --replace --up"


class RefusedKeys:
    """Counts the refusals that no event has said."""

    def __init__(self) -> None:
        self._said: dict[str, float] = {}  # at most MOST, whoever comes; the oldest first
        self._unsaid = 0

    def refuse(self, host: str, *, now: float) -> str | None:
        """Return what an event says of a refusal; None if it is only counted.

        Args:
            host: The address from which the machine came.
            now: In seconds of a monotonic clock.
        """
        self._said = {known: at for known, at in self._said.items() if now - at < WINDOW_S}
        if host in self._said or len(self._said) == MOST:
            self._unsaid += 1
            return None
        self._said[host] = now
        unsaid, self._unsaid = self._unsaid, 0
        before = f" ({unsaid} before it, too)" if unsaid else ""
        return f"a machine at {host} came with another mesh key, and was refused{before}; {CURE}"
