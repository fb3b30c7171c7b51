"""What the trainers of a run are told and report, and what follows: times, and what is wrong.

All times are CLOCK_MONOTONIC, which is one clock for all processes of a machine.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import msgspec

TRAINS_ALONE = "this rank trains alone"  # as pmesh says it: for lack of an agent, or of its history


class TrainerOptions(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    """Of its machine, from 1: what it gives to each op depends on it."""
    wait_for: int
    op_bytes: int
    calls: Literal["sum", "collectives", "compressed", "ranks"] = "sum"
    job: str = "chaos"
    state_bytes: int = 0
    """Of weights that `sync` hands to newcomers."""
    pause_s: float = 0.0
    """What a forward and a backward pass take, before each op."""
    min_ranks: int = 1
    quorum: Literal["any", "majority"] = "any"
    on_superseded: Literal["raise", "sync"] = "sync"
    straggler_after_s: float = 60.0
    compute_at_step: int = -1
    """In this step it computes for `compute_s`, without a call."""
    compute_s: float = 0.0
    round_s: float = 0.0
    """Of local updates, where `pause_s` is the time of a sample; 0: it makes other calls."""
    epochs: int = 0
    """For how long it learns handwritten digits; 0: it makes calls until it is killed."""


class TrainerReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a trainer."""

    what: str
    """joined, entered, called, done, counted, waiting, superseded, error or ended."""
    at: float
    step: int = -1
    names: tuple[str, ...] = ()
    """Of the contributors' machines, by rank."""
    digest: str = ""
    right: bool = True
    """Whether the result is the sum of what the contributors gave, in every bit."""
    says: str = ""
    value: float = 0.0
    """Of entering: how long it took, in seconds; of counted: the samples of a round that this rank
    has brought into the average; of the end: the loss."""


_decoder = msgspec.json.Decoder(TrainerReport)
_encoder = msgspec.json.Encoder()


def encode_report(report: TrainerReport) -> bytes:
    """One line, without its end."""
    return _encoder.encode(report)


def decode_report(line: str) -> TrainerReport | None:
    """What a trainer has printed; None for anything else, such as a traceback."""
    try:
        return _decoder.decode(line)
    except msgspec.MsgspecError:
        return None


@dataclass(frozen=True, slots=True)
class SeenOp:
    """One op as one trainer saw it."""

    step: int
    called: float
    done: float
    names: tuple[str, ...]
    digest: str
    right: bool


@dataclass(slots=True)
class Life:
    """One trainer process from its start to its end."""

    name: str
    """Of its machine, and its place there if that is not the first."""
    ops: dict[int, SeenOp] = field(default_factory=dict[int, SeenOp])
    """Completed, by step; if a step came twice (after another history won), the last. More come
    while one looks, in a thread: who does not hold `NEWS` looks at a copy."""
    calls: dict[int, float] = field(default_factory=dict[int, float])
    others: list[TrainerReport] = field(default_factory=list[TrainerReport])
    """All reports that are no ops."""
    last: SeenOp | None = None

    def hear(self, report: TrainerReport) -> None:
        match report.what:
            case "called":
                self.calls[report.step] = report.at
            case "done":
                called = self.calls.get(report.step, report.at)
                op = SeenOp(
                    report.step, called, report.at, report.names, report.digest, report.right
                )
                self.ops[report.step] = self.last = op
            case _:
                self.others.append(report)

    def forget(self, *, before: float) -> None:
        """Drop the ops that were done before this time, but for the last."""
        calls = self.calls.items()
        self.calls = {s: at for s, at in calls if at >= before or s not in self.ops}
        self.ops = {s: op for s, op in self.ops.items() if op.done >= before or op is self.last}

    def knew_to_be_alone(self, op: SeenOp) -> bool:
        """Whether the op was its own alone, and its trainer had been told so: no history counts it.

        Its next `sync` brings it the state of the others.
        """
        told = (r.at for r in self.others if r.what == "waiting" and TRAINS_ALONE in r.says)
        return len(op.names) == 1 and min(told, default=math.inf) <= op.done

    def errors(self, since: float) -> list[TrainerReport]:
        return [r for r in self.others if r.what in {"error", "superseded"} and r.at >= since]


def next_step(survivors: Iterable[Life], fault_at: float) -> int:
    """The first step that no survivor had completed when the fault struck."""
    before = [
        op.step for life in survivors for op in list(life.ops.values()) if op.done <= fault_at
    ]
    return max(before, default=-1) + 1


def recovery_s(survivors: Sequence[Life], fault_at: float) -> float | None:
    """From the fault until the last survivor has completed the next op; None while one has not.

    Where one survivor had completed an op before the fault and others had not, the one after it
    counts, so that nobody is measured by an op that the fault did not touch.
    """
    step = next_step(survivors, fault_at)
    ops = [life.ops.get(step) for life in survivors]
    if any(op is None for op in ops):
        return None
    return max(op.done for op in ops if op is not None) - fault_at


def clean_ops_s(lives: Sequence[Life], *, since: float, until: float) -> list[float]:
    """How long each op took that all of them did in this time.

    From the last call to the last return: what the slowest did before its call is not the op's.
    """
    steps = set[int].intersection(*(set(life.ops) for life in lives)) if lives else set[int]()
    took: list[float] = []
    for step in sorted(steps):
        ops = [life.ops[step] for life in lives]
        called, done = max(op.called for op in ops), max(op.done for op in ops)
        if called >= since and done <= until:
            took.append(done - called)
    return took


def find_violations(
    lives: Mapping[str, Sequence[SeenOp]], *, survivors: Iterable[str] = ()
) -> list[str]:
    """What must never be: wrong values, torn ops, skipped ops. Empty if all is well.

    Args:
        lives: The ops to be compared, each trainer's in the order of their completion.
        survivors: Those of them who must have done every step from their first on, up to their
            own last: the lines of one may be read later than those of the others.
    """
    found = [
        f"step {op.step} at {name}: not the sum of what {', '.join(op.names)} gave"
        for name, ops in lives.items()
        for op in ops
        if not op.right
    ]
    by_step: dict[int, list[tuple[str, SeenOp]]] = defaultdict(list)
    for name, ops in lives.items():
        for op in ops:
            by_step[op.step].append((name, op))
    for step, seen in sorted(by_step.items()):
        if len({(op.names, op.digest) for _, op in seen}) > 1:
            all_of_them = "; ".join(
                f"{n}: {op.digest[:8]} of {','.join(op.names)}" for n, op in seen
            )
            found.append(f"step {step} is torn: {all_of_them}")
    return found + _skipped({name: lives[name] for name in survivors})


def _skipped(lives: Mapping[str, Sequence[SeenOp]]) -> list[str]:
    last = max((op.step for ops in lives.values() for op in ops), default=-1)
    found: list[str] = []
    for name, ops in lives.items():
        if not ops:
            found.append(f"{name} has completed nothing, others step {last}")
            continue
        steps = {op.step for op in ops}
        missing = set(range(ops[0].step, ops[-1].step)) - steps
        if missing:
            found.append(f"{name} has not completed {sorted(missing)}, but step {ops[-1].step}")
    return found


def longest_gap_s(done_at: Iterable[float], *, since: float, until: float) -> float:
    """The longest time without a completed op.

    >>> longest_gap_s([2.0, 3.5, 9.0], since=1.0, until=10.0)
    5.5
    """
    times = [since, *sorted(t for t in done_at if since <= t <= until), until]
    return max(later - earlier for earlier, later in pairwise(times))
