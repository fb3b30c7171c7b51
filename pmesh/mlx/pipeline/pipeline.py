"""`Pipeline`: one step of a training in stages."""

import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, cast, get_args

import mlx.core as mx
import numpy as np

from pmesh.client.calls.queue import Handle, check_timeout
from pmesh.client.group import Collectives
from pmesh.client.mesh import Mesh
from pmesh.client.trees.mlx import evaluate
from pmesh.core.ops.reductions import Values
from pmesh.errors import RosterChanged, UsageError
from pmesh.mlx.flat import as_arrays, utils
from pmesh.mlx.pipeline.passes import Name, Passes
from pmesh.mlx.pipeline.rules.checks import (
    DIFFERENT,
    NO_ARRAYS,
    NOTHING,
    check_communication,
    check_rows,
    check_whole,
)
from pmesh.mlx.pipeline.rules.narrow import from_int8_untrusted, to_int8
from pmesh.mlx.pipeline.rules.schedules import (
    AHEAD,
    MOST_SENDING,
    Action,
    Schedule,
    make_schedule,
)
from pmesh.mlx.pipeline.rules.timeline import bubble, needs
from pmesh.mlx.pipeline.stages import Stage

ScheduleName = Literal["gpipe", "1f1b", "eager_1f1b", "interleaved", "zero_bubble"]
SendAs = Literal["bfloat16", "int8"]

_TAGS_PER_STEP = 2**11  # two for each stage, and some for tied weights
STATE_TAG = _TAGS_PER_STEP - 2  # of the messages of `ElasticPipeline`
_STEPS = 2**20  # tags go up to 2**31


@dataclass(frozen=True, slots=True)
class StageReport:
    """Where the time of a rank's last step went, in seconds."""

    compute_s: float
    wait_s: float
    """Waiting for other ranks."""
    send_s: float
    """Handing messages to the agent, and waiting at the end until they are received."""


@dataclass(frozen=True, slots=True)
class PipelineReport:
    """The times of the last step of all ranks."""

    step_s: float
    """Of the slowest rank, without the averaging of the loss."""
    stages: tuple[StageReport, ...]
    """Of each rank."""
    bubble: float
    """The part of the ranks' time, from 0 to 1, in which they did not compute."""
    schedule_bubble: float
    """The same if all stages and all passes take as long and messages take no time: for gpipe and
    1f1b it is (P - 1) / (M + P - 1)."""


