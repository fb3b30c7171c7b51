"""What a user says to have values compressed: a scheme with its options, checked at once.

A scheme says what is to be done, and holds nothing of what has been: residuals and warm starts are
the mesh's (`pmesh.client.feedback.memory`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from pmesh.errors import UnsupportedCompression

MAX_MODEL_CHARACTERS: Final = 64
_MAX_SEED: Final = 2**63 - 1  # it travels as an int64
_LARGEST_RANK: Final = 1024  # a factorization of more columns than this compresses nothing real


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A way to send fewer bytes; what all of them have in common."""

    error_feedback: bool | None = None
    """Whether what compression leaves out of a call is added to the values of the next one.

    None: in `average_gradients`, whose next call brings the same parameters' gradients; and not in
    `all_reduce`, whose next array may have nothing to do with this one.
    """
    model: str = ""
    """Whose values they are: two models whose trees look alike need two names here, or what is left
    out of the gradients of one would be added to the other's."""

    def __post_init__(self) -> None:
        """Raises UnsupportedCompression, which says what is allowed."""
        _check_flag("error_feedback", self.error_feedback, optional=True)
        _check_model(self.model)

    @property
    def feeds_back(self) -> bool:
        """Whether `average_gradients` feeds errors back."""
        return self.error_feedback is not False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cast(Scheme):
    """A float of 16 bits at every hop of the ring; so precise that feedback seldom pays."""

    @property
    def feeds_back(self) -> bool:
        """Only if asked for: it would cost twice the memory for half a part in a thousand."""
        return self.error_feedback is True


@dataclass(frozen=True, slots=True)
class FP16(_Cast):
    """IEEE half precision: 11 bits of precision; what is above 65504 is clipped, and counted."""


@dataclass(frozen=True, slots=True)
class BF16(_Cast):
    """bfloat16: 8 bits of precision, the range of float32. The one to begin with."""


@dataclass(frozen=True, slots=True)
class INT8(Scheme):
    """8 bits a value, and one float32 scale for each 256."""

    stochastic: bool = False
    """Round up or down at random, so that the mean is right; else to the nearest."""

    def __post_init__(self) -> None:
        """Raises UnsupportedCompression, which says what is allowed."""
        Scheme.__post_init__(self)
        _check_flag("stochastic", self.stochastic)


@dataclass(frozen=True, slots=True)
class TopK(Scheme):
    """The largest values of each rank, by magnitude."""

    ratio: float = 0.01
    """Which part of the values travels; more than 0, at most 1."""
    compact: bool = False
    """Values as bfloat16 and indices as 16-bit gaps: half the bytes."""

    def __post_init__(self) -> None:
        """Raises UnsupportedCompression, which says what is allowed."""
        Scheme.__post_init__(self)
        _check_ratio(self.ratio)
        _check_flag("compact", self.compact)


@dataclass(frozen=True, slots=True)
class RandomK(Scheme):
    """Values at random places, which all ranks draw alike, so that no index travels."""

    ratio: float = 0.1
    """Which part of the values travels; more than 0, at most 1."""
    seed: int = 0
    """Another one gives other places."""

    def __post_init__(self) -> None:
        """Raises UnsupportedCompression, which says what is allowed."""
        Scheme.__post_init__(self)
        _check_ratio(self.ratio)
        _check_count("seed", self.seed, 0, _MAX_SEED)


@dataclass(frozen=True, slots=True)
class PowerSGD(Scheme):
    """Each matrix as a product of two thin ones (Vogels et al. 2019)."""

    rank: int = 4
    """How thin: columns of both."""
    start_step: int = 10
    """The first so many calls of `average_gradients` go uncompressed: early gradients are large,
    and turn fast. `all_reduce` compresses at once."""
    min_rate: float = 2.0
    """A matrix that would not become smaller by this factor goes uncompressed."""

    def __post_init__(self) -> None:
        """Raises UnsupportedCompression, which says what is allowed."""
        Scheme.__post_init__(self)
        _check_count("rank", self.rank, 1, _LARGEST_RANK)
        _check_count("start_step", self.start_step, 0, _MAX_SEED)
        _check_factor("min_rate", self.min_rate)


