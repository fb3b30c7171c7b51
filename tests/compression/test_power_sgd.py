import hashlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.compression import power_sgd
from pmesh.compression.blocks import Float32s
from pmesh.compression.draws import draw_uniform
from pmesh.compression.power_sgd import PowerSGDPlan
from tests.compression.values import gaussian

SHAPES = [(7,), (40, 30), (), (5, 3), (3, 3, 25, 20), (2,), (0, 4)]


def first_q(plan: PowerSGDPlan) -> Float32s:
    q = np.zeros(plan.q_count, np.float32)
    power_sgd.warm_up(plan, q, key=1)
    return q


def one_rank(
    plan: PowerSGDPlan, own: Float32s, q: Float32s, *, residual: Float32s | None = None
) -> tuple[Float32s, Float32s]:
    """The result of a mesh of one, and the next Q; the residual is replaced."""
    p, out = np.full(plan.p_count, np.nan, np.float32), np.full(plan.count, np.nan, np.float32)
    next_q = np.full(plan.q_count, np.nan, np.float32)
    own.flags.writeable = q.flags.writeable = False
    power_sgd.compress(plan, own, q, p, residual=residual, residual_out=residual)
    power_sgd.orthogonalize(plan, p)
    power_sgd.project(plan, own if residual is None else residual, p, next_q)
    power_sgd.decompress(plan, p, next_q, out, residual_out=residual)
    power_sgd.warm_up(plan, next_q, key=2)
    return out, next_q


def digest(*arrays: Float32s) -> str:
    return hashlib.sha256(b"".join(each.astype("<f4").tobytes() for each in arrays)).hexdigest()[
        :16
    ]


def test_what_does_not_pay_goes_uncompressed_and_comes_out_as_it_is() -> None:
    plan = power_sgd.plan_matrices(SHAPES, rank=2)
    assert [(m.start, m.rows, m.columns) for m in plan.matrices] == [(7, 40, 30), (1223, 225, 20)]
    assert plan.rest == ((0, 7), (1207, 1223), (5723, 5725))
    own = gaussian(plan.count, seed=1)
    residual = np.zeros_like(own)
    residual[5] = 2
    out, _ = one_rank(plan, own, first_q(plan), residual=residual)
    for start, end in plan.rest:
        expected = own[start:end] + (np.arange(start, end) == 5) * np.float32(2)
        np.testing.assert_array_equal(out[start:end], expected)
        assert not residual[start:end].any()


@pytest.mark.parametrize(("min_rate", "pays"), [(1.0, True), (2.5, True), (2.6, False)])
def test_a_matrix_pays_from_the_rate_on_that_is_asked_for(
    min_rate: float,
    pays: bool,  # noqa: FBT001 - a parameter
) -> None:
    plan = power_sgd.plan_matrices([(20, 20)], rank=4, min_rate=min_rate)
    assert bool(plan.matrices) == pays
    assert plan.p_count + plan.q_count == (160 if pays else 400)


def resnet18_for_cifar() -> list[tuple[int, ...]]:
    """He et al. 2016 as usual for 32 x 32 pixels; shapes as torch has them."""
    shapes: list[tuple[int, ...]] = [(64, 3, 3, 3), (64,), (64,)]
    before = 64
    for width in (64, 128, 256, 512):
        for _ in range(2):
            shapes += [(width, before, 3, 3), (width,), (width,)]
            shapes += [(width, width, 3, 3), (width,), (width,)]
            if before != width:
                shapes += [(width, before, 1, 1), (width,), (width,)]
            before = width
    return [*shapes, (10, 512), (10,)]


@pytest.mark.parametrize(("rank", "factor"), [(1, 240), (2, 135), (4, 71)])
def test_a_resnet18_takes_so_many_times_fewer_values(rank: int, factor: int) -> None:
    plan = power_sgd.plan_matrices(resnet18_for_cifar(), rank=rank)
    assert plan.count == 11_173_962
    assert plan.count / (plan.p_count + plan.q_count) >= factor


