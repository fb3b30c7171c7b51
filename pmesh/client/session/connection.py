"""The trainer's end of the Unix socket. It blocks, and moves whole messages and descriptors."""

import array
import contextlib
import logging
import os
import select
import socket
import time
from collections import deque
from pathlib import Path
from typing import Generic, TypeVar

from pmesh import errors
from pmesh.client.session.interrupts import wait
from pmesh.core.values import Verdict
from pmesh.core.wire.framing import FrameReader, frame
from pmesh.core.wire.session import (
    MAX_SESSION_MESSAGE_BYTES,
    SessionDecoder,
    SessionMessage,
    encode,
)
from pmesh.errors import (
    AgentNotRunning,
    AgentStopped,
    MeshClosed,
    PmeshError,
    ProtocolError,
    RunError,
)
from pmesh.home_paths import LOCK_NAME, LOG_NAME, socket_path

SILENCE_S = 60.0  # while a call waits, an agent that lives sends something every 10 s (I6)
FIRST_ANSWER_S = 4.0  # an agent that lives answers a Connect within 3 s
ANSWER_S = 14.0  # once the trainer is in a job, an agent that lives answers within 10 s
_QUEUE_FULL_RETRY_S = 0.01  # an agent accepts all waiting connections in one turn of its loop
_RECEIVE_BYTES = 64 * 1024
_ANCILLARY_BYTES = socket.CMSG_SPACE(16 * array.array("i").itemsize)
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # macOS has no such flag

_logger = logging.getLogger("pmesh")


_Reply_co = TypeVar("_Reply_co", bound=SessionMessage, covariant=True)


