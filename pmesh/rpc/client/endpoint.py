"""One rank's calls: those that it has made, those that it serves, and what carries them."""

import os
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from pmesh.client.calls.queue import check_timeout
from pmesh.client.elastic.place import Place
from pmesh.core.ops.reductions import Values
from pmesh.errors import MeshClosed, OpTimedOut, PmeshError, ProtocolError, RankLost, UsageError
from pmesh.ids import Rank, TrainerId
from pmesh.p2p.client.session import P2PSession, attach
from pmesh.rpc.client.carrier import Carrier
from pmesh.rpc.client.serving import Serving
from pmesh.rpc.client.values import Arriving, Came, check_text, error_of, pack_arguments
from pmesh.rpc.rules.calls import Calls
from pmesh.rpc.wire import (
    MAX_TEXT,
    AnyFrame,
    Cancel,
    Failure,
    Kept,
    Release,
    Request,
    Result,
    Value,
)

CALL_TIMEOUT_S = 60.0


@dataclass(slots=True, eq=False)
class CallAnswer:
    """What has come for a call: a value, or the number of a kept object."""

    value: Arriving | None = None
    reference: int = -1


class OutgoingCall:
    """A call that this rank has made."""

    def __init__(
        self, endpoint: "Endpoint", number: int, callee: TrainerId, function: str, timeout_s: float
    ) -> None:
        self._endpoint = endpoint
        self.number = number
        self.callee = callee
        self.function = function
        self.timeout_s = timeout_s
        self.future: Future[CallAnswer] = Future()

    def result(self) -> object:
        """Wait for the result; give the call up when its time is over, or on Ctrl-C."""
        return self._take(self._answer())

    def reference(self) -> int:
        """Wait for the number of the object that the callee keeps."""
        reference = self._answer().reference
        if reference < 0:
            raise ProtocolError("a call has ended without a reference")
        return reference

    def result_within(self, wait_s: float | None) -> object:
        """Wait for the result at most so long; raise TimeoutError if there is none yet."""
        return self._take(self._ended(wait_s))

    def give_up(self, why: str) -> None:
        """End the call without a result, unless it has ended."""
        self._endpoint.give_up(self, OpTimedOut(f"no result of {self}: {why}"))

    def overdue(self) -> None:
        """Give the call up: its time is over."""
        self.give_up(f"it took more than {self.timeout_s:g} s")

    def __str__(self) -> str:
        return f"{self.function} on {self._endpoint.describe(self.callee)}"

    def _answer(self) -> CallAnswer:
        try:
            self.future.exception(self.timeout_s)
        except TimeoutError:
            self.overdue()
        except BaseException:
            self.give_up("it was interrupted")
            raise
        return self._ended(None)

    def _ended(self, wait_s: float | None) -> CallAnswer:
        """Return the answer, or raise a copy of the error.

        The traceback of what is raised has the caller's frame, which has this call. In a cycle, all
        that this frame refers to would stay until the garbage collector runs: objects elsewhere.
        """
        error = self.future.exception(wait_s)
        if error is not None:
            raise _copy_of(error)
        return self.future.result()

    def _take(self, answer: CallAnswer) -> object:
        if answer.value is None:
            raise ProtocolError("a call has ended without a value")
        return answer.value.unpack_untrusted()


def _copy_of(error: BaseException) -> BaseException:
    made = type(error).__new__(type(error), *error.args)
    vars(made).update(vars(error))
    return made


