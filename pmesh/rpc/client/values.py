"""Arguments, results and exceptions, from Python to frames and back."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, cast

import numpy as np

from pmesh.client.trees.state import describe, rebuild_untrusted
from pmesh.core.ops.reductions import Values
from pmesh.errors import (
    PmeshError,
    ProtocolError,
    RankLost,
    RemoteCallFailed,
    TooManyCalls,
    UnsupportedArray,
    UsageError,
)
from pmesh.rpc.wire import (
    FULL,
    GONE,
    INLINE_BYTES,
    MAX_ARRAYS,
    MAX_FRAME_BYTES,
    MAX_TEXT,
    MAX_TRACEBACK,
    REFUSED,
    Apart,
    Failure,
    Value,
)

Came: TypeAlias = "Values | UsageError | None"
"""An array that has arrived, flat uint8; None if it did not come in time, or why it can't come."""


class PackedValue(NamedTuple):
    """A value to send."""

    value: Value
    arrays: list[tuple[int, Values]]
    """Those that travel by themselves, by their tags; in the user's memory."""


def pack(x: object, next_tag: Callable[[], int] | None) -> PackedValue:
    """Take a value apart.

    Args:
        x: plain values and arrays, in dicts, lists and tuples.
        next_tag: gives large arrays their tags; None if the value stays in this process.

    Raises:
        UnsupportedArray: it holds something else.
        UsageError: it is too large.
    """
    described = describe(x)
    if len(described.header) > MAX_FRAME_BYTES:
        raise UsageError(
            f"{len(described.header)} bytes of plain values are more than the "
            f"{MAX_FRAME_BYTES} that a call takes; arrays may be larger"
        )
    if len(described.arrays) > MAX_ARRAYS:
        raise UsageError(f"a call takes at most {MAX_ARRAYS} arrays, not {len(described.arrays)}")
    arrays: list[bytes | Apart] = []
    apart: list[tuple[int, Values]] = []
    for array in described.arrays:
        if next_tag is None or array.data.size <= INLINE_BYTES:
            arrays.append(array.data.tobytes())
        else:
            tag = next_tag()
            arrays.append(Apart(tag, array.data.size))
            apart.append((tag, array.data))
    return PackedValue(Value(described.header, tuple(arrays)), apart)


def check_text(name: str) -> None:
    """Raise UsageError unless a function can be called by this name."""
    if not 0 < len(name) <= MAX_TEXT:
        raise UsageError(f"a function's name has 1 to {MAX_TEXT} characters")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UsageError(f"a function's name is text in Unicode, not {name!r}") from None


class Arriving:
    """A value whose large arrays may not be here yet."""

    def __init__(self, value: Value) -> None:
        self._value = value
        self._arrays: list[Values | None] = [None] * len(value.apart)

    def put(self, index: int, data: Values) -> bool:
        """Keep one of the arrays that travel by themselves; return True if it was the last."""
        self._arrays[index] = data
        return all(each is not None for each in self._arrays)

    def unpack_untrusted(self) -> object:
        """Return the value. Raises as `rebuild_untrusted`."""
        apart = iter(self._arrays)
        arrays = (
            # A copy: of bytes, numpy would make an array that nobody may write to.
            np.frombuffer(each, np.uint8).copy() if isinstance(each, bytes) else next(apart)
            for each in self._value.arrays
        )
        return rebuild_untrusted(self._value.header, cast("Sequence[Values]", arrays), None)


def pack_arguments(
    args: tuple[object, ...],
    named: Mapping[str, object],
    next_tag: Callable[[], int] | None,
) -> PackedValue:
    """Pack positional and named arguments; an error names the argument, as pack's does."""
    both: dict[int | str, object] = dict(enumerate(args))
    both.update(named)
    try:
        return pack(both, next_tag)
    except UnsupportedArray as e:
        raise UnsupportedArray(f"argument {e}") from None


def check_items(items: Sequence[object]) -> None:
    """Raise UnsupportedArray, which names the item, if one of them can't be sent."""
    for number, item in enumerate(items):
        try:
            describe(item)
        except UnsupportedArray as e:
            raise UnsupportedArray(f"item {number}: {e}") from None


def unpack_arguments_untrusted(arriving: Arriving) -> tuple[list[object], dict[str, object]]:
    """Return positional and named arguments. Raises ProtocolError if it has no such."""
    found = arriving.unpack_untrusted()
    if not isinstance(found, dict):
        raise ProtocolError("arguments that are no dict")
    args, named = list[object](), dict[str, object]()
    for key, x in cast("dict[object, object]", found).items():
        if isinstance(key, str):
            named[key] = x
        else:
            args.append(x)
    return args, named


def failure_of(call: int, error: BaseException) -> Failure:
    """Describe an exception that a function has raised, from the function's own frame on."""
    trace = error.__traceback__
    own = trace if trace is None or trace.tb_next is None else trace.tb_next
    text = _in_unicode("".join(traceback.format_exception(type(error), error, own)))
    kind, reason = _in_unicode(type(error).__name__), _in_unicode(_reason_of(error))
    return Failure(call, kind[:MAX_TEXT], reason[:MAX_TEXT], text[-MAX_TRACEBACK:])


def _reason_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a method of the user's class, and the caller waits
        return "its text can't be told, as its __str__ has raised an exception"


def _in_unicode(text: str) -> str:
    """Return text that can be sent: names of files, for example, may have bytes of no character."""
    return text.encode(errors="backslashreplace").decode()


def error_of(failure: Failure, rank: str, function: str) -> PmeshError:
    """Return the error that the caller raises.

    Args:
        failure: what the callee has sent.
        rank: the callee, for people.
        function: what was called.
    """
    if failure.kind == FULL:
        return TooManyCalls(f"{rank} does not take {function}: {failure.message}")
    if failure.kind == GONE:
        return RankLost(
            f"{rank} has freed the object whose {function} was called, as one of the two ranks was "
            "lost to the other meanwhile; make another one by mesh.rpc.remote"
        )
    if failure.kind == REFUSED:
        return UsageError(f"{rank} does not call {function}: {failure.message}")
    text = f"{function} on {rank} has raised {failure.kind}: {failure.message}"
    return RemoteCallFailed(
        text, kind=failure.kind, reason=failure.message, remote_traceback=failure.traceback
    )
