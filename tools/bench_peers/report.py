"""docs/explanation/benchmarks.md, made of what was measured."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from tools.bench_peers.cases import (
    CASES,
    ORDINARY,
    Verdict,
    find_case,
    judge,
    judge_flatness,
    size_text,
)
from tools.bench_peers.results import Measured, Results

FRAME = """\
# How fast it is, measured

<!-- Written by `python -m tools.bench_peers report`: change the tool, or measure again. -->

pmesh beside what a user could take instead: gloo, the CPU backend of `torch.distributed`, and the
ring of `mlx.core.distributed`. Every number is measured by `tools/bench_peers`, by the command that
stands at the end of this page; the results lie in `docs/explanation/benchmarks/`, and a test
compares this page with them.

## How it is measured

- **Whole path.** A time goes from the call in a training process to the moment at which the result
  can be read there. pmesh runs as users have it: agents that were started by `pmesh up`, trainers
  that reach them through the Unix socket and shared memory, AES-256-GCM between the agents. gloo
  and MLX's ring run inside the training processes, and encrypt nothing.
- **pmesh** is `mesh.all_reduce(x, copy=False)` of an array made by `mesh.empty`: it lies in memory
  that the trainer shares with its agent, and neither it nor the result is copied. **Ordinary
  arrays** are `mesh.all_reduce(x, out=x)` of any numpy array, which is copied there and back. Both
  are held against the bars, in the same run; all other cases are of ordinary arrays.
- **In place**, where that is possible: `out=x`, likewise `average_gradients`, and gloo knows no
  other way. MLX's arrays can't be written to; its result is a new one.
- **In turns.** All systems have been started; then pmesh, gloo, MLX's ring and the bare line have
  their turns, one after the other, again and again. What is compared are neighbouring turns: a
  ratio is the median of the turns' ratios. A turn is as many calls as take about 0.4 s, its time
  their median. Each call counts as long as it took at its slowest rank.
- **The bare line**: on loopback one plain TCP stream from one process to another; between the hosts
  of a network lab `iperf3 --bidir`, the mean of both directions.
- **Bus bandwidth** is that of nccl-tests: 2(n-1)/n · bytes / time for n ranks, what each rank must
  send and receive. It can be compared with the line, whatever n is.
- **CPU seconds per GB**: of all processes of a system, the agents' included, for 10⁹ bytes of one
  rank's array, while the calls run.
- **Checked**: every result of every rank is compared, value by value, with the right sum.
- All ranks share the cores of one machine. On loopback that favours who computes least; the hosts
  of a lab are network namespaces, whose lines are shaped by the kernel in both directions.

## The bars

**{verdict}**

{verdicts}

## Bus bandwidth and time

{speeds}
{others}
## Repeat it

From a clone after `make venv`, with torch and, for the labs, as root on Linux with iperf3:

