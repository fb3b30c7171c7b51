"""`mesh.rpc`: calls of functions on other ranks."""

import queue
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import index
from typing import Any, Self, TypeVar, overload
from weakref import finalize

from pmesh.client.calls.queue import Handle
from pmesh.client.calls.traceback import make_public
from pmesh.client.elastic.place import Place
from pmesh.errors import RankLost, TooManyCalls, UsageError
from pmesh.ids import TrainerId
from pmesh.rpc.client.carrier import TICK_S
from pmesh.rpc.client.endpoint import CALL_TIMEOUT_S, Endpoint, OutgoingCall
from pmesh.rpc.client.serving import THREADS, WAITING, name_for
from pmesh.rpc.client.values import check_items
from pmesh.rpc.rules.deal import Deal, Dealt

F = TypeVar("F", bound=Callable[..., Any])


class RemoteCall(Handle[Any]):
    """A call under way, of `mesh.rpc.call_async`: a Handle that can also be given up."""

    def __init__(self, call: OutgoingCall) -> None:
        super().__init__(call.future.done, call.result_within)
        self._call = call

    def cancel(self) -> None:
        """Give the call up: `wait` raises OpTimedOut, unless there is a result already.

        If the function waits for a thread, it never runs; if it runs, `mesh.rpc.cancelled` returns
        True there.
        """
        self._call.give_up("it was cancelled")


class RemoteObject:
    """An object that another rank keeps for this one. `mesh.rpc.remote` makes it.

    Its owner frees it when nothing refers to this any more, in `close`, and when this rank is lost;
    not before the calls that have begun have ended.
    """

    def __init__(self, endpoint: Endpoint, owner: TrainerId, reference: int, made_by: str) -> None:
        self._endpoint = endpoint
        self._owner = owner
        self._reference = reference
        self._made_by = made_by
        self._finalizer = finalize(self, endpoint.dropped.append, (owner, reference))
        self._finalizer.atexit = False

    def __repr__(self) -> str:
        return f"<RemoteObject of {self._made_by!r} on {self._endpoint.describe(self._owner)}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(
        self, method: str, /, *args: object, timeout_s: float = CALL_TIMEOUT_S, **named: object
    ) -> Any:  # noqa: ANN401 - whatever it returns
        """Call a method of the object and return its result, as `mesh.rpc.call` does.

        Only methods that its class names in `remote_methods` can be called.

        Raises:
            UsageError: the class does not name the method, or the object was let go.
            RankLost: the owner is lost, or was meanwhile; then the object is lost, too.
            PmeshError: as for `mesh.rpc.call`.
        """
        return self._begin(method, args, named, timeout_s).result()

    def call_async(
        self, method: str, /, *args: object, timeout_s: float = CALL_TIMEOUT_S, **named: object
    ) -> RemoteCall:
        """Call a method and return a handle at once. Calls of one object may run at one time."""
        return RemoteCall(self._begin(method, args, named, timeout_s))

    def close(self) -> None:
        """Let the object go now."""
        if self._finalizer.detach() is not None:
            self._endpoint.release(self._owner, self._reference)

    def _begin(
        self, method: str, args: tuple[object, ...], named: dict[str, object], timeout_s: float
    ) -> OutgoingCall:
        if not self._finalizer.alive:
            raise UsageError(f"this object of {self._made_by!r} was let go by close()")
        return self._endpoint.begin(
            self._owner, method, args, named, timeout_s, reference=self._reference
        )


make_public(RemoteObject)


