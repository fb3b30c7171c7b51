"""One who holds the mesh key and sends what no honest member would, to a whole agent."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import msgspec
import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.mesh.dial_targets import MAX_INTRODUCED
from pmesh.agent.mesh.links import Link
from pmesh.core.identity.certificates import issue_credentials
from pmesh.core.identity.keys import NodeKey
from pmesh.core.values import Roster, Seat, View
from pmesh.core.wire.link import (
    PROTOCOL_VERSION,
    Address,
    Commit,
    Hello,
    KnownPeers,
    LinkMessage,
    OfferLane,
    PathMessage,
    Propose,
    Refuse,
    Splice,
    TellView,
)
from pmesh.errors import LaneBroken, PeerUnreachable, ProtocolError
from pmesh.ids import MAX_COUNTER, Epoch, Incarnation, JobName, Member, NodeId, TrainerId
from pmesh.net.lanes.lane import Lane
from pmesh.net.lanes.opening import dial_lane
from pmesh.net.links.path import Path, shake_hands
from pmesh.net.links.tls import TlsContexts
from tests.worlds.builders import make_heartbeat, make_member, make_roster, make_view
from tests.worlds.lanes import descriptors
from tests.worlds.trainer import until
from tests.worlds.village import MESH, Machine, village
from tests.worlds.village_ops import reduce_all

KEY = NodeKey.from_seed(b"l" * 32)
LIAR = Member(KEY.node, Incarnation(666))
CRONY = make_member("z")
THIRD = make_member("y")


@dataclass
class Liar:
    """A program with the mesh key, and what it has been told."""

    link: Path
    heard: list[PathMessage] = field(default_factory=list)
    ended: bool = False

    def ask_to_promise(self, epoch: Epoch, base: View, honest: Member) -> None:
        """As the leader of a heavier view, that takes the honest member in."""
        self.link.send(TellView(base))
        self.link.send(make_heartbeat(base, honest))
        self.link.send(Propose(epoch, base, (LIAR, honest), (LIAR,), ()))

    async def read(self) -> None:
        try:
            while True:
                self.heard.append((await self.link.receive()).message)
        except (trio.EndOfChannel, trio.ClosedResourceError, PeerUnreachable, ProtocolError):
            self.ended = True


@asynccontextmanager
async def lying_to(machine: Machine) -> AsyncGenerator[Liar]:
    stream = await trio.open_tcp_stream("127.0.0.1", machine.port)
    link = await shake_hands(
        stream,
        contexts=TlsContexts.of(issue_credentials(MESH, KEY)),
        server_side=False,
        hello=lambda _: Hello(PROTOCOL_VERSION, LIAR, "liar", link=1),
    )
    async with trio.open_nursery() as nursery:
        liar = Liar(link)
        nursery.start_soon(link.run_writer)
        nursery.start_soon(liar.read)
        try:
            yield liar
        finally:
            with trio.CancelScope(shield=True):
                await link.aclose()
            nursery.cancel_scope.cancel()


def of(machine: Machine) -> Member:
    return machine.agent._me  # noqa: SLF001 - also while it begins anew


def commit(epoch: Epoch, *members: Member, rosters: tuple[Roster, ...] = ()) -> Commit:
    """In the ring order that follows from equal costs: only the view is bad."""
    seats = tuple(Seat(member, "mac", epoch, None) for member in sorted(members))
    view = View(epoch, seats, rosters)
    size = len(view.seats)
    return Commit(view, tuple(tuple(20 * (a != b) for b in range(size)) for a in range(size)))


def without_a_seat_for_its_leader(epoch: Epoch, honest: Member) -> Commit:
    return commit(epoch, honest, CRONY)


def with_a_roster_without_trainers(epoch: Epoch, honest: Member) -> Commit:
    born = msgspec.structs.replace(make_roster(), born=epoch, number=epoch.counter)
    return commit(epoch, LIAR, honest, rosters=(born,))


def with_300_seats(epoch: Epoch, honest: Member) -> Commit:
    others = [Member(NodeId(n.to_bytes(32, "big")), Incarnation(n)) for n in range(1, 299)]
    return commit(epoch, LIAR, honest, *others)


@pytest.mark.parametrize(
    "bad_commit",
    [without_a_seat_for_its_leader, with_a_roster_without_trainers, with_300_seats],
    ids=lambda make: make.__name__,
)
async def test_a_commit_that_no_leader_could_have_made_ends_the_liars_link_and_nothing_else(
    clock: MockClock, bad_commit: Callable[[Epoch, Member], Commit]
) -> None:
    async with village(clock, 1) as here:
        (one,) = here.machines
        async with lying_to(one) as liar:
            base, epoch = make_view(5, LIAR, CRONY, THIRD), Epoch(7, *LIAR)
            liar.ask_to_promise(epoch, base, of(one))
            await until(lambda: one.agent.membership.state.promised == epoch)
            liar.link.send(bad_commit(epoch, of(one)))
            await until(lambda: liar.ended)
        assert one.agent.peers.broken_links == 1
        assert not [line for line in one.lines if "inside pmesh" in line]
        two = here.new_machine("mac-1", peers=[one.address])
        await two.start()
        await here.settle(one, two)


async def test_a_counter_that_no_honest_member_reaches_leaves_the_others_together(
    clock: MockClock,
) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        trainers = await here.job(one, two)
        async with lying_to(one) as liar:
            view = make_view(MAX_COUNTER, LIAR, rosters=[make_roster(LIAR)])
            liar.link.send(TellView(view))
            liar.link.send(make_heartbeat(view, of(one)))
            await until(lambda: liar.ended)
        assert one.agent.peers.broken_links == 1
        assert one.agent.membership.state.highest_counter < 100
        await trainers[0].die()
        await until(lambda: len(two.agent.jobs.ranks) <= 1)
        await here.settle(one, two)


async def test_a_leader_that_never_commits_is_left_out_and_gets_no_link_for_a_while(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Link.send
    async with village(clock, 3) as here:
        leader = here.machines[0].agent.membership.view.by_seniority[0]
        (liar,) = (m for m in here.machines if of(m) == leader)
        honest = [m for m in here.machines if m is not liar]

        def withhold(link: Link, message: LinkMessage) -> None:
            if not (
                link in liar.agent.peers.links.values() and isinstance(message, Commit | TellView)
            ):
                send(link, message)

        monkeypatch.setattr(Link, "send", withhold)
        trainers = await here.job(*honest, timeout_s=60.0)
        assert {t.world.trainers for t in trainers} == {(0, 1)}
        assert any("it made no view for 30 s" in line for m in honest for line in m.lines)
        assert liar.settings.name not in honest[0].names


async def test_agents_without_jobs_that_were_led_astray_come_together_again(
    clock: MockClock,
) -> None:
    """They have promised what an agent with a job can't follow."""
    async with village(clock, 1) as here:
        (one,) = here.machines
        before = of(one)
        async with lying_to(one) as liar:
            view = make_view(2**40, LIAR, CRONY, rosters=[make_roster(LIAR)])
            epoch = Epoch(2**40 + 1, *LIAR)
            liar.ask_to_promise(epoch, view, of(one))
            await until(lambda: one.agent.membership.state.promised == epoch)
        await until(lambda: of(one) != before and one.agent.has_started)
        assert one.agent.membership.state.promised.counter < 100
        two = here.new_machine("mac-1", peers=[one.address])
        await two.start()
        await here.settle(one, two)


