"""docs/explanation/compression-speed.md, made of what was measured."""

from collections.abc import Iterator, Sequence

from tools.bench_compression.cases import CASES, OURS, find_case, judge
from tools.bench_compression.results import (
    Measured,
    Results,
    seconds_of,
    wire_bytes_of,
)
from tools.bench_compression.schemes import UNCOMPRESSED, WAYS
from tools.bench_compression.training import START_STEP
from tools.bench_peers.cases import Verdict
from tools.bench_peers.report import time_text

FRAME = """\
# What compression gains, measured

<!-- Written by `python -m tools.bench_compression report`: change the tool, or measure again. -->

How long an all-reduce takes with each scheme beside the same without, how many bytes leave each
host, and how training with PowerSGD compares with `powerSGD_hook` of torch's
DistributedDataParallel. The schemes are explained in [compression](compression.md). Every number is
measured by `tools/bench_compression`, by the command that stands at the end of this page; the
results lie in `docs/explanation/compression/`, and a test compares this page with them.

## How it is measured

- **Whole path.** A time goes from the call in a training process to the moment at which the result
  can be read there: kernels, agents, encryption and network. pmesh runs as users have it: agents
  that were started by `pmesh up`, and trainers that call `mesh.all_reduce(x, "mean", out=...,
  compression=...)`. x is a matrix of Gaussian values. Nothing is fed back unless it says so.
- **In turns.** After a call or two of each to warm up, all schemes have their turns, one after the
  other, again and again; each call counts as long as it took at its slowest rank, a turn as its
  median call. A ratio compares the turns of one round: it is the median of the rounds' ratios.
- **Links** are those of network namespaces on one machine, shaped by the kernel in both directions.
  All ranks share its cores, so whatever is computed takes longer here than on machines of their
  own: the faster the link, the more that weighs.
- **Bytes** are counted by the network interface of each host, in the direction out: with the
  headers of all layers, acknowledgements and heartbeats.
- **Checked**: after each turn the results of all ranks must be the same, bit for bit, and within
  what the scheme is allowed to be wrong.
- **CPU**: seconds of one call, of all agents and trainers together.
- **Training**: a perceptron of 4.3 M parameters on scikit-learn's digits, in torch, one thread a
  rank. Weights, samples, optimizer and the {start} uncompressed steps at the beginning are the same
  for both; then each has {steps} steps in turn. DistributedDataParallel averages while it goes
  backward, pmesh afterwards; `gloo` encrypts nothing.

![how many times as fast each scheme is, on three links](compression/speeds.svg)

## The bars

**{verdict}**

{verdicts}

## All-reduces

{reduces}

## Training

{training}

## Repeat it

From a clone after `make venv`, as root on Linux, with numba and for `training` torch:

{commands}
"""
_BARS = ("| case | values | what | bar | measured | verdict |", "|---|---|---|---|---|---|")
_REDUCES = (
    "| case | values | scheme | time | times as fast | sent by host | times less | error | CPU |",
    "|---|---|---|---|---|---|---|---|---|",
)
_TRAINING = (
    "| case | who averages | time per step | over the other's | sent by host | loss | CPU s |",
    "|---|---|---|---|---|---|---|",
)
_ORDER = {case.name: number for number, case in enumerate(CASES)}
_LABELS = {OURS: "pmesh, PowerSGD rank 4", "gloo": "DistributedDataParallel, powerSGD_hook rank 4"}


def render(results: Sequence[Results]) -> str:
    """The whole page."""
    measured = sorted(
        (m for file in results for m in file.measured), key=lambda m: (_ORDER[m.case], m.values)
    )
    judged = [(m, verdict) for m in measured for verdict in judge(m)]
    return FRAME.format(
        start=START_STEP,
        steps=find_case("training").steps,
        verdict=_verdict([verdict for _, verdict in judged], measured),
        verdicts="\n".join([*_BARS, *(_bar_row(*each) for each in judged)]),
        reduces="\n".join([*_REDUCES, *_rows(measured, "reduce"), "", *_picks(measured)]),
        training="\n".join([*_TRAINING, *_rows(measured, "train")]),
        commands="\n".join(_commands(measured)),
    )