class Rpc:
    """Calls of functions on other ranks, beside the training. Get it as `mesh.rpc`.

    A rank serves calls from its first use of `mesh.rpc` on, in threads of their own, also while it
    computes or waits in a collective; a call of a rank that has not used it yet waits for that.
    Nothing can be called that was not registered there. Arguments and results are copied: None,
    bool, int, float, str, bytes, and arrays of numpy, MLX and torch, in dicts, lists and tuples.
    Nothing is pickled. Each call runs at most once. Calls of one rank begin in their order, except
    that one with large arrays waits for these, and may run at the same time. Any thread may call; a
    rank may also call itself.

    Calls that wait for a rank raise RankLost as soon as it is lost. If this rank is cut off from
    its job, all its calls raise what the next collective would, and it serves again after the
    `mesh.sync` that brings it back.
    """

    def __init__(self, place: Place, trainer_at: Callable[[int], TrainerId]) -> None:
        """`trainer_at` returns the trainer that has a rank now, or raises."""
        self._place = place
        self._trainer_at = trainer_at
        self._endpoint = Endpoint(place)

    # --- serving

    @overload
    def register(self, function: F, /, *, name: str = ...) -> F: ...
    @overload
    def register(self, /, *, name: str = ...) -> Callable[[F], F]: ...
    def register(self, function: Any = None, /, *, name: str = "") -> Any:
        """Let all ranks call a function or make objects of a class; use it as a decorator.

            @mesh.rpc.register
            def evaluate(weights, *, seed): ...

        All ranks of the job may call it, with any arguments. Calls run in several threads.

        Args:
            function: a function, or a class.
            name: its name for the callers; by default its own. The same name again replaces it.

        Raises:
            UsageError: it can't be called, or there is no such name.
        """
        if function is None:
            return partial(self.register, name=name)
        self._endpoint.serving.register(name_for(function, name), function)
        self._endpoint.start()
        return function

    def serve(self, threads: int = THREADS, waiting: int = WAITING, *, copy: bool = True) -> None:
        """Serve calls, also if nothing is registered yet; say how many.

        Args:
            threads: so many calls run at a time; at least 1.
            waiting: so many more wait for a thread. Further calls raise TooManyCalls at their
                callers. Their arguments take at most 4 GiB together.
            copy: False: numpy arrays of 1 MiB and more that come to this rank, as arguments or as
                results, are read-only, and stay where the agent has put them. If you keep more than
                16, or more than an eighth of the machine's memory, further ones are copies.

        Raises:
            UsageError: a number is out of range.
        """
        if threads < 1 or waiting < 0:
            raise UsageError(
                f"a rank serves with at least 1 thread, and at least 0 calls wait, not {threads} "
                f"and {waiting}"
            )
        self._endpoint.serving.limit(threads, waiting)
        self._endpoint.borrow(borrows=not copy)
        self._endpoint.start()

    def cancelled(self) -> bool:
        """Return True in a function that is called, if its caller has given up or is lost.

        A long function may look at it from time to time, and return.
        """
        return self._endpoint.serving.is_cancelled()

    # --- calling

    def call(
        self,
        rank: int,
        function: str,
        /,
        *args: object,
        timeout_s: float = CALL_TIMEOUT_S,
        **named: object,
    ) -> Any:  # noqa: ANN401 - whatever it returns
        """Call a function on a rank and return its result.

        Args:
            rank: the rank; if ranks change, it stays the same trainer.
            function: the name under which it is registered there.
            args: positional arguments.
            timeout_s: after this time the call is given up: it never runs if it waits for a thread,
                and `mesh.rpc.cancelled()` is True in it if it runs.
            named: named arguments.

        Raises:
            RemoteCallFailed: the function has raised an exception.
            UsageError: there is no such rank, or no such function there.
            UnsupportedArray: an argument can't be sent; nothing was.
            TooManyCalls: the rank has no room for another call.
            RankLost: the rank is lost; the function may have run.
            OpTimedOut: the time is over; the function may have run.
            HistorySuperseded: the job has continued without this rank.
            AgentStopped: the agent on this machine has stopped.
        """
        callee = self._callee(rank, function)
        return self._endpoint.begin(callee, function, args, named, timeout_s).result()

    def call_async(
        self,
        rank: int,
        function: str,
        /,
        *args: object,
        timeout_s: float = CALL_TIMEOUT_S,
        **named: object,
    ) -> RemoteCall:
        """Call a function on a rank; return a handle at once, as for `call`.

        The arguments may be changed once this has returned. The handle's `wait` returns the result
        or raises the error, and `cancel` gives the call up.
        """
        callee = self._callee(rank, function)
        return RemoteCall(self._endpoint.begin(callee, function, args, named, timeout_s))

    def remote(
        self,
        rank: int,
        function: str,
        /,
        *args: object,
        timeout_s: float = CALL_TIMEOUT_S,
        **named: object,
    ) -> RemoteObject:
        """Call a function, or a class, on a rank, and let the result stay there.

        The class of the result names the methods that can be called, as in
        `remote_methods = ("reset", "step")`.

        Returns:
            A reference to the result, whose `call` calls these methods. Only this rank has it.

        Raises:
            UsageError: the result's class has no `remote_methods`.
            PmeshError: as for `call`.
        """
        callee = self._callee(rank, function)
        call = self._endpoint.begin(callee, function, args, named, timeout_s, keeps=True)
        return RemoteObject(self._endpoint, callee, call.reference(), function)

    def map(
        self,
        function: str,
        items: Iterable[object],
        *,
        ranks: Sequence[int] | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> list[Any]:
        """Call a function with each item, on many ranks; return the results in the items' order.

        Each rank gets a new item when it has returned one, so faster machines do more of them. The
        items of a rank that is lost are given to others: an item may run twice, but each result is
        used once. A rank that enters the job meanwhile, or comes back, takes part as soon as this
        rank's `sync` lets it in; so it registers the function before its own `sync`.

        Args:
            function: the name under which the ranks have registered it.
            items: each is the one argument of one call.
            ranks: by default all, this one too.
            timeout_s: for each call.

        Raises:
            RankLost: all of the ranks are lost.
            UnsupportedArray: an item can't be sent; nothing was.
            PmeshError: as for `call`, of the first call that fails; the others are cancelled.
        """
        check_name(function)
        trainers = self._trainers(ranks)
        return Map(self._endpoint, function, list(items), trainers, timeout_s).run()

    def close(self) -> None:
        """Stop serving; calls under way raise MeshClosed. `mesh.close` does this."""
        self._endpoint.close()

    def _trainers(self, ranks: Sequence[int] | None) -> Callable[[], Sequence[TrainerId]]:
        """Return what returns the trainers of these ranks; of all, also those that will come."""
        if ranks is None:
            self._place.check_synced()
            return lambda: self._place.world.trainers
        if len(ranks) == 0 or len(set(ranks)) < len(ranks):
            raise UsageError(f"map takes different ranks, at least one, not {list(ranks)}")
        chosen = [self._at(rank) for rank in ranks]
        return lambda: chosen

    def _callee(self, rank: int, function: str) -> TrainerId:
        check_name(function)
        return self._at(rank)

    def _at(self, rank: int) -> TrainerId:
        try:
            return self._trainer_at(index(rank))
        except TypeError:
            raise UsageError(f"a rank is an int, not {rank!r}") from None


make_public(Rpc)


def check_name(function: object) -> None:
    """Raise UsageError unless a function is called by its name."""
    if not isinstance(function, str):
        name = getattr(function, "__name__", "evaluate")
        raise UsageError(
            f"a function is called by the name under which it is registered, as in "
            f"mesh.rpc.call(1, {name!r}), not by a {type(function).__name__}"
        )


class Map:
    """One `map` under way."""

    def __init__(
        self,
        endpoint: Endpoint,
        function: str,
        items: list[object],
        ranks: Callable[[], Sequence[TrainerId]],
        timeout_s: float,
    ) -> None:
        self._endpoint = endpoint
        self._function = function
        self._items = items
        self._timeout_s = timeout_s
        self._ranks = ranks
        check_items(items)
        self._deal = Deal(len(items))
        self._results: list[object] = [None] * len(items)
        self._ended = queue.SimpleQueue[tuple[Dealt, OutgoingCall]]()
        self._calls: dict[Dealt, OutgoingCall] = {}

    def run(self) -> list[object]:
        """Return the results. Raises as `Rpc.map`."""
        try:
            while not self._deal.is_done:
                self._deal.join(self._ranks())
                for dealt in self._deal.deal():
                    self._start(dealt)
                self._take()
        finally:
            for call in self._calls.values():
                call.give_up("another call of the same map has failed")
        return self._results

    def _start(self, dealt: Dealt) -> None:
        argument = (self._items[dealt.item],)
        try:
            call = self._endpoint.begin(dealt.rank, self._function, argument, {}, self._timeout_s)
        except RankLost as e:
            self._lose(dealt.rank, e)
            return
        self._calls[dealt] = call
        call.future.add_done_callback(lambda _: self._ended.put((dealt, call)))

    def _take(self) -> None:
        """Wait for the end of a call, or for a moment: ranks come, and full ones have room."""
        try:
            dealt, call = self._ended.get(timeout=TICK_S)
        except queue.Empty:
            self._deal.retry()
            return
        if self._calls.pop(dealt, None) is None:
            return
        try:
            result = call.result()
        except RankLost as e:
            self._lose(dealt.rank, e)
        except TooManyCalls:
            self._deal.refused(*dealt)
        else:
            if self._deal.done(*dealt):
                self._results[dealt.item] = result

    def _lose(self, rank: TrainerId, why: RankLost) -> None:
        self._deal.lose(rank)
        if not self._deal.ranks:
            raise why
