"""Which compression a call takes: what it names, or the agent's default; checked before an op."""

from pmesh.client.calls import Arrays, Compression
from pmesh.compression.schemes import PowerSGD, RandomK, Scheme, scheme_of
from pmesh.errors import UnsupportedCompression

NONE = "none"
_ADDED = ("sum", "mean")
_ROUND_THE_RING = ("", "ring")


def chosen(
    named: Scheme | str | None, arrays: Arrays, *, reduction: str, strategy: str
) -> Compression | None:
    """What an all-reduce takes; None: nothing is compressed.

    Args:
        named: in the call.
        arrays: its values.
        reduction: how they are reduced.
        strategy: as the call says it; empty: any.

    Raises:
        UnsupportedCompression: the scheme, or a scheme for such a call; says what is allowed.
    """
    if named is None or named == NONE:
        return None
    scheme = scheme_of(named)
    if reduction not in _ADDED:
        raise UnsupportedCompression(f"what is compressed is added: sum or mean, not {reduction!r}")
    _check_dtypes(arrays)
    if not _goes_by(scheme, strategy):
        raise UnsupportedCompression(
            f"{type(scheme).__name__} goes round the ring: strategy is 'auto' or 'ring', "
            f"not {strategy!r}"
        )
    return Compression(scheme, feeds_back=scheme.error_feedback is True)


def chosen_for_gradients(
    named: Scheme | str | None, default: str, arrays: Arrays, *, strategy: str
) -> Compression | None:
    """What an average of gradients takes.

    The agent's default is for these alone: they are what a training can bear to have changed, and
    the next call makes good what was left out of this one. Where the call names a strategy that the
    default has none of, that holds.

    Args:
        named: in the call.
        default: the agent's, for calls that name none.
        arrays: the gradients.
        strategy: as the call says it; empty: any.

    Raises:
        UnsupportedCompression: as for `chosen`.
    """
    why = ""
    if named is None and default and _goes_by(scheme_of(default), strategy):
        named, why = default, "the default of this machine's agent"
    compression = chosen(named, arrays, reduction="mean", strategy=strategy)
    if compression is None:
        return None
    return Compression(compression.scheme, compression.scheme.feeds_back, why)


def _goes_by(scheme: Scheme, strategy: str) -> bool:
    return strategy in _ROUND_THE_RING or isinstance(scheme, RandomK | PowerSGD)


def _check_dtypes(arrays: Arrays) -> None:
    for path, leaf in zip(arrays.tree.paths, arrays.leaves, strict=True):
        if leaf.wire not in ("float32", "float64"):
            raise UnsupportedCompression(
                f"{path + ': ' if path else ''}float32, float16, bfloat16 and float64 (as float32) "
                f"can be compressed, not {leaf.dtype}"
            )