class Pipeline:
    """Trains a model in stages: each rank computes some layers, and passes activations on.

    A batch is cut into micro-batches, so that several ranks compute at the same time. Real
    activations and gradients cross stages, each in its own dtype. The loss and the gradients are
    those of one process with the whole batch, to sums in another order::

        stage = pmesh.mlx.split_layers(model, mesh)
        pipeline = pmesh.mlx.Pipeline(stage, mesh, loss, micro_batch_size=4)
        for x, y in batches:
            value, gradients = pipeline.step(x, y)
            optimizer.update(stage, gradients)
            mx.eval(stage.parameters(), optimizer.state)

    A lost rank takes its stage along. Every rank's step then raises an error; begin again from a
    checkpoint. After any error of a step, make a new pipeline.

    Args:
        stage: what `split_layers` returned, with the same mesh.
        mesh: the mesh or a group, such as one dimension of a `DeviceMesh`.
        loss: takes the output of the model and y for some rows, and returns their mean loss.
        micro_batch_size: the rows of a micro-batch; the last one of a batch may have fewer.
        schedule: "gpipe", "1f1b", "eager_1f1b", "interleaved" or "zero_bubble".
        recompute: compute a stage's activations again in the backward pass, from its input. False
            keeps them, which takes more memory and less time.
        send_as: "bfloat16" sends float32 activations and gradients as bfloat16. A stage then gets
            its input as bfloat16. "int8" sends them in a quarter of the bytes, with a scale for
            each 256 values; a stage then gets float32, off by at most 1/254 of the most of 256.
        communication: "direct": messages go from stage to stage, and nobody else keeps them.
        timeout_s: for each message and op; a message may wait for most of a step.

    Raises:
        UsageError: an argument is not as above, the ranks' arguments differ, or their stages are
            not those of one model.
        PmeshError: as for `all_gather`.
    """

    def __init__(
        self,
        stage: Stage,
        mesh: Collectives,
        loss: Callable[[Any, Any], mx.array],
        *,
        micro_batch_size: int = 4,
        schedule: ScheduleName = "1f1b",
        recompute: bool = True,
        send_as: SendAs | None = None,
        communication: Literal["direct"] = "direct",
        timeout_s: float = 600.0,
    ) -> None:
        check_whole("micro_batch_size", micro_batch_size)
        check_communication(communication)
        if not isinstance(stage, Stage):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"stage is what split_layers returns, not a {type(stage).__name__}")
        if not callable(loss):
            raise UsageError(f"loss is a function of the output and y, not {loss!r}")
        if send_as not in (None, *get_args(SendAs)):
            raise UsageError(f"send_as is 'bfloat16', 'int8' or None, not {send_as!r}")
        layout = stage.layout
        make_schedule(schedule, mesh.size, 1, len(layout.chunks))
        self._mesh, self._timeout_s = mesh, check_timeout(timeout_s)
        self._settings = _Settings(
            stage, mesh, loss, micro_batch_size, schedule, send_as, self._timeout_s
        )
        self._passes = {s: Passes(stage, s, recompute=recompute) for s in layout.chunks}
        self._place = mesh.rank, mesh.size
        own = [list(layout.chunks), list(layout.counts), micro_batch_size, schedule, send_as]
        first = secrets.randbelow(_STEPS)
        found = mesh.all_gather_object([own, first], self._timeout_s)
        for rank, (theirs, _) in enumerate(found):
            if theirs[1:] != own[1:] or theirs[0] != list(range(rank, layout.stages, mesh.size)):
                raise UsageError(
                    f"rank {rank} has the stages {theirs[0]} of {theirs[1]} layers and the "
                    f"arguments {theirs[2:]}; rank {mesh.rank} has {own[0]} of {own[1]} and "
                    f"{own[2:]}: all must split one model with one mesh, and pass the same ones"
                )
        self._step = int(found[0][1])
        self._failed = False
        self._rows = 0
        self._report: PipelineReport | None = None

    @property
    def rows(self) -> int:
        """The rows of the last batch, the same on all ranks: its weight in an average."""
        return self._rows

    def report(self) -> PipelineReport:
        """Return where the time of the last step went, on all ranks. It asks nobody.

        Raises:
            UsageError: there was no step yet.
        """
        if self._report is None:
            raise UsageError("there was no step yet")
        return self._report

    def step(self, x: Any = None, y: Any = None) -> tuple[float, dict[str, Any]]:  # noqa: ANN401 - trees of arrays
        """Return the mean loss of the batch, and the gradients of this rank's stage.

        Args:
            x: the input; its rows are its first dimension. Only rank 0 reads it.
            y: the targets: an array, or a container of arrays, with as many rows. Only the last
                rank reads it.

        Returns:
            The loss, the same on all ranks, and gradients in the form of
            `stage.trainable_parameters()`, evaluated, in the dtypes of the weights.

        Raises:
            UsageError: the first rank has no x, the last one no y, these are no arrays of MLX, or
                they differ in rows: on all ranks, before anything is sent.
            RosterChanged: ranks are lost, and their stages too.
            PmeshError: as for `recv`.
        """
        if self._failed or (self._mesh.rank, self._mesh.size) != self._place:
            self._refuse()
        self._failed = True  # until the step has ended
        try:
            total = self._agree_on_rows(x, y)
        except UsageError:  # on all ranks: nothing was sent
            self._failed = False
            raise
        step = _Step(self._settings, self._passes, self._step, (x, y, total))
        gradients = step.run()
        self._before_exchange()
        value, self._report = step.exchange()
        if self._mesh.size != self._place[1]:
            self._refuse()
        self._failed = False
        self._step, self._rows = self._step + 1, total
        return value, gradients

    # --- inside

    def _before_exchange(self) -> None:
        """Do what must have ended on all ranks when the step ends; for subclasses."""

    def _refuse(self) -> NoReturn:
        raise RosterChanged(
            "a step of this pipeline has failed, or a rank is lost with its stage: load a "
            "checkpoint on all ranks, split the model and make a new Pipeline"
        )

    def _agree_on_rows(self, x: Any, y: Any) -> int:  # noqa: ANN401 - as above
        is_array = x is None or isinstance(x, mx.array)  # a stage takes one array
        own = np.array([_rows_of(x) if is_array else NO_ARRAYS, _rows_of(y)])
        found = self._mesh.all_gather(own[None], self._timeout_s)
        return check_rows(int(found[0, 0]), int(found[-1, 1]), self._mesh.size - 1)


