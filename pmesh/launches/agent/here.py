"""The ranks of one launch on this machine: their processes, and their output."""

import math
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import trio

from pmesh.agent.containment import Contain
from pmesh.core.wire.stream import PART_BYTES, Stream
from pmesh.errors import ProtocolError, UsageError
from pmesh.home_paths import COPY_VARIABLE, remove_tree
from pmesh.ids import Member, PathName, path_name
from pmesh.launches.agent.checks import Found
from pmesh.launches.agent.groups import PipedChild, start_piped_group
from pmesh.launches.agent.spool import Spool
from pmesh.launches.rules import part as decide
from pmesh.launches.rules.engines import environment_of, ranks_untrusted, settings_of
from pmesh.launches.rules.lines import ERROR, MACHINE, OUT, LineSplitter, note
from pmesh.launches.rules.part import (
    LocalRanks,
    PartStep,
    ReportEnd,
    Say,
    SignalRank,
    StartRank,
    Warn,
)
from pmesh.launches.rules.restarts import exit_code
from pmesh.launches.wire.messages import (
    AnyLaunchMessage,
    BeginRanks,
    Command,
    LaunchPart,
    PrepareLaunch,
    RankEnded,
    RankFails,
)

DRAIN_S = 1.0  # a process that has left the group may hold a pipe open for ever
UNSTARTED_S = 60.0  # the starter begins, or cancels, within seconds
UNSTARTED_SYNCED_S = 3600.0  # longer with --sync: others may still take files over a slow line
_FAILED = 1
_NOT_FOUND = 127  # as in shells
_READ_BYTES = 64 * 1024


