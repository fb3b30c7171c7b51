"""What a user reads while a call waits."""

import logging
import sys

from pmesh.core.wire.trainer import StillWaiting

_logger = logging.getLogger("pmesh")


class WaitNotices:
    """The messages to the user while a call waits.

    Until the job begins, the agent reports every second what it waits for. Each change is logged,
    and a terminal shows a count of the seconds. Later a line is logged every 10 s.
    """

    def __init__(self) -> None:
        self._facts: tuple[str, ...] = ()
        self._counts = False

    def note(self, waiting: StillWaiting) -> None:
        """Log a report, or count the seconds if it is the same as before."""
        if waiting.op >= 0:
            on = "; ".join(waiting.on)
            what = f" for op {waiting.op} for {waiting.waited_s:.0f} s; {on}"
        elif waiting.on != self._facts:
            what = f": {'; '.join(waiting.on)}"
        else:
            self._count(waiting.waited_s)
            return
        self.end()
        self._facts = waiting.on
        _logger.warning("waiting%s", what)

    def end(self) -> None:
        """End the line of the count, if there is one, as the call no longer waits."""
        self._facts = ()
        if self._counts:
            self._counts = False
            sys.stderr.write("\n")

    def _count(self, seconds: float) -> None:
        if sys.stderr.isatty() and _logger.isEnabledFor(logging.WARNING):
            self._counts = True
            sys.stderr.write(f"\r{seconds:.0f} s ")
            sys.stderr.flush()
