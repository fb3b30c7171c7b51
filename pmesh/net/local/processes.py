"""What the system says of another process of this machine."""

import errno
import os
import select
import sys

import psutil
import trio


def is_stopped(pid: int) -> bool:
    """Whether it has been stopped, as by SIGSTOP or Ctrl-Z; False also when it is gone.

    Linux calls this state T, macOS SSTOP; psutil knows both. Who merely computes is not stopped.
    Nor is, for all that can be told, a process for whose state there is no file descriptor left.
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
        """Since when it has been seen to be stopped, as by SIGSTOP; None while it may run."""
        if not is_stopped(self._pid):
            self._stopped_since = None
            return None
        if self._stopped_since is None:
            self._stopped_since = now
        return now - self._stopped_since


async def wait_for_exit(pid: int) -> None:
    """Return when the process has ended: costs nothing until then.

    By then the system has closed its sockets.

    Raises:
        OSError: no descriptor is left; Linux before 5.3 can't tell; macOS tells one task only.
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
    except ProcessLookupError:  # it has ended before
        await trio.lowlevel.checkpoint()
    except trio.BusyResourceError as e:
        raise OSError(errno.EBUSY, "another task waits for the same process") from e