{commands}
"""
_BARS = (
    "| case | size | what | bar | measured | verdict | ordinary arrays |",
    "|---|---|---|---|---|---|---|",
)
_SPEEDS = (
    "| case | size | system | time | bus bandwidth | of the line | CPU s per GB |",
    "|---|---|---|---|---|---|---|",
)
_Row = tuple[str, str, Verdict, Verdict | None]
_ORDER = {case.name: number for number, case in enumerate(CASES)}
_LABELS = {"mlx": "MLX's ring", ORDINARY: "pmesh, ordinary arrays"}


def render(results: Sequence[Results]) -> str:
    """The whole page."""
    measured = sorted(
        (m for file in results for m in file.measured), key=lambda m: (_ORDER[m.case], m.op_bytes)
    )
    judged = [row for m in measured for row in _judged(m)]
    with_ordinary = [m for m in measured if ORDINARY in m.series]
    flat, ordinary = judge_flatness(measured), judge_flatness(with_ordinary, ORDINARY)
    judged += [("flat", "", *each) for each in zip_longest(flat, ordinary)]
    return FRAME.format(
        verdict=_verdict(judged, measured),
        verdicts="\n".join([*_BARS, *(_bar_row(*each) for each in judged)]),
        speeds="\n".join([*_SPEEDS, *(row for m in measured for row in _speed_rows(m)), ""]),
        others="".join(f"- {line}\n" for m in measured for line in _facts(m)),
        commands="\n".join(_commands(measured)),
    )


def lines_of(measured: Measured) -> Iterator[str]:
    """What a terminal shows of one measurement."""
    yield f"{size_text(measured.op_bytes)}:"
    for name, series in measured.series.items():
        if series.seconds:
            speed = measured.bus_bytes_per_s(name) / 1e9
            cpu = f", CPU {series.median_cpu_s_per_gb:.2f} s/GB" if series.cpu_s_per_gb else ""
            yield (
                f"  {name:18} {time_text(series.median_s)}, bus {speed:.3f} GB/s{cpu}; "
                f"{series.checked} results checked, {series.wrong} wrong"
            )
    if measured.ceiling:
        yield f"  {'the bare line':18} {_median(measured.ceiling) / 1e9:.3f} GB/s"
    for name, value in measured.facts.items():
        yield f"  {name}: {value:.6g}"
    for verdict in judge(measured):
        yield f"  {verdict.what}: {verdict.value} (bar {verdict.bar}): {verdict.outcome}"


def time_text(seconds: float) -> str:
    """Three digits, in the unit that fits.

    >>> time_text(0.000123), time_text(0.0123), time_text(2.5)
    ('123 µs', '12.3 ms', '2.5 s')
    """
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 1000:  # noqa: PLR2004 - the next unit
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def _judged(measured: Measured) -> Iterator[_Row]:
    """Each bar, and what it says of ordinary arrays where they were measured."""
    case, size = measured.case, size_text(measured.op_bytes)
    ordinary = judge(measured, ORDINARY) if ORDINARY in measured.series else ()
    for verdict, beside in zip_longest(judge(measured), ordinary):
        yield case, size, verdict, beside


def _verdict(judged: Sequence[_Row], measured: Sequence[Measured]) -> str:
    said = _counts([verdict for _, _, verdict, _ in judged])
    said += f" With ordinary arrays {_counts([beside or both for *_, both, beside in judged])}"
    unmeasured = [case.name for case in CASES if case.name not in {m.case for m in measured}]
    return f"{said} Not measured: {', '.join(unmeasured)}." if unmeasured else said


def _counts(verdicts: Sequence[Verdict]) -> str:
    outcomes = [verdict.outcome for verdict in verdicts]
    said = f"{outcomes.count('met')} of {len(outcomes)} bars met"
    if halfway := outcomes.count("goal missed"):
        said += f"; {halfway} more reach their floor, not their goal"
    if missed := outcomes.count("MISSED"):
        said += f"; {missed} missed"
    return f"{said}."


def _bar_row(case: str, size: str, verdict: Verdict, ordinary: Verdict | None) -> str:
    what = find_case(case).what if case in _ORDER else "all numbers of hosts"
    beside = "" if ordinary is None else f"{ordinary.value}, {_shown(ordinary)}"
    cells = (what, size, verdict.what, verdict.bar, verdict.value, _shown(verdict), beside)
    return f"| {' | '.join(cells)} |"


def _shown(verdict: Verdict) -> str:
    return verdict.outcome if verdict.outcome == "met" else f"**{verdict.outcome}**"


def _speed_rows(measured: Measured) -> Iterator[str]:
    case = find_case(measured.case)
    if case.kind != "peers":
        return
    head = [case.what, size_text(measured.op_bytes)]
    for name, series in measured.series.items():
        bandwidth = measured.bus_bytes_per_s(name)
        cells = [
            *head,
            _LABELS.get(name, name),
            time_text(series.median_s),
            f"{bandwidth / 1e6:,.1f} MB/s",
            f"{measured.share_of_ceiling(name):.2f}",
            f"{series.median_cpu_s_per_gb:.2f}",
        ]
        yield f"| {' | '.join(cells)} |"
    line = f"{_median(measured.ceiling) / 1e6:,.1f} MB/s"
    yield f"| {' | '.join([*head, 'the bare line', '', line, '', ''])} |"


def _facts(measured: Measured) -> Iterator[str]:
    if measured.facts:
        said = "; ".join(f"{name}: {value:,.5g}" for name, value in measured.facts.items())
        yield f"{find_case(measured.case).what}, {size_text(measured.op_bytes)}: {said}."


def _commands(measured: Sequence[Measured]) -> Iterator[str]:
    for m in measured:
        turns = max((len(s.seconds) for s in m.series.values()), default=0)
        note = f"; {m.note}" if m.note else ""
        yield f"    {m.command}   # {turns} turns, at {m.commit}, {m.machine}{note}"


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
