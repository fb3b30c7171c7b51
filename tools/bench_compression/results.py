"""What was measured, as it lies in a file until the page is written."""

import statistics
from collections.abc import Callable
from pathlib import Path

import msgspec


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One scheme, or one program that trains, at its turn."""

    seconds: float
    """The median call or step, each as long as at its slowest rank."""
    calls: int
    cpu_s: float = 0.0
    """Of each call, all processes of all ranks together."""
    wire_bytes: int = 0
    """Of each call, what a host has sent through its interface, the mean of all hosts; 0: they have
    none of their own."""
    error: float = 0.0
    """The worst relative L2 error of any rank."""
    picked: str = ""
    """What Auto has picked, and why."""
    loss: float = 0.0
    """After these steps."""
    wrong: str = ""
    """What was wrong with a result; empty: nothing."""


Round = dict[str, Turn]
"""Each has had one turn, one after the other."""


class Run(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Rounds of one start."""

    command: str
    """Repeats it."""
    commit: str
    machine: str
    rounds: tuple[Round, ...]


class Measured(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One case with arrays of one size; runs may differ in who had a turn."""

    case: str
    ranks: int
    values: int
    """float32 values of each rank's array, or of the model."""
    runs: tuple[Run, ...]

    @property
    def rounds(self) -> tuple[Round, ...]:
        """Of all runs."""
        return tuple(each for run in self.runs for each in run.rounds)

    def turns(self, name: str) -> list[Turn]:
        """All that it had."""
        return [each[name] for each in self.rounds if name in each]

    @property
    def names(self) -> list[str]:
        """Who had turns, in their order."""
        return list(dict.fromkeys(name for each in self.rounds for name in each))

    def median(self, name: str, figure: Callable[[Turn], float]) -> float:
        """Over all its turns."""
        return statistics.median(map(figure, self.turns(name)))

    def ratio(self, one: str, other: str, figure: Callable[[Turn], float]) -> float | None:
        """How much larger it is for one: the median of the rounds' ratios; None: they never met."""
        both = [
            figure(each[one]) / figure(each[other])
            for each in self.rounds
            if one in each and other in each
        ]
        return statistics.median(both) if both else None


class Results(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One file."""

    measured: tuple[Measured, ...] = ()


def seconds_of(turn: Turn) -> float:
    """To be compared."""
    return turn.seconds


def wire_bytes_of(turn: Turn) -> float:
    """To be compared."""
    return turn.wire_bytes


def write_results(path: Path, results: Results) -> None:
    """As JSON that a person can read and a diff shows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def read_results(path: Path) -> Results:
    """The reverse; nothing from a file that is not there.

    Raises:
        msgspec.ValidationError: it holds anything else.
    """
    if not path.exists():
        return Results()
    return msgspec.json.decode(path.read_bytes(), type=Results)


def merged(old: Results, measured: Measured, *, add: bool) -> Results:
    """With this in the place of what was measured of the same before, or beside it."""
    this = measured.case, measured.values
    others = tuple(m for m in old.measured if (m.case, m.values) != this)
    if add:
        before = [run for m in old.measured if (m.case, m.values) == this for run in m.runs]
        measured = msgspec.structs.replace(measured, runs=(*before, *measured.runs))
    return Results(measured=(*others, measured))
