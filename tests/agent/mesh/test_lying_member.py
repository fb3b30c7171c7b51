"""One who holds the mesh key and sends what no honest member would, to a whole agent."""

from collections.abc import Callable
from contextlib import suppress

import msgspec
import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.mesh.dial_targets import MAX_INTRODUCED
from pmesh.agent.mesh.links import Link
from pmesh.core.identity.names import sign_name
from pmesh.core.values import Roster, Seat, View
from pmesh.core.wire.lanes import OfferLane, Splice
from pmesh.core.wire.link import PROTOCOL_VERSION, Address, Hello, KnownPeers
from pmesh.core.wire.views import Commit, Refuse, TellView
from pmesh.errors import LaneBroken
from pmesh.ids import MAX_COUNTER, Epoch, Incarnation, JobName, Member, NodeId, TrainerId
from pmesh.net.lanes.lane import Lane
from pmesh.net.lanes.opening import dial_lane
from simulation.wire import AnyMessage
from tests.agent.mesh.liar import ALL_KEYS, CRONY, KEY, LIAR, SAID, THIRD, Told, lying_to, of
from tests.worlds.builders import make_heartbeat, make_roster, make_view, unsigned
from tests.worlds.faults import Faults, Real
from tests.worlds.lanes import descriptors, sockets
from tests.worlds.nodes import signed
from tests.worlds.trainer import until
from tests.worlds.village import Machine, Village, village
from tests.worlds.village_ops import reduce_all


def commit(epoch: Epoch, said: Told, rosters: tuple[Roster, ...] = ()) -> Commit:
    """In the ring order that follows from equal costs: only the view is bad."""
    seats = tuple(Seat(member, said[member], epoch, None) for member in sorted(said))
    view = View(epoch, seats, rosters)
    size = len(view.seats)
    return Commit(view, tuple(tuple(20 * (a != b) for b in range(size)) for a in range(size)))


def without_a_seat_for_its_leader(epoch: Epoch, honest: Told) -> Commit:
    return commit(epoch, honest | {CRONY: SAID[CRONY]})


def with_a_roster_without_trainers(epoch: Epoch, honest: Told) -> Commit:
    born = msgspec.structs.replace(make_roster(), born=epoch, number=epoch.counter)
    return commit(epoch, honest | {LIAR: SAID[LIAR]}, rosters=(born,))


def with_300_seats(epoch: Epoch, honest: Told) -> Commit:
    others = [Member(NodeId(n.to_bytes(32, "big")), Incarnation(n)) for n in range(1, 299)]
    return commit(epoch, honest | dict.fromkeys(others, unsigned("mac")) | {LIAR: SAID[LIAR]})


def with_its_own_name_for_another(epoch: Epoch, honest: Told) -> Commit:
    ((member, said),) = honest.items()
    return commit(epoch, {LIAR: said, member: SAID[LIAR]})


def with_a_rank_of_another_name(epoch: Epoch, honest: Told) -> Commit:
    ((member, said),) = honest.items()
    begun = msgspec.structs.replace(make_roster(member), born=epoch, number=epoch.counter)
    rank = msgspec.structs.replace(begun.trainers[0], said=SAID[LIAR])
    named = msgspec.structs.replace(begun, trainers=(rank,))
    return commit(epoch, {LIAR: SAID[LIAR], member: said}, rosters=(named,))


BAD_COMMITS: dict[Callable[[Epoch, Told], Commit], str] = {
    without_a_seat_for_its_leader: "a view whose leader has no seat",
    with_a_roster_without_trainers: "without trainers",
    with_300_seats: "not a control message",
    with_its_own_name_for_another: "a name that its machine has not signed",
    with_a_rank_of_another_name: "a name that its machine has not signed",
}


@pytest.mark.parametrize("bad_commit", BAD_COMMITS, ids=lambda make: make.__name__)
async def test_a_commit_that_no_leader_could_have_made_ends_the_liars_link_and_nothing_else(
    clock: MockClock, bad_commit: Callable[[Epoch, Told], Commit]
) -> None:
    async with village(clock, 1) as here:
        (one,) = here.machines
        async with lying_to(one) as liar:
            base, epoch = signed(make_view(5, LIAR, CRONY, THIRD), *ALL_KEYS), Epoch(7, *LIAR)
            liar.ask_to_promise(epoch, base, of(one))
            await until(lambda: one.agent.membership.state.promised == epoch)
            liar.link.send(bad_commit(epoch, {of(one): one.agent.membership.state.said}))
            await until(lambda: liar.ended)
        (why,) = one.agent.peers.targets.refusals.values()
        assert BAD_COMMITS[bad_commit] in str(why.error)
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
            view = signed(make_view(MAX_COUNTER, LIAR, rosters=[make_roster(LIAR)]), KEY)
            liar.link.send(TellView(view))
            liar.link.send(make_heartbeat(view, of(one)))
            await until(lambda: liar.ended)
        assert one.agent.peers.broken_links == 1
        assert one.agent.membership.state.highest_counter < 100
        await trainers[0].die()
        await until(lambda: len(two.agent.jobs.ranks) <= 1)
        await here.settle(one, two)