def _rows_of(tree: Any) -> int:  # noqa: ANN401 - a tree of arrays
    """Return the rows of its arrays, or what else `check_rows` knows."""
    if tree is None:
        return NOTHING
    leaves: list[object] = list(as_arrays(tree).values())
    if not all(isinstance(a, mx.array) and a.ndim for a in leaves):
        return NO_ARRAYS
    rows = {len(a) for a in as_arrays(tree).values()}
    return rows.pop() if len(rows) == 1 else DIFFERENT


@dataclass(frozen=True, slots=True)
class _Settings:
    """What a pipeline is given."""

    stage: Stage
    mesh: Collectives
    loss: Callable[[Any, Any], mx.array]
    micro_batch_size: int
    schedule: ScheduleName
    send_as: str | None
    timeout_s: float


class _Step:
    """One step of a pipeline."""

    def __init__(
        self,
        settings: _Settings,
        passes: dict[int, Passes],
        number: int,
        batch: tuple[Any, Any, int],
    ) -> None:
        self._of, self._passes = settings, passes
        self._mesh, self._stage = settings.mesh, settings.stage
        self._first_tag = number % _STEPS * _TAGS_PER_STEP
        self._x, self._y, self._total = batch
        size, total = settings.micro_batch_size, self._total
        self._bounds = [(i, min(i + size, total)) for i in range(0, total, size)]
        layout = self._stage.layout
        self._stages = layout.stages
        self._schedule: Schedule = make_schedule(
            settings.schedule, self._mesh.size, len(self._bounds), len(layout.chunks)
        )
        self._actions = self._schedule[self._mesh.rank]
        self._splits_backward = any(action.kind == "W" for action in self._actions)
        self._coming = iter([m for a in self._actions for m in self._messages(a)])
        self._asked: deque[tuple[Action, Handle[mx.array]]] = deque()
        self._sending: deque[Handle[None]] = deque()
        self._here: dict[Action, mx.array] = {}  # from a stage of this rank to another
        self._sums: dict[Name, mx.array] = {}
        self._value = 0.0
        self._took_s = self._wait_s = self._send_s = 0.0

    def run(self) -> dict[str, Any]:
        """Compute and send; return the gradients of the stage."""
        began = time.perf_counter()
        try:
            self._ask()
            for action in self._actions:
                self._do(action)
            self._settle(0)
        finally:
            for passes in self._passes.values():
                passes.clear()
        self._took_s = time.perf_counter() - began
        return self._gradients()

    def _do(self, action: Action) -> None:
        passes: Passes = self._passes[action.stage]
        kind, stage, i = action
        is_last = stage == self._stages - 1
        if kind == "F":
            begin, end = self._bounds[i]
            x = self._x[begin:end] if stage == 0 else self._take(Action("F", stage - 1, i))
            loss = self._loss_of(begin, end) if is_last else None
            output = passes.forward(i, x, loss, (end - begin) / self._total)
            if not is_last:
                self._give(action, output)
        elif kind == "B":
            after = None if is_last else self._take(Action("B", stage + 1, i))
            before, value = passes.backward(i, after)
            self._value += value
            if stage:
                self._give(action, before)
        if kind == "W" or (kind == "B" and not self._splits_backward):
            self._add(passes.gradients(i))

    def _loss_of(self, begin: int, end: int) -> Callable[[mx.array], mx.array]:
        def cut(a: mx.array) -> mx.array:
            return a[begin:end]

        y = utils.tree_map(cut, self._y)
        return lambda output: self._of.loss(output, y)

    def _add(self, gradients: dict[Name, mx.array]) -> None:
        for name, gradient in gradients.items():
            is_narrow = gradient.dtype.size < mx.float32.size
            wide = gradient.astype(mx.float32) if is_narrow else gradient
            self._sums[name] = self._sums[name] + wide if name in self._sums else wide
        evaluate([self._sums])

    # --- messages

    def _messages(self, action: Action) -> Iterator[Action]:
        """Yield what an action needs of other ranks."""
        size = self._mesh.size
        return (m for m in needs(action, self._stages) if (m.stage - action.stage) % size)

    def _tag(self, message: Action) -> int:
        return self._first_tag + 2 * message.stage + (message.kind == "B")

    def _ask(self) -> None:
        while len(self._asked) < AHEAD and (message := next(self._coming, None)) is not None:
            handle = self._mesh.recv(
                message.stage % self._mesh.size,
                self._tag(message),
                self._of.timeout_s,
                like=mx.zeros(0),
                async_op=True,
            )
            self._asked.append((message, handle))

    def _take(self, message: Action) -> mx.array:
        if message in self._here:
            return self._here.pop(message)
        began = time.perf_counter()
        _, handle = self._asked.popleft()
        found = handle.wait()
        self._wait_s += time.perf_counter() - began
        self._ask()
        if self._of.send_as == "int8" and found.dtype == mx.uint8:
            return mx.array(from_int8_untrusted(cast("Values", np.array(found))))
        return found

    def _give(self, message: Action, x: mx.array) -> None:
        to = (message.stage + (1 if message.kind == "F" else -1)) % self._mesh.size
        is_wide = x.dtype == mx.float32
        if self._of.send_as == "bfloat16" and is_wide:
            x = x.astype(mx.bfloat16)
        if to == self._mesh.rank:
            self._here[message] = x
            return
        evaluate([x])
        sent: object = x
        if self._of.send_as == "int8" and is_wide:
            sent = to_int8(cast("Values", np.array(x, copy=False)))
        began = time.perf_counter()
        self._settle(MOST_SENDING - 1)
        handle = self._mesh.send(sent, to, self._tag(message), self._of.timeout_s, async_op=True)
        self._sending.append(handle)
        self._send_s += time.perf_counter() - began

    def _settle(self, most: int) -> None:
        """Wait until at most so many messages are not received."""
        began = time.perf_counter()
        while len(self._sending) > most:
            self._sending.popleft().wait()
        if not most:
            self._send_s += time.perf_counter() - began

    # --- the end of a step

    def _gradients(self) -> dict[str, Any]:
        """Return the gradients of the stage, those of tied weights added up among their ranks."""
        whole = as_arrays(self._stage.trainable_parameters())
        named = {f"layers.{i}.{path}": x for (i, path), x in self._tied().items()}
        found = {path: named[path].astype(whole[path].dtype) for path in whole}
        evaluate([found])
        if not found:
            return {}
        return cast("dict[str, Any]", utils.tree_unflatten(list(found.items())))

    def _tied(self) -> dict[Name, mx.array]:
        """All ranks that have a module add in the order of ranks, so they get the same bits."""
        mesh, timeout_s = self._mesh, self._of.timeout_s
        rank, tag = int(mesh.rank), self._first_tag + _TAGS_PER_STEP - 1
        found = dict(self._sums)
        for name, own in sorted(self._sums.items(), key=lambda item: item[0]):
            holders = self._stage.layout.holders[name[0]]
            if len(holders) == 1:
                continue
            others = [other for other in holders if other != rank]
            sending = [mesh.send(own, to, tag, timeout_s, async_op=True) for to in others]
            parts = {r: mesh.recv(r, tag, timeout_s, like=own) for r in others}
            parts[rank] = own
            for handle in sending:
                handle.wait()
            added = parts[holders[0]]
            for other in holders[1:]:
                added = added + parts[other]
            found[name] = added
        return found

    def exchange(self) -> tuple[float, PipelineReport]:
        """Return the loss of the batch, and the times of all ranks."""
        compute_s = max(0.0, self._took_s - self._wait_s - self._send_s)
        row = np.array([[self._value, self._took_s, compute_s, self._wait_s, self._send_s]])
        rows = self._mesh.all_gather(row, self._of.timeout_s)
        step_s = float(rows[:, 1].max())
        report = PipelineReport(
            step_s,
            tuple(StageReport(*times) for times in rows[:, 2:].tolist()),
            1 - float(rows[:, 2].sum()) / (step_s * len(rows)),
            bubble(self._schedule),
        )
        if isinstance(self._mesh, Mesh):
            self._mesh.report(bubble=report.bubble, compute_s=compute_s, wait_s=self._wait_s)
        return math.fsum(rows[:, 0].tolist()), report