@dataclass(frozen=True, slots=True)
class OneBit(Scheme):
    """The sign of each value, and the mean magnitude of each block (Seide et al. 2014)."""


@dataclass(frozen=True, slots=True)
class Auto(Scheme):
    """Whichever of the allowed takes the least time here, or none of them."""

    allow: Sequence[Scheme | str] = ("bf16", "int8")
    """What may be used; objects or names."""
    min_gain: float = 1.2
    """A scheme is used if calls are faster by this factor than without compression."""

    def __post_init__(self) -> None:
        """Raises UnsupportedCompression, which says what is allowed."""
        Scheme.__post_init__(self)
        _check_factor("min_gain", self.min_gain)
        _check_list(self.allow)
        schemes = tuple(scheme_of(each) for each in self.allow)
        if any(isinstance(each, Auto) for each in schemes):
            raise UnsupportedCompression("allow is a list of schemes other than Auto")
        object.__setattr__(self, "allow", schemes)

    @property
    def feeds_back(self) -> bool:
        """As any of the allowed does: what one has left out goes along with the next."""
        if self.error_feedback is not None:
            return self.error_feedback
        return any(each.feeds_back for each in self.schemes)

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """What is allowed, as objects."""
        return tuple(scheme_of(each) for each in self.allow)


RingScheme: TypeAlias = FP16 | BF16 | INT8
"""What the agents do at every hop of the ring; the others are computed by the trainers."""

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
"""Each scheme with the options that it has by itself."""


def named(name: str) -> Scheme:
    """The scheme of that name, with its default options.

    Raises:
        UnsupportedCompression: there is none; it says which there are.
    """
    make = NAMES.get(name)
    if make is None:
        raise UnsupportedCompression(f"no compression {name!r}; there are: {', '.join(NAMES)}")
    return make()


def scheme_of(given: object) -> Scheme:
    """A scheme from what a user may give for one: the object itself, or a name.

    Raises:
        UnsupportedCompression: it is neither.
    """
    if isinstance(given, str):
        return named(given)
    if isinstance(given, Scheme) and type(given) in _SPECS:
        return given
    raise UnsupportedCompression(
        f"a compression is one of {', '.join(NAMES)}, or an object such as PowerSGD(rank=4), "
        f"not {given!r}"
    )


def spec(scheme: Scheme) -> str:
    """The scheme in at most 64 characters: alike on two ranks only if both send the same bytes.

    A ring codec has the name that `pmesh.compression.codecs` knows it by; what the trainers compute
    has parentheses (`pmesh.core.ops.coded.ring_codec_name`).

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
            f"model is up to {MAX_MODEL_CHARACTERS} letters, digits, '-', '_' and '.', not {name!r}"
        )


def _check_list(allow: object) -> None:
    if not isinstance(allow, list | tuple) or not allow:
        raise UnsupportedCompression(f"allow is a list of schemes, not {allow!r}")


def _check_flag(name: str, value: object, *, optional: bool = False) -> None:
    if not isinstance(value, bool) and not (optional and value is None):
        raise UnsupportedCompression(f"{name} is True or False, not {value!r}")


def _check_ratio(ratio: object) -> None:
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise UnsupportedCompression(f"ratio is more than 0 and at most 1, not {ratio!r}")


def _check_count(name: str, count: object, least: int, most: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or not least <= count <= most:
        raise UnsupportedCompression(f"{name} is from {least} to {most}, not {count!r}")


def _check_factor(name: str, factor: object) -> None:
    if (
        isinstance(factor, bool)
        or not isinstance(factor, int | float)
        or not 1 <= factor < math.inf
    ):
        raise UnsupportedCompression(f"{name} is at least 1, not {factor!r}")
