"""The schemes that are compared, as a user would write them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from pmesh.compression.schemes import (
    BF16,
    FP16,
    INT8,
    OneBit,
    PowerSGD,
    RandomK,
    Scheme,
    TopK,
)

UNCOMPRESSED: Final = "none"
WARM_UP_PARTS: Final = 4  # Lin et al. 2018 lower the ratio from 25 % in four epochs
_WARM_UP_RATIO: Final = 0.25


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

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
    Case("BF16()", BF16()),
    Case("FP16()", FP16()),
    Case("INT8()", INT8()),
    Case("OneBit()", OneBit()),
    Case("TopK(ratio=0.01)", TopK(ratio=0.01)),
    Case("TopK(ratio=0.01), warmed up", TopK(ratio=0.01), warms_up=True, is_judged=False),
    Case("RandomK(ratio=0.1)", RandomK(ratio=0.1)),
    Case("PowerSGD(rank=2)", PowerSGD(rank=2)),
    Case("PowerSGD(rank=4)", PowerSGD(rank=4)),
)
