"""An agent for n trainers in one process: real sockets and arenas, threads, numpy for the ring."""

import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

import pmesh
from pmesh.core.ops.kinds import BOUND_KINDS, extent_of, ring_codec_name
from pmesh.core.values import Verdict
from pmesh.core.wire.link import Call
from pmesh.core.wire.local import (
    ENTERS,
    ArenaGone,
    Compresses,
    Connect,
    DropArena,
    Joined,
    Leave,
    OpDone,
    OpFailed,
    Refused,
    StartOp,
    StillWaiting,
    WantArena,
    World,
)
from pmesh.ids import OpNumber, TrainerId
from tests.worlds.fake_ops import Given, Numbers, coded_result_of, result_of
from tests.worlds.scripted_agent import PATIENCE_S, VIEW, Listening, Trainer

T = TypeVar("T")
_ROOTED = {"broadcast", "reduce", "gather", "scatter"}


@dataclass
class Outcome:
    """How an op has ended, the same for all of `trainers`."""

    trainers: tuple[TrainerId, ...]
    verdict: Verdict | None = None


@dataclass
class Op:
    started: dict[TrainerId, Given] = field(default_factory=dict)
    root: TrainerId | None = None
    outcome: Outcome | None = None
    held: bool = False
    """Its lost root's agent still holds the result (O2)."""


@dataclass
class Job:
    roster: list[TrainerId] = field(default_factory=list)
    founders: tuple[TrainerId, ...] = ()
    ops: dict[int, Op] = field(default_factory=dict)
    entering: dict[TrainerId, Given] = field(default_factory=dict)
    trainers: dict[TrainerId, Trainer] = field(default_factory=dict)
    began: bool = False
    raises: bool = False
    lost: bool = False
    """Somebody, since the last op; only where `raises`."""

    def world(self, me: TrainerId, trainers: Sequence[TrainerId]) -> World:
        rank = trainers.index(me) if me in trainers else -1
        return World(rank, tuple(trainers), tuple(f"mac-{i}" for i in trainers))

    def op(self, number: int) -> Op:
        return self.ops.setdefault(number, Op())


