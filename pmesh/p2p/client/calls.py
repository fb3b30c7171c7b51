"""Messages between two ranks: send and recv."""

import os
import threading
from collections.abc import Callable
from functools import partial
from operator import index
from typing import Literal, TypeVar, cast, overload
from weakref import finalize

from pmesh.client.calls.queue import Caller, Handle, check_timeout
from pmesh.client.calls.reducing import DEFAULT_TIMEOUT_S
from pmesh.client.collective.gather_ops import Head, block_of, build
from pmesh.client.elastic.place import Place
from pmesh.client.trees.arrays import evaluate_mlx
from pmesh.core.ops.reductions import Values
from pmesh.core.wire.calls import Envelope
from pmesh.errors import MeshClosed, PmeshError, ProtocolError, UsageError
from pmesh.ids import Rank, TrainerId
from pmesh.p2p.client.session import Arrived, P2PSession, attach
from pmesh.p2p.wire import MAX_TAG

ANY = -1
"""The source of a `recv` that takes a message from any rank."""

T = TypeVar("T")


class PointToPoint(Caller):
    """send, recv, recv_like and sendrecv.

    They run at the same time as each other and as collectives, in any number of threads. Messages
    of one pair and tag arrive in the order in which they were sent, each once, even if machines
    come and go meanwhile. When a rank is lost, only the calls that wait for it fail.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._p2p: tuple[TrainerId, P2PSession] | None = None
        self._opening = threading.Lock()
        self._last = threading.local()

    @property
    def last_source(self) -> Rank | None:
        """The sender of the last message that this thread has received; None before the first.

        A `recv` with `async_op=True` counts once it was waited for. The rank is that of the sender
        in the mesh at that time; -1 if the sender had no rank any more.
        """
        source: Rank | None = getattr(self._last, "source", None)
        return source

    @overload
    def send(
        self,
        x: object,
        to: int,
        tag: int = ...,
        timeout_s: float = ...,
        *,
        async_op: Literal[False] = ...,
    ) -> None: ...
    @overload
    def send(
        self,
        x: object,
        to: int,
        tag: int = ...,
        timeout_s: float = ...,
        *,
        async_op: Literal[True],
    ) -> Handle[None]: ...
    def send(
        self,
        x: object,
        to: int,
        tag: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        async_op: bool = False,
    ) -> Handle[None] | None:
        """Send an array to one rank; return when that rank has received it.

        If two ranks both send first and then receive, each waits for the other until both time out:
        use `sendrecv`, or `async_op=True`.

        Args:
            x: an array of numpy, MLX or torch, of any dtype of numbers. It is sent with its dtype
                and shape; nothing is converted.
            to: the receiver; if ranks change, it stays the same trainer.
            tag: from 0 to 2^31 - 1; only a receive with the same tag takes the message.
            timeout_s: for the whole call.
            async_op: return a handle at once. x may be changed as soon as this returns.

        Raises:
            UsageError: there is no such rank or tag, or it is this rank.
            UnsupportedArray: x is not an array of numbers.
            RankLost: the receiver is lost.
            OpTimedOut: the receiver did not receive in time; it may have x if it was just doing so.
            HistorySuperseded: the job has continued without this rank; `sync` comes back to it.
            AgentStopped: the agent on this machine has stopped.
        """
        check_tag(tag)
        timeout_s = check_timeout(timeout_s)
        receiver = self._peer(to, "to")
        evaluate_mlx([x])
        block = block_of(x)
        envelope = Envelope(tag, block.head.dtype, block.head.shape, block.data.size)
        session = self._attached()
        call = session.begin_send(receiver, envelope, block.data, timeout_s)

        def take(wait_s: float | None) -> None:
            session.end(call, wait_s)

        if async_op:
            return self._handle(session, call, take)
        take(None)
        return None

    @overload
    def recv(
        self,
        from_: int,
        tag: int = ...,
        timeout_s: float = ...,
        *,
        async_op: Literal[False] = ...,
    ) -> Values: ...
    @overload
    def recv(
        self,
        from_: int,
        tag: int = ...,
        timeout_s: float = ...,
        *,
        like: T,
        async_op: Literal[False] = ...,
    ) -> T: ...
    @overload
    def recv(
        self, from_: int, tag: int = ..., timeout_s: float = ..., *, async_op: Literal[True]
    ) -> Handle[Values]: ...
    @overload
    def recv(
        self,
        from_: int,
        tag: int = ...,
        timeout_s: float = ...,
        *,
        like: T,
        async_op: Literal[True],
    ) -> Handle[T]: ...
    def recv(
        self,
        from_: int,
        tag: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        like: object = None,
        async_op: bool = False,
    ) -> object:
        """Receive an array from one rank, whatever its shape and dtype.

        Args:
            from_: the sender; or ANY for the message that was announced first, by any rank. Then
                `last_source` has the sender.
            tag: the sender's tag.
            timeout_s: for the whole call.
            like: an array of the library for the result; a torch tensor also sets the device. By
                default the result is numpy's.
            async_op: return a handle at once. Receives of one source and tag take messages in the
                order in which they were called.

        Raises:
            UsageError: there is no such rank or tag, or the library has no such dtype.
            RankLost: the sender is lost; with ANY, all others are.
            OpTimedOut: no such message came in time.
            PmeshError: as for `send`.
        """
        library = "numpy" if like is None else _head_of(like).library

        def finish(arrived: Arrived) -> object:
            return _array(arrived, library, like)

        return self._receive(from_, tag, timeout_s, finish, async_op=async_op)

    @overload
    def recv_like(
        self,
        x: T,
        from_: int,
        tag: int = ...,
        timeout_s: float = ...,
        *,
        async_op: Literal[False] = ...,
    ) -> T: ...
    @overload
    def recv_like(
        self,
        x: T,
        from_: int,
        tag: int = ...,
        timeout_s: float = ...,
        *,
        async_op: Literal[True],
    ) -> Handle[T]: ...
    def recv_like(
        self,
        x: T,
        from_: int,
        tag: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        async_op: bool = False,
    ) -> T | Handle[T]:
        """Receive an array with the library, dtype and shape of x; x itself is not changed.

        Raises:
            UsageError: the message has another dtype or shape. It is received all the same.
            PmeshError: as for `recv`.
        """
        head = _head_of(x)

        def finish(arrived: Arrived) -> object:
            came = arrived.envelope
            if (came.dtype, came.shape) != (head.dtype, head.shape):
                rank = self._rank_of(arrived.source)
                raise UsageError(
                    f"rank {rank} has sent {came.dtype} of shape {came.shape} with tag {tag}, not "
                    f"{head.dtype} of shape {head.shape}"
                )
            return _array(arrived, head.library, x)

        result = self._receive(from_, tag, timeout_s, finish, async_op=async_op)
        return cast("T | Handle[T]", result)

    def sendrecv(
        self,
        x: T,
        to: int,
        from_: int,
        tag: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> T:
        """Send an array and receive one at the same time: neither waits for the other.

        Args:
            x: the array to send. The result has its library, and any dtype and shape.
            to: as for `send`.
            from_: as for `recv`.
            tag: the tag of both messages.
            timeout_s: for each of the two.

        Raises:
            PmeshError: as for `send` and `recv`; the other half still runs to its end.
        """
        self._peer(to, "to")  # or the receive would take a message that nobody reads
        receiving: Handle[T] = self.recv(from_, tag, timeout_s, like=x, async_op=True)
        self.send(x, to, tag, timeout_s)
        return receiving.wait()

    # --- inside

    def _receive(
        self,
        from_: int,
        tag: int,
        timeout_s: float,
        finish: Callable[[Arrived], object],
        *,
        async_op: bool,
    ) -> object:
        check_tag(tag)
        timeout_s = check_timeout(timeout_s)
        sources = self._others() if from_ == ANY else (self._peer(from_, "from_"),)
        session = self._attached()
        call = session.begin_receive(sources, tag, timeout_s)

        def take(wait_s: float | None) -> object:
            arrived = session.end(call, wait_s)
            if arrived is None:
                raise ProtocolError("a receive has ended as a send does")
            self._last.source = self._rank_of(arrived.source)
            return finish(arrived)

        return self._handle(session, call, take) if async_op else take(None)

    def _handle(
        self, session: P2PSession, call: int, take: Callable[[float | None], T]
    ) -> Handle[T]:
        failures: list[PmeshError] = []

        def take_or_fail_again(wait_s: float | None) -> T:
            if failures:
                raise failures[0]
            try:
                return take(wait_s)
            except PmeshError as e:
                failures.append(e)
                raise

        handle = Handle(partial(self._is_done, session, call), take_or_fail_again)
        # Without its handle a call still runs to its end, and its result is dropped.
        finalize(handle, session.forget, call).atexit = False
        return handle

    def _is_done(self, session: P2PSession, call: int) -> bool:
        """A bound method, so that a handle keeps its group alive: else the call would end."""
        return session.done(call)

    def _peer(self, rank: int, name: str) -> TrainerId:
        """O5: return the trainer that has this rank when the call is made."""
        self._place.check_synced()
        others = self._others()
        try:
            rank = index(rank)
        except TypeError:
            raise UsageError(f"{name}={rank!r}: a rank is an int") from None
        if not 0 <= rank < self.size:
            raise UsageError(
                f"{name}={rank}: there is no such rank, there are ranks 0 to {self.size - 1}"
            )
        if rank == self.rank or not others:
            raise UsageError(f"{name}={rank} is this rank: nobody sends messages to itself")
        return self._world.trainers[rank]

    def _others(self) -> tuple[TrainerId, ...]:
        self._place.check_synced()
        world = self._place.world if self._place.is_alone else self._world
        others = tuple(t for rank, t in enumerate(world.trainers) if rank != world.rank)
        if not others:
            raise UsageError("there is no other rank to send to, or to receive from")
        return others

    def _rank_of(self, trainer: TrainerId) -> Rank:
        trainers = self._world.trainers
        return Rank(trainers.index(trainer) if trainer in trainers else -1)

    def _attached(self) -> P2PSession:
        """Return the connection for messages; open one first if there is none for this trainer."""
        if os.getpid() != self._process:
            raise MeshClosed("this process was forked from the trainer; call connect() in it")
        self._place.check_open()
        me = self._place.world.trainers[self._place.world.rank]
        with self._opening:
            if self._p2p is not None and (self._p2p[0] != me or self._p2p[1].has_ended):
                self._p2p[1].close("this trainer has entered its job anew")
                self._p2p = None
            if self._p2p is None:
                self._p2p = me, self._place.attach(attach)
            return self._p2p[1]

    def _stop(self, *, crashed: BaseException | None) -> None:
        if os.getpid() == self._process and self._p2p is not None:
            self._p2p[1].close("it was closed")
        super()._stop(crashed=crashed)


def check_tag(tag: int) -> None:
    """Raise UsageError unless the tag is valid."""
    if not 0 <= tag <= MAX_TAG:
        raise UsageError(f"a tag is from 0 to {MAX_TAG}, not {tag}")


def _head_of(x: object) -> Head:
    evaluate_mlx([x])
    return block_of(x, "like").head


def _array(arrived: Arrived, library: str, like: object) -> object:
    envelope = arrived.envelope
    try:
        return build(Head(library, envelope.dtype, envelope.shape), arrived.data, like)
    except ProtocolError as e:
        raise UsageError(
            f"a message of {envelope.dtype} of shape {envelope.shape} can't be an array of "
            f"{library} here: {e}; name another library by like="
        ) from e