@pytest.mark.parametrize("layout", ["wide", "tall", "beyond a part"])
def test_a_matrix_of_low_rank_comes_out_whole(layout: str) -> None:
    rows, columns = {"wide": (30, 400), "tall": (400, 30), "beyond a part": (12, 40_000)}[layout]
    plan = power_sgd.plan_matrices([(rows, columns)], rank=3)
    rng = np.random.default_rng(2)
    matrix = rng.standard_normal((rows, 3)) @ rng.standard_normal((3, columns))
    own = matrix.astype(np.float32).reshape(-1)
    out, _ = one_rank(plan, own, first_q(plan))
    assert np.abs(out - own).max() < 1e-5 * np.abs(own).max()


def test_a_warm_start_finds_the_best_approximation_in_a_few_steps() -> None:
    rng = np.random.default_rng(3)
    u, _ = np.linalg.qr(rng.standard_normal((60, 60)))
    v, _ = np.linalg.qr(rng.standard_normal((50, 50)))
    values = 0.5 ** np.arange(50)
    matrix = (u[:, :50] * values) @ v.T
    plan = power_sgd.plan_matrices([(60, 50)], rank=2)
    own, q = matrix.astype(np.float32).reshape(-1), first_q(plan)
    best = math.sqrt(float((values[2:] ** 2).sum()))
    errors = []
    for _ in range(6):
        out, q = one_rank(plan, own, q)
        errors.append(float(np.linalg.norm(out - own)))
    assert errors[0] > 1.05 * best
    assert errors[-1] < 1.001 * best


@given(st.integers(1, 4), st.integers(0, 2**32), st.sampled_from([1e-30, 1e-3, 1.0, 1e18]))
def test_what_comes_out_and_what_is_kept_make_up_the_values(
    rank: int, seed: int, scale: float
) -> None:
    plan = power_sgd.plan_matrices(SHAPES, rank=rank)
    own = gaussian(plan.count, seed=seed) * np.float32(scale)
    before = gaussian(plan.count, seed=seed + 1) * np.float32(scale)
    residual, q = before.copy(), first_q(plan)
    out, next_q = one_rank(plan, own, q, residual=residual)
    left = own + before - out
    for start, end in plan.rest:
        left[start:end] = 0
    np.testing.assert_array_equal(residual, left)
    without, _ = one_rank(plan, own + before, q)
    np.testing.assert_array_equal(without, out)
    assert np.isfinite(next_q).all()


def test_columns_of_p_are_orthonormal_even_if_they_hardly_differ() -> None:
    plan = power_sgd.plan_matrices([(500, 300)], rank=4)
    first = gaussian(500, seed=4)
    p = np.concatenate([first, first + 1e-4 * gaussian(500, seed=5), 2 * first, first * 0 + 1])
    power_sgd.orthogonalize(plan, p)
    columns = p.reshape(4, 500)
    assert not columns[2].any()  # it depends on the first
    expected = np.diag([1.0, 1.0, 0.0, 1.0])
    np.testing.assert_allclose(columns @ columns.T, expected, atol=1e-6)


def test_zeros_come_out_as_zeros_and_the_next_step_starts_afresh() -> None:
    plan = power_sgd.plan_matrices([(40, 30)], rank=2)
    out, q = one_rank(plan, np.zeros(1200, np.float32), first_q(plan))
    assert not out.any()
    assert q.any(axis=None)
    out, _ = one_rank(plan, np.ones(1200, np.float32), q)
    np.testing.assert_allclose(out, 1, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_matrix_that_is_not_finite_comes_out_so_and_does_not_stay(bad: float) -> None:
    plan = power_sgd.plan_matrices([(40, 30), (30, 40)], rank=2)
    own, residual = gaussian(2400, seed=6), np.zeros(2400, np.float32)
    own[77] = bad
    out, q = one_rank(plan, own, first_q(plan), residual=residual)
    assert np.isnan(out[:1200]).all()
    assert np.isfinite(out[1200:]).all()
    assert np.isfinite(residual).all()
    assert np.isfinite(q).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0])
