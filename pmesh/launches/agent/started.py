"""A launch that was started on this machine: its questions, its output, its end."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import trio

from pmesh.core.wire.stream import PART_BYTES, Stream
from pmesh.errors import ProtocolError
from pmesh.ids import JobName, Member, NodeId, PathName
from pmesh.launches.agent.spool import Spool
from pmesh.launches.rules import starting as decide
from pmesh.launches.rules.engines import LaunchPlace, begin_messages, unreachable
from pmesh.launches.rules.lines import STARTER, note, seated
from pmesh.launches.rules.starting import (
    AskMachine,
    Begin,
    LaunchMember,
    NoRestart,
    Over,
    Signal,
    Started,
    Step,
    Tell,
)
from pmesh.launches.wire.messages import (
    AnyLaunchMessage,
    BeginRanks,
    Command,
    GiveUpRank,
    Launch,
    LaunchPart,
    LaunchPrepared,
    PrepareLaunch,
    RankEnded,
    RankFails,
    SignalNumber,
    SignalRanks,
    StopLaunch,
)

MAX_QUESTIONS = 4  # for the tree and the contents, in two attempts; each reads up to 16 MiB
_SIGTERM: SignalNumber = 15
Deliver = Callable[[NodeId, AnyLaunchMessage], None]


def read_of(message: LaunchPart) -> LaunchPart:
    """Return the acknowledgement of output that is dropped, after which more may come."""
    return LaunchPart(message.launch, 0, message.offset + len(message.data))


class _MachineStream:
    """The stream with a machine, and the lines in it."""

    def __init__(self, begin: int) -> None:
        self.stream = Stream(far_begin=begin, again_s=math.inf)
        self._torn = b""

    def receive_untrusted(self, message: LaunchPart) -> bytes:
        """Return the lines that are whole now. Raises ProtocolError if one does not end."""
        data = self.stream.receive_untrusted(message.part, now=trio.current_time())
        self.stream.consume(len(data))
        if len(self._torn) + len(data.partition(b"\n")[0]) > PART_BYTES:
            raise ProtocolError("a line of output that does not end")
        lines, newline, self._torn = (self._torn + data).rpartition(b"\n")
        return lines + newline


class StartedHere:
    """Carries out what `pmesh.launches.rules.starting` decides."""

    def __init__(
        self,
        launch: PathName,
        request: Launch,
        seats: Sequence[LaunchMember],
        *,
        spool: Spool,
        send: Deliver,
    ) -> None:
        self.launch = launch
        self.request = request
        self.job = JobName(request.job or launch)
        self.spool = spool
        self.since = trio.current_time()
        self.begun = trio.Event()
        """Set once all machines have agreed, or the launch is over."""
        self.over = trio.Event()
        self.code: int | None = None
        self.refusal = ""
        self.input_taken = trio.Event()
        self.input_taken.set()
        self._input_ends = False
        self.state = Started(
            elastic=request.terms.engine == "pmesh",
            restarts=request.terms.restarts,
            grace_s=request.terms.grace_s,
            seats=tuple(seats),
        )
        self._send = send
        self._prepared: dict[NodeId, LaunchPrepared] = {}
        self._streams: dict[NodeId, _MachineStream] = {}
        self._begins: dict[NodeId, BeginRanks] = {}
        self._lost: dict[NodeId, Member] = {}
        self._questions = Counter[NodeId]()
        self._heard_at = self.since

    @property
    def command(self) -> Command:
        return self.request.command

    @property
    def phase(self) -> str:
        """The state of the launch, for a person."""
        return self.state.phase

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(seat.name for seat in self.state.seats)

    @property
    def is_over(self) -> bool:
        return self.over.is_set()

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(seat.count for seat in self.state.seats)

    def close(self) -> None:
        """Forget the output of a launch that is over."""
        self.spool.close()

    def start(self) -> None:
        """Ask all machines whether they can run their part."""
        self._apply(decide.first_step(self.state, now=trio.current_time()))

    def interrupt(self, number: SignalNumber) -> None:
        """Pass a signal on to all ranks."""
        self._apply(decide.interrupt(self.state, number, now=trio.current_time()))

    def pass_time(self) -> None:
        """Give up machines that do not answer, and ranks that hang; call this often."""
        now = trio.current_time()
        self._apply(decide.pass_time(self.state, now=now))
        quiet_s = self.request.terms.hang_timeout_s
        if quiet_s and self.state.phase == "running" and now - self._heard_at >= quiet_s:
            self._heard_at = now
            self._apply(decide.hang(self.state, quiet_s, now=now))

    def send_input(self, data: bytes) -> None:
        """Pass input on to rank 0; `input_taken` is set when it may be given more.

        Raises ProtocolError for more than that, as the machine of rank 0 would.
        """
        if self._input_ends or not self.input_taken.is_set():
            raise ProtocolError("input before the last one was taken, or after its end")
        self._input_ends = not data
        first = next((seat for seat in self.state.seats if 0 in seat.ranks), None)
        if first is not None and first.phase == "runs":
            stream = self._streams[first.node].stream
            stream.write(data)
            if self._input_ends:
                stream.close()
            elif stream.room < PART_BYTES:
                self.input_taken = trio.Event()
            self._send_parts(first.node)

    def lose(self, member: Member, why: str) -> None:
        """Note that the link with a machine has ended; detached ranks that run go on without it."""
        seat = self.state.seat_of(member.node)
        if seat is None:
            return
        self._lost[member.node] = member
        if 0 in seat.ranks:
            self.input_taken.set()
        if not (self.request.terms.detach and seat.phase == "runs"):
            self._apply(decide.machine_lost(self.state, seat.node, why, now=trio.current_time()))

    def find(self, member: Member) -> None:
        """Note that there is a link again with a machine, whose agent may have been restarted."""
        node, now = member.node, trio.current_time()
        seat = self.state.seat_of(node)
        if seat is None:
            return
        lost = self._lost.get(node) if self.request.terms.detach else None
        if lost == member:
            self._say_again(seat)
        elif lost is not None:
            self._apply(decide.machine_lost(self.state, node, "it was restarted", now=now))
        self._apply(decide.machine_back(self.state, node, now=now))

    def _say_again(self, seat: LaunchMember) -> None:
        """Repeat to a machine whose ranks may have gone on what was perhaps lost with the link."""
        if seat.phase == "runs" and self.state.phase == "running":
            self._send(seat.node, self._begins[seat.node])
        else:
            self._send(seat.node, SignalRanks(self.launch, _SIGTERM))

    def receive(self, node: NodeId, message: AnyLaunchMessage) -> None:
        """Handle a machine's message. Raises ProtocolError for one that no machine sends."""
        seat = self.state.seat_of(node)
        if seat is None:
            return  # the machine takes no part
        match message:
            case LaunchPrepared():
                self._take_answer(seat, message)
            case LaunchPart():
                self._take_part(seat, message)
            case RankEnded() | RankFails():
                if message.generation == self.state.generation:
                    self._apply(self._judge(node, message))
            case StopLaunch():
                self._stop(seat)
            case _:
                raise ProtocolError(f"{type(message).__name__} to the starter of a launch")

    def _judge(self, node: NodeId, message: RankEnded | RankFails) -> Step:
        rank, state = message.rank, self.state
        if message.number >= 0:
            state = decide.rank_is(state, node, rank, message.number)
        if isinstance(message, RankFails):
            return decide.rank_fails(state, node, rank, message.how)
        now = trio.current_time()
        return decide.rank_ended(state, node, rank, message.code, now=now)

    def _take_answer(self, seat: LaunchMember, message: LaunchPrepared) -> None:
        if len(message.ports) < 2 * seat.count and not message.refusal:
            raise ProtocolError("a launch was prepared without ports")
        if seat.phase == "asked":
            if not message.refusal:  # it has no ports, and others must be told of those before
                self._prepared[seat.node] = message
            self._streams[seat.node] = _MachineStream(message.offset)
            why = f"{seat.name}: {message.refusal}" if message.refusal else ""
            self._apply(decide.prepared(self.state, seat.node, why, now=trio.current_time()))

    def _stop(self, seat: LaunchMember) -> None:
        if not (self.state.signal or self.is_over):  # only once, so that nobody delays the end
            self._note(f"stopped on {seat.name}")
            self.interrupt(_SIGTERM)

    def name_of(self, node: NodeId) -> str:
        seat = self.state.seat_of(node)
        return "" if seat is None else seat.name

    def is_preparing(self, node: NodeId) -> bool:
        """Return True if a machine was asked and has not answered.

        It has more time then, if there are files to take: others that have agreed wait for it.
        """
        if self.request.command.tree is not None:
            self.state = decide.prepares(self.state, node, now=trio.current_time())
        seat = self.state.seat_of(node)
        return seat is not None and seat.phase == "asked"

    def may_ask(self, node: NodeId) -> bool:
        """Return True if a machine gets the files that it asks for; refuse one that never ends.

        A late question is no protocol error: its link may have been lost while it was on its way.
        """
        if not self.is_preparing(node):
            return False
        self._questions[node] += 1
        if self._questions[node] > MAX_QUESTIONS:
            self.refuse(node, "it asks for the files again and again")
        return self._questions[node] <= MAX_QUESTIONS

    def refuse(self, node: NodeId, why: str) -> None:
        """Note that a machine can't get its files from here, so that it does not wait for them."""
        seat = self.state.seat_of(node)
        if seat is not None and seat.phase == "asked":
            self._send(node, SignalRanks(self.launch, _SIGTERM))
            refusal = f"{seat.name}: {why}"
            self._apply(decide.prepared(self.state, node, refusal, now=trio.current_time()))

    def _take_part(self, seat: LaunchMember, message: LaunchPart) -> None:
        """Store what a machine's ranks print, and note what input rank 0 has taken.

        Output of ranks that can't print is acknowledged and dropped: the launch may have ended
        while it was on its way.
        """
        node = seat.node
        if self.is_over or not seat.prints:
            if message.data:
                self._send(node, read_of(message))
            return
        lines = self._streams[node].receive_untrusted(message)
        if 0 in seat.ranks and self._streams[node].stream.room >= PART_BYTES:
            self.input_taken.set()
        if lines:
            index = next(i for i, seat in enumerate(self.state.seats) if seat.node == node)
            self.spool.append(seated(lines, index))
            self._heard_at = trio.current_time()
        self._send_parts(node)

    def _send_parts(self, node: NodeId) -> None:
        for part in self._streams[node].stream.parts(now=trio.current_time()):
            self._send(node, LaunchPart(self.launch, *part))

    def _note(self, text: str) -> None:
        self.spool.append(seated(note(0, text), STARTER))

    # --- decisions, carried out

    def _apply(self, step: Step) -> None:
        self.state = step.launch
        parts = self._parts_of([a.node for a in step.actions if isinstance(a, Begin)])
        for action in step.actions:
            match action:
                case AskMachine(node):
                    self._questions[node] = 0
                    self._send(node, self._prepare(node))
                case Begin(node):
                    if node in parts:
                        self._begin(node, parts[node])
                case Signal(node, number):
                    self._send(node, SignalRanks(self.launch, number))
                case NoRestart(node, rank):
                    self._send(node, GiveUpRank(self.launch, self.state.generation, rank))
                case Tell(text):
                    self._note(text)
                case Over(code, refusal):  # nothing is written after it
                    self.code, self.refusal = code, refusal
                    self.over.set()
                    self.begun.set()
                    self.input_taken.set()

    def _begin(self, node: NodeId, begin: BeginRanks) -> None:
        self._begins[node] = begin
        self._send(node, begin)
        if begin.group == 0:  # it has rank 0
            self.input_taken.set()
            if self._input_ends:  # an earlier rank 0 has had all input
                self._streams[node].stream.close()
                self._send_parts(node)

    def _prepare(self, node: NodeId) -> PrepareLaunch:
        seats = self.state.seats
        (index,) = (i for i, seat in enumerate(seats) if seat.node == node)
        return PrepareLaunch(
            launch=self.launch,
            job=self.job,
            command=self.request.command,
            terms=self.request.terms,
            seat=index,
            nodes=tuple(seat.node for seat in seats),
            names=self.names,
            ranks=seats[index].count,
        )

    def _parts_of(self, nodes: Sequence[NodeId]) -> Mapping[NodeId, BeginRanks]:
        """Return what each machine must begin; end the launch if two can't reach each other."""
        if not nodes:
            return {}
        self._heard_at = trio.current_time()
        known = [self._place(seat) for seat in self.state.seats if seat.node in self._prepared]
        places = [place for place in known if place.ranks]
        engine = self.request.terms.engine
        neighbours = unreachable(engine, places)
        if neighbours is not None:
            one, other = map(self.name_of, neighbours)
            why = f"{one} has no IPv4 address of {other}, which --engine {engine} needs"
            self._apply(decide.apart(self.state, why))
            return {}
        self.begun.set()
        return begin_messages(self.launch, self.state.generation, places)

    def _place(self, seat: LaunchMember) -> LaunchPlace:
        said = self._prepared[seat.node]
        ways = {way.node: (way.host, way.interface) for way in said.ways}
        ranks = seat.ranks if seat.phase != "lost" or self.state.elastic else ()
        return LaunchPlace(node=seat.node, ranks=ranks, ports=said.ports, ways=ways)
