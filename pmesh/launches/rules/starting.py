"""A launch on the machine that has started it: from the first question to one exit code.

Every machine is asked first, and nothing starts unless all agree. With the engine `pmesh` a machine
that is lost leaves the others running, and starts its ranks again when it is back. The other
engines can't go on without a rank: all ranks are ended, and those machines that are there are asked
again, as a new generation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from pmesh.ids import NodeId
from pmesh.launches.rules.restarts import AT_ONCE_S, describe_end, exit_code, fails_by_itself
from pmesh.launches.wire.messages import Failure, SignalNumber

ANSWER_S = 20.0  # a machine looks for programs and hashes files before it answers
MOST_AT_ONCE = 3  # starts of all ranks: a port may be taken once, and a script stays as it is
REPORT_S = 2.0  # after the grace: killed processes are reported at once

Phase: TypeAlias = Literal["asking", "running", "restarting", "ending", "over"]
SeatPhase: TypeAlias = Literal["asked", "ready", "runs", "over", "lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchMember:
    """One machine of the launch."""

    node: NodeId
    name: str
    count: int
    """How many ranks it runs."""
    phase: SeatPhase = "asked"
    refusal: str = ""
    ranks: tuple[int, ...] = ()
    codes: Mapping[int, int] = field(default_factory=dict[int, int])
    fails: Mapping[int, Failure] = field(default_factory=dict[int, Failure])
    """The ranks that fail, and are started again by their machine."""
    numbers: Mapping[int, int] = field(default_factory=dict[int, int])
    """The `mesh.rank` of each rank that has told it."""

    def number(self, rank: int) -> int:
        """Return how a person knows a rank: as its script does, if that is known."""
        return self.numbers.get(rank, rank)

    @property
    def prints(self) -> bool:
        """It has agreed and begun, and not ended: only then its output counts.

        A machine that is lost may come back with its last lines, also once it was asked again.
        """
        return bool(self.ranks) and not self.refusal and self.phase not in {"ready", "over"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A launch, as its starter knows it."""

    elastic: bool
    """True if the ranks go on without one that is lost."""
    restarts: int
    grace_s: float
    seats: tuple[LaunchMember, ...]
    phase: Phase = "asking"
    generation: int = 0
    failures: int = 0
    signal: int = 0
    """The signal that ends it; 0 while none does."""
    code: int = 0
    """Of the first rank that failed; 0 while none did."""
    deadline: float | None = None
    began: float = 0.0
    """When the ranks of this generation were started."""
    failed_at_once: int = 0
    """How many generations in a row have failed in their first seconds."""

    def seat_of(self, node: NodeId) -> LaunchMember | None:
        return next((seat for seat in self.seats if seat.node == node), None)


@dataclass(frozen=True, slots=True)
class AskMachine:
    """Ask this machine whether it can run its ranks."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Begin:
    """All have agreed: start the ranks of this machine."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Signal:
    """Send a signal to the ranks of this machine, or cancel what it has agreed to."""

    node: NodeId
    number: SignalNumber


