"""The state of other processes on this machine."""

import errno
import os
import select
import sys

import psutil
import trio


def is_stopped(pid: int) -> bool:
    """Return True if a process is stopped, as by SIGSTOP or Ctrl-Z; False if it is gone.

    Linux calls this state T, macOS SSTOP; psutil knows both. A process that computes is not
    stopped. If no file descriptor is left to read the state, the result is False.
    """
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except (psutil.Error, OSError):
        return False


class TrainerProcess:
    """The process at the other end of a session, as the system sees it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stopped_since: float | None = None

    def stopped_for_s(self, now: float) -> float | None:
        """Return the seconds since it was first seen stopped, as by SIGSTOP; None if it may run."""
        if not is_stopped(self._pid):
            self._stopped_since = None
            return None
        if self._stopped_since is None:
            self._stopped_since = now
        return now - self._stopped_since


async def wait_for_exit(pid: int) -> None:
    """Wait without polling until the process has ended and its sockets are closed.

    Raises:
        OSError: No descriptor is left, Linux is older than 5.3, or on macOS another task waits.
    """
    try:
        if sys.platform == "darwin":
            queue = trio.lowlevel.current_kqueue()

            def tell(flags: int) -> None:
                event = select.kevent(pid, select.KQ_FILTER_PROC, flags, select.KQ_NOTE_EXIT)
                queue.control([event], 0)

            def give_up(_: object) -> trio.lowlevel.Abort:
                tell(select.KQ_EV_DELETE)
                return trio.lowlevel.Abort.SUCCEEDED

            tell(select.KQ_EV_ADD | select.KQ_EV_ONESHOT)
            await trio.lowlevel.wait_kevent(pid, select.KQ_FILTER_PROC, give_up)
        else:
            descriptor = os.pidfd_open(pid)
            try:
                await trio.lowlevel.wait_readable(descriptor)
            finally:
                os.close(descriptor)
    except ProcessLookupError:  # it had already ended
        await trio.lowlevel.checkpoint()
    except trio.BusyResourceError as e:
        raise OSError(errno.EBUSY, "another task already waits for this process") from e