class FakeAgent(Listening):
    """All ranks of each job live here; whoever is lost leaves a smaller job."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self._changed = threading.Condition()
        self.jobs: dict[str, Job] = {}
        self.calls: list[Call] = []
        """Of the first trainer, in order."""
        self.left: list[TrainerId] = []
        """Trainers that said Leave."""
        self.crashed: list[TrainerId] = []
        self.wanted: list[int] = []
        """The sizes of input arenas asked for."""
        self.lends = True
        """Whether a result stays where it is, if the trainer would have it so."""
        self.evict = False
        """Whether each output arena is taken back before the next op."""
        self.retained: list[tuple[memoryview, bytes]] = []
        """What roots have broadcast, and what it was: it must stay so (O2)."""
        self.before_op: Callable[[Job, int, Call], None] = lambda *_: None
        """Called when all ranks have started an op, before it is run; may expel some."""
        self.entered: list[TrainerId] = []
        self.compression = ""
        """Of gradients, where trainers don't say it."""
        self.shown: list[str] = []
        """What trainers say of their compression."""

    def serve(self, trainer: Trainer) -> None:
        request = trainer.receive()
        assert isinstance(request, Connect)
        with self._changed:
            job = self.jobs.setdefault(request.job, Job())
            if job.began and not job.roster:
                job = self.jobs[request.job] = Job()  # the next run of that name
            trainer.id = TrainerId(len(job.trainers))
            job.trainers[trainer.id] = trainer
            job.raises = job.raises or request.terms.on_loss == "raise"
            if not job.began:
                self._wait_for_job(trainer, request, job)
            if not job.began:
                refusal = Verdict("NotEnoughRanks", "1 of 2 came; mac-2 has none")
                if self._is_broken(request):
                    refusal = Verdict("RankLost", "rank 0 (mac-0) is lost; not all had come")
                trainer.send(Refused(refusal))
                return
            running = trainer.id not in job.founders
            trainer.told = job.world(trainer.id, job.roster if running else job.founders)
            trainer.send(Joined(trainer.told, VIEW, self.compression))
        self._serve_rank(trainer, job)

    def expel(self, job: Job, trainer: TrainerId, *, superseded: bool = False) -> None:
        """Lose a rank: its connection ends, or it is told that it was superseded."""
        job.roster.remove(trainer)
        self._changed.notify_all()
        job.lost = job.raises
        lost = job.trainers[trainer]
        lost.superseded = superseded
        if not superseded:
            lost.connection.shutdown(socket.SHUT_RDWR)

    def wait_until(self, happened: Callable[[], bool]) -> None:
        """Until something is so that changes with requests."""
        with self._changed:
            assert self._changed.wait_for(happened, PATIENCE_S)

    def _wait_for_job(self, trainer: Trainer, request: Connect, job: Job) -> None:
        job.roster.append(trainer.id)
        if len(job.roster) >= request.wait_for:
            job.began, job.founders = True, tuple(job.roster)
        self._changed.notify_all()
        self._changed.wait_for(
            lambda: job.began or self._is_broken(request), min(request.timeout_s, PATIENCE_S)
        )
        if not job.began:
            job.roster.remove(trainer.id)

    def _is_broken(self, request: Connect) -> bool:
        """Whether it is of a group one of whose ranks is lost."""
        group = request.group_of
        return group is not None and not {*group.members} <= {*self.jobs[group.job].roster}

    def _serve_rank(self, trainer: Trainer, job: Job) -> None:
        while True:
            match request := trainer.receive():
                case WantArena(nbytes):
                    self.wanted.append(nbytes)
                    arena = self.grant(trainer, "input", nbytes)
                    trainer.inputs[arena.number] = arena
                case DropArena(number) if number in trainer.lent:
                    trainer.outputs.insert(0, trainer.lent.pop(number))
                case DropArena(number):
                    del trainer.inputs[number]
                case Compresses(text):
                    self.shown.append(text)
                case StartOp():
                    if ring_codec_name(request.call.compression):
                        assert request.call.kind == "all_reduce"
                    if self.evict and trainer.outputs:
                        trainer.send(ArenaGone(trainer.outputs.pop().number))
                    self._run_op(trainer, job, request)
                case Leave() | None:
                    self._say_goodbye(trainer, job, left=request is not None)
                    return
                case _:
                    raise AssertionError(request)

    def _say_goodbye(self, trainer: Trainer, job: Job, *, left: bool) -> None:
        with self._changed:
            (self.left if left else self.crashed).append(trainer.id)
            if trainer.id in job.roster:
                self.expel(job, trainer.id, superseded=True)  # it will never hear of it
            self._settle(job)

    def _run_op(self, trainer: Trainer, job: Job, request: StartOp) -> None:
        given = self._given(trainer, request)
        with self._changed:
            if trainer.id == 0:
                self.calls.append(request.call)
            number = request.op
            if number == ENTERS:
                assert request.call.kind == "sync"
                trainer.superseded = False
                job.entering[trainer.id] = given
            elif not trainer.superseded:
                assert number == trainer.next_op
                op = job.op(number)
                op.started[trainer.id] = given
                if request.call.kind in _ROOTED and op.root is None:
                    op.root = trainer.told.trainers[request.call.root]
            self._settle(job)
            number = self._await_outcome(trainer, job, number)
            op = job.op(number)
            if trainer.superseded or op.outcome is None:
                verdict = Verdict("HistorySuperseded", "the job has gone on without this rank")
                trainer.send(OpFailed(number, verdict, world=World(-1, (), ())))
                return
            trainer.next_op = number + 1
            self._answer(trainer, job, number, op.outcome, op)

    def _await_outcome(self, trainer: Trainer, job: Job, number: int) -> OpNumber:
        """Until the op has ended; returns its number, also for one that entered in it."""

        def entered_in() -> int:
            entered = (n for n, op in job.ops.items() if trainer.id in op.started)
            return max(entered, default=-1) if number == ENTERS else number

        def ended() -> bool:
            return trainer.superseded or (
                trainer.id not in job.entering and job.op(entered_in()).outcome is not None
            )

        self._changed.wait_for(ended, PATIENCE_S)
        return OpNumber(entered_in())

    def _settle(self, job: Job) -> None:
        """End every op that can end."""
        for number, op in [*job.ops.items()]:
            while op.outcome is None and job.roster and {*job.roster} <= op.started.keys():
                self._enter(job, op)
                call = next(iter(op.started.values())).request.call
                before = [*job.roster]
                self.before_op(job, number, call)
                if job.roster == before or not job.roster:
                    self._end(job, number, op)
        self._changed.notify_all()

    def _enter(self, job: Job, op: Op) -> None:
        if all(request.call.kind == "sync" for request, *_ in op.started.values()):
            for trainer, given in job.entering.items():
                job.roster.append(trainer)
                op.started[trainer] = given
                self.entered.append(trainer)
            job.entering.clear()

    def _end(self, job: Job, number: int, op: Op) -> None:
        calls = {t: op.started[t].request.call for t in job.roster}
        verdict = None
        root_is_lost = op.root is not None and op.root not in job.roster and not op.held
        is_bound = any(call.kind in BOUND_KINDS for call in calls.values())
        expected = {job.trainers[t].told.trainers for t in job.roster}
        if job.lost or root_is_lost:
            verdict, job.lost = Verdict("RankLost", "rank 0 (mac-0) is lost"), False
        elif len({*calls.values()}) > 1:
            text = " but ".join(f"rank {job.roster.index(t)}: {call}" for t, call in calls.items())
            verdict = Verdict("OpMismatch", f"op {number}: {text}")
        elif is_bound and expected != {tuple(job.roster)}:  # O4
            verdict = Verdict("RosterChanged", f"op {number} depends on who takes part")
        op.outcome = Outcome(tuple(job.roster), verdict)

    def _answer(
        self, trainer: Trainer, job: Job, number: OpNumber, outcome: Outcome, op: Op
    ) -> None:
        if trainer.id not in outcome.trainers:
            return  # it was lost, and does not listen any more
        world = job.world(trainer.id, outcome.trainers)
        news = world if world != trainer.told else None
        trainer.told = world
        if outcome.verdict is not None:
            trainer.send(OpFailed(number, outcome.verdict, world=news))
            return
        root = None
        if op.root is not None:
            # A lost root's result was held: it stands where the first rank's would.
            root = outcome.trainers.index(op.root) if op.root in outcome.trainers else 0
        given = [op.started[t] for t in outcome.trainers]
        if op.held and op.root is not None:
            given[0] = op.started[op.root]
        rank, clipped = outcome.trainers.index(trainer.id), 0
        call = given[rank].request.call
        if call.kind == "all_reduce" and ring_codec_name(call.compression):
            result, clipped = coded_result_of(given, rank)
        else:
            result = result_of(given, rank, root)
        is_source = given[0].request.call.kind == "broadcast" and op.root == trainer.id
        output = self._write(trainer, result) if result.size and not is_source else -1
        trainer.send(StillWaiting(number, 10.0, ("rank 1 (mac-1)",)))
        lent = self.lends and output >= 0 and op.started[trainer.id].request.borrows
        if lent:
            trainer.lent[output] = trainer.outputs.pop()
        trainer.send(OpDone(number, output, news, clipped, lent))

    def _given(self, trainer: Trainer, request: StartOp) -> Given:
        values = self._input(trainer, request)
        if request.residual < 0:
            return Given(request, values)
        read, write = (
            np.frombuffer(trainer.inputs[number].memory, np.float32, request.count)
            for number in (request.residual, request.residual_out)
        )
        return Given(request, values, read.copy(), write)

    def _input(self, trainer: Trainer, request: StartOp) -> Numbers:
        dtype = np.dtype(request.wire_dtype)
        told = trainer.told
        gives = extent_of(request, rank=told.rank, size=len(told.trainers)).gives
        if not gives:
            assert request.arena == -1
            return np.zeros(0, dtype)
        assert request.offset % dtype.itemsize == 0
        end = request.offset + gives * dtype.itemsize
        memory = trainer.inputs[request.arena].memory[request.offset : end]
        if request.call.kind == "broadcast":
            self.retained.append((memory, bytes(memory)))
        return np.frombuffer(memory, dtype).copy()

    def _write(self, trainer: Trainer, result: Numbers) -> int:
        # Not the last one: its result may be read until this op has ended.
        free = [arena for arena in trainer.outputs[:-1] if arena.nbytes >= result.nbytes]
        output = free[0] if free else self.grant(trainer, "output", result.nbytes)
        trainer.outputs = [*(arena for arena in trainer.outputs if arena is not output), output]
        np.frombuffer(output.memory, result.dtype, result.size)[:] = result
        return output.number


def run_ranks(home: Path, size: int, program: Callable[[pmesh.Mesh], T]) -> list[T]:
    """Run the program on `size` ranks, each a thread of its own; results by rank."""

    def rank(_: int) -> tuple[int, T]:
        with pmesh.connect("job", wait_for=size, home=home) as mesh:
            return mesh.rank, program(mesh)

    with ThreadPoolExecutor(size) as pool:
        results: Sequence[tuple[int, T]] = list(pool.map(rank, range(size)))
    return [result for _, result in sorted(results, key=lambda pair: pair[0])]


def loses(
    agent: FakeAgent, losses: dict[int, TrainerId], *, superseded: bool = False
) -> Callable[[Job, int, Call], None]:
    """For `before_op`: before each number's op is run, a trainer is expelled."""

    def before_op(job: Job, number: int, call: Call) -> None:
        del call
        if number in losses:
            agent.expel(job, losses.pop(number), superseded=superseded)

    return before_op