async def test_what_a_member_invents_is_dialled_little_and_forgotten_with_it(
    clock: MockClock,
) -> None:
    async with village(clock, 1) as here:
        (one,) = here.machines
        async with lying_to(one) as liar:
            for batch in range(8):
                inventions = tuple(
                    Hello(
                        PROTOCOL_VERSION,
                        Member(NodeId((512 * batch + n + 1).to_bytes(32, "big")), Incarnation(1)),
                        "nobody",
                        (Address("127.0.0.1", 1),) if n else (),
                    )
                    for n in range(512)
                )
                liar.link.send(KnownPeers(inventions))
            await until(lambda: len(one.agent.peers.targets.wanted) == MAX_INTRODUCED)
            await trio.sleep(1)
            assert len(one.agent.peers.targets.wanted) == MAX_INTRODUCED
        await until(lambda: not one.agent.peers.targets.wanted)


async def test_a_refusal_of_nothing_changes_nothing(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        (one,) = here.machines
        async with lying_to(one) as liar:
            liar.link.send(Refuse(Epoch(1, *LIAR), Epoch(2, *LIAR)))
            await until(lambda: one.agent.membership.state.highest_counter == 2)
            assert not liar.ended


# --- lanes of jobs that do not exist


def made_up_offer(number: int) -> OfferLane:
    return OfferLane(
        lane=number.to_bytes(16, "big"),
        job=JobName("there is none"),
        born=Epoch(1, *LIAR),
        number=number,
        sender=TrainerId(0),
        receiver=TrainerId(1),
        key=bytes(32),
        return_key=bytes(32),
        dial=number % 3 == 0,
        several=number % 2 == 0,
    )


async def test_a_member_without_a_rank_that_opens_lanes_leaves_nothing(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        trainers = await here.job(one, two)
        for _ in range(4):  # then they have all the memory that they need
            await reduce_all(trainers)
        before, most = descriptors(), 0
        opened: list[Lane] = []

        async def open_it(offer: OfferLane) -> None:
            stream = await trio.open_tcp_stream("127.0.0.1", one.port)
            with suppress(LaneBroken):
                opened.append(await dial_lane(stream, offer, peer="victim"))

        async with lying_to(one) as liar:
            for number in range(1, 91):
                liar.link.send(made_up_offer(number))
                liar.link.send(Splice(number.to_bytes(16, "little"), of(two)))
            await trio.sleep(0.1)
            async with trio.open_nursery() as nursery:
                for number in range(1, 91):
                    if number % 3:
                        nursery.start_soon(open_it, made_up_offer(number))
                        await trio.sleep(0.1)
                        most = max(most, descriptors() - before - len(nursery.child_tasks))
            assert not opened
            assert most <= 64
            assert [r[0] for r in await reduce_all(trainers)] == [2.0, 2.0]
        await trio.sleep(5)
        assert descriptors() == before
        assert one.agent.peers.broken_links == 0
        assert [r[0] for r in await reduce_all(trainers)] == [2.0, 2.0]
