"""The threads that run calls. All of them end before the interpreter does.

Python ends a daemon thread that is left at finalization where it next takes the interpreter's lock.
If the thread returns from C++ at that point, as from an op of torch, the whole process aborts with
"terminate called without an active exception". So threads are joined at the program's end.
"""

import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from weakref import WeakMethod

PATIENCE_S = (
    60.0  # calls have been interrupted by then: only computations and callbacks take longer
)

_logger = logging.getLogger("pmesh")

_threads: set[threading.Thread] = set()
_endings: list["WeakMethod[Callable[[], None]]"] = []
# No lock guards these two, as a forked child could find it locked forever. Each access is atomic.


def start(run: Callable[[], None], name: str) -> threading.Thread:
    """Start a thread that is joined at the program's end, after the methods given to `at_end`.

    It is a daemon, since Python joins other threads before anything could tell them to end.

    Raises:
        RuntimeError: the system can't start a thread.
    """
    _threads.difference_update([each for each in tuple(_threads) if not each.is_alive()])
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    _threads.add(thread)
    return thread


def at_end(ending: Callable[[], None]) -> None:
    """Call a method at the program's end if threads are left, so that they end; it must not wait.

    The method's object may be garbage-collected before.
    """
    for each in tuple(_endings):
        if each() is None:
            with contextlib.suppress(ValueError):  # another thread has just removed it
                _endings.remove(each)
    _endings.append(WeakMethod(ending))


def join(threads: Iterable[threading.Thread], within_s: float = PATIENCE_S) -> bool:
    """Wait until these threads, except the calling one, have ended; return True if they have."""
    until = time.monotonic() + within_s
    others = [each for each in threads if each is not threading.current_thread()]
    for each in others:
        each.join(max(0.0, until - time.monotonic()))
    return not any(each.is_alive() for each in others)


@atexit.register
def _end_with_the_program() -> None:
    if not any(each.is_alive() for each in tuple(_threads)):
        return
    for each in tuple(_endings):
        ending = each()
        if ending is not None:
            ending()
    if not join(tuple(_threads)):
        _logger.warning("the program ends while a callback of one of its calls still runs")
