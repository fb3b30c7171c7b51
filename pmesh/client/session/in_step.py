"""O10: after a call that failed, the ranks compare their numbers of calls before the next one."""

from collections.abc import Callable
from typing import TypeVar

from pmesh.client.session.interrupts import Postponed, interrupts
from pmesh.client.session.session import TrainerSession
from pmesh.core.jobs.call_count import COMPARE, MOST_COMPARED
from pmesh.errors import OpMismatch

R = TypeVar("R")


def in_step(
    session: TrainerSession,
    ops: Callable[[TrainerSession], R],
    *,
    timeout_s: float,
    syncs: bool = False,
) -> R:
    """Run the ops of a call of the program.

    If a signal interrupts it after an op, the session ends, as the others continue the call.

    Args:
        session: the session of the call.
        ops: runs the ops.
        timeout_s: for each op in which the counts are compared.
        syncs: the call is a `sync`, which every rank may make after an error, whatever its count.

    Raises:
        OpMismatch: this rank was behind the others; the call is not made.
        PmeshError: the counts could not be compared; the call is not made.
    """
    calls, ops_before = session.calls, session.calls.ops
    with Postponed():
        calls.begin()
        try:
            if calls.doubtful and not session.enters:
                calls.compared(_most_calls(session, timeout_s))
            if not syncs and calls.made < calls.resumes_at:
                raise OpMismatch(calls.why_skipped())  # noqa: TRY301 - this call has failed, too
            return ops(session)
        except BaseException as e:
            calls.failed()
            if calls.ops > ops_before and interrupts(e):
                session.end(f"{type(e).__name__}: {e}".rstrip(": "))
            raise


def _most_calls(session: TrainerSession, timeout_s: float) -> int:
    """Return the highest count. Until all ranks compare, an op that another calls instead fails."""
    if len(session.world.trainers) == 1:
        return session.calls.made  # others only enter in a sync, which all ranks make together
    for _ in range(MOST_COMPARED - 1):
        number = session.next_op
        try:
            return _compare(session, timeout_s)
        except OpMismatch:
            if session.next_op == number:
                raise  # it is that of an op that had succeeded here: the program must know (I5)
    return _compare(session, timeout_s)


def _compare(session: TrainerSession, timeout_s: float) -> int:
    session.input_values(COMPARE.dtype, 1, room_bytes=0)[:] = session.calls.made
    return int(session.run_op(COMPARE, COMPARE.dtype, 1, timeout_s=timeout_s).values[0])