@dataclass(frozen=True, slots=True)
class NoRestart:
    """Tell this machine not to start a rank again that fails."""

    node: NodeId
    rank: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Write a note into the output."""

    text: str


@dataclass(frozen=True, slots=True)
class Over:
    """The launch has ended with this exit code."""

    code: int
    refusal: str = ""
    """Set if nothing was started."""


Action: TypeAlias = AskMachine | Begin | Signal | NoRestart | Tell | Over


@dataclass(frozen=True, slots=True)
class Step:
    """The next state, and what to do."""

    launch: Started
    actions: tuple[Action, ...] = ()


def first_step(launch: Started, *, now: float) -> Step:
    """Ask all machines."""
    asked = replace(launch, deadline=now + ANSWER_S)
    return Step(asked, tuple(AskMachine(seat.node) for seat in launch.seats))


def prepared(launch: Started, node: NodeId, refusal: str, *, now: float) -> Step:
    """A machine has answered."""
    seat = launch.seat_of(node)
    if seat is None or seat.phase != "asked":
        return Step(launch)
    if refusal:
        return _answered(_seated(launch, replace(seat, phase="lost", refusal=refusal)), now=now)
    return _answered(_seated(launch, replace(seat, phase="ready")), now=now)


def prepares(launch: Started, node: NodeId, *, now: float) -> Started:
    """A machine that was asked takes files: it has more time to answer."""
    seat = launch.seat_of(node)
    if seat is None or seat.phase != "asked":
        return launch
    return replace(launch, deadline=now + ANSWER_S)


def rank_is(launch: Started, node: NodeId, rank: int, number: int) -> Started:
    """The script of a rank knows itself by this number."""
    seat = launch.seat_of(node)
    if seat is None or rank not in seat.ranks:
        return launch
    return _seated(launch, replace(seat, numbers={**seat.numbers, rank: number}))


def rank_ended(launch: Started, node: NodeId, rank: int, code: int, *, now: float) -> Step:
    """A rank of the present generation has ended and is not started again by its machine."""
    seat = launch.seat_of(node)
    if seat is None or seat.phase != "runs" or rank not in seat.ranks or rank in seat.codes:
        return Step(launch)
    codes = {**seat.codes, rank: code}
    over = len(codes) == len(seat.ranks)
    fails = _without(seat.fails, rank)
    seat = replace(seat, codes=codes, fails=fails, phase="over" if over else "runs")
    launch = _seated(launch, seat)
    if launch.phase in {"ending", "restarting"}:
        return _settle(launch, now=now)
    if code == 0:
        return _give_up(_settle(launch, now=now))
    launch = replace(launch, code=launch.code or exit_code(code))
    note = Tell(f"rank {seat.number(rank)} on {seat.name} {describe_end(code)}")
    if launch.elastic:
        return _settle(launch, (note,), now=now)
    at_once = fails_by_itself(code) and now < launch.began + AT_ONCE_S
    return _fail(launch, note, now=now, at_once=at_once)


def rank_fails(launch: Started, node: NodeId, rank: int, how: Failure) -> Step:
    """A rank has failed, and its machine starts it again soon; or it works again."""
    seat = launch.seat_of(node)
    if seat is None or seat.phase != "runs" or rank not in seat.ranks or rank in seat.codes:
        return Step(launch)
    fails = _without(seat.fails, rank) if how == "no more" else {**seat.fails, rank: how}
    return _give_up(Step(_seated(launch, replace(seat, fails=fails))))


def machine_lost(launch: Started, node: NodeId, why: str, *, now: float) -> Step:
    """The link with a machine has ended."""
    seat = launch.seat_of(node)
    if seat is None or seat.phase in {"over", "lost"} or launch.phase == "over":
        return Step(launch)
    note = Tell(f"{seat.name} is lost: {why}")
    if launch.phase == "asking":
        return _answered(_seated(launch, replace(seat, phase="lost", refusal=note.text)), now=now)
    launch = _seated(launch, replace(seat, phase="lost"))
    if launch.phase == "running" and not launch.elastic:
        return _fail(replace(launch, code=launch.code or 1), note, now=now)
    return _settle(launch, (note,), now=now)


def machine_back(launch: Started, node: NodeId, *, now: float) -> Step:
    """There is a link again with a machine that was lost: it starts its ranks again."""
    seat = launch.seat_of(node)
    if seat is None or seat.phase != "lost" or launch.phase in {"ending", "over"}:
        return Step(launch)
    if launch.phase == "asking" and launch.generation == 0:  # it counts as a refusal
        return Step(launch)
    seat = replace(seat, refusal="", codes={})
    if launch.phase == "restarting" or not launch.elastic:
        # It takes part in the next generation, if there is one.
        return Step(_seated(launch, replace(seat, phase="over", ranks=())))
    launch = _seated(launch, replace(seat, phase="asked"))
    return Step(
        replace(launch, deadline=now + ANSWER_S),
        (Tell(f"{seat.name} is back: its ranks are started again"), AskMachine(node)),
    )


def interrupt(launch: Started, number: SignalNumber, *, now: float) -> Step:
    """A signal came, or the starter is lost; the second one kills."""
    if launch.phase == "over":
        return Step(launch)
    sent = _KILL if launch.signal else number
    launch = replace(
        launch,
        signal=launch.signal or number,
        phase="ending",
        deadline=now + (0.0 if launch.signal else launch.grace_s) + REPORT_S,
    )
    live = [seat for seat in launch.seats if seat.phase in {"ready", "runs", "asked"}]
    seats = tuple(
        replace(seat, phase="over") if seat.phase in {"ready", "asked"} else seat
        for seat in launch.seats
    )
    signals = tuple(Signal(seat.node, sent if seat.phase == "runs" else _KILL) for seat in live)
    return _settle(replace(launch, seats=seats), signals, now=now)


def apart(launch: Started, why: str) -> Step:
    """Two machines can't reach each other as the engine needs, and nothing has begun: end."""
    runs = [seat for seat in launch.seats if seat.phase == "runs"]
    for seat in runs:
        launch = _seated(launch, replace(seat, phase="over"))
    over = replace(launch, phase="over", code=1, deadline=None)
    cancelled = tuple(Signal(seat.node, _KILL) for seat in runs)
    if launch.generation > 0:
        return Step(over, (*cancelled, Tell(why), Over(1)))
    return Step(over, (*cancelled, Over(1, why)))


