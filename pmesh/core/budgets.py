"""A shared amount: no holder can take it all, and each newcomer gets something."""

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

H = TypeVar("H", bound=Hashable)


class Budget(Generic[H]):
    """An amount of which each holder may take half of what the others leave.

    A single holder gets a half, each of two a third, each of n an (n + 1)-th part. This is the
    dynamic threshold with alpha = 1 by which switches share the memory of their queues (Choudhury
    and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998).

    >>> budget = Budget[str](limit=12)
    >>> budget.take("a", 6), budget.take("a", 1), budget.take("b", 3), budget.take("b", 1)
    (True, False, True, False)
    """

    def __init__(self, *, limit: int) -> None:
        self.limit = limit
        self._held: Counter[H] = Counter()

    @property
    def held(self) -> int:
        """The amount that all holders have together."""
        return self._held.total()

    def held_by(self, holder: H) -> int:
        return self._held[holder]

    def allowed(self, holder: H) -> int:
        """Return the most that this holder may have now; the last unit goes to the first caller."""
        left_by_others = self.limit - self.held + self._held[holder]
        return max(left_by_others // 2, min(left_by_others, 1))

    def take(self, holder: H, amount: int) -> bool:
        """Take the amount, or return False if this holder may not have it."""
        if self._held[holder] + amount > self.allowed(holder):
            return False
        self._held[holder] += amount
        return True

    def give_back(self, holder: H, amount: int) -> None:
        self._held[holder] -= amount
        if not self._held[holder]:
            del self._held[holder]  # processes come and go