def lines_of(measured: Measured) -> Iterator[str]:
    """What a terminal shows of one measurement."""
    for cells in _cells(measured):
        yield "; ".join(cell for cell in cells if cell)
    for name, picked in _picked(measured):
        yield f"{name}: {picked}"
    for verdict in judge(measured):
        yield f"{verdict.what}: {verdict.value} (bar {verdict.bar}): {verdict.outcome}"
    for each in measured.rounds:
        for name, turn in each.items():
            if turn.wrong:
                yield f"WRONG: {name}: {turn.wrong}"


def _verdict(verdicts: Sequence[Verdict], measured: Sequence[Measured]) -> str:
    outcomes = [verdict.outcome for verdict in verdicts]
    said = f"{outcomes.count('met')} of {len(outcomes)} bars met"
    if missed := outcomes.count("MISSED"):
        said += f"; {missed} missed"
    unmeasured = [case.name for case in CASES if case.name not in {m.case for m in measured}]
    said += "."
    return f"{said} Not measured: {', '.join(unmeasured)}." if unmeasured else said


def _bar_row(measured: Measured, verdict: Verdict) -> str:
    outcome = verdict.outcome if verdict.outcome == "met" else f"**{verdict.outcome}**"
    case = find_case(measured.case).what
    return _row([case, _values(measured), verdict.what, verdict.bar, verdict.value, outcome])


def _rows(measured: Sequence[Measured], kind: str) -> Iterator[str]:
    for m in measured:
        case = find_case(m.case)
        if case.kind == kind:
            for cells in _cells(m):
                yield _row([case.what, *([_values(m)] if kind == "reduce" else []), *cells])


def _cells(measured: Measured) -> Iterator[list[str]]:
    """Of each that had turns."""
    trains = find_case(measured.case).kind == "train"
    for name in measured.names:
        yield (_training_cells if trains else _reduce_cells)(measured, name)


def _reduce_cells(measured: Measured, name: str) -> list[str]:
    faster = measured.ratio(UNCOMPRESSED, name, seconds_of)
    sent = measured.median(name, wire_bytes_of)
    fewer = measured.ratio(UNCOMPRESSED, name, wire_bytes_of) if sent else None
    error = measured.median(name, lambda turn: turn.error)
    return [
        WAYS[name].label,
        time_text(measured.median(name, seconds_of)),
        f"{faster:.2f}" if faster else "",
        _bytes_text(sent),
        f"{fewer:.2f}" if fewer else "",
        f"{error:.2g}",
        f"{measured.median(name, lambda turn: turn.cpu_s):.2f}",
    ]


def _training_cells(measured: Measured, name: str) -> list[str]:
    other = next((each for each in measured.names if each != name), name)
    ratio = measured.ratio(name, other, seconds_of)
    losses = ", ".join(f"{run.rounds[-1][name].loss:.4f}" for run in measured.runs)
    return [
        _LABELS[name],
        time_text(measured.median(name, seconds_of)),
        f"{ratio:.2f}" if ratio else "",
        _bytes_text(measured.median(name, wire_bytes_of)),
        losses,
        f"{measured.median(name, lambda turn: turn.cpu_s):.2f}",
    ]


def _picks(measured: Sequence[Measured]) -> Iterator[str]:
    for m in measured:
        for name, picked in _picked(m):
            yield f"- {find_case(m.case).what}, {_values(m)}: {name} took {picked}."


def _picked(measured: Measured) -> Iterator[tuple[str, str]]:
    """What Auto has picked, each time that it was another."""
    for name in measured.names:
        if name in WAYS and WAYS[name].allowed:
            for picked in dict.fromkeys(turn.picked for turn in measured.turns(name)):
                yield WAYS[name].label, picked


def _commands(measured: Sequence[Measured]) -> Iterator[str]:
    for m in measured:
        for run in m.runs:
            yield f"    {run.command}   # at {run.commit}, {run.machine}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _values(measured: Measured) -> str:
    """How many, in millions or thousands."""
    count = measured.values
    return f"{count / 1e6:.3g} M" if count >= 10**6 else f"{count / 1e3:.3g} k"


def _bytes_text(count: float) -> str:
    """Three digits.

    >>> _bytes_text(150_400_000), _bytes_text(1234), _bytes_text(0)
    ('150 MB', '1.23 kB', '')
    """
    if not count:
        return ""
    return f"{count / 1e6:.3g} MB" if count >= 10**6 else f"{count / 1e3:.3g} kB"