class Endpoint:
    """The calls that one trainer makes and serves; `Events` of its carrier. Any thread may call."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._calls = Calls()
        self._pending: dict[int, OutgoingCall] = {}
        self._lock = threading.Lock()
        self._posting = threading.Lock()
        """Held from a call's number until its frame is posted: callees take ascending numbers."""
        self.dropped = deque[tuple[TrainerId, int]]()
        """Objects that nobody refers to: their owner and number. The garbage collector appends, in
        any thread."""
        self._carrier = Carrier(self._open_session, self._peers, self)
        self._was = self.me()
        """This trainer at the last tick; None before it has entered its job."""
        self.serving = Serving(self.me, self._answer, self._carrier.next_tag)
        self._process = os.getpid()

    def start(self) -> None:
        """Serve from now on."""
        self.check_process()
        self._carrier.start()

    def borrow(self, *, borrows: bool) -> None:
        """Let large arrays arrive read-only in shared memory, or not."""
        self._carrier.borrows = borrows

    def close(self) -> None:
        """Stop serving; calls under way raise MeshClosed."""
        if os.getpid() == self._process:
            self._carrier.close()
            self.serving.end()

    def begin(
        self,
        callee: TrainerId,
        function: str,
        args: tuple[object, ...],
        named: dict[str, object],
        timeout_s: float,
        *,
        reference: int = -1,
        keeps: bool = False,
    ) -> OutgoingCall:
        """Begin a call; it has ended once its future is done.

        Args:
            callee: a rank, or this one.
            function: the name of a function, or of a method.
            args: positional arguments.
            named: named arguments.
            timeout_s: until the call is given up.
            reference: the object whose method it is; -1 for a function.
            keeps: the callee is to keep the result.

        Raises:
            PmeshError: as for `Rpc.call_async`.
        """
        self.check_process()
        timeout_s = check_timeout(timeout_s)
        check_text(function)
        is_own = callee == self.me()
        packed = pack_arguments(args, named, None if is_own else self._carrier.next_tag)
        with self._posting:
            with self._lock:
                number = self._calls.begin(callee, deadline=time.monotonic() + timeout_s)
                call = self._pending[number] = OutgoingCall(
                    self, number, callee, function, timeout_s
                )
            request = Request(number, function, packed.value, timeout_s, reference, keeps)
            try:
                self._post(call, request, packed.arrays)
            except BaseException as e:
                error = e if isinstance(e, PmeshError) else MeshClosed(str(e))
                self.give_up(call, error)
                raise
        return call

    def _post(self, call: OutgoingCall, request: Request, arrays: list[tuple[int, Values]]) -> None:
        if call.callee == self.me():
            self._place.check_open()
            self.received(call.callee, request)
            return
        failed = partial(self.give_up, call)
        self._carrier.post(call.callee, request, arrays, timeout_s=call.timeout_s, failed=failed)

    def give_up(self, call: OutgoingCall, error: PmeshError) -> None:
        """End a call by an error, unless it has ended."""
        with self._lock:
            callee = self._calls.give_up(call.number)
            self._pending.pop(call.number, None)
        if callee is not None:
            call.future.set_exception(error)
            self._tell(callee, Cancel(call.number))

    def release(self, owner: TrainerId, reference: int) -> None:
        """Let an object go."""
        self._tell(owner, Release(reference))

    def _tell(self, to: TrainerId, frame: AnyFrame) -> None:
        self._answer(to, frame, [], CALL_TIMEOUT_S)

    def _answer(
        self, to: TrainerId, frame: AnyFrame, arrays: list[tuple[int, Values]], timeout_s: float
    ) -> None:
        """Send a frame to a rank that may be lost, or to this one; whatever fails is not ours."""
        if to == self.me():
            self.received(to, frame)
            return

        def failed(error: PmeshError) -> None:
            if isinstance(frame, Result):
                failure = Failure(frame.call, type(error).__name__, str(error)[:MAX_TEXT])
                self._answer(to, failure, [], timeout_s)

        try:
            self._carrier.post(to, frame, arrays, timeout_s=timeout_s, failed=failed)
        except UsageError as e:
            failed(e)
        except PmeshError:
            return  # it is lost, or this rank is: the calls have ended

    def _open_session(self) -> P2PSession:
        self._place.check_open()
        self._place.check_synced()
        return self._place.attach(attach)

    def me(self) -> TrainerId | None:
        """Return this trainer; None unless it is in its job."""
        world = self._place.world
        return None if world.rank < 0 else world.trainers[world.rank]

    def _peers(self) -> list[TrainerId]:
        me = self.me()
        return [each for each in self._place.world.trainers if each != me]

    def describe(self, trainer: TrainerId) -> str:
        """Return a trainer's rank and machine, for people."""
        world = self._place.world
        if trainer not in world.trainers:
            return "a lost rank"
        rank = Rank(world.trainers.index(trainer))
        return f"rank {rank} ({world.names[rank]})"

    def check_process(self) -> None:
        """Raise MeshClosed in a forked child."""
        if os.getpid() != self._process:
            raise MeshClosed("this process was forked from the trainer; call connect() in it")

    # --- events of the carrier

    def received(self, source: TrainerId, frame: AnyFrame) -> None:
        """Handle a frame of another rank, or of this one."""
        match frame:
            case Request():
                came = self.serving.request(source, frame)
                if came:
                    self._carrier.receive(source, frame.arguments.apart, frame.timeout_s, came)
            case Cancel(call):
                self.serving.cancel(source, call)
            case Release(reference):
                self.serving.release(source, reference)
            case Result(call, value):
                self._receive_value(source, call, value)
            case Kept(call, reference):
                if not self._settle(source, call, CallAnswer(reference=reference)):
                    self.release(source, reference)
            case Failure(call):
                found = self._pending.get(call)
                name = "a call" if found is None else found.function
                self._settle(source, call, error_of(frame, self.describe(source), name))

    def lost(self, rank: TrainerId, why: RankLost) -> None:
        """End what waits for a lost rank, and what it waits for."""
        self.serving.lose(rank)
        with self._lock:  # a call that is given up now ends once: by this
            ended = [self._pending.pop(number) for number in self._calls.lose([rank])]
        _fail(ended, why)

    def cut_off(self, why: PmeshError) -> None:
        """End all calls: this rank can't reach the others."""
        for rank in self.serving.callers():
            self.serving.lose(rank)
        with self._lock:
            ended = [self._pending.pop(number) for number in self._calls.lose_all()]
        _fail(ended, why)

    def tick(self) -> None:
        """Let go of what nobody refers to, and give up what is overdue."""
        was, me = self._was, self.me()
        if was is not None and me not in (None, was):  # it was cut off: it is another trainer now
            self.lost(was, RankLost("this rank was cut off from its job"))
        self._was = was if me is None else me
        while self.dropped:
            self.release(*self.dropped.popleft())
        with self._lock:
            overdue = [self._pending[each] for each in self._calls.overdue(time.monotonic())]
        for call in overdue:
            call.overdue()

    def _receive_value(self, source: TrainerId, number: int, value: Value) -> None:
        answer = CallAnswer(Arriving(value))
        if not value.apart:
            self._settle(source, number, answer)
            return

        def came(index: int, data: Came) -> None:
            if isinstance(data, UsageError):
                self._settle(source, number, data)
            elif answer.value is not None and data is not None and answer.value.put(index, data):
                self._settle(source, number, answer)

        pending = self._pending.get(number)
        timeout_s = CALL_TIMEOUT_S if pending is None else pending.timeout_s
        waiting = [partial(came, i) for i in range(len(value.apart))]
        self._carrier.receive(source, value.apart, timeout_s, waiting)

    def _settle(self, source: TrainerId, number: int, end: CallAnswer | PmeshError) -> bool:
        with self._lock:
            call = self._pending.pop(number, None) if self._calls.end(number, source) else None
        if call is None:
            return False
        if isinstance(end, PmeshError):
            call.future.set_exception(end)
        else:
            call.future.set_result(end)
        return True


def _fail(calls: list[OutgoingCall], why: PmeshError) -> None:
    for call in calls:
        call.future.set_exception(type(why)(str(why)))
