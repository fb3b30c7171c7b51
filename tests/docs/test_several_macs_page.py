"""The page on MLX on several Macs: its computed table."""

import math
from collections.abc import Callable
from typing import NamedTuple

from tests.docs.pages import DOCS, read, sections, table_rows

PAGE = sections(read(DOCS / "how-to" / "mlx-on-several-macs.md"))
BYTES_PER_S = [300e6 / 8, 0.94e9 / 8, 0.94e10 / 8, 20e9 / 8]
RANK, LAYERS, STEPS = 8, 16, 500


class Llama(NamedTuple):
    """What the number of adapters' values depends on."""

    parameters: float
    hidden: int
    keys: int
    feed_forward: int

    @property
    def adapter_bytes(self) -> int:
        pairs = 2 * (self.hidden + self.hidden) + 2 * (self.hidden + self.keys)
        return 4 * LAYERS * RANK * (pairs + 3 * (self.hidden + self.feed_forward))


MODELS = {
    "1B": Llama(1.236e9, 2048, 512, 8192),
    "7B": Llama(6.738e9, 4096, 4096, 11008),
    "70B": Llama(70.55e9, 8192, 1024, 28672),
}
BYTES: dict[str, Callable[[Llama], float]] = {
    "gradients, bfloat16": lambda model: 2 * model.parameters,
    "gradients, int8": lambda model: model.parameters,
    f"local updates, int8, {STEPS} steps": lambda model: model.parameters / STEPS,
    f"LoRA, rank {RANK}, {LAYERS} layers": lambda model: model.adapter_bytes,
}


def two_digits(x: float) -> str:
    """As the table has them: 3,800, 56, 2.1, 0.021."""
    digits = 1 - math.floor(math.log10(x))
    return f"{round(x, digits):,.{max(0, digits)}f}"


def test_two_digits_are_rounded_as_they_are_read() -> None:
    assert [two_digits(x) for x in (3762.0, 56.4, 2.06, 0.0207)] == ["3,800", "56", "2.1", "0.021"]


def in_bytes(x: float) -> str:
    unit, name = (1e9, "GB") if x >= 1e9 else (1e6, "MB")
    return f"{two_digits(x / unit)} {name}"


def test_the_table_is_what_the_page_says_that_it_computes() -> None:
    rows = list(table_rows(PAGE["How long the network takes for a step"]))
    expected = [
        [
            name,
            what,
            in_bytes(nbytes(model)),
            *(f"{two_digits(nbytes(model) / speed)} s" for speed in BYTES_PER_S),
        ]
        for name, model in MODELS.items()
        for what, nbytes in BYTES.items()
    ]
    assert rows == expected
