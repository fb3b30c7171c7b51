"""The threads that run calls. All of them end before the interpreter does.

Python ends a daemon thread that is left at finalization where it next takes the interpreter's lock.
If the thread returns from C++ at that point, as from an op of torch, the whole process aborts with
"terminate called without an active exception". So threads are joined at the program's end.
"""

import atexit
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar
from weakref import ref

T = TypeVar("T")

PATIENCE_S = (
    60.0  # calls have been interrupted by then: only computations and callbacks take longer
)

_logger = logging.getLogger("pmesh")

_threads: set[threading.Thread] = set()
_endings: dict[int, tuple["ref[Any]", Callable[[Any], None]]] = {}
_numbers = itertools.count()
# No lock guards these, as a forked child could find it locked forever. Each access is atomic. A
# `list` of a set or of a dict's values is; a `tuple` of a list is not: up to Python 3.11 the memory
# for it can start the collector, whose finalizers let other threads run after the length was read.


def start(run: Callable[[], None], name: str) -> threading.Thread:
    """Start a thread that is joined at the program's end, after the methods given to `at_end`.

    It is a daemon, since Python joins other threads before anything could tell them to end.

    Raises:
        RuntimeError: the system can't start a thread.
    """
    _threads.difference_update([each for each in list(_threads) if not each.is_alive()])
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    _threads.add(thread)
    return thread


def at_end(owner: T, end: Callable[[T], None]) -> None:
    """Call `end(owner)` at the program's end if threads are left, so that they end.

    It must not wait. The owner may be garbage-collected before.
    """
    number = next(_numbers)
    _endings[number] = ref(owner, lambda _: _endings.pop(number, None)), end


def join(threads: Iterable[threading.Thread], within_s: float = PATIENCE_S) -> bool:
    """Wait until these threads, except the calling one, have ended; return True if they have."""
    until = time.monotonic() + within_s
    others = [each for each in threads if each is not threading.current_thread()]
    for each in others:
        each.join(max(0.0, until - time.monotonic()))
    return not any(each.is_alive() for each in others)


@atexit.register
def _end_with_the_program() -> None:
    if not any(each.is_alive() for each in list(_threads)):
        return
    for reference, end in list(_endings.values()):
        owner = reference()
        if owner is not None:
            end(owner)
    if not join(list(_threads)):
        _logger.warning("the program ends while a callback of one of its calls still runs")
