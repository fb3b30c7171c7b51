"""The training script of the campaigns: the elastic loop, with an op whose result can be checked.

Started in a trainer process by `tools.chaos.warm`, or as `python -m tools.chaos.trainer OPTIONS`,
with a job's options as JSON. Each call and each result is a line on standard output.
"""

import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import numpy as np

import pmesh
from tools.chaos.calls import LOST, failed, prepare
from tools.chaos.oplog import Report, encode_report
from tools.chaos.pattern import Pattern
from tools.chaos.trials import At


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What one trainer does."""

    number: int
    """Of its machine, from 1: what it gives to each op depends on it."""
    wait_for: int
    op_bytes: int
    calls: Literal["sum", "collectives", "compressed"] = "sum"
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
    epochs: int = 0
    """For how long `tools.chaos.digits` learns."""


def say(what: str, **more: Any) -> None:  # noqa: ANN401 - a Report's own fields
    """One line, at once, in one write: lines of threads don't mix."""
    at = more.pop("at", None) or time.monotonic()
    os.write(sys.stdout.fileno(), encode_report(Report(what=what, at=at, **more)) + b"\n")


class _Waits(logging.Handler):
    """Passes on what pmesh says while an op waits."""

    def emit(self, record: logging.LogRecord) -> None:
        say("waiting", says=record.getMessage())


def work(seconds: float) -> None:
    """Compute for so long: busy, not asleep, as a trainer is."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def train(mesh: pmesh.Mesh, options: Options) -> None:
    """One op after the other, until the process is killed or an op fails."""
    pattern = Pattern(options.op_bytes)
    weights = np.zeros(options.state_bytes // 4, np.float32)
    state: dict[str, Any] = {"position": 0, "weights": weights}
    expected = -1
    while True:
        began = time.monotonic()
        try:
            state = mesh.sync(state)
        except pmesh.HistorySuperseded as e:
            say("superseded", says=str(e))
            continue  # the next sync brings the other history
        except LOST as e:
            if options.calls == "sum":
                raise
            # I5: the call before has failed, though it had returned here.
            late = failed(e)
            say("done", step=expected - 1, names=mesh.names, **late._asdict())
            continue
        step = int(state["position"])
        if step != expected:  # its first, or another history's
            say("entered", step=step, names=mesh.names, value=time.monotonic() - began)
        work(options.compute_s if step == options.compute_at_step else options.pause_s)
        trial = prepare(options.calls, At(mesh, pattern, options.number, step))
        say("called", step=step)
        try:
            result = trial.call()
        except pmesh.HistorySuperseded as e:
            say("superseded", step=step, says=str(e))
            continue
        done = time.monotonic()
        say("done", at=done, step=step, names=mesh.names, **trial.judge(result)._asdict())
        expected = state["position"] = step + 1


def main(options_text: str, run: Callable[[pmesh.Mesh, Options], None] = train) -> int:
    """Join the job and train; the exit code is 1 if a call has raised."""
    options = msgspec.json.decode(options_text, type=Options)
    logger = logging.getLogger("pmesh")
    logger.addHandler(_Waits())
    logger.propagate = False
    say("connecting")
    try:
        with pmesh.connect(
            job=options.job,
            wait_for=options.wait_for,
            min_ranks=options.min_ranks,
            quorum=options.quorum,
            on_superseded=options.on_superseded,
            straggler_after_s=options.straggler_after_s,
        ) as mesh:
            say("joined")
            run(mesh, options)
    except pmesh.PmeshError as e:
        say("error", says=f"{type(e).__name__}: {e}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
