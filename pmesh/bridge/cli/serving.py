"""The bridge at work: it lets workers in, and takes them and the job through step after step."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias, cast

import trio

from pmesh.agent.host_port import host_port_text
from pmesh.bridge.cli.worker import Frames, Worker, WorkerEnded, WorkerGone, receive_join
from pmesh.bridge.rules import (
    Contribution,
    Layout,
    Part,
    WholeLayout,
    WholePart,
    answer_to,
    check,
    deal,
    mean_of,
    parts_of,
)
from pmesh.bridge.wire import Floats, JoinRequest, Message, ShardAssignment
from pmesh.errors import ConfigError, NotEnoughRanks, ProtocolError, RunError
from pmesh.terminal.lines import complain, say

Stream: TypeAlias = trio.abc.HalfCloseableStream

MOST_STRANGERS = 16  # connections that have not joined; each may hold a frame of 64 KiB
JOIN_S = 10.0  # a worker joins as soon as it has connected


class Job(Protocol):
    """The bridge's place in a job of pmesh. Each call is made by all its ranks."""

    async def begin(self) -> Layout | None:
        """Begin a step: return what the ranks average; None if no rank is left."""
        ...

    async def average(self, values: Floats, weight: float) -> Floats:
        """Average one part."""
        ...

    async def mean_loss(self, loss: float, rows: int) -> float:
        """Return the mean loss of all rows."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeOptions:
    """What the user has chosen."""

    workers: int
    rows: int | None
    """How many rows are dealt in each step; None: the workers choose their own."""
    silence_s: float
    most_frame: int
    wait_s: float


class Bridge:
    """The coordinator of the workers. Each is served by a task of the nursery."""

    def __init__(self, options: BridgeOptions, nursery: trio.Nursery) -> None:
        self._options = options
        self._nursery = nursery
        self._strangers = 0
        self._workers: dict[int, Worker] = {}
        self._complete = trio.Event()
        self._step = -1
        self._has_ended = False
        """Whether a worker has closed its connection between two steps, as one that is ready."""
        self._last_fault = ""

    async def admit(self, listeners: Sequence[trio.abc.Listener[Stream]]) -> None:
        """Wait for all workers, then close the listeners. Raises NotEnoughRanks."""
        with trio.move_on_after(self._options.wait_s):
            async with trio.open_nursery() as accepting:
                accept = partial(trio.serve_listeners, handler_nursery=self._nursery)
                accepting.start_soon(accept, self._meet, list(listeners))
                await self._complete.wait()
                accepting.cancel_scope.cancel()
        if not self._complete.is_set():
            raise NotEnoughRanks(
                f"{len(self._workers)} of {self._options.workers} workers have joined within "
                f"{self._options.wait_s:g} s"
            )

    async def _meet(self, stream: Stream) -> None:
        """Serve a connection until its end; trio closes it then."""
        address = _address_of(stream)
        if self._strangers == MOST_STRANGERS:
            complain(f"{address} is turned away: {MOST_STRANGERS} others have not joined yet")
            return
        frames = Frames(stream, silence_s=self._options.silence_s)
        self._strangers += 1
        join = None
        try:
            with trio.fail_after(JOIN_S):
                join = await receive_join(frames)
        except trio.TooSlowError:
            complain(f"{address} has not joined within {JOIN_S:g} s")
        except ProtocolError as e:
            complain(f"{address} is no worker of entrenar: it {e}")
        except WorkerGone as e:
            complain(f"{address} {e} before it has joined")
        finally:
            self._strangers -= 1
        if join is not None:
            await self._serve(join, frames)

    async def _serve(self, join: JoinRequest, frames: Frames) -> None:
        """Give a worker a number, and serve it until it has gone or all ends."""
        count = self._options.workers
        free = next((n for n in range(count) if n not in self._workers), None)
        if free is None or self._complete.is_set():
            complain(f"a worker ({join.node_id}) comes too late")
            await frames.say_shutdown()
            return
        worker = self._workers[free] = Worker(free, join.node_id, frames)
        say(f"{worker} has joined, with {join.gpu_count} GPUs ({join.backend})")
        if len(self._workers) == count:
            self._complete.set()
        await worker.live(total_workers=count, most=self._options.most_frame)
        if not self._complete.is_set():
            del self._workers[free]
            complain(f"{worker} has gone before the training")

    async def train(self, job: Job) -> int:
        """Take all through the steps, until the job or the workers have ended; return how many.

        Raises:
            RunError: All workers were dropped.
            ConfigError: The ranks average what no worker will send.
        """
        while (layout := await job.begin()) is not None:
            self._step += 1
            if isinstance(layout, WholeLayout) and self._options.rows is None:
                raise ConfigError(
                    "the ranks average whole gradients, whose workers wait for rows: add --rows"
                )
            await self._deal()
            for part in parts_of(layout):
                contributions = await self._collect(part, is_first=part == parts_of(layout)[0])
                if not contributions:
                    return self._end_without_workers()
                await self._average(job, part, contributions)
        return self._step + 1

    def _end_without_workers(self) -> int:
        if not self._has_ended:
            raise RunError(f"no worker is left in step {self._step}: {self._last_fault}")
        return self._step

    async def _deal(self) -> None:
        if self._options.rows is not None and self._workers:
            shares = deal(self._options.rows, len(self._workers))
            messages = {
                worker: ShardAssignment(self._step, start, end)
                for worker, (start, end) in zip(self._in_order(), shares, strict=True)
            }
            await self._send(messages)

    async def _collect(self, part: Part, *, is_first: bool) -> list[Contribution]:
        """Return what the workers have sent of a part; drop those that did not."""
        found: dict[int, Contribution] = {}
        owed_since = trio.current_time()

        async def take(worker: Worker) -> None:
            try:
                message = await worker.take(
                    owed_since=owed_since, silence_s=self._options.silence_s
                )
                found[worker.id] = check(message, part, step=self._step, worker_id=worker.id)
            except WorkerEnded as e:
                if is_first:
                    say(f"{worker} has ended after {self._step} steps")
                    del self._workers[worker.id]
                    self._has_ended = True
                else:
                    self._drop(worker, f"{e} before {part} of step {self._step}")
            except WorkerGone as e:
                self._drop(worker, f"{e}, and {part} of step {self._step} is due")
            except ProtocolError as e:
                self._drop(worker, str(e))

        await self._for_each(take)
        return [found[worker] for worker in sorted(found)]

    async def _average(self, job: Job, part: Part, given: Sequence[Contribution]) -> None:
        mean = mean_of([each.values for each in given])
        averaged = await job.average(mean, len(given))
        loss = 0.0
        if isinstance(part, WholePart):
            rows = sum(each.rows for each in given)
            total = sum(each.loss * each.rows for each in given)
            loss = await job.mean_loss(total / rows if rows else 0.0, rows)
        answer = answer_to(part, averaged, step=self._step, loss=loss)
        await self._send(dict.fromkeys(self._in_order(), answer))

    async def _send(self, messages: Mapping[Worker, Message]) -> None:
        async def send(worker: Worker) -> None:
            try:
                await worker.frames.send(messages[worker])
            except WorkerGone as e:
                self._drop(worker, f"{e} in step {self._step}")

        await self._for_each(send)

    async def _for_each(self, serve: Callable[[Worker], Awaitable[None]]) -> None:
        async with trio.open_nursery() as nursery:
            for worker in self._in_order():
                nursery.start_soon(serve, worker)

    def _in_order(self) -> list[Worker]:
        return [self._workers[worker] for worker in sorted(self._workers)]

    def _drop(self, worker: Worker, why: str) -> None:
        del self._workers[worker.id]
        worker.drop()
        self._last_fault = f"{worker} {why}"
        complain(f"{self._last_fault}; it is dropped, and {len(self._workers)} go on")


def _address_of(stream: Stream) -> str:
    try:
        host, port = cast("trio.SocketStream", stream).socket.getpeername()[:2]
    except (AttributeError, OSError):  # it is none of a socket, or has gone already
        return "a connection"
    return host_port_text(host, port)


async def serve(
    listeners: Sequence[trio.abc.Listener[Stream]],
    enter: Callable[[], Awaitable[Job]],
    options: BridgeOptions,
) -> int:
    """Let the workers in, enter the job, and train; return the number of steps.

    All workers are told Shutdown, however this ends.

    Args:
        listeners: Where the workers come; closed before this returns.
        enter: Enters the job, when all workers are there.
        options: What the user has chosen.

    Raises:
        ExceptionGroup: Of NotEnoughRanks, if too few workers came in time; or of what
            `Bridge.train` and `enter` raise.
    """
    steps = 0
    async with trio.open_nursery() as nursery:
        bridge = Bridge(options, nursery)
        try:
            await bridge.admit(listeners)
            steps = await bridge.train(await enter())
        finally:
            nursery.cancel_scope.cancel()
    return steps