def by_seniority(here: Village) -> list[Machine]:
    """Its leader first."""
    members = here.machines[0].agent.membership.view.by_seniority
    return sorted(here.machines, key=lambda machine: members.index(of(machine)))


async def test_a_leader_that_never_commits_is_left_out_and_gets_no_link_for_a_while(
    clock: MockClock, faults: Faults
) -> None:
    async with village(clock, 3) as here:
        liar, *honest = by_seniority(here)

        def withhold(send: Real, link: Link, message: AnyMessage) -> None:
            if not (
                link in liar.agent.peers.links.values() and isinstance(message, Commit | TellView)
            ):
                send(link, message)

        faults.around(Link, "send", withhold)
        trainers = await here.job(*honest, timeout_s=60.0)
        assert {t.world.trainers for t in trainers} == {(0, 1)}
        assert any("it made no view for 30 s" in line for m in honest for line in m.lines)
        assert liar.settings.name not in honest[0].names


def swapped(view: View) -> View:
    """The view in which every two neighbours have each other's names."""
    seats = view.seats
    names = [seats[i ^ 1].said if i ^ 1 < len(seats) else seats[i].said for i in range(len(seats))]
    renamed = [msgspec.structs.replace(s, said=n) for s, n in zip(seats, names, strict=True)]
    return msgspec.structs.replace(view, seats=tuple(renamed))


async def test_a_leader_that_swaps_the_names_of_two_seats_is_refused_and_nobody_else(
    clock: MockClock, faults: Faults
) -> None:
    async with village(clock, 3) as here:
        liar, *honest = by_seniority(here)

        def lie(send: Real, link: Link, message: AnyMessage) -> None:
            if link in liar.agent.peers.links.values() and isinstance(message, Commit):
                message = Commit(swapped(message.view), message.costs)
            send(link, message)

        faults.around(Link, "send", lie)
        trainers = await here.job(*honest, timeout_s=60.0)  # they need a view for it
        assert {t.world.trainers for t in trainers} == {(0, 1)}
        for machine in honest:
            seats = machine.agent.membership.view.seats
            assert {seat.member: seat.name for seat in seats} == {
                of(other): other.settings.name for other in honest
            }
            assert machine.agent.peers.broken_links == 1
            (refusal,) = machine.agent.peers.targets.refusals.values()
            assert refusal.node == liar.key.node
        assert liar.agent.peers.broken_links == 0


async def test_a_peer_that_changes_its_name_while_it_runs_gets_no_link(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        (one,) = here.machines
        async with lying_to(one) as liar:
            renamed = Hello(PROTOCOL_VERSION, LIAR, sign_name(KEY, LIAR, "mac-0"), link=1)
            liar.link.send(KnownPeers((renamed,)))
            await until(lambda: liar.ended)
        assert one.agent.peers.broken_links == 1


async def test_a_hello_with_a_name_that_was_not_signed_gets_no_link(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        (one,) = here.machines
        said = sign_name(KEY, Member(KEY.node, Incarnation(1)), "liar")  # of an earlier start
        async with lying_to(one, Hello(PROTOCOL_VERSION, LIAR, said, link=1)) as liar:
            await until(lambda: liar.ended)
        assert not one.agent.peers.links


async def test_agents_without_jobs_that_were_led_astray_come_together_again(
    clock: MockClock,
) -> None:
    """They have promised what an agent with a job can't follow."""
    async with village(clock, 1) as here:
        (one,) = here.machines
        before = of(one)
        async with lying_to(one) as liar:
            view = make_view(2**40, LIAR, CRONY, rosters=[make_roster(LIAR)])
            view = signed(view, *ALL_KEYS)
            epoch = Epoch(2**40 + 1, *LIAR)
            liar.ask_to_promise(epoch, view, of(one))
            await until(lambda: one.agent.membership.state.promised == epoch)
        await until(lambda: of(one) != before)
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
                        Member(NodeId((120 * batch + n + 1).to_bytes(32, "big")), Incarnation(1)),
                        unsigned("nobody"),
                        (Address("127.0.0.1", 1),) if n else (),
                    )
                    for n in range(120)  # as many as a message has room for
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
                        most = max(most, sockets() - before - len(nursery.child_tasks))
            assert not opened
            assert most <= 64
            assert [r[0] for r in await reduce_all(trainers)] == [2.0, 2.0]
        await trio.sleep(5)
        assert descriptors() == before
        assert one.agent.peers.broken_links == 0
        assert [r[0] for r in await reduce_all(trainers)] == [2.0, 2.0]
