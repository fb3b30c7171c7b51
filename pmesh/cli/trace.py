"""`pmesh trace`: where the time of a job's ranks went, as a table and as a file for Perfetto."""

import gzip
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

import msgspec

from pmesh.agent.home import reason
from pmesh.client.session.connection import AgentConnection, error_of
from pmesh.core.wire.session import Refused
from pmesh.errors import ConfigError, UsageError
from pmesh.home_paths import home_directory
from pmesh.ids import MAX_NAME, JobName
from pmesh.terminal import rows
from pmesh.terminal.lines import complain, say
from pmesh.texts import printable
from pmesh.traces.rules.perfetto import entries_of
from pmesh.traces.rules.timeline import (
    PlacedOp,
    Process,
    TimeShares,
    find_waits,
    only_latest_run,
    place_ops,
    share_out,
)
from pmesh.traces.wire import (
    MOST_SECONDS,
    TRACE_REPLIES,
    AskTrace,
    Traced,
    TracedMachine,
    TracedOps,
)

SILENCE_S: Final = 15.0  # a machine that does not answer holds it up for 5 s
_HEADERS: Final = ("rank", "machine", "calls", "outside calls", "waits for others", "moves values")
_UNUSUAL: Final = re.compile(r"[^\w.-]")


def write_trace(home: Path | None, job: str, seconds: float, to: Path | None) -> int:
    """Ask the agent, write the file, and print a row for each rank.

    Raises:
        ConfigError: an option has no sense.
        UsageError: no call of the job has ended lately, or the file can't be written.
        AgentNotRunning: nobody listens at the socket of this home.
    """
    if not 0 < seconds <= MOST_SECONDS:
        raise ConfigError(f"--seconds is above 0 and at most {MOST_SECONDS:g}, not {seconds:g}")
    if not 0 < len(job) <= MAX_NAME or not job.isprintable():
        raise ConfigError(f"no job has the name {job!r}; 'pmesh status' shows those that run")
    path = to or Path(f"pmesh-trace-{_UNUSUAL.sub('_', job)}.json.gz")
    found, traced = _ask(home_directory(home), AskTrace(JobName(job), seconds))
    since_us, machines = traced.until_us - round(seconds * 1e6), traced.machines
    placed = place_ops(found, machines, since_us=since_us, until_us=traced.until_us)
    ops, earlier = only_latest_run(placed, job)
    waits = find_waits(ops)
    entries = entries_of(ops, waits, machines, traced.changes, job=job, since_us=since_us)
    error_us = max((each.error_us for each in ops), default=0.0)
    left_out = tuple(f"{each.name}: {each.why_not}" for each in machines if each.why_not)
    if earlier:
        runs = "an earlier run is" if earlier == 1 else f"{earlier} earlier runs are"
        left_out += (f"{runs} left out; 'pmesh trace' right after a run shows that one",)
    about = {
        "job": job,
        "seconds": seconds,
        "pmesh": traced.version,
        "clock": next((each.name for each in machines if each.me), ""),
        "clock_error_us": round(error_us, 1),
        "left_out": left_out,
    }
    _write(path, {"traceEvents": list(entries), "displayTimeUnit": "ms", "otherData": about})
    for text in left_out:
        complain(text)
    rows.output().print(_table(ops, share_out(ops, waits), machines, job))
    say(
        f"{path}: {len(ops)} calls, on one clock within {error_us / 1e3:.3f} ms; "
        "open it at https://ui.perfetto.dev"
    )
    return 0


def _ask(home: Path, request: AskTrace) -> tuple[list[TracedOps], Traced]:
    found: list[TracedOps] = []
    with closing(AgentConnection(home, TRACE_REPLIES, silence_s=SILENCE_S)) as connection:
        connection.send(request)
        while True:
            match connection.receive():
                case Refused(verdict):
                    raise error_of(verdict)
                case TracedOps() as ops:
                    found.append(ops)
                case Traced() as traced:
                    return found, traced


def _write(path: Path, trace: Mapping[str, object]) -> None:
    data = msgspec.json.encode(trace)
    try:
        path.write_bytes(gzip.compress(data, 6) if path.suffix == ".gz" else data)
    except OSError as e:
        raise UsageError(
            f"can't write {path}: {reason(e)}; choose another file with --output"
        ) from e


def _table(
    ops: Sequence[PlacedOp],
    shares: Mapping[Process, TimeShares],
    machines: Sequence[TracedMachine],
    job: str,
) -> rows.Rows:
    """Return a row for each process: the parts of its time, of what the file shows of it."""
    ranks = {each.process: each.rank for each in ops if each.job == job}
    cells: list[tuple[str, ...]] = []
    for process in sorted(shares, key=lambda each: (ranks.get(each, -1), each)):
        share, rank = shares[process], ranks.get(process, -1)
        parts = (share.outside_us, share.waited_us, share.moved_us)
        whole_us = sum(parts) or 1.0
        percents = (f"{100 * part / whole_us:.0f} %" for part in parts)
        name = printable(machines[process.machine].name)
        cells.append(("" if rank < 0 else str(rank), name, str(share.calls), *percents))
    return rows.Rows(_HEADERS, cells, compact=True)
