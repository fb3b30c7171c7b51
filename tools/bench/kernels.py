"""How long the compression's kernels take here on one thread, in numpy and in C.

Set OPENBLAS_NUM_THREADS=1 for that. All runs of a codec or scheme take turns, so that what else the
machine does hits them alike; each figure is the shortest of its rounds, with the median of the
rounds behind it. What counts is the thread's own time, not what it waits for a processor. `copy`
stands beside them: it reads and writes as many fp32 values, and says how fast memory is just then,
which others use, too.

A kernel is added by a function in KERNELS that takes the number of values and returns its runs.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from pmesh.compression import one_bit, power_sgd, random_k, top_k
from pmesh.compression.blocks import Bytes, Float32s
from pmesh.compression.codecs import Codec, codec_of
from pmesh.compression.compiled import in_numpy, kernels

VALUES = 25_000_000  # 100 MB of fp32: no cache holds it
ROUNDS = 5
NUMPY, IN_C = "numpy", "C"

Run: TypeAlias = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRuns:
    name: str
    runs: Mapping[str, Run]
    """By NUMPY and IN_C; the second is missing where nothing is compiled."""


def gaussian(count: int, *, seed: int) -> Float32s:
    """float32[count] that look like gradients."""
    return np.random.default_rng(seed).standard_normal(count, np.float32)


def codec_rows(codec: Codec, count: int) -> list[KernelRuns]:
    """A first hop, a later one, one with feedback, and decoding."""
    own, residual = gaussian(count, seed=0), gaussian(count, seed=1)
    residual *= np.float32(0.01)
    kept, out = np.zeros_like(own), np.zeros_like(own)
    incoming, outgoing = np.zeros((2, codec.wire_bytes(count)), np.uint8)
    codec.hop(None, own, incoming)
    steps: dict[str, Run] = {
        "encode": lambda: codec.hop(None, own, outgoing),
        "hop": lambda: codec.hop(incoming, own, outgoing),
        "hop with feedback": lambda: codec.hop(
            incoming, own, outgoing, residual=residual, residual_out=kept
        ),
        "decode": lambda: codec.decode(incoming, out),
    }
    rows = {name: in_both(step) for name, step in steps.items()}
    return rows_of(rows | {"copy": {NUMPY: lambda: np.copyto(out, own)}})


def rows_of(runs: Mapping[str, Run | Mapping[str, Run]]) -> list[KernelRuns]:
    """A row for each name; a run that stands alone is not compiled."""
    return [
        KernelRuns(name=name, runs=run if isinstance(run, Mapping) else {NUMPY: run})
        for name, run in runs.items()
    ]


def in_both(run: Run) -> dict[str, Run]:
    """A kernel that is there in C, too."""

    def by_numpy() -> None:
        with in_numpy():
            run()

    return {NUMPY: by_numpy} if kernels() is None else {NUMPY: by_numpy, IN_C: run}


def top_k_rows(count: int) -> list[KernelRuns]:
    """One percent; beside it what finds the same values without a sampled threshold."""
    k = top_k.kept(count, 0.01)
    own, before = gaussian(count, seed=0), gaussian(count, seed=1)
    after = np.zeros_like(own)
    wide = np.zeros(top_k.wire_bytes(count, k), np.uint8)
    compact = np.zeros(top_k.wire_bytes(count, k, compact=True), np.uint8)

    def with_feedback(wire: Bytes, *, compact: bool) -> None:
        top_k.compress(own, wire, k=k, compact=compact, residual=before, residual_out=after)

    runs: dict[str, Run] = {
        "compress": lambda: top_k.compress(own, wide, k=k),
        "with feedback": lambda: with_feedback(wide, compact=False),
        "compact, feedback": lambda: with_feedback(compact, compact=True),
        "accumulate": lambda: top_k.accumulate(wide, after, k=k),
        "accumulate compact": lambda: top_k.accumulate(compact, after, k=k, compact=True),
        "argpartition": lambda: np.argpartition(np.abs(own), count - k),
        "copy": lambda: np.copyto(after, own),
    }
    return rows_of(runs)


def random_k_rows(count: int) -> list[KernelRuns]:
    k = top_k.kept(count, 0.1)
    own, before = gaussian(count, seed=0), gaussian(count, seed=1)
    after, sent = np.zeros_like(own), np.zeros(k, np.float32)
    indices = random_k.draw_indices(count, k, 1)
    feedback = {"residual": before, "residual_out": after}
    runs: dict[str, Run] = {
        "draw": lambda: random_k.draw_indices(count, k, 1),
        "compress": lambda: random_k.compress(own, indices, sent),
        "with feedback": lambda: random_k.compress(own, indices, sent, **feedback),
        "decompress": lambda: random_k.decompress(sent, indices, after),
        "copy": lambda: np.copyto(after, own),
    }
    return rows_of(runs | {"draw": in_both(runs["draw"])})


def one_bit_rows(count: int) -> list[KernelRuns]:
    """Signs, and a mean magnitude for each block."""
    own, before = gaussian(count, seed=0), gaussian(count, seed=1)
    after, wire = np.zeros_like(own), np.zeros(one_bit.wire_bytes(count), np.uint8)
    feedback = {"residual": before, "residual_out": after}
    return rows_of(
        {
            "compress": in_both(lambda: one_bit.compress(own, wire)),
            "with feedback": in_both(lambda: one_bit.compress(own, wire, **feedback)),
            "accumulate": in_both(lambda: one_bit.accumulate(wire, after)),
            "copy": lambda: np.copyto(after, own),
        }
    )


def power_sgd_rows(count: int) -> list[KernelRuns]:
    """Rank 4 of a square matrix, with feedback; its two products with a vector are BLAS's."""
    side = math.isqrt(count)
    plan = power_sgd.plan_matrices([(side, side)], rank=4)
    own, before = gaussian(plan.count, seed=0), gaussian(plan.count, seed=1)
    after, out = np.zeros((2, plan.count), np.float32)
    p, q = gaussian(plan.p_count, seed=2), gaussian(plan.q_count, seed=3)
    feedback = {"residual": before, "residual_out": after}

    def compress() -> None:
        power_sgd.compress(plan, own, q, p, **feedback)
        power_sgd.orthogonalize(plan, p)
        power_sgd.project(plan, after, p, q)
        power_sgd.warm_up(plan, q, key=1)

    def decompress() -> None:
        power_sgd.decompress(plan, p, q, out, residual_out=after)

    def whole() -> None:
        compress()
        decompress()

    return rows_of(
        {
            "compress": compress,
            "decompress": in_both(decompress),
            "both": in_both(whole),
            "copy": lambda: np.copyto(out, own),
        }
    )


