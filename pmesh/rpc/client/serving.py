"""The functions that a rank serves, the threads that run them, and the objects that it keeps."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import numpy as np

from pmesh.client.calls import threads
from pmesh.core.ops.reductions import Values
from pmesh.errors import UsageError
from pmesh.ids import TrainerId
from pmesh.rpc.client.values import (
    Arriving,
    Came,
    check_text,
    failure_of,
    pack,
    unpack_arguments_untrusted,
)
from pmesh.rpc.rules.calls import CallKey, RequestOutcome, Service
from pmesh.rpc.wire import FULL, GONE, MAX_TEXT, REFUSED, AnyFrame, Failure, Kept, Request, Result

THREADS = 4
WAITING = 1024
MOST_NAMES = MAX_TEXT // 2  # characters of what is registered, in an error that has a bound
ROOM_BYTES = 4 * 1024**3  # arguments of calls that wait or run: a few large models


class Post(Protocol):
    """Sends an answer; an error is not the function's, so it is not raised."""

    def __call__(
        self, to: TrainerId, frame: AnyFrame, arrays: list[tuple[int, Values]], timeout_s: float
    ) -> None:
        """Send a frame with its large arrays, which are received within `timeout_s`."""
        ...


class _Refused(Exception):  # noqa: N818 - no error of this rank
    """The function is not called."""

    kind = REFUSED


class _Gone(_Refused):
    """The object was freed, as its holder was lost to this rank."""

    kind = GONE


@dataclass(slots=True)
class _Incoming:
    request: Request
    arguments: Arriving
    kept: object
    """The object whose method it is: it stays until the call has ended. None for a function."""


