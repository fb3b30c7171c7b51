"""MLX's random numbers, such as those of dropout, for a computation that is made twice."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx


def random_place() -> int:
    """Return the seed after which the next random numbers come."""
    state: Any = mx.random.state  # it has no types
    high, low = state[0].tolist()
    return int(high) << 32 | int(low)


@contextmanager
def drawn_again(place: int) -> Generator[None]:
    """Draw what was drawn from this place on; afterwards go on as if nothing had been drawn."""
    before = random_place()
    mx.random.seed(place)
    try:
        yield
    finally:
        mx.random.seed(before)
