"""Answers other agents that ask for the latest ops of ranks here, and asks them for `pmesh trace`.

An answer is small, and each needs a question, so a link never carries more than one at a time. Who
asks all the time is answered at the pace of the agreement.
"""

import itertools
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, assert_never

import trio

from pmesh.agent.features import Feature, Kernel
from pmesh.errors import UsageError
from pmesh.ids import Member
from pmesh.net.sessions.sessions import Session
from pmesh.traces.rules.answers import is_of, next_ops
from pmesh.traces.wire import (
    MAX_CHANGES,
    MOST_TIMES,
    TRACES,
    AskOps,
    AskTrace,
    Cursor,
    RankOps,
    TellOps,
    Traced,
    TracedEvent,
    TracedMachine,
    TracedOps,
    TracesMessage,
)

ANSWER_S: Final = 5.0
MOST_ANSWERS: Final = 1024  # to one `pmesh trace`: a million ops, some 100 MB of JSON
OF_MESH: Final = frozenset(
    {"agent stalled", "path changed", "peer joined", "peer lost", "peer silent", "network loop"}
)
"""Events of no job that explain why one stood still."""
ANSWERS_BEFORE_POLL: Final = 4  # of some 2 ms each, between two polls, whatever members ask


@dataclass(slots=True, eq=False)
class _AskedOps:
    member: Member
    answered: trio.Event = field(default_factory=trio.Event)
    answer: TellOps | None = None


class Traces(Feature[TracesMessage, AskTrace]):
    """What this agent tells of its ranks' ops, and asks of other agents."""

    channel = TRACES
    openings = (AskTrace,)

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._numbers = itertools.count()
        self._open: dict[int, _AskedOps] = {}
        self._waiting: dict[Member, AskOps] = {}
        """The last question of each member that is to be answered at the next poll."""
        self._answers_left = ANSWERS_BEFORE_POLL

    def poll(self) -> None:
        """Answer whom we could not answer at once."""
        self._answers_left = ANSWERS_BEFORE_POLL
        for member in list(self._waiting)[:ANSWERS_BEFORE_POLL]:
            self._answer(member, self._waiting.pop(member))

    def follow(self) -> None:
        """Forget the questions of those that are no members any more."""
        members = self._kernel.jobs.membership.view.members
        self._waiting = {who: what for who, what in self._waiting.items() if who in members}

    def receive(self, member: Member, message: TracesMessage) -> None:
        """Answer a member of the view, or take its answer, if it is not too late."""
        match message:
            case AskOps():
                if member not in self._kernel.jobs.membership.view.members:
                    return
                if self._answers_left:
                    self._answer(member, message)
                else:
                    self._waiting[member] = message
            case TellOps(number):
                question = self._open.get(number)
                if question is not None and question.member == member:
                    question.answer = message
                    question.answered.set()
            case _:
                assert_never(message)

    def _answer(self, member: Member, asked: AskOps) -> None:
        self._answers_left -= 1
        self._kernel.peers.reach.send(member, TellOps(asked.question, self._next_ops(asked)))

    def _next_ops(self, asked: AskOps) -> RankOps | None:
        jobs, since_us = self._kernel.jobs, _now_us() - round(asked.seconds * 1e6)
        return next_ops(jobs.times, asked, since_us=since_us)

    # --- for a program of this machine

    async def serve(self, session: Session, request: AskTrace) -> None:
        """Collect what all members know of a job. Raises UsageError if nobody knows of an op."""
        with self._kernel.admission().follow():
            session.stay()
            await self._collect(session, request)

    async def _collect(self, session: Session, request: AskTrace) -> None:
        until_us, membership = _now_us(), self._kernel.jobs.membership
        seats = membership.view.seats
        whys, found = [""] * len(seats), False

        async def collect_from(place: int, member: Member) -> None:
            async def tell(ops: RankOps) -> None:
                nonlocal found
                found = True  # the ops themselves may be a million: they are kept by who asked
                await session.send(TracedOps(place, ops))

            whys[place] = await self._ask_all(member, request, tell, MOST_ANSWERS // len(seats))

        async with trio.open_nursery() as nursery:
            for place, seat in enumerate(seats):
                nursery.start_soon(collect_from, place, seat.member)
        if not found:
            raise UsageError(self._describe_nothing(request))
        machines = [
            TracedMachine(
                name=membership.names.of_seat(seat),
                me=seat.member == self._kernel.me,
                clock=membership.clock_of(seat.member.node),
                why_not=whys[place],
            )
            for place, seat in enumerate(seats)
        ]
        changes = tuple(self._changes(request))[-MAX_CHANGES:]
        await session.send(Traced(self._kernel.version, until_us, tuple(machines), changes))

    async def _ask_all(
        self,
        member: Member,
        request: AskTrace,
        tell: Callable[[RankOps], Awaitable[None]],
        most: int,
    ) -> str:
        """Tell all that a member knows; return why that is not all, or nothing."""
        after: Cursor | None = None
        for _ in range(most):
            answer = await self._ask(member, request, after)
            if answer is None:
                return f"it has not answered within {ANSWER_S:g} s"
            if answer.ops is None:
                return ""
            after = answer.ops.last
            await tell(answer.ops)
        return f"it has more than {most * MOST_TIMES} calls"

    async def _ask(self, member: Member, request: AskTrace, after: Cursor | None) -> TellOps | None:
        number = next(self._numbers)
        asked = AskOps(number, request.job, request.seconds, after)
        if member == self._kernel.me:
            await trio.lowlevel.checkpoint()  # each takes as long as those that others get
            return TellOps(number, self._next_ops(asked))
        question = self._open[number] = _AskedOps(member)
        try:
            self._kernel.peers.reach.send(member, asked)
            with trio.move_on_after(ANSWER_S):
                await question.answered.wait()
        finally:
            del self._open[number]
        return question.answer

    def _changes(self, request: AskTrace) -> Iterator[TracedEvent]:
        for at, event in self._kernel.jobs.event_log.lately(request.seconds):
            if (event.job is not None and is_of(event.job, request.job)) or event.kind in OF_MESH:
                took_us = round(1e6 * (event.duration_s or 0))
                yield TracedEvent(round(1e6 * at), took_us, event.kind, event.text)

    def _describe_nothing(self, request: AskTrace) -> str:
        jobs = [repr(each.job) for each in self._kernel.jobs.membership.view.rosters]
        there = f"the jobs that run are {', '.join(jobs)}" if jobs else "no job runs now"
        return (
            f"no call of job {request.job!r} has ended in the last {request.seconds:g} s; {there}"
        )


def _now_us() -> int:
    return round(trio.current_time() * 1e6)