class PartHere:
    """The part of a launch that this machine runs."""

    def __init__(
        self,
        prepare: PrepareLaunch,
        found: Found,
        starter: Member,
        *,
        link: object | None,
        home: Path,
        spool: Spool,
        begin: int,
        send: Callable[[AnyLaunchMessage], None],
        nursery: trio.Nursery,
        contain: Contain,
    ) -> None:
        self.prepare = prepare
        self.starter = starter
        self.spool = spool
        self.since = trio.current_time()
        elastic = prepare.terms.engine == "pmesh"
        restarts = prepare.terms.restarts if elastic else 0
        self.state = LocalRanks(restarts=restarts, grace_s=prepare.terms.grace_s)
        self._unstarted_s = UNSTARTED_S if prepare.command.tree is None else UNSTARTED_SYNCED_S
        self.over = trio.Event()
        """Set once all ranks have ended, or the launch was cancelled before they began."""
        self._link = link
        self._found = found
        self._home = home
        self._send = send
        self._nursery = nursery
        self._contain = contain
        self._begun: BeginRanks | None = None
        self._begun_over: object | None = None
        """The link over which that has come last."""
        self._children: dict[int, PipedChild] = {}
        self._numbers: dict[int, int] = {}
        """The `mesh.rank` of each rank whose script has, or had, one."""
        self._reports = list[tuple[int, RankEnded | RankFails]]()
        """The reports, sent or not yet, each with the offset up to which output must go first."""
        self._reported = 0
        self._stream = Stream(begin=begin, again_s=math.inf)
        self._taken = 0
        """The offset in the spool behind what was written to the stream."""
        self._connected = True
        self._changed = trio.Event()
        self._scope = trio.CancelScope()
        self._input = bytearray()
        """What rank 0 has not taken."""

    @property
    def launch(self) -> PathName:
        return self.prepare.launch

    @property
    def job(self) -> str:
        return self.prepare.job

    @property
    def command(self) -> Command:
        """The command, as the starter has given it."""
        return self.prepare.command

    @property
    def names(self) -> tuple[str, ...]:
        return self.prepare.names

    @property
    def counts(self) -> tuple[int, ...]:
        """How many ranks each machine runs; 1 for the others, of which it is not known."""
        return tuple(
            self.prepare.ranks if seat == self.prepare.seat else 1
            for seat in range(len(self.names))
        )

    @property
    def code(self) -> int | None:
        """The exit code of its first rank that failed, else 0; None while one runs."""
        codes = [rank.code for rank in self.state.ranks.values()]
        if not codes or None in codes:
            return None
        return next((exit_code(code) for code in codes if code), 0)

    @property
    def written(self) -> int:
        """The offset behind all output that was sent."""
        return self._stream.written

    @property
    def refusal(self) -> str:
        """Return "": its starter alone knows of a launch that was refused."""
        return ""

    @property
    def has_begun(self) -> bool:
        return bool(self.state.ranks)

    @property
    def is_over(self) -> bool:
        return self.over.is_set()

    @property
    def phase(self) -> str:
        """The state of the launch, for a person."""
        if not self.has_begun:
            return "over" if self.is_over else "asking"
        return "over" if self.is_over else "ending" if self.state.ends else "running"

    async def run(self) -> None:
        """Act on deadlines and send the output, until all has ended and the starter has read it."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send_output)
                await self._keep_time()
                nursery.cancel_scope.cancel()
        remove_tree(self._files.parent, self._files.name)

    @property
    def _files(self) -> Path:
        """The directory of the engine's files, within that of the output, which we have named."""
        return self.spool.directory / "files"

    def close(self) -> None:
        """Forget the output of a launch that is over."""
        self._scope.cancel()
        self.spool.close()

    # --- what the starter says

    def begin(self, message: BeginRanks) -> bool:
        """Start the ranks, and return True if they are started now.

        Raises ProtocolError if they were started already. A starter may repeat it once over each
        other link: it does not know whether the first one was lost.
        """
        ranks = ranks_untrusted(self.prepare, message)
        if self.has_begun:
            if message != self._begun or self._link is self._begun_over:
                raise ProtocolError("a launch began twice")
            self._begun_over = self._link
            return False
        if self.is_over:  # others kept the starter waiting, or 'pmesh stop' here crossed it
            for rank in ranks:
                code = -signal.SIGTERM
                self._send(RankEnded(self.launch, message.generation, rank, code))
            return False
        self._begun, self._begun_over = message, self._link
        now = trio.current_time()
        self._apply(decide.begin(self.state, message.generation, ranks, now=now))
        return True

    def end(self, number: int, *, is_lost: bool = False) -> None:
        """End all ranks by a signal, or cancel a launch that has not begun."""
        if self.has_begun:
            now = trio.current_time()
            self._apply(decide.end(self.state, number, now=now, is_lost=is_lost))
        else:
            self.over.set()
            self._tell()

    def give_up(self, generation: int, rank: int) -> None:
        """Stop restarting a rank that fails, as the starter has decided."""
        if generation == self.state.generation:
            self._apply(decide.give_up(self.state, rank))

    def rank_is(self, session: int, number: int) -> None:
        """Note the rank that the program of this session now has in its job."""
        for rank, child in self._children.items():
            if child.session == session:
                self._numbers[rank] = number

    def op_completed(self, session: int, *, syncs: bool) -> None:
        """Note that a program of this session has completed an op; `syncs` if one was a `sync`."""
        for rank, child in self._children.items():
            if child.session == session:
                self._apply(decide.op_completed(self.state, rank, syncs=syncs))

    def take_part(self, message: LaunchPart) -> None:
        """Take input for rank 0, and note which output the starter has stored."""
        self._input += self._stream.receive_untrusted(message.part, now=trio.current_time())
        self._send_parts()
        self._tell()

    def follow(self, link: object | None) -> None:
        """Use this link with the starter; send again what was on its way over an earlier one."""
        if link is self._link:
            return
        if self._link is not None:
            self._lose_starter()
        self._link = link
        if link is not None:
            self._connected = True
            self._stream.resume()
            self._send_parts()
            # Nobody acknowledges a report. Of each rank only the last one still holds.
            reports = (report for _, report in self._reports[: self._reported])
            for report in {report.rank: report for report in reports}.values():
                self._send(report)
            self._tell()

    def _lose_starter(self) -> None:
        """End all ranks, unless they are detached: the link with the starter has ended."""
        self._connected = False
        if not self.prepare.terms.detach and not self.is_over:
            self._append(note(MACHINE, "the starter is lost: all ranks here are ended"))
            self.end(signal.SIGTERM, is_lost=True)

    # --- decisions, carried out

    def _apply(self, step: PartStep) -> None:
        self.state = step.part
        for action in step.actions:
            match action:
                case StartRank(rank):
                    self._nursery.start_soon(self._run_rank, rank)
                case SignalRank(rank, number):
                    child = self._children.get(rank)
                    if child is not None:
                        child.send_signal(number)
                case ReportEnd(rank, code):
                    launch, generation = self.prepare.launch, self.state.generation
                    number = self._numbers.get(rank, -1)
                    ended = RankEnded(launch, generation, rank, code, number)
                    self._reports.append((self.spool.end, ended))
                case Warn(rank, how):
                    launch, generation = self.prepare.launch, self.state.generation
                    number = self._numbers.get(rank, -1)
                    fails = RankFails(launch, generation, rank, how, number)
                    self._reports.append((self.spool.end, fails))
                case Say(rank, text):
                    self._append(note(self._numbers.get(rank, rank), text))
        if self.has_begun and self.state.is_over:
            self.over.set()
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    @property
    def _is_done(self) -> bool:
        is_sent = (self._reported, self._taken) == (len(self._reports), self.spool.end)
        is_read = is_sent and self._stream.is_acknowledged
        awaited = self._connected or self.prepare.terms.detach
        return self.is_over and (is_read or not awaited)

    async def _keep_time(self) -> None:
        while not self._is_done:
            unstarted_at = self.since + self._unstarted_s
            asking = self.phase == "asking"
            deadline = unstarted_at if asking else decide.next_deadline(self.state)
            with trio.move_on_at(float("inf") if deadline is None else deadline):
                await self._changed.wait()
            now = trio.current_time()
            if self.phase == "asking" and now >= unstarted_at:
                self.end(signal.SIGTERM)
            else:
                self._pass_time(now)

    def _pass_time(self, now: float) -> None:
        step = decide.pass_time(self.state, now=now)
        if step.actions:
            self._apply(step)

    # --- processes

    async def _run_rank(self, rank: int) -> None:
        codes = list[int]()
        with self._contain(f"rank {rank} of a launch"):
            codes.append(await self._run_process(rank))
        self._children.pop(rank, None)
        code = codes[0] if codes else _FAILED
        self._apply(decide.rank_ended(self.state, rank, code, now=trio.current_time()))

    async def _run_process(self, rank: int) -> int:
        reads = rank == 0 and not self.prepare.terms.detach
        try:
            environment = self._environment(rank)
            async with start_piped_group(
                self._found.words, cwd=self._found.cwd, environment=environment, reads=reads
            ) as child:
                self._children[rank] = child
                self._numbers.pop(rank, None)
                # A signal may have come while the process was started, and the grace be over.
                if self.state.ranks[rank].is_given_up or self.state.is_killed:
                    child.send_signal(signal.SIGKILL)
                elif self.state.ends:
                    child.send_signal(signal.SIGTERM)
                return await self._follow(rank, child)
        except (OSError, UsageError) as e:
            why = e.strerror if isinstance(e, OSError) else str(e)
            self._append(note(rank, f"{self._found.words[0]} can't be started: {why}"))
            return _NOT_FOUND

    async def _follow(self, rank: int, child: PipedChild) -> int:
        async with trio.open_nursery() as readers:
            readers.start_soon(self._store, child.stdout, rank, LineSplitter(rank, OUT))
            readers.start_soon(self._store, child.stderr, rank, LineSplitter(rank, ERROR))
            feeding = trio.CancelScope()
            if child.stdin is not None:
                readers.start_soon(self._feed_input, child.stdin, feeding)
            code = await child.wait()
            feeding.cancel()
            readers.cancel_scope.deadline = trio.current_time() + DRAIN_S
        return code

    async def _store(self, stream: trio.abc.ReceiveStream, rank: int, lines: LineSplitter) -> None:
        try:
            while data := await stream.receive_some(_READ_BYTES):
                lines.rank = self._numbers.get(rank, rank)
                self._append(lines.receive(data))
        finally:
            self._append(lines.end())

    async def _feed_input(self, stdin: trio.abc.SendStream, scope: trio.CancelScope) -> None:
        with scope:
            while data := await self._next_input():
                try:
                    await stdin.send_all(data)
                except trio.BrokenResourceError:
                    pass  # rank 0 does not read it
                finally:  # it may also end before it has read this: the next run gets what follows
                    self._stream.consume(len(data))
                    self._send_parts()
            await stdin.aclose()

    async def _next_input(self) -> bytes:
        """Wait for input, and return it; b"" at its end."""
        while not (self._input or self._stream.has_ended):
            await self._changed.wait()
        data = bytes(self._input[:PART_BYTES])
        del self._input[: len(data)]
        return data

    def _environment(self, rank: int) -> Mapping[str, str]:
        """Return the variables of a rank; writes the files that the engine wants."""
        assert self._begun is not None  # noqa: S101 - else no rank is started
        settings = settings_of(self.prepare, self._begun, rank)
        own = {"PMESH_HOME": str(self._home), **settings.variables}
        if self.prepare.command.tree is not None:
            own[COPY_VARIABLE] = str(self._found.cwd)
        for number, (name, content) in enumerate(settings.files.items()):
            self._files.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self._files / path_name(f"{rank}-{number}")
            path.write_text(content, encoding="utf-8")
            own[name] = str(path)
        inherited = {"PYTHONUNBUFFERED": "1", **os.environ}
        return environment_of(inherited, own, self.prepare.command.variables)

    # --- output

    def _append(self, lines: bytes) -> None:
        self.spool.append(lines)
        self._tell()

    async def _send_output(self) -> None:
        """Send what the ranks print, as fast as the starter stores it, and then their ends."""
        while True:
            changed = self._changed
            if self._connected and await self._send_some():
                await trio.lowlevel.checkpoint()
            else:
                await changed.wait()

    async def _send_some(self) -> bool:
        """Send one message; return False if there is none to send now."""
        if self._reported < len(self._reports):
            after, ended = self._reports[self._reported]
            if self._taken >= after:
                self._send(ended)
                self._reported += 1
                self._tell()
                return True
        if self._stream.room < PART_BYTES or self._taken >= self.spool.end:
            return False
        offset, lines = await self.spool.read_soon(self._taken, PART_BYTES)
        if offset > self._taken:
            text = f"{offset - self._taken} bytes of output are lost: too much waited"
            self._taken, lines = offset, note(MACHINE, text)
        else:
            self._taken += len(lines)
        self._stream.write(lines)
        self._send_parts()
        return True

    def _send_parts(self) -> None:
        for part in self._stream.parts(now=trio.current_time()):
            self._send(LaunchPart(self.launch, *part, to_starter=True))
