"""The compressed ring, hop after hop: how exact it is, and that feedback loses nothing."""

from collections.abc import Sequence

import numpy as np
import pytest

import pmesh
from pmesh.compression.blocks import Float32s
from pmesh.compression.codecs import codec_of
from pmesh.testing import SimulatedMesh
from tests.worlds.coded_rings import Coded, reduce_coded

COUNT = 2**18
NAMES = ["bf16", "fp16", "int8", "int8-stochastic"]


def gaussian(size: int) -> list[Float32s]:
    dice = np.random.default_rng(size)
    return [dice.standard_normal(COUNT, np.float32) for _ in range(size)]


def heavy_tailed(size: int) -> list[Float32s]:
    """Student's t with 3 degrees of freedom, half of it common, every 512 values of another size.

    The sizes are lognormal, as those of a model's rows of gradients are.
    """
    dice = np.random.default_rng(1)
    scales = np.exp(1.5 * dice.standard_normal(COUNT // 512)).repeat(512)
    common = dice.standard_t(3, COUNT)
    own = [dice.standard_t(3, COUNT) for _ in range(size)]
    return [(0.7 * scales * (common + x)).astype(np.float32) for x in own]


def relative_error(result: Float32s, xs: Sequence[Float32s]) -> float:
    """Of their sum, by the L2 norm."""
    exact = np.sum(xs, axis=0, dtype=np.float64)
    return float(np.linalg.norm(result - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize(("size", "bar"), [(2, 0.009), (4, 0.0115), (8, 0.015)])
def test_int8_without_feedback_is_as_exact_as_the_design_asks(size: int, bar: float) -> None:
    xs = gaussian(size)
    result, clipped = reduce_coded(codec_of("int8"), [Coded(x) for x in xs], reduction="sum", op=0)
    assert relative_error(result, xs) <= bar
    assert not any(clipped)


def rounded_to_int8(values: Float32s) -> Float32s:
    blocks = values.reshape(-1, 256)
    scales = np.abs(blocks).max(axis=1, keepdims=True) / 127
    rounded: Float32s = (np.rint(blocks / scales) * scales).reshape(-1).astype(np.float32)
    return rounded


@pytest.mark.parametrize("size", [2, 4, 8])
def test_nor_is_it_less_exact_on_heavy_tails_than_its_formula(size: int) -> None:
    """How exact that is varies: one outlier makes a block, and all the error of a draw."""
    xs = heavy_tailed(size)
    sums = xs[0]
    for x in xs[1:]:
        sums = rounded_to_int8(sums) + x
    by_formula = relative_error(rounded_to_int8(sums), xs)
    result, _ = reduce_coded(codec_of("int8"), [Coded(x) for x in xs], reduction="sum", op=0)
    assert relative_error(result, xs) <= 1.1 * by_formula <= 0.05


class ReducingRanks:
    """Ranks that reduce again and again, and all that they have put in and got."""

    def __init__(self, name: str, ranks: int, count: int, *, feedback: bool = True) -> None:
        self.codec = codec_of(name)
        self.count = count
        self.feedback = feedback
        self.residuals = {rank: np.zeros(count, np.float32) for rank in range(ranks)}
        self.went_in = np.zeros(count)
        self.came_out = np.zeros(count)
        self.steps = 0

    def reduce(self, xs: Sequence[Float32s], ranks: Sequence[int], reduction: str) -> None:
        kept = {rank: np.empty(self.count, np.float32) for rank in ranks}
        coded = [
            Coded(x, self.residuals[rank], kept[rank]) if self.feedback else Coded(x)
            for x, rank in zip(xs, ranks, strict=True)
        ]
        result, _ = reduce_coded(self.codec, coded, reduction=reduction, op=self.steps)
        self.steps += 1
        self.went_in += np.sum(xs, axis=0, dtype=np.float64)
        factor = len(xs) if reduction == "mean" else 1
        self.came_out += factor * result.astype(np.float64)
        if self.feedback:
            self.residuals |= kept  # of who is lost, what it had at its last contribution

    @property
    def missing(self) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        """What went in and has neither come out nor is kept."""
        kept = np.sum(list(self.residuals.values()), axis=0, dtype=np.float64)
        return self.went_in - self.came_out - kept


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_casts_lose_nothing_at_all_over_a_thousand_steps(name: str) -> None:
    """Whole numbers, whose sums fp32 holds exactly: so each bit is accounted for."""
    dice, job = np.random.default_rng(1), ReducingRanks(name, 4, 300)
    for step in range(1000):
        ranks = range(4) if step < 500 else range(1, 4)  # O9: a rank is lost half way
        xs = [dice.integers(-5000, 5000, 300).astype(np.float32) for _ in ranks]
        job.reduce(xs, ranks, "sum")
    np.testing.assert_array_equal(job.missing, np.zeros(300))
    assert any(residual.any() for residual in job.residuals.values())


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("name", NAMES)
def test_feedback_loses_no_more_than_fp32_rounds_away_over_a_thousand_steps(
    name: str, reduction: str
) -> None:
    dice, count, ranks = np.random.default_rng(2), 300, range(2)
    job, without = ReducingRanks(name, 2, count), ReducingRanks(name, 2, count, feedback=False)
    bias = dice.standard_normal(count).astype(np.float32)
    for _ in range(1000):
        xs = [bias + dice.standard_normal(count).astype(np.float32) for _ in ranks]
        job.reduce(xs, ranks, reduction)
        without.reduce(xs, ranks, reduction)
    # Each of 2,000 hops rounds a few sums, of at most 20, to fp32: as a random walk.
    assert np.abs(job.missing).max() <= 4 * np.sqrt(2000) * 20 * 2.0**-24
    assert np.abs(without.missing).max() > 20 * np.abs(job.missing).max()
    for residual in job.residuals.values():  # it is of the size of one rounding, and stays so
        assert np.abs(residual).max() <= 1


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_simulated_ranks_get_the_bits_of_the_ring(size: int, name: str) -> None:
    xs = [x[:5000] for x in gaussian(size)]

    def train(mesh: pmesh.Mesh) -> Float32s:
        result: Float32s = mesh.all_reduce(xs[mesh.rank], "mean", compression=name)
        return result

    results = SimulatedMesh(size).run(train)
    expected, _ = reduce_coded(codec_of(name), [Coded(x) for x in xs], reduction="mean", op=0)
    assert {result.tobytes() for result in results} == {expected.tobytes()}
