"""What compression does to a training: three small models, each scheme, with feedback and without.

Prints how far the final losses are from uncompressed; four ranks train as threads of one process,
which make the calls that a user's script makes.
"""

import hashlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

import mlx.core as mx
import msgspec
import numpy as np

import pmesh
from pmesh.compression.schemes import BF16, FP16, INT8, OneBit, PowerSGD, RandomK, Scheme, TopK
from pmesh.testing import SimulatedMesh
from tools.bench.models import MODELS, Model, Weights
from tools.lab.commands import Flag
from tools.lab.report import fill, table
from tools.lab.results import describe_commit, describe_machine, read_results, write_results

PAGE = "compression-training"
BAR = 1.01
"""Times the uncompressed loss: what a scheme with feedback may end at."""
SEEDS = (1, 2, 3)
SHORT_STEPS = 12
RANKS = 4
POINTS = 20  # of a curve
MEASURED_SAMPLES = 8192  # the mean of fewer would follow single samples
_MEASURED_SEED = 2**31  # of samples that no training draws by the same numbers
_WARM_UP = 0.05  # of the steps, in which the learning rate rises
UNCOMPRESSED: Final = "none"
WARM_UP_PARTS: Final = 4  # Lin et al. 2018 lower the ratio from 25 % in four epochs
_WARM_UP_RATIO: Final = 0.25
_COLUMNS = "scheme | with feedback | ratio | worst seed | without | ratio | bar"
_NOTHING = "-"

Choice: TypeAlias = Callable[[int, int], Scheme | str]
"""The compression of a call, by its step and by how many there are."""
Trained: TypeAlias = tuple[float, tuple[float, ...]]
"""The final loss, and the mean losses of the batches on the way."""


@dataclass(frozen=True, slots=True)
class Contestant:
    name: str
    scheme: Scheme
    warms_up: bool = False
    """Sends more in the first tenth of the steps, as Deep Gradient Compression does."""
    is_judged: bool = True
    """Whether the bar is for it, or it is shown beside another."""

    def compression(self, *, feedback: bool) -> Callable[[int, int], Scheme]:
        """What a call takes, by its step and by how many there are."""
        scheme = replace(self.scheme, error_feedback=feedback)
        if not self.warms_up or not isinstance(scheme, TopK):
            return lambda _step, _steps: scheme
        last = scheme.ratio

        def ramp(step: int, steps: int) -> Scheme:
            part = step * 10 * WARM_UP_PARTS // steps
            ratio = last if part >= WARM_UP_PARTS else max(last, _WARM_UP_RATIO ** (1 + part))
            return replace(scheme, ratio=ratio)

        return ramp


CASES: Final = (
    Contestant("BF16()", BF16()),
    Contestant("FP16()", FP16()),
    Contestant("INT8()", INT8()),
    Contestant("OneBit()", OneBit()),
    Contestant("TopK(ratio=0.01)", TopK(ratio=0.01)),
    Contestant("TopK(ratio=0.01), warmed up", TopK(ratio=0.01), warms_up=True, is_judged=False),
    Contestant("RandomK(ratio=0.1)", RandomK(ratio=0.1)),
    Contestant("PowerSGD(rank=2)", PowerSGD(rank=2)),
    Contestant("PowerSGD(rank=4)", PowerSGD(rank=4)),
)


_ORDER = (
    *((case, True) for case in CASES if case.is_judged),
    *((case, False) for case in CASES if case.is_judged),
    *((case, True) for case in CASES if not case.is_judged),
)


class SchemeLosses(msgspec.Struct, frozen=True, kw_only=True):
    """One scheme, with feedback or without."""

    case: str
    feedback: bool
    is_judged: bool
    losses: tuple[float | None, ...]
    """At the end, for the first seeds; None: it was not a finite number."""
    curve: tuple[float | None, ...]
    """Mean losses of the batches on the way, over all seeds."""

    @property
    def mean(self) -> float:
        """Infinite if one has diverged."""
        return statistics.fmean(map(_number, self.losses))

    def ratio_to(self, plain: "SchemeLosses") -> float:
        """Of the means over the seeds that this row has."""
        return sum(map(_number, self.losses)) / sum(its for _, its in self._pairs(plain))

    def worst_ratio_to(self, plain: "SchemeLosses") -> float:
        return max(mine / its for mine, its in self._pairs(plain))

    def is_met(self, plain: "SchemeLosses") -> bool:
        return self.ratio_to(plain) <= BAR

    def _pairs(self, plain: "SchemeLosses") -> list[tuple[float, float]]:
        its = plain.losses[: len(self.losses)]
        return list(zip(map(_number, self.losses), map(_number, its), strict=True))


