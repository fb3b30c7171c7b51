"""What was measured, as it lies in a file until the page is written."""

import statistics
from pathlib import Path

import msgspec


class Series(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One system, as often as it had its turn."""

    seconds: tuple[float, ...] = ()
    """Of each turn: the median call, each call as long as at its slowest rank."""
    cpu_s_per_gb: tuple[float, ...] = ()
    """Of each turn: CPU seconds of all its processes, for each 10^9 bytes of the arrays reduced."""
    checked: int = 0
    """Results, each rank's counted, that were compared value by value with the right ones."""
    wrong: int = 0

    def __add__(self, other: "Series") -> "Series":
        """The turns of both."""
        return Series(
            seconds=self.seconds + other.seconds,
            cpu_s_per_gb=self.cpu_s_per_gb + other.cpu_s_per_gb,
            checked=self.checked + other.checked,
            wrong=self.wrong + other.wrong,
        )

    @property
    def median_s(self) -> float:
        """Over all turns."""
        return statistics.median(self.seconds)

    @property
    def median_cpu_s_per_gb(self) -> float:
        """Over all turns."""
        return statistics.median(self.cpu_s_per_gb)


class Measured(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One size of one case."""

    case: str
    op_bytes: int
    ranks: int
    command: str
    """Repeats it."""
    commit: str
    machine: str
    series: dict[str, Series] = {}
    """By system; the turns of all have the same order, A B C A B C."""
    ceiling: tuple[float, ...] = ()
    """Bytes a second of the plain stream, or of iperf3 in one direction of two; one each turn."""
    facts: dict[str, float] = {}
    """What else a bar asks for, by name."""
    note: str = ""
    """Where it was not measured as the page says."""

    def __add__(self, other: "Measured") -> "Measured":
        """More turns of the same."""
        return msgspec.structs.replace(
            other,
            series={name: self.series[name] + series for name, series in other.series.items()},
            ceiling=self.ceiling + other.ceiling,
            facts={name: max(self.facts[name], value) for name, value in other.facts.items()},
        )

    def ratio(self, one: str, other: str) -> float:
        """How much longer `one` took than `other`: the median of the turns' ratios."""
        return _median_ratio(self.series[one].seconds, self.series[other].seconds)

    def cpu_ratio(self, one: str, other: str) -> float:
        """The same for the CPU seconds."""
        return _median_ratio(self.series[one].cpu_s_per_gb, self.series[other].cpu_s_per_gb)

    def bus_bytes_per_s(self, system: str) -> float:
        """As nccl-tests has it: 2(n-1)/n of the bytes, over the time."""
        return self.op_bytes * bus_factor(self.ranks) / self.series[system].median_s

    def share_of_ceiling(self, system: str) -> float:
        """Bus bandwidth over what the stream of the same turn got: the median of the turns'."""
        bus_bytes = self.op_bytes * bus_factor(self.ranks)
        turns = zip(self.series[system].seconds, self.ceiling, strict=True)
        return statistics.median(bus_bytes / s / ceiling for s, ceiling in turns)


class Results(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One file."""

    measured: tuple[Measured, ...] = ()


def bus_factor(ranks: int) -> float:
    """What all_reduce must carry over each link, over its bytes.

    >>> bus_factor(2), bus_factor(4)
    (1.0, 1.5)
    """
    return 2 * (ranks - 1) / ranks


def _median_ratio(ones: tuple[float, ...], others: tuple[float, ...]) -> float:
    return statistics.median(a / b for a, b in zip(ones, others, strict=True) if b > 0)


def write_results(path: Path, results: Results) -> None:
    """As JSON that a person can read and a diff shows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def read_results(path: Path) -> Results:
    """The reverse; raises msgspec.ValidationError for anything else."""
    return msgspec.json.decode(path.read_bytes(), type=Results)


def keep(path: Path, measured: Measured, *, add: bool = False) -> None:
    """Put it into the file, in the place of what was measured of the same before, or beside it."""
    old = read_results(path).measured if path.exists() else ()
    this = measured.case, measured.op_bytes
    same = [m for m in old if (m.case, m.op_bytes) == this]
    others = tuple(m for m in old if (m.case, m.op_bytes) != this)
    if add and same:
        measured = same[0] + measured
    write_results(path, Results(measured=(*others, measured)))
