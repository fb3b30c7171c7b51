"""The driver of the agreement: what it sends, what it does with what comes, and in which order."""

import itertools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from queue import Queue
from threading import Thread, current_thread, main_thread

import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.mesh import membership
from pmesh.agent.mesh.membership import (
    DOUBT_S,
    HEARTBEAT_S,
    NEW_CLAIMS,
    REST_HEARTBEAT_S,
    TICK_S,
    Membership,
)
from pmesh.agent.mesh.names import MachineNames
from pmesh.agent.mesh.probing import Probing
from pmesh.core.identity.keys import NodeKey
from pmesh.core.identity.names import check_name_untrusted, sign_name
from pmesh.core.links.health import DEAF, LONGEST_SILENCE_S, WIRED, Condition
from pmesh.core.values import Seat, SignedName, View
from pmesh.core.views.state import Facts
from pmesh.core.wire.channels import Message
from pmesh.core.wire.views import (
    AgreementMessage,
    Candidate,
    Commit,
    Flushed,
    Heartbeat,
    Propose,
    TellView,
)
from pmesh.errors import ProtocolError
from pmesh.ids import Epoch, Incarnation, JobName, Member, NodeId, Slot
from pmesh.net.sessions.processes import Clocks, Stall, tick
from tests.worlds.faults import Faults
from tests.worlds.nodes import signed
from tests.worlds.trainer import until

KEYS = sorted((NodeKey.from_seed(bytes([i]) * 32) for i in (1, 2, 3)), key=lambda key: key.node)
KEY_OF = {key.node: key for key in KEYS}
A, B, C = (Member(key.node, Incarnation(i)) for i, key in enumerate(KEYS, 1))
AWAKE = Stall(late_s=0.0, slept_s=0.0)


@dataclass
class RecordingFollower:
    """Who lives by the views; says when it was told what."""

    now: Facts = field(default_factory=Facts)
    told: list[str] = field(default_factory=list)
    membership: Membership | None = None
    moved_at: float = 0.0

    def facts(self) -> Facts:
        return self.now

    def fence(self, jobs: tuple[JobName, ...]) -> None:
        self.told.append(f"fence {list(jobs)}")

    def doubt(self) -> None:
        self.told.append("doubt")

    def vouch(self) -> None: ...

    def trust(self) -> None:
        self.told.append("trust")

    def install(self, view: View) -> None:
        self.told.append(f"install {[seat.name for seat in view.seats]}")
        if self.membership is not None:  # as an op task would: in the middle of an action
            self.membership.reevaluate()
            self.membership.beat()

    def lost(self, member: Member) -> None:
        self.told.append(f"lost {member.incarnation}")

    def marked(self, member: Member, heartbeat: Heartbeat) -> None:
        del member
        self.told.append(f"marked {heartbeat.view.counter}")


class LosslessNetwork:
    """Members joined by wires that lose nothing."""

    def __init__(self, *members: Member) -> None:
        self.sides = {member: NetworkedMember(member, self) for member in members}

    def link(self, one: Member, other: Member) -> None:
        for me, them in ((one, other), (other, one)):
            self.sides[me].links.add(them)
        for me, them in ((one, other), (other, one)):
            self.sides[me].membership.link_up(them, WIRED)

    async def deliver(self) -> None:
        """Until nobody has anything to say."""
        while any(side.inbox for side in self.sides.values()):
            for side in self.sides.values():
                inbox, side.inbox = side.inbox, []
                for sender, message in inbox:
                    side.membership.receive(sender, message)
            await trio.lowlevel.checkpoint()


