"""What workers are told and answer, a line of JSON each, and what was measured, in turns."""

import statistics
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from tools.lab.report import BarVerdict, at_most

What = Literal["all_reduce", "all_reduce_shared", "average_gradients", "compressed", "train", "end"]
"""all_reduce_shared: of arrays in the memory that pmesh's trainers share with their agents."""
Layout = Literal["matrix", "resnet18"]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Make this call so often, or so many steps; each rank gets the same order."""

    what: What
    count: int = 0
    """How many float32 values, over all arrays."""
    arrays: int = 1
    """Over how many arrays of a tree they are dealt."""
    times: int = 1
    together: int | None = None
    """How many calls follow each other before their results are checked; None: as many as fit."""
    scheme: str = "none"
    """Of a compressed call: a name of `tools.bench.compressed`."""
    layout: Layout = "matrix"
    side: int = 0
    """Of the matrix: so many rows, and so many columns."""


class RankAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What it came to at one rank."""

    seconds: tuple[float, ...] = ()
    """Of each call or step, until its result can be read."""
    cpu_s: float = 0.0
    """Of this process, and its agent if it has one, over all calls, the checks not counted."""
    wrong: int = 0
    """How many of the results were not what they had to be."""
    digest: str = ""
    """Of the last result, or of the model's weights: the same on all ranks."""
    error: float = 0.0
    """Relative L2 error of the last result."""
    picked: str = ""
    """What was sent in the last call, and why, as `mesh.last_op` says it."""
    settled: bool = True
    """Whether Auto has picked; false while it tries."""
    loss: float = 0.0
    """Over all samples, after the last step."""


class BenchTurn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One system, one scheme, or one program that trains, at its turn."""

    seconds: float
    """The median call or step, each as long as at its slowest rank."""
    calls: int = 1
    cpu_s: float = 0.0
    """Of each call, all processes of all ranks together."""
    checked: int = 0
    """Results, each rank's counted, that were compared with the right ones."""
    wrong: int = 0
    fault: str = ""
    """What was wrong with a result."""
    wire_bytes: int = 0
    """Of each call, what a host has sent through its interface, the mean of all hosts; 0: they have
    none of their own."""
    error: float = 0.0
    """The worst relative L2 error of any rank."""
    picked: str = ""
    """What Auto has picked, and why."""
    loss: float = 0.0
    """After these steps."""


Figure = Callable[[BenchTurn], float]
Round = dict[str, BenchTurn]
"""Each has had one turn, one after the other."""


class CaseRun(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    command: str
    commit: str
    machine: str
    rounds: tuple[Round, ...]
    ceiling: tuple[float, ...] = ()
    """Bytes a second of the plain stream, or of iperf3 in one direction of two; one each round."""
    note: str = ""
    """Where it was not measured as the page says."""


class CaseResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One case with arrays of one size; runs may differ in who had a turn."""

    case: str
    ranks: int
    machines: int = 0
    """How many machines they are on; 0: each on one of its own, or all on one."""
    op_bytes: int
    """Of each rank's arrays, or of the model."""
    runs: tuple[CaseRun, ...] = ()
    facts: dict[str, float] = {}
    """What else a bar asks for, by name."""

    def __add__(self, other: "CaseResult") -> "CaseResult":
        """More runs of the same; of facts the worst."""
        facts = {n: max(x, self.facts.get(n, x)) for n, x in other.facts.items()}
        return msgspec.structs.replace(other, runs=self.runs + other.runs, facts=facts)

    @property
    def identity(self) -> tuple[str, int]:
        """Equal for measurements of the same."""
        return self.case, self.op_bytes

    @property
    def rounds(self) -> tuple[Round, ...]:
        return tuple(each for run in self.runs for each in run.rounds)

    @property
    def ceiling(self) -> tuple[float, ...]:
        return tuple(each for run in self.runs for each in run.ceiling)

    @property
    def names(self) -> list[str]:
        """Who had turns, in their order."""
        return list(dict.fromkeys(name for each in self.rounds for name in each))

    def turns(self, name: str) -> list[BenchTurn]:
        return [each[name] for each in self.rounds if name in each]

    def median(self, name: str, figure: Figure) -> float:
        return statistics.median(map(figure, self.turns(name)))

    def ratio(self, one: str, other: str, figure: Figure) -> float | None:
        """How much larger it is for one: the median of the rounds' ratios; None: they never met."""
        both = [(each[one], each[other]) for each in self.rounds if {one, other} <= set(each)]
        ratios = [figure(a) / figure(b) for a, b in both if figure(b) > 0]
        return statistics.median(ratios) if ratios else None

    def bus_bytes_per_s(self, name: str) -> float:
        """As nccl-tests has it: 2(n-1)/n of the bytes, over the time; n counts machines."""
        return self._bus_bytes / self.median(name, seconds_of)

    def share_of_ceiling(self, name: str) -> float:
        """Bus bandwidth over what the stream of the same round got: the median of the rounds'."""
        turns = zip(self.turns(name), self.ceiling, strict=True)
        return statistics.median(self._bus_bytes / t.seconds / line for t, line in turns)

    @property
    def _bus_bytes(self) -> float:
        count = self.machines or self.ranks
        return self.op_bytes * 2 * (count - 1) / count

    def judge_results(self) -> Iterable[BarVerdict]:
        """Says something only where a result was wrong."""
        wrong = sum(turn.wrong for each in self.rounds for turn in each.values())
        if wrong:
            yield at_most("wrong results", wrong, goal=0, form="{:.0f}")


class CaseResults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    measured: tuple[CaseResult, ...] = ()


def seconds_of(turn: BenchTurn) -> float:
    return turn.seconds


def cpu_s_of(turn: BenchTurn) -> float:
    return turn.cpu_s


def wire_bytes_of(turn: BenchTurn) -> float:
    return turn.wire_bytes