class AgentConnection(Generic[_Reply_co]):
    """A connection to the agent of this home. It ends if the agent is silent for `silence_s` (60).

    Raises:
        AgentNotRunning: no process listens at the socket.
        AgentStopped: a process listens, but does not answer for that long.
    """

    def __init__(
        self, home: Path, replies: SessionDecoder[_Reply_co], *, silence_s: float | None = None
    ) -> None:
        self.path = socket_path(home)
        self._home = home
        self._replies = replies
        self._silence_s = SILENCE_S if silence_s is None else silence_s
        self._reader = FrameReader(max_bytes=MAX_SESSION_MESSAGE_BYTES)
        self._descriptors: deque[int] = deque()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(self._silence_s)
        try:
            self._connect()
        except BaseException:
            self._socket.close()
            raise

    def _connect(self) -> None:
        deadline = time.monotonic() + self._silence_s
        while True:
            try:
                self._socket.connect(str(self.path))
            except BlockingIOError as e:  # Linux: the agent lives, and its queue is full
                if time.monotonic() >= deadline:
                    raise self._stopped(TimeoutError()) from e
                time.sleep(_QUEUE_FULL_RETRY_S)
            except OSError as e:
                raise AgentNotRunning(
                    f"no agent listens at {self.path} ({e.strerror or e}); "
                    "start one with 'pmesh up'"
                ) from e
            else:
                return

    def send(self, *requests: SessionMessage) -> None:
        """Send requests in one write. If the agent has ended, `receive` returns its last words."""
        data = b"".join(map(frame, map(encode, requests)))
        try:
            try:  # it is non-blocking, as it has a timeout: Python would wait for it first
                sent = os.write(self._socket.fileno(), data)
            except BlockingIOError:
                sent = 0
            if sent < len(data):
                self._socket.sendall(data[sent:])
        except ConnectionError:
            pass  # it may have said why
        except OSError as e:
            raise self._stopped(e) from e

    def send_last(self, request: SessionMessage) -> None:
        """Send a request before `close`, without waiting: the agent may be gone or frozen."""
        with contextlib.suppress(OSError):
            self._socket.setblocking(False)  # noqa: FBT003 - it takes no names
            self._socket.sendall(frame(encode(request)))

    def receive(self, *, due_s: float | None = None) -> _Reply_co:
        """Return the next reply.

        Args:
            due_s: log a warning after a silence this long, and after 4 s already if the agent's
                process is stopped. None: log nothing.

        Raises:
            AgentStopped: the agent has ended, or has been silent for too long.
            ProtocolError: something else than a reply arrived.
        """
        while (message := self._reader.next_message_untrusted()) is None:
            began = time.monotonic()
            if due_s is not None and not self._has_sent(FIRST_ANSWER_S):
                self._warn_of_silence(due_s, began)
            self._reader.receive_data(self._receive_data())
        return self._replies.decode_untrusted(message)

    def receive_within(self, timeout_s: float | None) -> _Reply_co | None:
        """Return the next reply; None if none arrives within `timeout_s`. Raises as `receive`."""
        message = self._reader.next_message_untrusted()
        if message is not None:
            return self._replies.decode_untrusted(message)
        if timeout_s is not None and not self._has_sent(timeout_s):
            return None
        return self.receive(due_s=ANSWER_S)

    def _has_sent(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s`; return True if there is data, or the connection has ended."""
        poll = select.poll()  # not select, which takes no descriptor above 1,023
        poll.register(self._socket.fileno(), select.POLLIN)
        return wait(lambda: bool(poll.poll(1000 * timeout_s)), otherwise=False)

    def _warn_of_silence(self, due_s: float, began: float) -> None:
        """Wait until the agent sends something; warn once if it is late."""
        warned, has_sent = False, False
        while not has_sent:
            silent_s = time.monotonic() - began
            if silent_s >= self._silence_s:
                raise self._stopped(TimeoutError())
            stopped, process = self._process()
            if not warned and (stopped or silent_s >= due_s):
                warned = True
                _logger.warning("the agent at %s does not answer: %s", self.path, process)
            has_sent = self._has_sent(FIRST_ANSWER_S)

    def await_end(self) -> None:
        """Wait until the agent has closed the connection; raise AgentStopped if it is silent."""
        try:
            while self._socket.recv(_RECEIVE_BYTES):
                pass
        except ConnectionResetError:
            return  # that is an end, too
        except OSError as e:
            raise self._stopped(e) from e

    def take_descriptor(self) -> int:
        """Return the descriptor that came with the reply; the caller closes it.

        Each comes with the last byte of its message, so they have the order of the messages.
        """
        if not self._descriptors:
            raise ProtocolError("a reply came without its descriptor")
        return self._descriptors.popleft()

    def nonsense(self, what: str) -> AgentStopped:
        """Return the error for a reply that makes no sense here."""
        return AgentStopped(
            f"the agent at {self.path} sent what no agent sends ({what}); "
            "if you have just updated pmesh, restart it: 'pmesh down', then 'pmesh up'"
        )

    def interrupt(self) -> None:
        """Make a `receive` in another thread raise AgentStopped."""
        with contextlib.suppress(OSError):  # it has just ended by itself
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; unless a Leave was sent, the agent takes that for a crash."""
        self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _receive_data(self) -> bytes:
        # Never a plain recv: it would silently drop a descriptor that comes with the data.
        try:
            data, ancillary, _, _ = self._socket.recvmsg(
                _RECEIVE_BYTES, _ANCILLARY_BYTES, _CLOSE_ON_EXEC
            )
        except OSError as e:
            raise self._stopped(e) from e
        for level, kind, rights in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._keep_descriptors(rights)
        if not data:
            raise self._ended()
        return data

    def _keep_descriptors(self, rights: bytes) -> None:
        descriptors = array.array("i")
        descriptors.frombytes(rights[: len(rights) - len(rights) % descriptors.itemsize])
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)  # noqa: FBT003 - the name of the call says it
            self._descriptors.append(descriptor)

    def _stopped(self, error: OSError) -> AgentStopped:
        if not isinstance(error, TimeoutError):
            return self._ended()
        return AgentStopped(
            f"the agent at {self.path} has not answered for {self._silence_s:g} s: "
            f"{self._process()[1]}"
        )

    def _ended(self) -> AgentStopped:
        return AgentStopped(
            f"the agent at {self.path} has ended{self._log()}; start another with 'pmesh up'"
        )

    def _process(self) -> tuple[bool, str]:
        """Return whether the process is stopped, and a text: its state, its log, what to type."""
        import psutil  # noqa: PLC0415 - it takes 20 ms, and only this needs it

        try:
            pid = int((self._home / LOCK_NAME).read_text())
            status = psutil.Process(pid).status()
        except (OSError, ValueError, psutil.Error):
            return False, f"its process is not running{self._log()}; start another with 'pmesh up'"
        stopped = status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        state, command = ("is stopped", "kill -CONT") if stopped else ("runs", "kill -9")
        then = "" if stopped else "; pmesh up"
        return stopped, f"its process (pid {pid}) {state}{self._log()}; run '{command} {pid}{then}'"

    def _log(self) -> str:
        path = self._home / LOG_NAME  # without --detach the log goes to its terminal
        return f"; its log is {path}" if path.exists() else ""


def mesh_ended(reason: str) -> MeshClosed:
    """Return the error of a call that is made after the end."""
    return MeshClosed(f"this mesh has ended: {reason}; call pmesh.connect() again")


def error_of(verdict: Verdict) -> PmeshError:
    """Return the error that a verdict names; RunError if this version does not know it."""
    found: object = getattr(errors, verdict.error, None)
    if isinstance(found, type) and issubclass(found, PmeshError) and found is not ProtocolError:
        return found(verdict.message)
    return RunError(verdict.message)