def test_a_column_that_is_zero_or_not_finite_is_drawn_anew(bad: float) -> None:
    plan = power_sgd.plan_matrices([(40, 30)], rank=2)
    first, q = first_q(plan), gaussian(60, seed=13)
    q[30:] *= 0
    q[40] = bad
    power_sgd.warm_up(plan, q, key=1)
    np.testing.assert_array_equal(q[30:], first[30:])
    assert not np.array_equal(q[:30], first[:30])


def test_a_first_q_is_drawn_by_its_key_and_warm_ones_keep_their_direction() -> None:
    plan = power_sgd.plan_matrices([(40, 30), (30, 40)], rank=2)
    q, other = first_q(plan), np.zeros(plan.q_count, np.float32)
    power_sgd.warm_up(plan, other, key=2)
    assert np.abs(q).max() <= 1
    assert abs(q.mean()) < 0.2  # of 140 uniform ones: 0.05
    assert not np.array_equal(q, other)
    warm = q.copy()
    power_sgd.warm_up(plan, warm, key=3)
    for column in warm[:60].reshape(2, 30):
        assert 1 <= np.abs(column).max() < 2
    for scale in (2.0**-120, 0.25, 2.0**100):
        scaled = q * np.float32(scale)
        power_sgd.warm_up(plan, scaled, key=4)
        np.testing.assert_array_equal(scaled, warm)


def test_buckets_without_matrices_have_no_second_all_reduce() -> None:
    plan = power_sgd.plan_matrices([(5,), ()], rank=1)
    assert (plan.q_count, plan.p_count, plan.rest) == (0, 6, ((0, 6),))
    own = gaussian(6, seed=7)
    out, _ = one_rank(plan, own, first_q(plan))
    np.testing.assert_array_equal(out, own)
    assert power_sgd.plan_matrices([], rank=1).count == 0


def ordered(terms: list[float]) -> float:
    total = terms[0]
    for term in terms[1:]:
        total += term
    return total


def test_what_every_rank_computes_is_stated_to_the_last_bit() -> None:
    """Value by value, in Python's floats: no BLAS, no order of numpy's own, no fused product."""
    plan = power_sgd.plan_matrices([(50, 40)], rank=3)
    p, q = gaussian(150, seed=8), gaussian(120, seed=9)
    p[:50] = 1
    # Of what lies between these is left what the order in which they cancel out has left.
    p[50:98:4], p[52:98:4] = 2**60, -(2**60)
    columns = [[float(x) for x in column] for column in p.reshape(3, 50)]
    for i, column in enumerate(columns):
        inverse = 1 / math.sqrt(ordered([x * x for x in column]))
        column[:] = [x * inverse for x in column]
        for other in columns[i + 1 :]:
            share = ordered([x * y for x, y in zip(other, column, strict=True)])
            other[:] = [x - share * y for x, y in zip(other, column, strict=True)]
    power_sgd.orthogonalize(plan, p)
    np.testing.assert_array_equal(p.reshape(3, 50), np.array(columns).astype(np.float32))
    out = np.empty(2000, np.float32)
    power_sgd.decompress(plan, p, q, out)
    thin_p, thin_q = p.reshape(3, 50), q.reshape(3, 40)
    for row, place in [(0, 0), (49, 39), (17, 21)]:
        value = thin_p[0, row] * thin_q[0, place]
        for i in (1, 2):
            value = value + thin_p[i, row] * thin_q[i, place]
        assert out[row * 40 + place] == value


def test_what_every_rank_computes_is_the_same_on_every_machine() -> None:
    plan = power_sgd.plan_matrices([(300, 200), (64, 3, 3, 32)], rank=4)
    p, q = draw_uniform(10, 0, plan.p_count), draw_uniform(11, 0, plan.q_count)
    out = np.empty(plan.count, np.float32)
    power_sgd.orthogonalize(plan, p)
    power_sgd.decompress(plan, p, q, out)
    q[:200] = 0
    power_sgd.warm_up(plan, q, key=12)
    assert digest(p, q, out) == "2e8abc3df529b3ea"
