"""The training scripts of the campaigns; each call and each result is a line on standard output.

Started in a trainer process by `tools.lab.cluster`, or as `python -m tools.chaos.trainer OPTIONS`,
with a job's options as JSON. One is the elastic loop, with an op whose result can be checked.
Another trains by local updates. The third learns handwritten digits: softmax regression with weight
decay, so that it converges to one minimum, whatever has happened on the way. The batch of all ranks
together is the same for any number of them.
"""

import importlib.util
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

import pmesh
from tools.chaos.calls import LOST, At, Pattern, failed, prepare
from tools.chaos.ranks import prepare_call
from tools.lab.oplog import TrainerOptions, TrainerReport, encode_report


def say(what: str, **more: Any) -> None:  # noqa: ANN401 - a Report's own fields
    """One line, at once, in one write: lines of threads don't mix."""
    at = more.pop("at", None) or time.monotonic()
    os.write(sys.stdout.fileno(), encode_report(TrainerReport(what=what, at=at, **more)) + b"\n")


class _Waits(logging.Handler):
    """Passes on what pmesh says while an op waits."""

    def emit(self, record: logging.LogRecord) -> None:
        say("waiting", says=record.getMessage())


def work(seconds: float) -> None:
    """Compute for so long: busy, not asleep, as a trainer is."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def train(mesh: pmesh.Mesh, options: TrainerOptions) -> None:
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
            if options.calls in {"sum", "ranks"}:
                raise
            # I5: the call before has failed, though it had returned here.
            late = failed(e)
            say("done", step=expected - 1, names=mesh.names, **late._asdict())
            continue
        step = int(state["position"])
        if step != expected:  # its first, or another history's
            say("entered", step=step, names=mesh.names, value=time.monotonic() - began)
        work(options.compute_s if step == options.compute_at_step else options.pause_s)
        at = At(mesh, pattern, options.number, step)
        trial = prepare_call(at) if options.calls == "ranks" else prepare(options.calls, at)
        say("called", step=step)
        try:
            result = trial.call()
        except pmesh.HistorySuperseded as e:
            say("superseded", step=step, says=str(e))
            continue
        done = time.monotonic()
        say("done", at=done, step=step, names=mesh.names, **trial.judge(result)._asdict())
        expected = state["position"] = step + 1


def train_apart(mesh: pmesh.Mesh, options: TrainerOptions) -> None:
    """Local updates in rounds of a time, until the process is killed; the computation sleeps.

    Eight ranks can't compute on two cores without slowing each other down; asleep each keeps the
    speed that it is given.
    """
    local = pmesh.LocalUpdates(mesh, round_s=options.round_s)
    weights = np.zeros(options.op_bytes // 4, np.float32)
    while True:
        weights, _ = local.begin(weights)
        number, samples = local.round, 0
        say("called", step=number)
        for _ in local.steps():
            time.sleep(options.pause_s)
            samples += 1
        weights = local.end(weights + np.float32(samples * options.number), samples=samples)
        digest = xxhash.xxh3_128_hexdigest(weights.tobytes())
        say("done", step=number, names=mesh.names, digest=digest)
        say("counted", step=number, value=samples)


GLOBAL_BATCH = 96
WEIGHT_DECAY = 1e-3
LEARNING_RATE = 0.5
SEED = 7

Array = NDArray[np.float32]


def load() -> tuple[Array, NDArray[np.int64]]:
    """scikit-learn's digits, without the two seconds that its import takes."""
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise pmesh.UsageError("the digits ship with scikit-learn: install it")
    file = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    digits = np.loadtxt(file, delimiter=",", dtype=np.float32)
    return (digits[:, :64] / 16).astype(np.float32), digits[:, 64].astype(np.int64)


def loss_of(weights: Array, pixels: Array, labels: NDArray[np.int64]) -> tuple[float, Array]:
    """The mean loss over these samples, and its gradient, both without the decay."""
    logits = pixels @ weights[:-1] + weights[-1]
    chance = np.exp(logits - logits.max(axis=1, keepdims=True))
    chance /= chance.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = float(-np.log(chance[rows, labels]).mean())
    chance[rows, labels] -= 1
    gradient = np.vstack([pixels.T @ chance, chance.sum(axis=0)]) / len(labels)
    return loss, gradient.astype(np.float32)


def learn(mesh: pmesh.Mesh, options: TrainerOptions) -> None:
    """The elastic loop, for so many epochs; the last line gives the loss and the weights' hash."""
    pixels, labels = load()
    state: dict[str, Any] = {
        "weights": np.zeros((65, 10), np.float32),
        "epoch": 0,
        "position": 0,
        "steps": 0,
    }
    while True:
        state = mesh.sync(state)
        if state["epoch"] >= options.epochs:
            break
        share = GLOBAL_BATCH // mesh.size
        size = mesh.size
        mine = mesh.shard(len(labels), epoch=state["epoch"], position=state["position"], seed=SEED)
        mine, gradient = mine[:share], np.zeros((65, 10), np.float32)
        if len(mine):
            _, gradient = loss_of(state["weights"], pixels[mine], labels[mine])
        time.sleep(options.pause_s)
        say("called", step=state["steps"])
        gradient = mesh.average_gradients(gradient, weight=len(mine))
        rate = LEARNING_RATE * (1 - state["epoch"] / options.epochs)
        weights = state["weights"]
        weights = weights - np.float32(rate) * (gradient + np.float32(WEIGHT_DECAY) * weights)
        position = state["position"] + share * size
        over = position >= len(labels)
        say(
            "done", step=state["steps"], names=mesh.names, digest=xxhash.xxh3_128_hexdigest(weights)
        )
        state = {
            "weights": weights,
            "epoch": state["epoch"] + over,
            "position": 0 if over else position,
            "steps": state["steps"] + 1,
        }
    loss, _ = loss_of(state["weights"], pixels, labels)
    digest = xxhash.xxh3_128_hexdigest(state["weights"])
    say("ended", step=state["steps"], digest=digest, value=loss)


def main() -> int:
    """Join the job and train; the exit code is 1 if a call has raised."""
    options = msgspec.json.decode(sys.argv[1], type=TrainerOptions)
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
            apart = train_apart if options.round_s else train
            (learn if options.epochs else apart)(mesh, options)
    except pmesh.PmeshError as e:
        say("error", says=f"{type(e).__name__}: {e}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
