"""The schemes that are measured, by the names that the command line has for them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pmesh.compression.schemes import BF16, FP16, INT8, Auto, OneBit, PowerSGD, Scheme, TopK

UNCOMPRESSED = "none"
RATIO = 0.01


@dataclass(frozen=True, slots=True)
class Way:
    """One way to send the values of an all-reduce."""

    label: str
    """For the page."""
    scheme: Scheme | None
    most_error: float | None = 1.0
    """Relative L2 error of a mean of Gaussian values over up to 8 ranks; None: with feedback a
    result also holds what earlier calls had left out."""
    allowed: tuple[str, ...] = ()
    """What Auto may pick, among these names."""


def _fed_back(label: str, scheme: Scheme) -> Way:
    return Way(f"{label}, with feedback", scheme, None)


WAYS: Mapping[str, Way] = MappingProxyType(
    {
        UNCOMPRESSED: Way("uncompressed", None, 1e-6),
        "bf16": Way("bf16", BF16(), 0.01),
        "fp16": Way("fp16", FP16(), 0.002),
        "int8": Way("int8", INT8(), 0.015),  # the bar for 8 ranks
        "topk": Way("TopK 1 %", TopK(RATIO)),
        "topk-compact": Way("TopK 1 %, compact", TopK(RATIO, compact=True)),
        "onebit": Way("OneBit", OneBit()),
        "powersgd-1": Way("PowerSGD, rank 1", PowerSGD(rank=1)),
        "powersgd-2": Way("PowerSGD, rank 2", PowerSGD(rank=2)),
        "powersgd-4": Way("PowerSGD, rank 4", PowerSGD(rank=4)),
        "int8-feedback": _fed_back("int8", INT8(error_feedback=True, model="int8")),
        "topk-feedback": _fed_back("TopK 1 %", TopK(RATIO, error_feedback=True, model="topk")),
        "powersgd-4-feedback": _fed_back(
            "PowerSGD, rank 4", PowerSGD(rank=4, error_feedback=True, model="powersgd")
        ),
        "auto": Way(
            "Auto of bf16, int8",
            Auto(allow=("bf16", "int8"), model="auto"),
            allowed=(UNCOMPRESSED, "bf16", "int8"),
        ),
        "auto-any": Way(
            "Auto of bf16, int8, TopK 1 %, PowerSGD rank 4",
            Auto(allow=("bf16", "int8", TopK(RATIO), PowerSGD(rank=4)), model="any"),
            allowed=(UNCOMPRESSED, "bf16", "int8", "topk", "powersgd-4"),
        ),
    }
)


def find_way(name: str) -> Way:
    """Raises ValueError, naming those that there are."""
    if name not in WAYS:
        raise ValueError(f"no scheme {name!r}; there are: {', '.join(WAYS)}")
    return WAYS[name]
