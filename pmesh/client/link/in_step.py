"""O10: before the call after an error, the ranks compare how many calls they have made."""

from collections.abc import Generator
from contextlib import contextmanager

from pmesh.client.link.session import TrainerSession
from pmesh.core.jobs.call_count import COMPARE, MOST_COMPARED
from pmesh.errors import OpMismatch


@contextmanager
def in_step(session: TrainerSession, *, timeout_s: float, syncs: bool = False) -> Generator[None]:
    """Make a call of the program in it.

    Args:
        session: the call's.
        timeout_s: for each op in which the counts are compared.
        syncs: the call is a `sync`, which every rank may make after an error, whatever its count.

    Raises:
        OpMismatch: this rank was behind the others; the call is not made.
        PmeshError: the counts could not be compared; the call is not made.
    """
    calls = session.calls
    calls.begin()
    try:
        if calls.doubtful and not session.enters:
            calls.compared(_most_calls(session, timeout_s))
        if not syncs:
            _check_not_behind(session)
        yield
    except BaseException:
        calls.failed()
        raise


def _check_not_behind(session: TrainerSession) -> None:
    why = session.calls.why_skipped()
    if why:
        raise OpMismatch(why)


def _most_calls(session: TrainerSession, timeout_s: float) -> int:
    """The highest count; what others have called under this op's number fails until all come."""
    if len(session.world.trainers) == 1:
        return session.calls.made  # others enter in a sync, which all make together
    for _ in range(MOST_COMPARED - 1):
        number = session.next_op
        try:
            return _compare(session, timeout_s)
        except OpMismatch:
            if session.next_op == number:
                raise  # of an op that had ended well here: the program must learn of it (I5)
    return _compare(session, timeout_s)


def _compare(session: TrainerSession, timeout_s: float) -> int:
    session.input_values(COMPARE.dtype, 1, room_bytes=0)[:] = session.calls.made
    return int(session.run_op(COMPARE, COMPARE.dtype, 1, timeout_s=timeout_s).values[0])