class Serving:
    """Serves the calls of all ranks. `post` sends the answers; `next_tag` gives arrays tags."""

    def __init__(
        self, me: Callable[[], TrainerId | None], post: Post, next_tag: Callable[[], int]
    ) -> None:
        """`me` is this trainer, whose own calls travel nowhere."""
        self._me = me
        self._post = post
        self._next_tag = next_tag
        self._lock = threading.Lock()
        self._functions: dict[str, Callable[..., object]] = {}
        self._service = Service(threads=THREADS, waiting=WAITING, room_bytes=ROOM_BYTES)
        self._incoming: dict[CallKey, _Incoming] = {}
        self._objects: dict[int, object] = {}
        self._ready = queue.SimpleQueue[CallKey | None]()
        self._threads = 0
        self._current = threading.local()
        self._ended = False

    def register(self, name: str, function: Callable[..., object]) -> None:
        """Let other ranks call a function."""
        with self._lock:
            self._functions[name] = function

    def limit(self, threads: int, waiting: int) -> None:
        """Change how many calls run at a time, and how many wait."""
        with self._lock:
            self._service.threads, self._service.waiting = threads, waiting
        self._start_ready()

    def is_cancelled(self) -> bool:
        """Return True in a call whose caller has given up or is lost."""
        call: CallKey | None = getattr(self._current, "call", None)
        if call is None:
            return False
        with self._lock:
            return self._service.is_cancelled(call)

    def request(self, caller: TrainerId, request: Request) -> list[Callable[[Came], None]]:
        """Take a call, or answer that there is no room; return who waits for its large arrays."""
        call, arriving = CallKey(caller, request.call), Arriving(request.arguments)
        apart = request.arguments.apart
        if request.reference < 0 and (why := self._lacks(request.name)):
            # At once: its arrays may take long.
            self._post(caller, Failure(request.call, REFUSED, why), [], request.timeout_s)
            return [_ignore] * len(apart)
        with self._lock:
            answer = self._service.request(call, nbytes=request.arguments.nbytes, arrays=len(apart))
            if answer is RequestOutcome.TAKEN:
                kept = self._kept(caller, request.reference)
                self._incoming[call] = _Incoming(request, arriving, kept)
            running, waiting = self._service.running, len(self._service)
        if answer is RequestOutcome.FULL:
            text = (
                f"it runs {running} calls, and {waiting - running} wait; call again once some of "
                "them have ended, or let it serve more by mesh.rpc.serve(threads=, waiting=)"
            )
            self._post(caller, Failure(request.call, FULL, text), [], request.timeout_s)
        self._start_ready()

        def came(index: int, data: Came) -> None:
            if not isinstance(data, np.ndarray):
                self.cancel(caller, request.call)
                if data is not None:
                    self._post(caller, failure_of(request.call, data), [], request.timeout_s)
                return
            with self._lock:
                if call in self._incoming:
                    arriving.put(index, data)
                    self._service.arrived(call)
            self._start_ready()

        return [partial(came, index) for index in range(len(apart))]

    def cancel(self, caller: TrainerId, number: int) -> None:
        """Drop a call that its caller has given up; if it runs, `is_cancelled` says so."""
        call = CallKey(caller, number)
        with self._lock:
            dropped = self._incoming.pop(call, None) if self._service.cancel(call) else None
        del dropped  # outside of the lock: user's arrays may have finalizers

    def release(self, holder: TrainerId, reference: int) -> None:
        """Free an object that its holder needs no more."""
        with self._lock:
            held = self._service.release(holder, reference)
            freed = self._objects.pop(reference, None) if held else None
        del freed

    def callers(self) -> tuple[TrainerId, ...]:
        """Return the ranks that have called, and are not lost."""
        with self._lock:
            return self._service.callers

    def lose(self, caller: TrainerId) -> None:
        """Drop the calls and the objects of a lost rank."""
        with self._lock:
            never, references = self._service.lose(caller)
            freed = [self._incoming.pop(call, None) for call in never]
            kept = [self._objects.pop(each, None) for each in references]
        del freed, kept

    def end(self) -> None:
        """End the threads once the calls that run have ended."""
        with self._lock:
            self._ended = True
            count = self._threads
        for _ in range(count):
            self._ready.put(None)

    # --- in the threads

    def _start_ready(self) -> None:
        with self._lock:
            while not self._ended and (call := self._service.start()) is not None:
                if self._service.running > self._threads:
                    self._threads += 1
                    threads.start(self._work, "pmesh-rpc-call")
                self._ready.put(call)

    def _work(self) -> None:
        while (call := self._ready.get()) is not None:
            with self._lock:
                incoming = self._incoming.pop(call)
            self._serve(call, incoming)
            del incoming
            self._start_ready()

    def _serve(self, call: CallKey, incoming: _Incoming) -> None:
        request = incoming.request
        frame: AnyFrame
        arrays: list[tuple[int, Values]] = []
        self._current.call = call
        try:
            function = self._function(request, incoming.kept)
            args, named = unpack_arguments_untrusted(incoming.arguments)
            result = function(*args, **named)
            if request.keeps:
                frame = Kept(call.number, self._keep(call, result))
            else:
                own = call.caller == self._me()
                value, arrays = pack(result, None if own else self._next_tag)
                frame = Result(call.number, value)
        except _Refused as e:
            frame = Failure(call.number, e.kind, str(e)[:MAX_TEXT])
        except BaseException as e:  # noqa: BLE001 - the caller raises it
            frame = failure_of(call.number, e)
        finally:
            self._current.call = None
        with self._lock:
            is_wanted = self._service.finish(call)
        if is_wanted:
            self._post(call.caller, frame, arrays, request.timeout_s)
        elif isinstance(frame, Kept):
            self.release(call.caller, frame.reference)

    def _keep(self, call: CallKey, result: object) -> int:
        if not _methods_of(result):
            raise _Refused(
                f"its result's class {type(result).__name__} has no remote_methods: name there "
                'what may be called, as in remote_methods = ("step",)'
            )
        with self._lock:
            reference = self._service.keep(call)
            if reference is None:
                raise _Refused("nobody waits for it any more")
            self._objects[reference] = result
            return reference

    def _kept(self, caller: TrainerId, reference: int) -> object:
        """Return an object that the caller holds, else None; the lock is held."""
        return self._objects[reference] if self._service.holds(caller, reference) else None

    def _lacks(self, name: str) -> str:
        """Return an empty text, or one that says that there is no such function."""
        with self._lock:
            if name in self._functions:
                return ""
            names = ", ".join(sorted(self._functions)) or "none"
        if len(names) > MOST_NAMES:
            names = f"{names[:MOST_NAMES]}…"
        return (
            f"it has registered no such function (registered are: {names}); put "
            "@mesh.rpc.register before it"
        )

    def _function(self, request: Request, kept: object) -> Callable[..., object]:
        if request.reference < 0:
            with self._lock:
                return self._functions[request.name]  # it was there when the call came
        if kept is None:
            raise _Gone("the object is not there any more")
        methods = _methods_of(kept)
        if request.name not in methods:
            raise _Refused(
                f"{type(kept).__name__}.remote_methods has {', '.join(methods)} and not this"
            )
        return cast("Callable[..., object]", getattr(kept, request.name))


def _ignore(_: Came) -> None:
    """Take an array of a call that was refused."""


def _methods_of(x: object) -> tuple[str, ...]:
    """Return the names of the methods that other ranks may call."""
    found: Any = getattr(type(x), "remote_methods", ())
    return (found,) if isinstance(found, str) else tuple(found)


def name_for(function: object, name: object) -> str:
    """Return the name under which to register a function or a class, which may be its own.

    Raises UsageError for anything else, and if there is no such name.
    """
    if not callable(function):
        raise UsageError(f"a {type(function).__name__} can't be called, so it can't be registered")
    chosen = name or getattr(function, "__name__", None)
    if not isinstance(chosen, str):
        what = f"a name is text, not {name!r}" if name else f"{function!r} has no name of its own"
        raise UsageError(f'{what}: register it as in mesh.rpc.register(evaluate, name="evaluate")')
    check_text(chosen)
    return chosen