KERNELS: Mapping[str, Callable[[int], list[KernelRuns]]] = MappingProxyType(
    {
        "int8": partial(codec_rows, codec_of("int8")),
        "int8-stochastic": partial(codec_rows, codec_of("int8-stochastic")),
        "bf16": partial(codec_rows, codec_of("bf16")),
        "fp16": partial(codec_rows, codec_of("fp16")),
        "topk": top_k_rows,
        "randomk": random_k_rows,
        "onebit": one_bit_rows,
        "powersgd": power_sgd_rows,
    }
)


def measure(rows: Sequence[KernelRuns], rounds: int) -> dict[tuple[str, str], list[float]]:
    """Milliseconds of each round, by row and place; the runs of a round in turn, one unmeasured."""
    taken: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        for row in rows:
            for where, run in row.runs.items():
                started = time.thread_time()
                run()
                ended = time.thread_time()
                if number:
                    taken.setdefault((row.name, where), []).append((ended - started) * 1e3)
    return taken


def line(row: KernelRuns, taken: Mapping[tuple[str, str], list[float]]) -> str:
    """One of the table: the shortest and the median of each, and how many times as fast."""
    text = f"  {row.name:20}"
    for where in (NUMPY, IN_C):
        found = taken.get((row.name, where))
        text += f"{min(found):8.1f} ({statistics.median(found):6.1f})" if found else " " * 17
    if IN_C in row.runs:
        text += f"{min(taken[row.name, NUMPY]) / min(taken[row.name, IN_C]):7.1f} x"
    return text.rstrip()


def run(*names: str, values: int = VALUES, rounds: int = ROUNDS) -> None:
    """How long the kernels of compression take in numpy and in C, on one thread.

    Args:
        names: Of KERNELS; without any, all.
        values: fp32 values of the tensor.
        rounds: Of which the shortest counts.
    """
    print(f"{values:,} fp32 values, ms: the shortest of {rounds} (their median)")
    for name in names or KERNELS:
        rows = KERNELS[name](values)
        taken = measure(rows, rounds)
        print(f"{name:22}{NUMPY:^17}{IN_C:^17}")
        for row in rows:
            print(line(row, taken))
