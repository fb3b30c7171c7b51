"""A few agents whose messages a test delivers by hand, and what must hold at each install."""

from collections import deque
from collections.abc import Iterable

import msgspec

from pmesh.core.values import View
from pmesh.core.views import agreement
from pmesh.core.views.state import (
    Facts,
    FenceJobs,
    Install,
    MemberState,
    MemberStep,
    SendOnLink,
    heartbeat_of,
)
from pmesh.core.wire.channels import encode
from pmesh.core.wire.views import AgreementMessage, Heartbeat, TellView
from pmesh.ids import Epoch, Member
from simulation.wire import decode_untrusted
from tests.worlds.builders import said_by

HEARTBEAT_S = 0.2


class Circle:
    """Agents, and between each linked pair a wire for each direction that keeps its order."""

    def __init__(self, *members: Member) -> None:
        self.now = 100.0
        self.states: dict[Member, MemberState] = {}
        self.facts: dict[Member, Facts] = {}
        self.wires: dict[tuple[Member, Member], deque[bytes]] = {}
        self.echoes: dict[tuple[Member, Member], int] = {}
        """The clock in the last heartbeat that the one has had from the other."""
        self.fences: list[tuple[Member, FenceJobs]] = []
        self.views: dict[Epoch, View] = {}
        """Every view that anyone ever installed."""
        for member in members:
            self.start(member)

    def start(self, member: Member) -> None:
        self.states[member] = agreement.first_state(member, said_by(member), now=self.now)
        self.facts[member] = Facts()

    def stop(self, member: Member) -> None:
        """The process has died; those linked with it will be told."""
        for other in self.linked_with(member):
            self.unlink(member, other)
        del self.states[member], self.facts[member]

    # Links

    def linked_with(self, member: Member) -> list[Member]:
        return sorted(to for sender, to in self.wires if sender == member)

    def link(self, one: Member, other: Member) -> None:
        for sender, to in ((one, other), (other, one)):
            self.wires[sender, to] = deque()
            self.send(sender, to, TellView(self.states[sender].view))
            self.beat(sender, to)

    def unlink(self, one: Member, other: Member) -> None:
        """What was on the way is gone, and both learn of it."""
        self.cut(one, other)
        self.lose(one, other)
        self.lose(other, one)

    def cut(self, one: Member, other: Member) -> None:
        """What was on the way is gone, and nobody has noticed yet."""
        self.wires.pop((one, other), None)
        self.wires.pop((other, one), None)

    def lose(self, member: Member, lost: Member) -> None:
        """The member gives the other up."""
        state, facts = self.states[member], self.facts[member]
        self.take(member, agreement.lose(state, lost.node, "unlinked", facts, now=self.now))

    def send(self, sender: Member, to: Member, message: AgreementMessage) -> None:
        """Over the codec, so that whatever is said can travel."""
        if (sender, to) in self.wires:
            self.wires[sender, to].append(encode(message))

    def carrying(self, *kinds: type[AgreementMessage]) -> list[tuple[Member, Member]]:
        """The wires on which such a message is on its way."""
        return sorted(
            wire
            for wire, waiting in self.wires.items()
            if any(isinstance(decode_untrusted(data), kinds) for data in waiting)
        )

    # Inputs

    def beat(self, sender: Member, to: Member) -> None:
        beat = heartbeat_of(self.states[sender], self.facts[sender], self.now)
        now_us, echo_us = round(self.now * 1e6), self.echoes.get((sender, to), 0)
        self.send(sender, to, msgspec.structs.replace(beat, sent_us=now_us, echo_us=echo_us))

    def tick(self, member: Member) -> None:
        """What an agent does every 0.2 s."""
        step = agreement.pass_time(self.states[member], self.facts[member], now=self.now)
        self.take(member, step)
        for other in self.linked_with(member):
            self.beat(member, other)

    def deliver(self, sender: Member, to: Member) -> AgreementMessage:
        """The next message on this wire arrives."""
        message = decode_untrusted(self.wires[sender, to].popleft())
        assert isinstance(message, AgreementMessage)
        self.hear(sender, to, message)
        return message

    def hear(self, sender: Member, to: Member, message: AgreementMessage) -> None:
        if isinstance(message, Heartbeat):
            self.echoes[to, sender] = message.sent_us
        step = agreement.receive(self.states[to], sender, message, self.facts[to], now=self.now)
        self.take(to, step)

    def take(self, member: Member, step: MemberStep) -> None:
        """Carry out what was decided, and see whether it may be."""
        before = self.states[member]
        self.states[member] = step.state
        assert step.state.promised >= before.promised, "V1: a promise is never taken back"
        installed = before.view
        for action in step.actions:
            match action:
                case SendOnLink(to, message):
                    self.send(member, to, message)
                case FenceJobs():
                    self.fences.append((member, action))
                case Install(view):
                    assert view.epoch > installed.epoch, "I2: only upwards"
                    assert member in view.members, "I2: only where it is a member"
                    assert self.views.setdefault(view.epoch, view) == view, (
                        "I1: one epoch, one view"
                    )
                    assert view.epoch >= before.promised, "V1: nothing below a promise"
                    lineage = (None, installed.epoch)
                    assert view.previous_epoch_of(member) in lineage, "V2: a false lineage"
                    installed = view
        assert step.state.view == installed

    # Longer stretches

    def deliver_all(self) -> None:
        """Until nothing is on the way. A heartbeat is answered at most by a question."""
        while busy := [wire for wire, waiting in self.wires.items() if waiting]:
            self.deliver(*busy[0])

    def deliver_between(self, one: Member, other: Member) -> None:
        """Until nothing is on the way between the two."""
        while busy := [wire for wire in ((one, other), (other, one)) if self.wires[wire]]:
            self.deliver(*busy[0])

    def pass_time(self, seconds: float) -> None:
        """Everyone beats and hears everyone it is linked with, for so long."""
        for _ in range(round(seconds / HEARTBEAT_S)):
            self.now += HEARTBEAT_S
            for member in sorted(self.states):
                self.tick(member)
            self.deliver_all()

    def link_everyone(self) -> None:
        for one in self.states:
            for other in self.states:
                if one < other and (one, other) not in self.wires:
                    self.link(one, other)

    def recover(self, *, within_s: float) -> View:
        """All links mended: everyone comes together in one view, and then it stays."""
        self.link_everyone()
        self.deliver_all()
        deadline = self.now + within_s
        while self.now < deadline and not self.agrees():
            self.pass_time(HEARTBEAT_S)
        view = self.agreed_view()
        self.pass_time(3 * HEARTBEAT_S)
        return view

    def agrees(self) -> bool:
        """Whether everyone has installed one view of them all, and waits for no other."""
        return all(
            state.view == self.view_of(min(self.states))
            and set(state.view.members) == set(self.states)
            and state.flushed_at is None
            for state in self.states.values()
        )

    def view_of(self, member: Member) -> View:
        return self.states[member].view

    def agreed_view(self, members: Iterable[Member] | None = None) -> View:
        """The one view that all of them have installed, and whose members they are."""
        expected = set(self.states if members is None else members)
        views = {self.view_of(member) for member in expected}
        assert len(views) == 1, "they differ"
        (view,) = views
        assert set(view.members) == expected
        return view


def gathered(*members: Member) -> Circle:
    """Agents that have met and agreed on one view; their wires are empty."""
    circle = Circle(*members)
    circle.recover(within_s=4.0)
    return circle