class NetworkedMember:
    """One of the members on it."""

    def __init__(self, me: Member, network: LosslessNetwork) -> None:
        self.me = me
        self.network = network
        self.links: set[Member] = set()
        self.inbox: list[tuple[Member, AgreementMessage]] = []
        self.dropped: list[str] = []
        self.noticed: list[tuple[str, str]] = []
        self.changes: list[tuple[int, Mapping[Member, str]]] = []
        self.follower = RecordingFollower()
        self.membership = Membership(
            me,
            sign_name(KEY_OF[me.node], me, f"mac-{me.incarnation}"),
            names=MachineNames(
                {}, noticed=lambda news: self.noticed.append((news.kind, news.text))
            ),
            follower=self.follower,
            send=self.send,
            drop=self.drop,
            ban=self.drop,
            installed=self.installed,
            noticed=lambda kind, text: self.noticed.append((kind, text)),
            led_astray=lambda: self.noticed.append(("led astray", "")),
            probing=Probing(lambda _: ()),
        )
        self.follower.membership = self.membership

    def send(self, member: Member, message: Message) -> None:
        assert isinstance(message, AgreementMessage)
        if member in self.links:
            self.network.sides[member].inbox.append((self.me, message))

    def drop(self, node: NodeId, why: str) -> None:
        self.dropped.append(why)
        self.membership.lose(node, why)

    def installed(self, _: View, after: View, losses: Mapping[Member, str]) -> None:
        self.changes.append((len(after.seats), dict(losses)))

    @property
    def view(self) -> View:
        return self.membership.view


