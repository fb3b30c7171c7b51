"""Over many steps: what came out and what is still kept are, together, what went in."""

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import pytest

from pmesh.compression.blocks import Float32s
from pmesh.compression.power_sgd import plan_matrices
from tests.worlds.meshes import ByPowerSGD, ByRandomK, ByRank, ByTopK, Scheme, by_one_bit, exact_sum

STEPS = 1000
COUNT = 240
SHAPES = [(12, 10), (5,), (3, 7, 5), (10,)]

EXACT: dict[str, Scheme] = {
    "topk": ByTopK(k=12, compact=False),
    "topk compact": ByTopK(k=12, compact=True),
    "randomk": ByRandomK(k=24),
}
"""Those that only move values or cut bits off: sums of dyadic values have no rounding at all."""


def rounding(name: str) -> Scheme:
    """Those that compute means and products."""
    if name == "onebit":
        return by_one_bit
    plan = plan_matrices(SHAPES, rank=int(name[-1]), min_rate=1)
    assert plan.count == COUNT
    assert len(plan.matrices) == 2
    return ByPowerSGD(plan=plan)


ROUNDING = ["onebit", "powersgd 1", "powersgd 2"]


@dataclass(slots=True)
class Run:
    """A job of four ranks, from its first step on."""

    scheme: Scheme
    ranks: set[int] = field(default_factory=lambda: set(range(4)))
    residuals: ByRank = field(
        default_factory=lambda: {rank: np.zeros(COUNT, np.float32) for rank in range(4)}
    )
    """Of those who were lost, too: what they had when they contributed for the last time."""
    given: Float32s = field(default_factory=lambda: np.zeros(COUNT, np.float64))
    came_out: Float32s = field(default_factory=lambda: np.zeros(COUNT, np.float64))
    largest: float = 0.0

    def step(self, number: int, *, lost: Collection[int] = ()) -> None:
        """Ranks have gradients of their own around a mean that is everyone's."""
        own: ByRank = {}
        for rank in sorted(self.ranks):
            rng = np.random.default_rng((number, rank))
            noise = rng.integers(-64, 65, COUNT) * np.linspace(0.05, 1, COUNT)
            own[rank] = (np.round(noise + np.arange(COUNT) % 7) / 64).astype(np.float32)
            values = own[rank] + self.residuals[rank]
            self.largest = max(self.largest, float(np.abs(values).max()))
        out, given = self.scheme(own, self.residuals, step=number, lost=lost)
        self.largest = max(self.largest, float(np.abs(out).max()))
        self.ranks -= set(lost)
        self.given += given
        self.came_out += out

    def join(self, rank: int) -> None:
        """A new rank begins with nothing kept."""
        self.ranks.add(rank)
        self.residuals[rank] = np.zeros(COUNT, np.float32)

    @property
    def kept(self) -> Float32s:
        """By all ranks that there were."""
        return exact_sum(self.residuals, self.residuals)


def run_to_the_end(scheme: Scheme, *, losses: bool) -> Run:
    run = Run(scheme)
    for number in range(STEPS):
        if losses and number == 500:
            run.join(4)
        run.step(number, lost={300: {1}, 700: {0, 4}}.get(number, ()) if losses else ())
    assert len(run.ranks) == (2 if losses else 4)
    return run


losses_or_not = pytest.mark.parametrize("losses", [False, True], ids=["whole", "with losses"])


@losses_or_not
@pytest.mark.parametrize("name", EXACT)
def test_not_a_bit_is_lost_between_what_went_in_and_what_came_out(
    name: str,
    losses: bool,  # noqa: FBT001 - a parameter
) -> None:
    run = run_to_the_end(EXACT[name], losses=losses)
    np.testing.assert_array_equal(run.given, run.came_out + run.kept)
    assert np.abs(run.given).max() > 300  # there was something to lose


@losses_or_not
@pytest.mark.parametrize("name", ROUNDING)
def test_no_more_is_lost_than_fp32_rounds_away(
    name: str,
    losses: bool,  # noqa: FBT001 - a parameter
) -> None:
    run = run_to_the_end(rounding(name), losses=losses)
    # In a step each of up to four ranks rounds when it adds its residual and when it subtracts what
    # came out, and the sum of what came out is rounded up to three times.
    roundings = STEPS * (2 * 4 + 3)
    allowed = roundings * 2.0**-24 * run.largest
    difference = np.abs(run.given - (run.came_out + run.kept)).max()
    assert difference <= allowed
    assert allowed < 0.001 * np.abs(run.given).max()


@pytest.mark.parametrize("name", [*EXACT, *ROUNDING])
def test_what_is_kept_does_not_grow(name: str) -> None:
    run = Run(EXACT[name] if name in EXACT else rounding(name))
    for number in range(100):
        run.step(number)
    early = float(np.linalg.norm(run.kept))
    for number in range(100, 400):
        run.step(number)
    assert float(np.linalg.norm(run.kept)) < 1.5 * early
    assert np.abs(run.kept).max() < 0.2 * np.abs(run.given).max()