def hang(launch: Started, quiet_s: float, *, now: float) -> Step:
    """No rank has shown any progress for so long."""
    if launch.phase != "running":
        return Step(launch)
    note = Tell(f"no rank has printed anything for {quiet_s:g} s")
    return _fail(replace(launch, code=launch.code or 1), note, now=now)


def pass_time(launch: Started, *, now: float) -> Step:
    """Give up machines that do not answer."""
    if launch.deadline is None or now < launch.deadline:
        return Step(launch)
    silent = [
        seat
        for seat in launch.seats
        if seat.phase == "asked"
        or (seat.phase == "runs" and launch.phase in {"ending", "restarting"})
    ]
    launch = replace(launch, deadline=None)
    for seat in silent:
        refusal = f"{seat.name} has not answered"
        launch = _seated(launch, replace(seat, phase="lost", refusal=refusal))
    if launch.phase == "asking":
        return _answered(launch, now=now)
    return _settle(launch, tuple(Tell(f"{s.name} has not answered") for s in silent), now=now)


_KILL: SignalNumber = 9
_TERM: SignalNumber = 15


def _seated(launch: Started, seat: LaunchMember) -> Started:
    seats = tuple(seat if other.node == seat.node else other for other in launch.seats)
    return replace(launch, seats=seats)


def _answered(launch: Started, *, now: float) -> Step:
    """See whether all machines that were asked have answered."""
    if launch.phase in {"restarting", "ending"}:  # meanwhile all ranks are being ended
        launch, cancelled = _cancel(launch)
        return _settle(launch, cancelled, now=now)
    if any(seat.phase == "asked" for seat in launch.seats):
        return Step(launch)
    refused = [seat.refusal for seat in launch.seats if seat.phase == "lost" and seat.refusal]
    ready = [seat.node for seat in launch.seats if seat.phase == "ready"]
    if launch.phase == "running":  # one that is back
        return _settle(launch, tuple(Tell(refusal) for refusal in refused if not ready), now=now)
    if ready and (not refused or launch.generation > 0):
        begun = _begin(replace(launch, phase="running", deadline=None, began=now))
        return Step(begun, (*map(Tell, refused), *map(Begin, ready)))
    over = replace(launch, phase="over", code=1, deadline=None)
    cancelled = tuple(Signal(node, _KILL) for node in ready)
    return Step(over, (*cancelled, Over(1, "; ".join(refused))))


def _cancel(launch: Started) -> tuple[Started, tuple[Signal, ...]]:
    """Cancel what machines have agreed to and not begun."""
    ready = [seat for seat in launch.seats if seat.phase == "ready"]
    for seat in ready:
        launch = _seated(launch, replace(seat, phase="over"))
    return launch, tuple(Signal(seat.node, _KILL) for seat in ready)


def _begin(launch: Started) -> Started:
    """Give the machines that are ready their ranks; those that were there keep theirs."""
    seats: list[LaunchMember] = []
    first = 0
    for seat in launch.seats:
        ready = seat.phase == "ready"
        ranks = tuple(range(first, first + seat.count))
        begun = replace(seat, phase="runs", ranks=ranks, codes={}, fails={}, numbers={})
        seats.append(begun if ready else seat)
        first += seat.count if ready or launch.elastic else 0
    return replace(launch, seats=tuple(seats))


