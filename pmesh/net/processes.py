"""What the system says of another process of this machine."""

import psutil


def is_stopped(pid: int) -> bool:
    """Whether it has been stopped, as by SIGSTOP or Ctrl-Z; False also when it is gone.

    Linux calls this state T, macOS SSTOP; psutil knows both. Who merely computes is not stopped.
    """
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False
