"""One who holds the mesh key and sends what no honest member would, to a whole agent."""

import contextlib
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np
import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.mesh.dial_targets import MAX_INTRODUCED
from pmesh.agent.mesh.links import Link
from pmesh.core.identity.certificates import issue_credentials
from pmesh.core.identity.keys import NodeKey
from pmesh.core.values import Roster, Seat, View
from pmesh.core.wire.link import (
    MAX_ADDRESSES,
    PROTOCOL_VERSION,
    Address,
    AskToJoin,
    Commit,
    Flushed,
    Heartbeat,
    Hello,
    KnownPeers,
    LinkMessage,
    PathMessage,
    PeerInterface,
    Propose,
    Refuse,
    TellView,
    Waiting,
    encode,
)
from pmesh.errors import PeerUnreachable, PmeshError, ProtocolError
from pmesh.ids import MAX_COUNTER, MAX_NAME, Epoch, Incarnation, JobName, Member, NodeId, Slot
from pmesh.net.links.path import Path, shake_hands
from pmesh.net.links.tls import TlsContexts
from tests.worlds.builders import make_heartbeat, make_member, make_roster, make_view
from tests.worlds.trainer import Trainer, together, until
from tests.worlds.village import MESH, Machine, village

KEY = NodeKey.from_seed(b"l" * 32)
LIAR = Member(KEY.node, Incarnation(666))
HELLO = Hello(PROTOCOL_VERSION, LIAR, "liar", link=1)
LONG_NAME = "\N{CAT FACE}" * MAX_NAME
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
async def lying_to(machine: Machine, hello: Hello = HELLO) -> AsyncGenerator[Liar]:
    stream = await trio.open_tcp_stream("127.0.0.1", machine.port)
    link = await shake_hands(
        stream,
        contexts=TlsContexts.of(issue_credentials(MESH, KEY)),
        server_side=False,
        hello=lambda _: hello,
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
            for batch in range(32):
                inventions = tuple(
                    Hello(
                        PROTOCOL_VERSION,
                        Member(NodeId((128 * batch + n + 1).to_bytes(32, "big")), Incarnation(1)),
                        "nobody",
                        (Address("127.0.0.1", 1),) if n else (),
                    )
                    for n in range(128)
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


# --- what one says, no honest machine is banned for (see also tests/core/views/test_bounds.py)


def together_as_before(one: Machine, two: Machine, links: tuple[Link, Link]) -> bool:
    """Neither has given up its link with the other, nor banned it."""
    now = one.agent.peers.links.get(two.key.node), two.agent.peers.links.get(one.key.node)
    return now == links


def links_between(one: Machine, two: Machine) -> tuple[Link, Link]:
    return one.agent.peers.links[two.key.node], two.agent.peers.links[one.key.node]


def large_hello(nbytes: int, machine: Machine) -> Hello:
    """Of an agent that names very many addresses, and listens where this machine does."""
    hello = msgspec.structs.replace(HELLO, addresses=(machine.address,))
    interfaces = [PeerInterface("eth0", "wired", 1000, ())]
    while (left := nbytes - size_of(hello, interfaces)) > 0:
        hosts = interfaces[-1].hosts
        if len(hosts) == MAX_ADDRESSES:
            interfaces.append(PeerInterface("eth1", "wired", 1000, ()))
        else:
            host = "h" * max(0, min(250, left - 2))
            interfaces[-1] = msgspec.structs.replace(interfaces[-1], hosts=(*hosts, host))
    hello = msgspec.structs.replace(hello, interfaces=tuple(interfaces))
    assert 0 <= len(msgspec.msgpack.encode(hello)) - nbytes <= 2  # prefixes grow, too
    return hello


def size_of(hello: Hello, interfaces: list[PeerInterface]) -> int:
    return len(msgspec.msgpack.encode(msgspec.structs.replace(hello, interfaces=tuple(interfaces))))


async def trains_on(trainers: list[Trainer]) -> None:
    for _ in range(3):
        results = await together(*[partial(t.reduce, np.ones(5)) for t in trainers])
        assert [set(result) for result in results] == [{float(len(trainers))}] * len(trainers)


@pytest.mark.parametrize("nbytes", [16_380, 262_142])
async def test_a_hello_of_any_size_parts_nobody(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    monkeypatch.setattr("pmesh.net.links.path.encode", msgspec.msgpack.encode)
    async with village(clock, 2) as here:
        one, two = here.machines
        trainers, links = await here.job(one, two), links_between(one, two)
        with contextlib.suppress(PmeshError):
            async with lying_to(one, large_hello(nbytes, one)) as liar:
                await trio.sleep(3.0)
                del liar
        await trains_on(trainers)
        assert together_as_before(one, two, links)


@pytest.mark.parametrize("count", [128, 1000])
async def test_trainers_that_wait_in_any_number_part_nobody(clock: MockClock, count: int) -> None:
    async with village(clock, 2) as here:
        one, two = here.machines
        trainers, links = await here.job(one, two), links_between(one, two)
        waiting = tuple(Waiting(JobName("theirs"), Slot(slot), 1) for slot in range(count))
        async with lying_to(one) as first, lying_to(two) as second:
            view = make_view(1, LIAR)
            beat = make_heartbeat(view, of(one), of(two), waiting=waiting)
            for _ in range(25):
                for liar in (first, second):
                    if liar.ended:
                        break
                    liar.link.send(TellView(view))
                    liar.link.send(beat)
                    liar.link.send(AskToJoin(view.epoch))
                    for asked in [m for m in liar.heard if isinstance(m, Propose)]:
                        liar.heard.remove(asked)
                        liar.link.send(Flushed(asked.epoch, LONG_NAME, view, (), waiting))
                await trio.sleep(0.1)
        await trains_on(trainers)
        assert together_as_before(one, two, links)


async def test_error_texts_of_any_size_part_nobody(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come from a rank of a job; another job, in which it has none, goes on."""
    async with village(clock, 3) as here:
        one, two, hostile = here.machines
        await here.job(one, two, hostile, name="shared")
        trainers, links = await here.job(one, two, name="ours"), links_between(one, two)
        (rank,) = hostile.agent.jobs.ranks
        roster = rank.roster
        asked = [
            [roster.job, roster.born, roster.number, ["OpTimedOut", "x" * 65_300, []], op]
            for op in range(4)
        ]
        send = Link.send

        def ask_too(link: Link, message: LinkMessage) -> None:
            """In each heartbeat, in bytes that no agent of ours would make."""
            if link in hostile.agent.peers.links.values() and isinstance(message, Heartbeat):
                raw = msgspec.msgpack.decode(encode(message))
                raw[8] = asked
                packet = link._delivery.send(msgspec.msgpack.encode(raw))  # noqa: SLF001
                if link.current is not None:
                    link.current.path.send_packet(packet)
            else:
                send(link, message)

        monkeypatch.setattr(Link, "send", ask_too)
        await trio.sleep(3.0)
        await trains_on(trainers)
        assert together_as_before(one, two, links)
