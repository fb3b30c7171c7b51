"""A small form of `python -m tools run sharded`."""

import numpy as np
import pytest

from tools.bench.sharded import bucket_bytes, measure_all

pytestmark = pytest.mark.slow

WIDTH = 320


@pytest.mark.e2e
def test_what_is_shared_out_takes_as_little_memory_as_the_page_says() -> None:
    found, weights = measure_all(WIDTH)

    plain, zero, fully = found["plain"], found["zero-1"], found["fully sharded"]
    assert 3 * zero["state"] <= 1.03 * plain["state"]
    assert peak(zero) <= peak(plain) + 2 * bucket_bytes(WIDTH)
    assert peak(fully) <= 0.65 * peak(plain)
    for way in ("zero-1", "fully sharded"):
        np.testing.assert_allclose(weights[way], weights["plain"], atol=1e-5)


def peak(its: dict[str, int]) -> int:
    return its["mlx"] + its["numpy"]
