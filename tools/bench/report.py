"""docs/explanation/benchmarks.md and compression-speed.md, made of what was measured."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from tools.bench.cases import (
    CASES,
    GLOO,
    MLX,
    ORDINARY,
    PMESH,
    Kind,
    find_case,
    judge,
    judge_flatness,
)
from tools.bench.compressed import START_STEP, UNCOMPRESSED, WAYS
from tools.bench.results import CaseResult, CaseResults, cpu_s_of, seconds_of, wire_bytes_of
from tools.lab.report import BarVerdict, count_met, facts_text, fill, not_measured, table
from tools.lab.units import count_text, size_text, time_text

PEERS_PAGE, COMPRESSION_PAGE = "benchmarks", "compression-speed"
_BARS = "case | size | what | bar | measured | verdict | ordinary arrays"
_COMPRESSION_BARS = "case | values | what | bar | measured | verdict"
_SPEEDS = "case | size | system | time | bus bandwidth | of the line | CPU s per GB"
_REDUCES = "case | values | scheme | time | times as fast | sent by host | times less | error | CPU"
_TRAINING = "case | who averages | time per step | over the other's | sent by host | loss | CPU s"
_ORDER = {case.name: number for number, case in enumerate(CASES)}
_LABELS = {MLX: "MLX's ring", ORDINARY: "pmesh, ordinary arrays"}
_TRAINERS = {PMESH: "pmesh, PowerSGD rank 4", GLOO: "DistributedDataParallel, powerSGD_hook rank 4"}


def render(page: str, results: Sequence[CaseResults]) -> str:
    found = [m for file in results for m in file.measured]
    found.sort(key=lambda m: (_ORDER[m.case], m.op_bytes))
    return (_render_compression if page == COMPRESSION_PAGE else _render_peers)(found)


def _render_peers(measured: Sequence[CaseResult]) -> str:
    judged = [
        (find_case(m.case).what, size_text(m.op_bytes), *both)
        for m in measured
        for both in zip_longest(judge(m), judge(m, ORDINARY) if ORDINARY in m.names else ())
    ]
    with_ordinary = [m for m in measured if ORDINARY in m.names]
    flat, ordinary = judge_flatness(measured), judge_flatness(with_ordinary, ORDINARY)
    judged += [("all numbers of hosts", "", *each) for each in zip_longest(flat, ordinary)]
    said = count_met([verdict for *_, verdict, _ in judged])
    said += f" With ordinary arrays {count_met([beside or both for *_, both, beside in judged])}"
    return fill(
        PEERS_PAGE,
        verdict=said + _not_measured(measured, is_compression=False),
        verdicts=table(_BARS, (_bar_row(*each) for each in judged)),
        speeds=table(_SPEEDS, (row for m in measured for row in _speed_rows(m))),
        others="".join(
            f"- {find_case(m.case).what}, {size_text(m.op_bytes)}: {facts_text(m.facts)}.\n"
            for m in measured
            if m.facts
        ),
        commands="\n".join(
            f"    {run.command}   # {len(run.rounds)} turns, at {run.commit}, {run.machine}"
            + (f"; {run.note}" if run.note else "")
            for m in measured
            for run in m.runs
        ),
    )


def _render_compression(measured: Sequence[CaseResult]) -> str:
    judged = [(m, verdict) for m in measured for verdict in judge(m)]
    said = count_met([verdict for _, verdict in judged])
    picks = "".join(
        f"\n- {find_case(m.case).what}, {_values(m)}: {name} took {picked}."
        for m in measured
        for name, picked in _picked(m)
    )
    return fill(
        COMPRESSION_PAGE,
        start=str(START_STEP),
        steps=str(find_case("training").steps),
        verdict=said + _not_measured(measured, is_compression=True),
        verdicts=table(
            _COMPRESSION_BARS,
            (
                [find_case(m.case).what, _values(m), v.what, v.bar, v.value, v.shown]
                for m, v in judged
            ),
        ),
        reduces=table(_REDUCES, _rows(measured, "compressed")) + f"\n{picks}",
        training=table(_TRAINING, _rows(measured, "train")),
        commands="\n".join(
            f"    {run.command}   # at {run.commit}, {run.machine}"
            for m in measured
            for run in m.runs
        ),
    )


def lines_of(measured: CaseResult) -> Iterator[str]:
    kind = find_case(measured.case).kind
    yield f"{size_text(measured.op_bytes)}:"
    for name in measured.names:
        cells = _CELLS.get(kind, _speed_cells)(measured, name)
        turns = measured.turns(name)
        checked, wrong = sum(t.checked for t in turns), sum(t.wrong for t in turns)
        said = "; ".join(cell for cell in cells if cell)
        yield f"  {said}; {checked} results checked, {wrong} wrong"
        yield from (f"  WRONG: {name}: {turn.fault}" for turn in turns if turn.fault)
    if measured.ceiling:
        yield f"  the bare line {_upper_median(measured.ceiling) / 1e9:.3f} GB/s"
    for name, picked in _picked(measured):
        yield f"  {name}: {picked}"
    for fact, value in measured.facts.items():
        yield f"  {fact}: {value:.6g}"
    for verdict in judge(measured):
        yield f"  {verdict.what}: {verdict.value} (bar {verdict.bar}): {verdict.outcome}"


def _not_measured(measured: Sequence[CaseResult], *, is_compression: bool) -> str:
    cases = [case.name for case in CASES if case.is_compression == is_compression]
    return not_measured(cases, (m.case for m in measured))


def _bar_row(what: str, size: str, verdict: BarVerdict, ordinary: BarVerdict | None) -> list[str]:
    beside = "" if ordinary is None else f"{ordinary.value}, {ordinary.shown}"
    return [what, size, verdict.what, verdict.bar, verdict.value, verdict.shown, beside]


def _speed_rows(measured: CaseResult) -> Iterator[list[str]]:
    case = find_case(measured.case)
    if case.kind == "peers":
        head = [case.what, size_text(measured.op_bytes)]
        for name in measured.names:
            share = f"{measured.share_of_ceiling(name):.2f}"
            *cells, cpu = _speed_cells(measured, name)
            yield [*head, *cells, share, cpu]
        line = f"{_upper_median(measured.ceiling) / 1e6:,.1f} MB/s"
        yield [*head, "the bare line", "", line, "", ""]


def _speed_cells(measured: CaseResult, name: str) -> list[str]:
    cpu_s_per_gb = measured.median(name, cpu_s_of) / (measured.op_bytes / 1e9)
    return [
        _LABELS.get(name, name),
        time_text(measured.median(name, seconds_of)),
        f"{measured.bus_bytes_per_s(name) / 1e6:,.1f} MB/s",
        f"{cpu_s_per_gb:.2f}",
    ]


def _reduce_cells(measured: CaseResult, name: str) -> list[str]:
    faster = measured.ratio(UNCOMPRESSED, name, seconds_of)
    fewer = measured.ratio(UNCOMPRESSED, name, wire_bytes_of)
    return [
        WAYS[name].label,
        time_text(measured.median(name, seconds_of)),
        f"{faster:.2f}" if faster else "",
        count_text(measured.median(name, wire_bytes_of), "B"),
        f"{fewer:.2f}" if fewer else "",
        f"{measured.median(name, lambda turn: turn.error):.2g}",
        f"{measured.median(name, cpu_s_of):.2f}",
    ]


def _training_cells(measured: CaseResult, name: str) -> list[str]:
    other = next((each for each in measured.names if each != name), name)
    ratio = measured.ratio(name, other, seconds_of)
    return [
        _TRAINERS[name],
        time_text(measured.median(name, seconds_of)),
        f"{ratio:.2f}" if ratio else "",
        count_text(measured.median(name, wire_bytes_of), "B"),
        ", ".join(f"{run.rounds[-1][name].loss:.4f}" for run in measured.runs),
        f"{measured.median(name, cpu_s_of):.2f}",
    ]


_CELLS = {"compressed": _reduce_cells, "train": _training_cells}


def _rows(measured: Sequence[CaseResult], kind: Kind) -> Iterator[list[str]]:
    for m in measured:
        case = find_case(m.case)
        if case.kind == kind:
            head = [case.what, _values(m)] if kind == "compressed" else [case.what]
            yield from ([*head, *_CELLS[kind](m, name)] for name in m.names)


def _picked(measured: CaseResult) -> Iterator[tuple[str, str]]:
    """What Auto has picked, each time that it was another."""
    for name in measured.names:
        if name in WAYS and WAYS[name].allowed:
            for picked in dict.fromkeys(turn.picked for turn in measured.turns(name)):
                yield WAYS[name].label, picked


def _values(measured: CaseResult) -> str:
    return count_text(measured.op_bytes // 4)


def _upper_median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
