"""When a command that has failed is started again, and how its end is told."""

import signal

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0  # a machine that has recovered should come back soon
AT_ONCE_S = 20.0  # to import torch takes half of it on a busy machine that is old
STEADY_S = 60.0  # a command that ran this long had started well: its failure is a new one


def wait_before_start(previous_s: float, *, ran_s: float) -> float:
    """Return the seconds to wait before a failed command is restarted.

    Args:
        previous_s: The wait before this run; 0 before the first.
        ran_s: How long it ran.

    >>> wait_before_start(0, ran_s=0.1)
    1.0
    >>> wait_before_start(16, ran_s=59), wait_before_start(16, ran_s=60)
    (30.0, 1.0)
    """
    if previous_s == 0 or ran_s >= STEADY_S:
        return FIRST_WAIT_S
    return min(2 * previous_s, LONGEST_WAIT_S)


def count_failures(failures: int, *, ran_s: float) -> int:
    """Return how often in a row it has failed, this time included.

    >>> count_failures(3, ran_s=0.1), count_failures(3, ran_s=60)
    (4, 1)
    """
    return 1 if ran_s >= STEADY_S else failures + 1


def fails_by_itself(code: int) -> bool:
    """Return False for the end of a process that was signalled from outside, or needed memory.

    >>> fails_by_itself(1), fails_by_itself(-11), fails_by_itself(-9)
    (True, True, False)
    """
    return -code not in {signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM}


def describe_end(code: int) -> str:
    """Say how a process ended; `code` as in `subprocess`.

    >>> describe_end(3), describe_end(-9)
    ('ended with exit code 3', 'ended by SIGKILL')
    >>> describe_end(-63)
    'ended by signal 63'
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"ended by signal {-code}"


def exit_code(code: int) -> int:
    """Return the code of a process as shells do.

    >>> exit_code(3), exit_code(-15)
    (3, 143)
    """
    return code if code >= 0 else 128 - code
