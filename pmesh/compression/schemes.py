"""The compression schemes for users: frozen options, checked at construction.

A scheme has no state: residuals and warm starts belong to the mesh
(`pmesh.client.feedback.memory`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from pmesh.errors import UnsupportedCompression

MAX_MODEL_CHARACTERS: Final = 64
_MAX_SEED: Final = 2**63 - 1  # it is sent as an int64
_LARGEST_RANK: Final = 1024  # more columns compress no real matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """The base of all schemes. An invalid option raises UnsupportedCompression."""

    error_feedback: bool | None = None
    """If True, the error of a call is added to the values of the next one.

    None: True in `average_gradients`, whose next call has gradients of the same parameters; False
    in `all_reduce`, whose next array may be unrelated.
    """
    model: str = ""
    """A name for the model. Two models with trees of the same structure need two names, or the
    errors of one would be added to the gradients of the other."""

    def __post_init__(self) -> None:
        _check_flag("error_feedback", self.error_feedback, optional=True)
        _check_model(self.model)

    @property
    def feeds_back(self) -> bool:
        """True if `average_gradients` feeds errors back."""
        return self.error_feedback is not False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cast(Scheme):
    """A float of 16 bits at every hop of the ring; so precise that feedback seldom pays."""

    @property
    def feeds_back(self) -> bool:
        """Only on request: it costs twice the memory for an error of 0.05 %."""
        return self.error_feedback is True


@dataclass(frozen=True, slots=True)
class FP16(_Cast):
    """IEEE half precision: 11 bits of precision; values above 65504 are clipped and counted."""


@dataclass(frozen=True, slots=True)
class BF16(_Cast):
    """bfloat16: 8 bits of precision, the range of float32. Try this one first."""


@dataclass(frozen=True, slots=True)
class INT8(Scheme):
    """8 bits per value, and one float32 scale for each 256 values."""

    stochastic: bool = False
    """True rounds up or down at random, so that the mean is right; False rounds to nearest."""

    def __post_init__(self) -> None:
        Scheme.__post_init__(self)
        _check_flag("stochastic", self.stochastic)


@dataclass(frozen=True, slots=True)
class TopK(Scheme):
    """The values of largest magnitude of each rank."""

    ratio: float = 0.01
    """The part of the values that is sent; more than 0, at most 1."""
    compact: bool = False
    """True sends values as bfloat16 and indices as 16-bit positions: half the bytes."""

    def __post_init__(self) -> None:
        Scheme.__post_init__(self)
        _check_ratio(self.ratio)
        _check_flag("compact", self.compact)


@dataclass(frozen=True, slots=True)
class RandomK(Scheme):
    """Values at random indices that are equal on all ranks, so that no index is sent."""

    ratio: float = 0.1
    """The part of the values that is sent; more than 0, at most 1."""
    seed: int = 0
    """The seed of the indices."""

    def __post_init__(self) -> None:
        Scheme.__post_init__(self)
        _check_ratio(self.ratio)
        _check_count("seed", self.seed, 0, _MAX_SEED)


@dataclass(frozen=True, slots=True)
class PowerSGD(Scheme):
    """Each matrix as a product of two thin ones (Vogels et al. 2019)."""

    rank: int = 4
    """The number of columns of both."""
    start_step: int = 10
    """The number of first calls of `average_gradients` without compression: early gradients are
    large and change fast. `all_reduce` compresses at once."""
    min_rate: float = 2.0
    """A matrix that would not shrink by this factor is sent uncompressed."""

    def __post_init__(self) -> None:
        Scheme.__post_init__(self)
        _check_count("rank", self.rank, 1, _LARGEST_RANK)
        _check_count("start_step", self.start_step, 0, _MAX_SEED)
        _check_factor("min_rate", self.min_rate)


@dataclass(frozen=True, slots=True)
class OneBit(Scheme):
    """The sign of each value, and the mean magnitude of each block (Seide et al. 2014)."""


@dataclass(frozen=True, slots=True)
class Auto(Scheme):
    """The allowed scheme that takes the least time on this network, or no compression."""

    allow: Sequence[Scheme | str] = ("bf16", "int8")
    """The allowed schemes, as objects or names."""
    min_gain: float = 1.2
    """A scheme is used if calls are faster by this factor than without compression."""

    def __post_init__(self) -> None:
        Scheme.__post_init__(self)
        _check_factor("min_gain", self.min_gain)
        _check_list(self.allow)
        schemes = tuple(scheme_of(each) for each in self.allow)
        if any(isinstance(each, Auto) for each in schemes):
            raise UnsupportedCompression("allow must be a list of schemes other than Auto")
        object.__setattr__(self, "allow", schemes)

    @property
    def feeds_back(self) -> bool:
        """True if any allowed scheme feeds back: the next one sends the errors of the last."""
        if self.error_feedback is not None:
            return self.error_feedback
        return any(each.feeds_back for each in self.schemes)

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """The allowed schemes, as objects."""
        return tuple(scheme_of(each) for each in self.allow)


RingScheme: TypeAlias = FP16 | BF16 | INT8
"""The schemes that agents apply at every hop of the ring; trainers compute the others."""

NAMES: Final[Mapping[str, Callable[[], Scheme]]] = MappingProxyType(
    {
        "fp16": FP16,
        "bf16": BF16,
        "int8": INT8,
        "int8-stochastic": lambda: INT8(stochastic=True),
        "topk": TopK,
        "randomk": RandomK,
        "powersgd": PowerSGD,
        "onebit": OneBit,
        "auto": Auto,
    }
)
"""Each scheme with its default options."""


def named(name: str) -> Scheme:
    """Return the scheme of that name, with its default options.

    Raises UnsupportedCompression with the known names if there is none.
    """
    make = NAMES.get(name)
    if make is None:
        raise UnsupportedCompression(f"no compression {name!r}; there are: {', '.join(NAMES)}")
    return make()


def scheme_of(given: object) -> Scheme:
    """Return the scheme that a user gave as an object or a name.

    Raises UnsupportedCompression if it is neither.
    """
    if isinstance(given, str):
        return named(given)
    if isinstance(given, Scheme) and type(given) in _SPECS:
        return given
    raise UnsupportedCompression(
        f"compression must be one of {', '.join(NAMES)}, or an object such as PowerSGD(rank=4), "
        f"not {given!r}"
    )


def spec(scheme: Scheme) -> str:
    """Return the scheme in at most 64 characters: equal on two ranks only if their bytes agree.

    A ring codec has its name in `pmesh.compression.codecs`; a scheme that trainers compute has
    parentheses (`pmesh.core.ops.kinds.ring_codec_name`).

    >>> spec(INT8()), spec(TopK(0.05, compact=True)), spec(PowerSGD(rank=2))
    ('int8', 'topk(0.05, compact)', 'powersgd(2, min_rate 2.0)')
    """
    return _SPECS[type(scheme)](scheme)


_SPECS: Final[Mapping[type[Scheme], Callable[[Any], str]]] = MappingProxyType(
    {
        FP16: lambda _: "fp16",
        BF16: lambda _: "bf16",
        INT8: lambda s: "int8-stochastic" if s.stochastic else "int8",
        TopK: lambda s: f"topk({float(s.ratio)}{', compact' if s.compact else ''})",
        RandomK: lambda s: f"randomk({float(s.ratio)}, seed {s.seed})",
        PowerSGD: lambda s: f"powersgd({s.rank}, min_rate {float(s.min_rate)})",
        OneBit: lambda _: "onebit()",
        Auto: lambda _: "auto()",
    }
)


def _check_model(name: object) -> None:
    allowed = isinstance(name, str) and len(name) <= MAX_MODEL_CHARACTERS
    if not allowed or not all(c.isascii() and (c.isalnum() or c in "-_.") for c in str(name)):
        raise UnsupportedCompression(
            f"model must have at most {MAX_MODEL_CHARACTERS} letters, digits, '-', '_' and '.', "
            f"not {name!r}"
        )


def _check_list(allow: object) -> None:
    if not isinstance(allow, list | tuple) or not allow:
        raise UnsupportedCompression(f"allow must be a list of schemes, not {allow!r}")


def _check_flag(name: str, value: object, *, optional: bool = False) -> None:
    if not isinstance(value, bool) and not (optional and value is None):
        raise UnsupportedCompression(f"{name} must be True or False, not {value!r}")


def _check_ratio(ratio: object) -> None:
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise UnsupportedCompression(f"ratio must be more than 0 and at most 1, not {ratio!r}")


def _check_count(name: str, count: object, least: int, most: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or not least <= count <= most:
        raise UnsupportedCompression(f"{name} must be from {least} to {most}, not {count!r}")


def _check_factor(name: str, factor: object) -> None:
    if (
        isinstance(factor, bool)
        or not isinstance(factor, int | float)
        or not 1 <= factor < math.inf
    ):
        raise UnsupportedCompression(f"{name} must be at least 1, not {factor!r}")
