"""The computed tables of the pages that say what to use on several Macs."""

import math
from collections.abc import Callable
from typing import NamedTuple

from tests.docs.pages import DOCS, read, sections, table_rows

PAGE = sections(read(DOCS / "how-to" / "mlx-on-several-macs.md"))
KINDS_PAGE = sections(read(DOCS / "how-to" / "kinds-of-parallel-training.md"))
BYTES_PER_S = [300e6 / 8, 0.94e9 / 8, 0.94e10 / 8, 20e9 / 8]
RANK, LAYERS, STEPS = 8, 16, 500
COUNTS = (2, 4, 8)
TOKENS = 8 * 2048


class Llama(NamedTuple):
    """What the number of adapters' values depends on."""

    parameters: float
    hidden: int
    keys: int
    feed_forward: int
    layers: int

    @property
    def adapter_bytes(self) -> int:
        pairs = 2 * (self.hidden + self.hidden) + 2 * (self.hidden + self.keys)
        return 4 * LAYERS * RANK * (pairs + 3 * (self.hidden + self.feed_forward))


MODELS = {
    "1B": Llama(1.236e9, 2048, 512, 8192, 16),
    "7B": Llama(6.738e9, 4096, 4096, 11008, 32),
    "13B": Llama(13.02e9, 5120, 5120, 13824, 40),
    "70B": Llama(70.55e9, 8192, 1024, 28672, 80),
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
        if name != "13B"
    ]
    assert rows == expected


def around_the_ring(nbytes: float, n: int) -> float:
    """What each of n ranks sends in an all-reduce."""
    return 2 * nbytes * (n - 1) / n


def to_neighbours(model: Llama, n: int) -> float:
    """Activations forward, and gradients backward: of two ranks each sends one of these."""
    return 2 * TOKENS * model.hidden * min(2, n - 1)


class Kind(NamedTuple):
    """What a kind of training takes of each of n ranks, in bytes."""

    memory: Callable[[Llama, int], float]
    sent: Callable[[Llama, int], float]


KINDS = {
    "`average_gradients`": Kind(
        lambda model, _: 8 * model.parameters,
        lambda model, n: around_the_ring(2 * model.parameters, n),
    ),
    "`ShardedOptimizer`": Kind(
        lambda model, n: (4 + 4 / n) * model.parameters,
        lambda model, n: around_the_ring(2 * model.parameters, n),
    ),
    "`fully_shard`": Kind(
        lambda model, n: 8 * model.parameters / n + 2 * 2 * model.parameters / model.layers,
        lambda model, n: 1.5 * around_the_ring(2 * model.parameters, n),
    ),
    "`Pipeline`": Kind(lambda model, n: 8 * model.parameters / n, to_neighbours),
    "LoRA, all layers on each": Kind(
        lambda model, _: 4.5 / 8 * model.parameters,
        lambda model, n: around_the_ring(model.adapter_bytes, n),
    ),
    "LoRA, `Pipeline`": Kind(lambda model, n: 4.5 / 8 * model.parameters / n, to_neighbours),
}


def test_the_kinds_of_training_take_what_the_page_says_that_it_computes() -> None:
    rows = list(table_rows(KINDS_PAGE["What each Mac needs"]))

    assert rows == [
        [
            name,
            what,
            *(in_bytes(kind.memory(model, n)) for n in COUNTS),
            *(in_bytes(kind.sent(model, n)) for n in COUNTS),
            f"{two_digits(kind.sent(model, 4) / BYTES_PER_S[1])} s",
        ]
        for name, model in MODELS.items()
        for what, kind in KINDS.items()
        if name != "1B"
    ]
