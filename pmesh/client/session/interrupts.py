"""Exceptions that signal handlers raise in the middle of a call.

Python runs signal handlers in the main thread, at any point of its code. torch's handler for
SIGCHLD raises when a worker of a DataLoader was killed. If that ended a call, the other ranks would
have made the call and this rank would not. So while a call waits, the exception is postponed, as in
gloo and NCCL, which wait in C: the call ends as usual and then raises it. Ctrl-C and `sys.exit` end
the call at once, and so does a second exception.
"""

import logging
import signal
import threading
from collections.abc import Callable
from types import CodeType
from typing import TypeVar

from pmesh.errors import PmeshError

T = TypeVar("T")

_logger = logging.getLogger("pmesh")


class _MainThread:
    """The state of the main thread's call; handlers run in no other thread."""

    calls = False
    raised: Exception | None = None


class Postponed:
    """A block, at whose end is raised what a handler has raised in a `wait` inside it."""

    __slots__ = ("_is_outer",)

    def __enter__(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        self._is_outer = is_main and not _MainThread.calls
        if self._is_outer:
            _MainThread.calls = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if not self._is_outer:
            return
        raised = _MainThread.raised
        _MainThread.calls, _MainThread.raised = False, None
        if raised is not None and (error is None or isinstance(error, PmeshError)):
            raise raised from error


def wait(for_something: Callable[[], T], otherwise: T) -> T:
    """Call a function that only waits; return `otherwise` if a handler has raised in it."""
    try:
        return for_something()
    except Exception as e:
        is_main = threading.current_thread() is threading.main_thread()
        if not (is_main and _MainThread.calls) or _MainThread.raised is not None:
            raise
        _MainThread.raised = e
        _logger.warning("once this call has ended it raises %s: %s", type(e).__name__, e)
        return otherwise


def interrupts(error: BaseException) -> bool:
    """Return True if a signal has raised it, so that other ranks do not raise it in this call."""
    if not isinstance(error, Exception):
        return True  # KeyboardInterrupt, SystemExit
    of_handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in of_handlers:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: object) -> CodeType | None:
    """Return the code of a function or method, or of the `__call__` of another callable.

    >>> import functools
    >>> _code_of(_code_of) is _code_of.__code__
    True
    >>> _code_of(signal.SIG_DFL), _code_of(None)
    (None, None)
    """
    for each in (handler, vars(type(handler)).get("__call__")):
        code = getattr(each, "__code__", None)
        if isinstance(code, CodeType):
            return code
    return None