class LossCurve(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    what: str
    weights: int
    ranks: int
    batch: int
    """Samples of each rank in each step."""
    steps: int
    rate: float
    seeds: tuple[int, ...]
    command: str
    commit: str
    machine: str
    took_cpu_s: float = 0
    plain: SchemeLosses
    rows: tuple[SchemeLosses, ...] = ()
    """As many as were measured."""

    def found(self, case: str, *, feedback: bool) -> SchemeLosses | None:
        rows = (row for row in self.rows if (row.case, row.feedback) == (case, feedback))
        return next(rows, None)


Many: TypeAlias = tuple[LossCurve, ...]


def finite(value: float) -> float | None:
    """As JSON can hold it, which has no infinity; to six digits."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _number(value: float | None) -> float:
    return math.inf if value is None else value


def train(model: Model, seed: int, *, steps: int, compression: Choice) -> Trained:
    """Train, and measure the loss at the end on samples that are the same for all.

    Raises:
        RuntimeError: the ranks ended with different bits.
    """

    def rank(mesh: pmesh.Mesh) -> tuple[Weights, list[float]]:
        return _train_rank(mesh, model, seed, steps, compression)

    trained = SimulatedMesh(RANKS).run(rank)
    if len({_hash_of(weights) for weights, _ in trained}) > 1:
        raise RuntimeError(f"{model.name}, seed {seed}: the ranks' weights differ")
    losses = np.mean([losses for _, losses in trained], axis=0)
    curve = tuple(float(part.mean()) for part in np.array_split(losses, min(POINTS, steps)))
    return _measure(model, trained[0][0]), curve


def learning_rate(model: Model, step: int, steps: int) -> float:
    """Up in a twentieth of the steps, then down to zero in a straight line."""
    return model.rate * min(1.0, (step + 1) / (_WARM_UP * steps), 1 - step / steps)


def _train_rank(
    mesh: pmesh.Mesh, model: Model, seed: int, steps: int, compression: Choice
) -> tuple[Weights, list[float]]:
    # Each rank has arrays of its own: MLX's belong to the thread that computes them.
    weights = model.begin(seed)
    loss_and_gradients = mx.value_and_grad(model.loss)
    losses: list[float] = []
    for step in range(steps):
        x, y = model.draw(np.random.default_rng([seed, step, mesh.rank]), model.batch)
        loss, gradients = loss_and_gradients(weights, mx.array(x), mx.array(y))
        gradients = mesh.average_gradients(
            gradients, weight=len(y), compression=compression(step, steps)
        )
        rate = learning_rate(model, step, steps)
        weights = {name: value - rate * gradients[name] for name, value in weights.items()}
        mx.eval(weights, loss)
        losses.append(float(np.array(loss)))
    return weights, losses


def _measure(model: Model, weights: Weights) -> float:
    here = {name: mx.array(np.array(value)) for name, value in weights.items()}
    x, y = model.draw(np.random.default_rng(_MEASURED_SEED), MEASURED_SAMPLES)
    loss = float(np.array(model.loss(here, mx.array(x), mx.array(y))))
    return loss if math.isfinite(loss) else math.inf


def _hash_of(weights: Weights) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(name.encode() + np.array(value).tobytes())
    return digest.hexdigest()


def table_of(measured: LossCurve) -> str:
    """One model's, with a row for each scheme."""
    plain = measured.plain
    rows = [["uncompressed", _text(plain.mean), *[_NOTHING] * 5]]
    for case in CASES:
        fed = measured.found(case.name, feedback=True)
        bare = measured.found(case.name, feedback=False)
        if fed is not None or bare is not None:
            verdict = _NOTHING if fed is None else _verdict_of(fed, plain)
            rows.append([case.name, *_cells(fed, plain), *_cells(bare, plain)[:2], verdict])
    return table(_COLUMNS, rows)


def _verdict_of(row: SchemeLosses, plain: SchemeLosses) -> str:
    """What the bar says of a scheme with feedback."""
    if not row.is_judged:
        return "beside"
    return "met" if row.is_met(plain) else "**MISSED**"


def verdicts(measured: Sequence[LossCurve]) -> str:
    """How many bars were met, which were not, and what was not measured."""
    judged = [(m, row) for m in measured for row in m.rows if row.feedback and row.is_judged]
    missed = [f"{row.case} on {m.model}" for m, row in judged if not row.is_met(m.plain)]
    judged_cases = [case for case in CASES if case.is_judged]
    unmeasured = [
        f"{case.name} on {m.model}"
        for m in measured
        for case in judged_cases
        if m.found(case.name, feedback=True) is None
    ]
    said = f"{len(judged) - len(missed)} of {len(judged)} bars met."
    if missed:
        said += f" Missed: {', '.join(missed)}."
    if unmeasured:
        said += f" Not measured: {', '.join(unmeasured)}."
    if any(m.found(case.name, feedback=False) is None for m in measured for case in judged_cases):
        said += " Without feedback not all was measured: a dash stands for that."
    return said


def _cells(row: SchemeLosses | None, plain: SchemeLosses) -> list[str]:
    if row is None:
        return [_NOTHING] * 3
    return [_text(x) for x in (row.mean, row.ratio_to(plain), row.worst_ratio_to(plain))]


def _text(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "diverged"


def render(measured: Sequence[LossCurve]) -> str:
    return fill(
        PAGE,
        verdict=verdicts(measured),
        tables="\n".join(
            f"## {m.what[0].upper()}{m.what[1:]}\n\n{m.weights:,} weights, {m.ranks} ranks of "
            f"{m.batch} samples each, {m.steps} steps, a rate of {m.rate:g}.\n\n{table_of(m)}\n"
            for m in measured
        ),
        commands="\n".join(
            f"    {m.command}   # {m.took_cpu_s:,.0f} s of CPU time, at {m.commit}, {m.machine}"
            for m in measured
        ),
    )


def measure(
    model: Model, old: Sequence[LossCurve] = (), *, short: bool = False
) -> Iterator[LossCurve]:
    """Train a model with all schemes; what is known at first, and after each of them.

    Those with feedback come first; without it the first seed does, as that is not judged.

    Args:
        model: what is trained.
        old: what an earlier run has written; of the same training it is taken as it is.
        short: one seed, a few steps.
    """
    seeds, steps = (SEEDS[:1], SHORT_STEPS) if short else (SEEDS, model.steps)
    began = time.process_time()
    measured = next((m for m in old if _is_of(m, model, seeds, steps)), None)
    measured = measured or LossCurve(
        model=model.name,
        what=model.what,
        weights=model.count,
        ranks=RANKS,
        batch=model.batch,
        steps=steps,
        rate=model.rate,
        seeds=seeds,
        command=f"python -m tools run losses {model.name}{' --short' if short else ''}",
        commit=describe_commit(),
        machine=describe_machine(),
        plain=_row(model, seeds, steps, lambda *_: UNCOMPRESSED),
    )
    yield measured
    before_s = measured.took_cpu_s
    for case, feedback in _ORDER:
        if measured.found(case.name, feedback=feedback) is not None:
            continue
        choice = case.compression(feedback=feedback)
        mine = seeds if feedback else seeds[:1]
        row = _row(model, mine, steps, choice, case=case, feedback=feedback)
        took_s = before_s + round(time.process_time() - began)
        measured = msgspec.structs.replace(measured, rows=(*measured.rows, row), took_cpu_s=took_s)
        yield measured


def _is_of(measured: LossCurve, model: Model, seeds: tuple[int, ...], steps: int) -> bool:
    same = (model.name, model.count, model.batch, steps, model.rate, seeds)
    m = measured
    return (m.model, m.weights, m.batch, m.steps, m.rate, m.seeds) == same


def _row(
    model: Model,
    seeds: Sequence[int],
    steps: int,
    choice: Choice,
    *,
    case: Contestant | None = None,
    feedback: bool = False,
) -> SchemeLosses:
    name = UNCOMPRESSED if case is None else case.name
    trained = [train(model, seed, steps=steps, compression=choice) for seed in seeds]
    row = SchemeLosses(
        case=name,
        feedback=feedback,
        is_judged=case is not None and case.is_judged,
        losses=tuple(finite(loss) for loss, _ in trained),
        curve=tuple(map(finite, np.mean([curve for _, curve in trained], axis=0))),
    )
    how = ", with feedback" if feedback else ""
    print(f"{model.name}: {name}{how}: {row.mean:.4f}", file=sys.stderr, flush=True)
    return row


def run(*models: str, json: Path | None = None, short: Flag = False) -> int:
    """Train with each scheme; exits with 1 if a bar was missed, but for the short form.

    Args:
        models: Which, of mlp, convolutional and characters; without any, all.
        json: Where the results go, after each scheme; what it holds already is not measured again.
        short: A few steps: does it work at all?
    """
    if unknown := set(models) - set(MODELS):
        raise ValueError(f"no model {', '.join(sorted(unknown))}; there are: {', '.join(MODELS)}")
    measured: list[LossCurve] = []
    old = read_results(json, Many) if json and json.exists() else ()
    for name in models or MODELS:
        for so_far in measure(MODELS[name](), old, short=short):
            if json is not None:
                write_results(json, (*measured, so_far))
        measured.append(so_far)
    for each in measured:
        print(f"\n{each.model}: {each.what}\n\n{table_of(each)}")
    print(f"\n{verdicts(measured)}")
    met = all(r.is_met(m.plain) for m in measured for r in m.rows if r.feedback and r.is_judged)
    return 0 if met or short else 1
