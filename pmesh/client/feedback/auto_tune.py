"""How Auto finds the fastest way: each one is tried a few times, timed, and all ranks compare."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pmesh.ids import TrainerId

ROUNDS = 3
"""How often each way is tried; the first time does not count: memory is fresh, code not compiled,
connections slow to begin."""


@dataclass(slots=True)
class Trials:
    """Of one tree, among the same ranks, which all have the same figures."""

    trainers: tuple[TrainerId, ...]
    ways: int
    """How many there are."""
    begun: int = 0
    """Trials that have succeeded here; the time of the last is not agreed on as yet."""
    own_ns: int = 0
    """What the last took here."""
    agreed_ns: list[int] = field(default_factory=list[int])
    """What each took on the slowest rank."""

    def hear(self, trainers: tuple[TrainerId, ...], told: Sequence[tuple[int, int]]) -> None:
        """What each rank says of its trials: how many, and how long the last took.

        All begin anew if the ranks are others, or one has not seen the trials of the rest.
        """
        same = trainers == self.trainers and {begun for begun, _ in told} == {self.begun}
        if not same:
            self.trainers, self.begun, self.agreed_ns = trainers, 0, []
        elif self.begun > len(self.agreed_ns):
            self.agreed_ns.append(max(took for _, took in told))

    def tells(self) -> tuple[int, int]:
        """What this rank says, for `hear`."""
        return self.begun, self.own_ns

    def progress(self) -> str:
        """Which trial is next, for a person."""
        return f"{self.begun + 1} of {ROUNDS * self.ways}"

    @property
    def are_over(self) -> bool:
        """Whether all are done and agreed on."""
        return len(self.agreed_ns) == ROUNDS * self.ways

    @property
    def next_way(self) -> int:
        """What to try now."""
        return self.begun % self.ways

    def tried(self, took_ns: int) -> None:
        """The trial has succeeded here, so it has on all ranks."""
        self.begun += 1
        self.own_ns = took_ns

    def best_ns(self) -> list[int]:
        """Of each way the shortest time, once they are over."""
        counted = self.agreed_ns[self.ways :]
        return [min(counted[way :: self.ways]) for way in range(self.ways)]

    def winner(self, min_gain: float) -> int:
        """The fastest way; the first, which is to do nothing, unless another gains enough."""
        best_ns = self.best_ns()
        fastest = min(range(self.ways), key=best_ns.__getitem__)
        return fastest if best_ns[fastest] * min_gain <= best_ns[0] else 0
