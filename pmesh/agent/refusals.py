"""Tells a local program that its request was refused or its session has failed."""

import contextlib
from collections.abc import Sequence

import trio

from pmesh.core.values import Verdict
from pmesh.core.wire.local import Refused
from pmesh.net.local.sessions import Session

TELL_S = 1.0  # a program that does not read this notices the end of its session


async def refuse(session: Session, error: str, message: str) -> None:
    """Refuse a request with the name of a class in `pmesh.errors`."""
    await session.send(Refused(Verdict(error, message)))


async def tell_errors(session: Session, errors: Sequence[str]) -> None:
    """Tell the program why its session ends, if it still reads.

    For the program the whole agent has ended: mesh.sync returns in a new session.
    """
    with trio.move_on_after(TELL_S), contextlib.suppress(trio.BrokenResourceError):
        for error in errors[:1]:
            await refuse(session, "AgentStopped", f"{error}; the agent's log has its traceback")
