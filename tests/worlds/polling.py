"""When the main thread polls the socket of its agent, in the middle of a call."""

import sys
import threading

from pmesh.client.session.connection import AgentConnection

_POLLS = AgentConnection._has_sent.__code__.co_consts  # noqa: SLF001 - with the code of its lambda


def await_poll_of_main_thread() -> None:
    """Return once it does; there is no event for it."""
    while sys._current_frames()[threading.main_thread().ident or 0].f_code not in _POLLS:  # noqa: SLF001 - as above
        pass
