"""How many guesses an agent's codes allow: one for each code, and three wrong ones an hour.

A code is used up as soon as an exchange about it begins, however that ends. So whoever does not
know its words has one guess. A code that has let a machine in gave nobody a wrong guess, and does
not count among the three.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from pmesh.errors import UsageError
from pmesh.invites.rules.codes import Code

LASTS_S: Final = 600.0  # long enough to walk to the other machine, and to install pmesh there
MOST_CODES: Final = 3  # an hour, of those that let nobody in
HOUR_S: Final = 3600.0

State: TypeAlias = Literal["none", "open", "taken"]
Signal: TypeAlias = Literal["open", "take", "withdraw", "finish"]

TRANSITIONS: Final[Mapping[tuple[State, Signal], State]] = MappingProxyType(
    {
        ("none", "open"): "open",
        ("open", "take"): "taken",
        ("open", "withdraw"): "none",
        ("taken", "finish"): "none",
    }
)
"""The states of an agent's one invitation. No other signal changes it."""


class Invitations:
    """The codes of one agent, of which at most one is open. All times are in seconds."""

    def __init__(self) -> None:
        self.state: State = "none"
        self._code: Code | None = None
        self._until = -math.inf
        self._counted: list[float] = []
        """When the codes of the last hour that let nobody in were opened, the latest last."""

    def open(self, draw: Callable[[], Code], *, now: float) -> Code:
        """Open a code, which anybody may try once until `LASTS_S` have passed.

        Raises UsageError if another one is open, or if the hour has had its codes.
        """
        self._expire(now)
        if self.state != "none":
            raise UsageError(
                "this machine invites already: end the other 'pmesh invite', or wait until it ends"
            )
        self._counted = [began for began in self._counted if now - began < HOUR_S]
        if len(self._counted) >= MOST_CODES:
            minutes = math.ceil((self._counted[0] + HOUR_S - now) / 60)
            raise UsageError(
                f"{MOST_CODES} codes of the last hour let nobody in, and there are no more: so "
                f"nobody can try many; wait {minutes} minutes, invite from another machine, or use "
                "'pmesh key show' and 'pmesh key set'"
            )
        self._enter("open")
        self._code, self._until = draw(), now + LASTS_S
        self._counted.append(now)
        return self._code

    def take(self, number: int, *, now: float) -> Code | None:
        """Use up the open code, if it has this number, for one exchange; else return None."""
        self._expire(now)
        if self._code is None or self._code.number != number:
            return None
        code = self._code
        self._enter("take")
        return code

    def finish(self, *, let_in: bool) -> None:
        """End the exchange for which a code was taken."""
        if self.state == "taken":
            self._enter("finish")
            if let_in:
                self._counted.pop()

    def withdraw(self) -> None:
        """Withdraw the code that is open, if any."""
        if self.state == "open":
            self._enter("withdraw")

    def _expire(self, now: float) -> None:
        if now >= self._until:
            self.withdraw()

    def _enter(self, signal: Signal) -> None:
        self.state = TRANSITIONS[self.state, signal]
        self._code = None