def _give_up(step: Step) -> Step:
    """Have no rank started again that would fail again, or wait for one that has finished."""
    launch = step.launch
    seats = [seat for seat in launch.seats if seat.phase != "lost"]
    if launch.phase != "running" or any(seat.phase in {"asked", "ready"} for seat in seats):
        return step
    actions: list[Action] = []
    if _all_failed_at_once(launch.seats):
        actions.append(Tell(_AT_ONCE))
        given_up = [(seat, rank) for seat in seats for rank in seat.fails]
    else:
        finished = [(rank, seat) for seat in seats for rank, code in seat.codes.items() if not code]
        given_up = [
            (seat, rank)
            for seat in seats
            for rank, how in seat.fails.items()
            if how == "in a fixed job" and finished
        ]
        for seat, rank in given_up:
            actions.append(Tell(_waits_in_vain(seat, rank, *finished[0])))
    for seat, rank in given_up:
        actions.append(NoRestart(seat.node, rank))
    gone = {(seat.node, rank) for seat, rank in given_up}
    left = [
        replace(seat, fails={r: how for r, how in seat.fails.items() if (seat.node, r) not in gone})
        for seat in launch.seats
    ]
    return Step(replace(launch, seats=tuple(left)), (*step.actions, *actions))


_AT_ONCE = (
    f"all ranks failed in their first {AT_ONCE_S:g} s, before any had completed an op: none is "
    "started again; mend what the lines above say"
)


def _all_failed_at_once(seats: Sequence[LaunchMember]) -> bool:
    """Not if a machine is lost: the others may have failed by that."""
    if any(seat.phase == "lost" for seat in seats):
        return False
    return all(seat.fails.get(rank) == "at once" for seat in seats for rank in seat.ranks)


def _waits_in_vain(seat: LaunchMember, rank: int, finished: int, where: LaunchMember) -> str:
    return (
        f"rank {seat.number(rank)} on {seat.name} is not started again: "
        f"rank {where.number(finished)} on {where.name} has "
        "finished, and this job can't begin again without it, nor be entered"
    )


def _without(fails: Mapping[int, Failure], rank: int) -> Mapping[int, Failure]:
    return {other: how for other, how in fails.items() if other != rank}


def _fail(launch: Started, note: Tell, *, now: float, at_once: bool = False) -> Step:
    """A rank of an engine that needs all of them is lost: end the others, perhaps begin again."""
    failures = launch.failures + 1
    failed_at_once = launch.failed_at_once + 1 if at_once else 0
    too_often = failed_at_once >= MOST_AT_ONCE
    again = failures <= launch.restarts and not too_often
    launch = replace(
        launch,
        failures=failures,
        failed_at_once=failed_at_once,
        phase="restarting" if again else "ending",
        deadline=now + launch.grace_s + REPORT_S,
    )
    running = [seat for seat in launch.seats if seat.phase == "runs"]
    left = f"{failures} of {launch.restarts}" if launch.restarts else ""
    what = f"all ranks are started again ({left})" if again else "all ranks are ended"
    if too_often and failures <= launch.restarts:
        what += (
            f", as one fails in the first {AT_ONCE_S:g} s of each start; mend what the lines above "
            "say"
        )
    signals = (Signal(seat.node, _TERM) for seat in running)
    launch, cancelled = _cancel(launch)
    return _settle(launch, (Tell(f"{note.text}; {what}"), *signals, *cancelled), now=now)


def _settle(launch: Started, actions: tuple[Action, ...] = (), *, now: float) -> Step:
    """Begin on machines that are back, once all have answered; go on once none runs anything."""
    if launch.phase == "running" and all(seat.phase != "asked" for seat in launch.seats):
        actions += tuple(Begin(seat.node) for seat in launch.seats if seat.phase == "ready")
        launch = _begin(launch)
    if launch.phase in {"asking", "over"} or any(
        seat.phase in {"asked", "ready", "runs"} for seat in launch.seats
    ):
        return Step(launch, actions)
    if launch.phase == "restarting":
        seats = tuple(
            seat if seat.phase == "lost" else replace(seat, phase="asked", codes={}, ranks=())
            for seat in launch.seats
        )
        there = [seat for seat in seats if seat.phase == "asked"]
        if there:
            again = replace(
                launch,
                seats=seats,
                phase="asking",
                generation=launch.generation + 1,
                deadline=now + ANSWER_S,
                code=0,
            )
            return Step(again, (*actions, *(AskMachine(seat.node) for seat in there)))
    code = _final_code(launch)
    return Step(replace(launch, phase="over", code=code, deadline=None), (*actions, Over(code)))


def _final_code(launch: Started) -> int:
    if launch.signal:
        return 128 + launch.signal
    if launch.code:
        return launch.code
    return 0 if any(seat.phase == "over" and seat.codes for seat in launch.seats) else 1
