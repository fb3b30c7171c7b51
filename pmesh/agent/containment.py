"""An unexpected exception ends one link or one session, and not the agent."""

import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, TypeAlias, TypeVarTuple, Unpack, cast

import structlog
import trio
from structlog.typing import FilteringBoundLogger

from pmesh.agent.events import EventLog

AGAIN_S = 60.0  # the same error is no news, and a peer that provokes it must not fill the disk
MAX_PLACES = 256  # few lines of the agent raise, and no place contains text from outside

_log: FilteringBoundLogger = structlog.get_logger()

_Args = TypeVarTuple("_Args")

_Place: TypeAlias = tuple[str, str, int]
"""The error's type, and the file and line that raised it."""


class Contain(Protocol):
    """The type of `Containment.contain`."""

    def __call__(
        self,
        what: str,
        on_error: Callable[[str], None] | None = None,
        *,
        passing: tuple[type[Exception], ...] = (),
    ) -> contextlib.AbstractContextManager[None]: ...


class Tasks(Protocol):
    """Where a driver starts what it does for one peer: a nursery, or `ContainedTasks`."""

    def start_soon(
        self, async_fn: Callable[[Unpack[_Args]], Awaitable[object]], /, *args: *_Args
    ) -> None:
        """Start a task; returns at once."""
        ...


class ContainedTasks:
    """Tasks of which none ends another, or the agent: not when no descriptor is left, either."""

    def __init__(self, nursery: trio.Nursery, contain: Contain, what: str) -> None:
        """`what` is the thing that an error ends, as for `Containment.contain`."""
        self._nursery = nursery
        self._contain = contain
        self._what = what

    def start_soon(
        self, async_fn: Callable[[Unpack[_Args]], Awaitable[object]], /, *args: *_Args
    ) -> None:
        """Start a task; returns at once."""

        async def run() -> None:
            with self._contain(self._what):
                await async_fn(*args)

        self._nursery.start_soon(run)


@dataclass(slots=True)
class _Raised:
    """How often one place has raised since it was last logged."""

    logged_at: float
    since: int = 0


@dataclass(slots=True)
class _Block:
    """What `Containment.contain` returns.

    It is no generator: from Python 3.12 on, one that catches an error leaves the error's frames in
    a cycle, and with them arenas, until the garbage collector comes.
    """

    _report: Callable[[BaseException | None], None]
    _passing: tuple[type[Exception], ...]

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        del kind, traceback
        if not isinstance(error, BaseExceptionGroup):
            unforeseen = isinstance(error, Exception) and not isinstance(error, self._passing)
            if unforeseen:
                self._report(error)
            return unforeseen
        group = cast("BaseExceptionGroup[BaseException]", error)
        caught, others = group.split(lambda e: _is_unforeseen(e, self._passing))
        self._report(caught)
        if caught is None or others is None:
            return others is None
        try:
            raise others
        finally:
            others.__context__ = None
            del error, group, caught, others  # their tracebacks have this frame


class Containment:
    """Contains unexpected exceptions, and logs them.

    The log gets the traceback and the event log an event, once a minute for the same type of error
    from the same line; the next entry says how often it was repeated.
    """

    def __init__(self, event_log: EventLog, *, clock: Callable[[], float]) -> None:
        self._event_log = event_log
        self._clock = clock
        self._seen: OrderedDict[_Place, _Raised] = OrderedDict()

    def contain(
        self,
        what: str,
        on_error: Callable[[str], None] | None = None,
        *,
        passing: tuple[type[Exception], ...] = (),
    ) -> contextlib.AbstractContextManager[None]:
        """Let no `Exception` out of the block, whether from the block itself or from a task.

        Cancellation, KeyboardInterrupt and SystemExit pass, even from a group with others.

        Args:
            what: The thing that the error ends, such as "the link to mac-2".
            on_error: Called with a sentence about the error after it was logged.
            passing: Exceptions that the caller handles.
        """
        return _Block(lambda error: self._report_all(what, error, on_error), passing)

    def _report_all(
        self, what: str, error: BaseException | None, on_error: Callable[[str], None] | None
    ) -> None:
        for leaf in _leaves(error):
            sentence = self._report(what, leaf)
            if on_error is not None:
                on_error(sentence)

    def _report(self, what: str, error: Exception) -> str:
        sentence = f"{what} ended with an error inside pmesh ({type(error).__name__}: {error})"
        place, now = _place_of(error), self._clock()
        seen = self._seen.pop(place, None)
        if seen is not None and now - seen.logged_at < AGAIN_S:
            seen.since += 1
        else:
            before = 0 if seen is None else seen.since
            again = f", {before} more times in the last minutes" if before else ""
            _log.error(f"internal error{again}", what=what, exc_info=error)
            self._event_log.note("internal error", f"{sentence}{again}; the log has its traceback")
            seen = _Raised(now)
        self._seen[place] = seen
        if len(self._seen) > MAX_PLACES:
            self._seen.popitem(last=False)
        return sentence


def _is_unforeseen(error: BaseException, passing: tuple[type[Exception], ...]) -> bool:
    one = not isinstance(error, BaseExceptionGroup)
    return one and isinstance(error, Exception) and not isinstance(error, passing)


def _leaves(error: BaseException | None) -> Iterator[Exception]:
    match error:
        case BaseExceptionGroup(exceptions=errors):
            for inner in errors:
                yield from _leaves(inner)
        case Exception():
            yield error
        case _:
            return


def _place_of(error: Exception) -> _Place:
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    kind = type(error).__name__
    if traceback is None:  # it was put into a group without being raised
        return kind, "", 0
    return kind, traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