class Crowd:
    """Nodes that a peer may show, and how many names are verified for that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.verified = 0

        def count(member: Member, said: SignedName) -> None:
            self.verified += 1
            check_name_untrusted(member, said)

        monkeypatch.setattr(f"{Membership.__module__}.check_name_untrusted", count)

    def view(self, leader: Member, numbers: Iterable[int]) -> View:
        """A view of a member and of the nodes with these numbers."""
        keys = [NodeKey.from_seed(number.to_bytes(32, "big")) for number in numbers]
        epoch = Epoch(1, *leader)
        seats = [
            Seat(Member(key.node, leader.incarnation), SAID, epoch, None)
            for key in (KEY_OF[leader.node], *keys)
        ]
        return signed(View(epoch, tuple(seats)), KEY_OF[leader.node], *keys)


SAID = SignedName("mac", bytes(64))


async def test_a_peer_can_not_make_us_verify_names_without_end(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    del autojump_clock
    network, crowd = await two_in_a_view(), Crowd(monkeypatch)
    here = network.sides[A].membership

    def show_many() -> None:
        for first in range(1000, 2000, 60):
            here.receive(B, TellView(crowd.view(B, range(first, first + 60))))

    with pytest.raises(ProtocolError, match="the names of more machines than it can have met"):
        show_many()
    assert crowd.verified <= NEW_CLAIMS
    await trio.sleep(1)
    here.receive(B, TellView(crowd.view(B, range(60))))  # as fast as machines can come


async def test_what_one_peer_shows_costs_another_nothing(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    del autojump_clock
    network, crowd = await in_a_view(A, B, C), Crowd(monkeypatch)
    here = network.sides[A].membership
    view = crowd.view(B, range(63))
    here.receive(B, TellView(view))
    assert crowd.verified == 64
    for first in range(1000, 1300, 60):  # more than we remember of one
        here.receive(C, TellView(crowd.view(C, range(first, first + 60))))
        await trio.sleep(1)
    crowd.verified = 0
    for _ in range(100):
        here.receive(B, TellView(view))
    assert crowd.verified == 0


async def two_in_a_view() -> LosslessNetwork:
    return await in_a_view(A, B)


async def in_a_view(*members: Member) -> LosslessNetwork:
    network = LosslessNetwork(*members)
    for one, other in itertools.combinations(members, 2):
        network.link(one, other)
    for _ in range(4):
        for side in network.sides.values():
            side.membership.reevaluate()
            side.membership.beat()
        await network.deliver()
        await trio.sleep(HEARTBEAT_S)
    assert len({side.view.epoch for side in network.sides.values()}) == 1
    assert len(network.sides[A].view.seats) == len(members)
    return network


async def test_a_new_link_shows_the_view_and_a_heartbeat_at_once() -> None:
    network = LosslessNetwork(A, B)
    network.link(A, B)
    kinds = [type(message) for _, message in network.sides[B].inbox]
    assert kinds == [TellView, Heartbeat]


async def test_two_agree_and_the_fence_comes_before_the_view(autojump_clock: MockClock) -> None:
    network = await two_in_a_view()
    for side in network.sides.values():
        told = [text for text in side.follower.told if not text.startswith("marked")]
        assert told == ["fence []", "install ['mac-1', 'mac-2']"]
    assert autojump_clock.current_time() < 2


async def test_heartbeats_go_on_without_news_and_measure_the_round_trip(
    autojump_clock: MockClock,
) -> None:
    network = await two_in_a_view()
    one, two = (network.sides[member] for member in (A, B))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.membership.run)
        nursery.start_soon(two.membership.run)
        for _ in range(60):
            await trio.sleep(0.05)
            await network.deliver()
        nursery.cancel_scope.cancel()
    health = one.membership.health_of(B.node)
    assert health is not None
    assert health.round_trip_s is not None
    assert 0 <= health.round_trip_s < 0.2
    assert one.membership.health_of(C.node) is None
    assert autojump_clock.current_time() > 3


async def test_what_others_must_know_is_told_at_once_and_only_once() -> None:
    network = await two_in_a_view()
    one = network.sides[A].membership
    one.reevaluate()
    assert not network.sides[B].inbox
    waiting = (Candidate(JobName("digits"), Slot(0), 2),)
    network.sides[A].follower.now = Facts(waiting=waiting)
    one.reevaluate()
    one.reevaluate()
    ((_, beat),) = network.sides[B].inbox
    assert isinstance(beat, Heartbeat)
    assert beat.waiting == waiting


async def test_of_a_view_change_others_hear_only_what_it_takes_and_the_new_view() -> None:
    network = await in_a_view(A, B, C)
    leader, one, other = (network.sides[m] for m in network.sides[A].view.by_seniority)
    leader.follower.now = Facts(waiting=(Candidate(JobName("digits"), Slot(0), 1),))
    leader.membership.reevaluate()
    (_, proposal), (_, wish) = one.inbox
    assert isinstance(proposal, Propose)
    assert isinstance(wish, Heartbeat)
    leader.follower.now = Facts()
    other.inbox.clear()
    one.membership.receive(leader.me, proposal)
    assert [type(message) for _, message in leader.inbox] == [Flushed]
    assert not other.inbox
    other.membership.receive(leader.me, proposal)
    await network.deliver()
    assert len({side.view.epoch for side in network.sides.values()}) == 1


async def test_silence_is_suspected_and_then_ends_the_membership(
    autojump_clock: MockClock,
) -> None:
    network = await two_in_a_view()
    one = network.sides[A]
    one.links.clear()
    for condition, after_s in ((Condition.SUSPECT, 1.2), (None, 1.0)):
        await trio.sleep(after_s)
        one.membership.judge(AWAKE)
        health = one.membership.health_of(B.node)
        assert (health.condition if health else None) is condition
    assert one.dropped == ["silent for 2.4 s"]
    assert one.noticed == [
        ("peer silent", "mac-2 has been silent for 1.4 s"),
        ("loss noticed", "mac-2 is lost: silent for 2.4 s"),
    ]
    assert one.view.members == (A,)
    assert one.changes[-1] == (1, {B: "silent for 2.4 s"})
    assert autojump_clock.current_time() < 4


async def pass_time(network: LosslessNetwork, seconds: float) -> None:
    """All agents send and judge, twice in each heartbeat."""
    end = trio.current_time() + seconds
    while trio.current_time() < end:
        for side in network.sides.values():
            side.membership.beat()
        for _ in range(2):
            await trio.sleep(HEARTBEAT_S / 2)
            await network.deliver()
            for side in network.sides.values():
                side.membership.judge(AWAKE)


@pytest.mark.parametrize("with_a_trainer", [False, True])
async def test_silence_is_noticed_as_soon_while_no_trainer_is_there(
    autojump_clock: MockClock, *, with_a_trainer: bool
) -> None:
    """Though heartbeats are sent, and silence is judged, half as often then."""

    async def deliver() -> None:
        while True:
            await network.deliver()
            await trio.sleep(0.01)

    def read() -> Clocks:
        return Clocks(elapsed_s=trio.current_time(), awake_s=trio.current_time())

    async def judge(membership: Membership) -> None:
        await tick(membership.judge, period_s=lambda: membership.tick_s, read=read)

    network = await in_a_view(A, B, C)
    one = network.sides[A]
    if with_a_trainer:
        one.follower.now = Facts(waiting=(Candidate(JobName("digits"), Slot(0), 2),))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(deliver)
        for side in network.sides.values():
            nursery.start_soon(side.membership.run)
            nursery.start_soon(judge, side.membership)
        await trio.sleep_until(10 * REST_HEARTBEAT_S + 0.05)  # a heartbeat has just been sent
        assert one.membership.pace_s == (HEARTBEAT_S if with_a_trainer else REST_HEARTBEAT_S)
        network.sides[C].links.clear()
        began = trio.current_time()
        await until(lambda: C not in one.view.members)
        nursery.cancel_scope.cancel()
    assert autojump_clock.current_time() - began <= WIRED.gone_after_s + TICK_S + 0.02


async def test_a_silent_peer_that_another_member_hears_gets_more_time(
    autojump_clock: MockClock,
) -> None:
    """V12: only the way between the two is bad."""
    network = await in_a_view(A, B, C)
    network.sides[B].links.discard(A)  # what B sends to A is lost
    await pass_time(network, LONGEST_SILENCE_S - 0.5)
    assert not network.sides[A].dropped
    await pass_time(network, 1.0)
    assert len(network.sides[A].dropped) == 1
    assert autojump_clock.current_time() > LONGEST_SILENCE_S


async def test_a_peer_that_is_silent_to_all_gets_no_more_time(autojump_clock: MockClock) -> None:
    """V12: the others hear it no better than we do."""
    network = await in_a_view(A, B, C)
    network.sides[C].links.clear()
    await pass_time(network, WIRED.gone_after_s + 0.5)
    assert network.sides[A].membership.view.members == network.sides[B].membership.view.members
    assert set(network.sides[A].membership.view.members) == {A, B}
    assert autojump_clock.current_time() < 2 * WIRED.gone_after_s


async def test_who_suddenly_hears_nobody_doubts_itself_first(autojump_clock: MockClock) -> None:
    """V12: of two peers both are silent, so the fault is probably ours."""
    network = await in_a_view(A, B, C)
    for peer in (B, C):
        network.sides[peer].links.discard(A)
    await pass_time(network, DEAF * WIRED.gone_after_s - 0.5)
    assert not network.sides[A].dropped
    await pass_time(network, 1.0)
    assert len(network.sides[A].dropped) == 2
    assert autojump_clock.current_time() > DEAF * WIRED.gone_after_s


async def test_a_stall_of_our_own_is_not_held_against_others(autojump_clock: MockClock) -> None:
    network = await two_in_a_view()
    one = network.sides[A]
    await trio.sleep(10)
    one.membership.judge(Stall(late_s=4.0, slept_s=6.0))
    assert one.membership.health_of(B.node) is not None
    assert not one.dropped
    assert autojump_clock.current_time() > 10


def last_word(side: NetworkedMember) -> str:
    """Whether it may deliver."""
    return [told for told in side.follower.told if told in {"doubt", "trust"}][-1]


async def test_after_an_own_stall_nothing_is_delivered_until_a_fresh_echo_names_our_view(
    autojump_clock: MockClock,
) -> None:
    """V8."""
    network = await two_in_a_view()
    one, two = (network.sides[member] for member in (A, B))
    two.membership.beat()  # it was on its way when we fell asleep, so it proves nothing
    one.membership.judge(Stall(late_s=0.0, slept_s=DOUBT_S))
    for _, message in one.inbox:
        one.membership.receive(B, message)  # all are of the agreement
    one.inbox.clear()
    assert last_word(one) == "doubt"
    await network.deliver()  # our question
    two.membership.beat()
    await network.deliver()
    assert last_word(one) == "trust"
    assert autojump_clock.current_time() < 2


async def test_a_member_that_is_lost_meanwhile_need_not_confirm_the_view(
    autojump_clock: MockClock,
) -> None:
    network = await two_in_a_view()
    one = network.sides[A]
    one.links.clear()
    one.membership.judge(Stall(late_s=DOUBT_S, slept_s=0.0))
    assert last_word(one) == "doubt"
    one.membership.lose(B.node, "its connection was closed")
    assert one.view.members == (A,)
    assert one.follower.told[-2:] == ["install ['mac-1']", "trust"]
    assert autojump_clock.current_time() < 2


async def test_a_view_promised_before_a_sleep_is_doubted_before_it_is_followed(
    autojump_clock: MockClock,
) -> None:
    """V8: its commit was under way when we fell asleep; the others may have left it since."""
    network = LosslessNetwork(A, B)
    sides = [network.sides[member] for member in (A, B)]
    network.link(A, B)
    while not (late := [(s, m) for side in sides for s, m in side.inbox if isinstance(m, Commit)]):
        for side in sides:
            inbox, side.inbox = side.inbox, []
            for sender, message in inbox:
                side.membership.receive(sender, message)  # all are
            side.membership.reevaluate()
            side.membership.beat()
        await trio.sleep(HEARTBEAT_S)
    ((leader, commit),) = late
    (sleeper,) = (side for side in sides if side.me != leader)
    sleeper.inbox.clear()
    await trio.sleep(DOUBT_S)
    sleeper.membership.judge(Stall(late_s=0.0, slept_s=DOUBT_S))
    assert "doubt" not in sleeper.follower.told  # it is alone in its view
    sleeper.membership.receive(leader, commit)
    assert sleeper.follower.told[-2:] == ["doubt", "install ['mac-1', 'mac-2']"]
    await network.deliver()
    network.sides[leader].membership.beat()
    await network.deliver()
    assert last_word(sleeper) == "trust"
    assert autojump_clock.current_time() < 4


async def test_who_is_alone_has_nobody_to_ask_and_a_short_stall_needs_no_question(
    autojump_clock: MockClock,
) -> None:
    network = LosslessNetwork(A)
    network.sides[A].membership.judge(Stall(late_s=100.0, slept_s=0.0))
    assert network.sides[A].follower.told == []
    both = await two_in_a_view()
    both.sides[A].membership.judge(Stall(late_s=DOUBT_S - 0.1, slept_s=0.0))
    assert "doubt" not in both.sides[A].follower.told
    assert autojump_clock.current_time() < 2


async def test_a_suspect_that_is_no_member_yet_is_a_stranger(autojump_clock: MockClock) -> None:
    one = LosslessNetwork(A, B).sides[A]
    one.membership.link_up(B, WIRED)
    await trio.sleep(1.5)
    one.membership.judge(AWAKE)
    assert one.noticed == [("peer silent", "a stranger has been silent for 1.5 s")]
    assert autojump_clock.current_time() < 2


async def test_a_restarted_peer_is_another_one(autojump_clock: MockClock) -> None:
    network = await two_in_a_view()
    one = network.sides[A]
    again = Member(B.node, Incarnation(99))
    one.membership.link_up(again, WIRED)
    assert one.changes[-1] == (1, {B: "it was restarted"})
    told = len(one.follower.told)
    one.membership.receive(B, TellView(network.sides[B].view))  # last words
    stranger = TellView(network.sides[B].view)
    one.membership.receive(C, stranger)
    assert len(one.follower.told) == told
    one.membership.lose(C.node, "it was never here")
    assert autojump_clock.current_time() < 2


async def test_another_link_to_the_same_peer_keeps_what_was_measured(
    autojump_clock: MockClock,
) -> None:
    network = await two_in_a_view()
    one = network.sides[A]
    before = one.membership.health_of(B.node)
    await trio.sleep(0.1)
    one.membership.link_up(B, WIRED)
    assert one.membership.health_of(B.node) is before
    assert autojump_clock.current_time() < 2


async def test_nonsense_is_the_senders_fault_and_changes_nothing(
    autojump_clock: MockClock,
) -> None:
    network = await two_in_a_view()
    one = network.sides[A]
    before = one.membership.state
    epoch = before.view.epoch._replace(counter=99)
    with pytest.raises(ProtocolError):
        one.membership.receive(B, Propose(epoch, before.view, (B,), (B,), ()))
    assert one.membership.state == before
    one.membership.reevaluate()  # and it works on
    assert autojump_clock.current_time() < 2


async def test_the_second_peer_brings_networkx_apart_from_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
    faults: Faults,
) -> None:
    imported = Queue[tuple[str, Thread]]()
    monkeypatch.delitem(sys.modules, "networkx", raising=False)
    faults.instead(membership, "import_module", lambda name: imported.put((name, current_thread())))
    network = LosslessNetwork(A, B, C)
    network.link(A, B)
    assert imported.empty()  # 12 MiB that two machines do not need
    network.link(A, C)
    name, thread = imported.get()
    assert name == "networkx"
    assert thread is not main_thread()
