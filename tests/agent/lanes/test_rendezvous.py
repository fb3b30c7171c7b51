"""How lanes come about between two agents, and what becomes of those that nobody takes."""

import contextlib
import errno
import gc
import socket
import weakref

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from pmesh.agent.lanes import rendezvous as rendezvous_module
from pmesh.agent.lanes.rendezvous import LaneEnd
from pmesh.agent.lanes.splices import MAX_DIALS
from pmesh.core.wire.lanes import OfferLane
from pmesh.core.wire.preamble import Preamble, encode_preamble
from pmesh.errors import LaneBroken, PeerUnreachable
from pmesh.ids import Member
from pmesh.net.lanes.lane import Lane, PathLost
from pmesh.net.lanes.opening import dial_lane
from tests.agent.lanes.sides import (
    JOB,
    A,
    B,
    C,
    Side,
    dial_as_offered,
    edge,
    made_offer,
    opened,
    take,
    two_sides,
)
from tests.worlds.faults import Faults, Real
from tests.worlds.kept import kept
from tests.worlds.lanes import is_closed


@pytest.mark.parametrize("ada_dials", [True, False])
async def test_the_lane_is_dialled_the_way_the_link_was(
    autojump_clock: MockClock, *, ada_dials: bool
) -> None:
    async with two_sides(ada_dials=ada_dials) as (ada, bob):
        ada.rendezvous.offer(edge(), B)
        await opened(ada, bob)
        assert autojump_clock.current_time() < 0.1
        assert [offer.dial for offer in ada.offers] == [not ada_dials]


@pytest.mark.parametrize("ada_dials", [True, False])
async def test_a_dial_that_fails_is_tried_again_under_a_new_offer(
    autojump_clock: MockClock, *, ada_dials: bool
) -> None:
    async with two_sides(ada_dials=ada_dials) as (ada, bob):
        dialler = ada if ada_dials else bob
        dialler.unreachable = 1
        ada.rendezvous.offer(edge(), B)
        await opened(ada, bob)
        assert len({offer.lane for offer in ada.offers}) == 2
        assert len(dialler.complaints) == 1
        assert autojump_clock.current_time() < 6


@pytest.mark.parametrize("ada_dials", [True, False])
async def test_after_three_attempts_whoever_waits_is_told(
    autojump_clock: MockClock, *, ada_dials: bool
) -> None:
    async with two_sides(ada_dials=ada_dials) as (ada, bob):
        ada.unreachable = bob.unreachable = 9
        ada.rendezvous.offer(edge(), B)
        with pytest.raises(LaneBroken, match="no data connection to bob can be made"):
            await take(ada, sending=True)
        assert len(ada.offers) == 3
        assert autojump_clock.current_time() < 20


async def test_an_offer_lost_with_its_link_is_made_again(autojump_clock: MockClock) -> None:
    async with two_sides(ada_dials=False) as (ada, bob):
        ada.link_is_up = False
        ada.rendezvous.offer(edge(), B)
        await trio.sleep(1)
        ada.link_is_up = True
        await opened(ada, bob)
        assert autojump_clock.current_time() > 5


async def test_a_connection_may_overtake_its_offer(autojump_clock: MockClock) -> None:
    async with two_sides() as (ada, bob):
        ada.link_is_up = False
        ada.rendezvous.offer(edge(), B)
        await trio.sleep(1)
        bob.rendezvous.accept(A, ada.offers[0])
        await opened(ada, bob)
        assert autojump_clock.current_time() < 1.5


async def test_a_connection_that_names_no_lane_is_refused(autojump_clock: MockClock) -> None:
    async with two_sides() as (ada, bob):
        ada.link_is_up = False
        ada.rendezvous.offer(edge(), B)
        with pytest.raises(LaneBroken):
            await take(ada, sending=True)
        assert "nobody has offered" in str(bob.complaints[0])
        assert autojump_clock.current_time() > 6


async def test_who_is_let_in_too_late_has_no_lane(autojump_clock: MockClock) -> None:
    async with two_sides() as (ada, bob):
        bob.late = True
        ada.rendezvous.offer(edge(), B)
        sending = await take(ada, sending=True)  # it can't know
        with trio.move_on_after(5) as waiting:
            await take(bob, sending=False)
        assert waiting.cancelled_caught
        assert isinstance(bob.complaints[0], PeerUnreachable)
        sending.close()
        assert autojump_clock.current_time() >= 5


async def test_ranks_of_one_agent_need_no_network() -> None:
    async with two_sides() as (ada, _):
        ada.rendezvous.offer(edge(), A)
        sending, receiving = await take(ada, sending=True), await take(ada, sending=False)
        assert sending.peer == "trainer 1 (ada)"
        assert receiving.peer == "trainer 0 (ada)"
        sending.close()
        receiving.close()
        assert not ada.offers


async def test_no_descriptor_for_a_lane_is_a_broken_lane(faults: Faults) -> None:
    faults.fail(rendezvous_module, "local_lanes", OSError(errno.EMFILE, "Too many open files"))
    async with two_sides() as (ada, _):
        ada.rendezvous.offer(edge(), A)
        with pytest.raises(LaneBroken, match="Too many open files"):
            await take(ada, sending=True)


async def test_a_lane_is_taken_once(autojump_clock: MockClock) -> None:
    async with two_sides() as (ada, _):
        lanes: list[Lane] = []
        refused: list[LaneBroken] = []

        async def compete() -> None:
            try:
                lanes.append(await take(ada, sending=True))
            except LaneBroken as e:
                refused.append(e)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(compete)
            nursery.start_soon(compete)
            await trio.sleep(0.1)
            ada.rendezvous.offer(edge(), B)
        assert (len(lanes), len(refused)) == (1, 1)
        lanes[0].close()
        assert autojump_clock.current_time() < 1


async def test_an_earlier_attempt_makes_way() -> None:
    async with two_sides() as (ada, bob):
        for _ in range(2):
            offer = made_offer(ada, edge(), dial=False)  # of two attempts
            bob.rendezvous.accept(A, offer)
            (await dial_as_offered(ada, offer)).close()
            await wait_all_tasks_blocked()
        assert list(map(is_closed, bob.begun)) == [True, False]
        lane = await take(bob, sending=False)
        assert lane is bob.begun[1]
        lane.close()


# --- rosters end


async def test_lanes_of_a_roster_that_is_over_are_closed_and_who_waits_is_told(
    autojump_clock: MockClock,
) -> None:
    async with two_sides() as (ada, bob):
        ada.rendezvous.offer(edge(), B)
        await trio.sleep(0.1)
        (lane,) = bob.begun
        assert not is_closed(lane)
        bob.rendezvous.forget(JOB, below=6)
        assert is_closed(lane)
        for number in (5, 6):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_expect_over, bob, number)
                await trio.sleep(0.1)
                bob.rendezvous.forget(JOB, below=number + 1)
        assert autojump_clock.current_time() < 1


class HeldByWaiter:
    pass


async def test_whoever_waited_in_vain_frees_its_memory_at_once(autojump_clock: MockClock) -> None:
    held = list[weakref.ref[HeldByWaiter]]()

    async def bring(side: Side) -> None:
        memory = HeldByWaiter()
        held.append(weakref.ref(memory))
        with contextlib.suppress(LaneBroken):
            await take(side, sending=False)

    gc.disable()
    try:
        async with two_sides() as (_, bob), trio.open_nursery() as nursery:
            nursery.start_soon(bring, bob)
            await trio.sleep(0.1)
            bob.rendezvous.forget(JOB, below=6)
            await trio.sleep(0.1)
            assert held[0]() is None
    finally:
        gc.enable()
    assert autojump_clock.current_time() < 1


async def test_a_lane_is_only_taken_from_its_senders_own_agent(autojump_clock: MockClock) -> None:
    """V4: of two views that settled a job at once, either may have called another trainer 0."""
    async with two_sides() as (ada, bob):
        ada.rendezvous.offer(edge(host=A), B)
        with trio.move_on_after(10) as waited:
            await bob.rendezvous.take(LaneEnd(edge(host=C), sending=False))
        assert waited.cancelled_caught
        (await take(bob, sending=False, of=edge(host=A))).close()
        (await take(ada, sending=True, of=edge(host=A))).close()
    assert autojump_clock.current_time() >= 10


async def test_a_lane_that_is_given_up_is_closed_and_offered_in_vain(
    autojump_clock: MockClock,
) -> None:
    async with two_sides() as (ada, bob):
        given_up = edge(op=-2)
        ada.rendezvous.offer(given_up, B)
        await trio.sleep(0.1)
        (lane,) = bob.begun
        assert not is_closed(lane)
        bob.rendezvous.give_up(LaneEnd(given_up, sending=False))
        assert is_closed(lane)
        bob.rendezvous.accept(A, made_offer(ada, given_up, dial=False))
        assert bob.keeps_nothing
        bob.rendezvous.forget(JOB, below=6)
        assert not kept(bob.rendezvous)["given_up"]  # nor is it remembered for longer
        ada.rendezvous.close()
    assert autojump_clock.current_time() < 1


async def _expect_over(side: Side, number: int) -> None:
    with pytest.raises(LaneBroken, match="its roster is over"):
        await take(side, sending=False, of=edge(number))


@pytest.mark.parametrize("ada_dials", [True, False])
async def test_what_arrives_for_a_roster_that_is_over_is_dropped(
    autojump_clock: MockClock, *, ada_dials: bool
) -> None:
    async with two_sides(ada_dials=ada_dials) as (ada, bob):
        bob.rendezvous.forget(JOB, below=6)
        bob.rendezvous.forget(JOB, below=3)  # an older view's word changes nothing
        ada.rendezvous.offer(edge(), B)
        await trio.sleep(0.1)
        assert bob.keeps_nothing
        ada.rendezvous.forget(JOB, below=6)
        ada.rendezvous.offer(edge(6), B)
        sending, receiving = (
            await take(ada, sending=True, of=edge(6)),
            await take(bob, sending=False, of=edge(6)),
        )
        sending.close()
        receiving.close()
        assert autojump_clock.current_time() < 10


@pytest.mark.parametrize("ada_dials", [True, False])
async def test_a_lane_that_opens_after_its_roster_is_over_is_closed(
    autojump_clock: MockClock, faults: Faults, *, ada_dials: bool
) -> None:
    opening, made = trio.Event(), list[Lane]()

    async def open_slowly(stream: trio.SocketStream, offer: OfferLane, *, peer: str) -> Lane:
        made.append(await dial_lane(stream, offer, peer=peer))
        try:
            await opening.wait()
        except trio.Cancelled:  # as the real one
            made[0].close()
            raise
        return made[0]

    faults.instead(rendezvous_module, "dial_lane", open_slowly)
    async with two_sides(ada_dials=ada_dials) as (ada, bob):
        ada.rendezvous.offer(edge(), B)
        await trio.sleep(0.1)
        for side in (ada, bob):
            side.rendezvous.forget(JOB, below=6)
        opening.set()
        await trio.sleep(1)
        assert is_closed(made[0])
        assert ada.keeps_nothing
        assert len(ada.offers) == 1
        assert autojump_clock.current_time() < 3


async def test_a_peer_can_not_make_an_agent_dial_without_end(
    faults: Faults, autojump_clock: MockClock
) -> None:
    """Each connection costs a descriptor, and may be to where nobody answers."""
    under_way = most = 0

    async def nobody_answers(_: Member) -> trio.SocketStream:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await trio.sleep(5)
        under_way -= 1
        raise PeerUnreachable("nobody answers")

    async with two_sides(ada_dials=True) as (ada, bob):
        faults.instead(bob, "dial_member", nobody_answers)
        for number in range(3 * MAX_DIALS):
            bob.rendezvous.accept(A, made_offer(ada, edge(number), dial=True))
        await trio.sleep(1)
        assert under_way == MAX_DIALS
        await trio.sleep(60)
        assert (under_way, most) == (0, MAX_DIALS)
        bob.rendezvous.lose(A)
        assert not kept(bob.rendezvous.splices)["turns"]  # what it keeps of a peer
        assert autojump_clock.current_time() > 60


async def test_nothing_is_kept_of_a_peer_that_is_lost_while_a_lane_to_it_is_tried_again(
    autojump_clock: MockClock,
) -> None:
    async with two_sides() as (ada, _):
        ada.unreachable = 9
        ada.rendezvous.offer(edge(), B)
        await trio.sleep(0.1)
        ada.rendezvous.lose(B)
        with pytest.raises(LaneBroken):
            await take(ada, sending=True)
        assert not any(kept(ada.rendezvous.splices).values())
        assert autojump_clock.current_time() < 2


@pytest.mark.parametrize("ada_dials", [True, False])
async def test_the_lanes_of_many_ranks_do_not_knock_all_at_once(
    autojump_clock: MockClock, faults: Faults, *, ada_dials: bool
) -> None:
    at_the_door = most = 0

    async def answer_slowly(answer: Real, side: Side, stream: trio.SocketStream) -> None:
        nonlocal at_the_door, most
        at_the_door += 1
        most = max(most, at_the_door)
        await trio.sleep(0.1)
        at_the_door -= 1
        await answer(side, stream)

    faults.around(Side, "answer_acceptor", answer_slowly)
    async with two_sides(ada_dials=ada_dials) as (ada, bob):
        edges = [edge(number) for number in range(5 * MAX_DIALS)]
        for of in edges:
            ada.rendezvous.offer(of, B)
        for of in edges:
            for side in (ada, bob):
                (await take(side, sending=side is ada, of=of)).close()
        assert most == MAX_DIALS
        assert autojump_clock.current_time() < 1


@pytest.mark.parametrize("ada_dials", [True, False])
async def test_the_lanes_of_many_ranks_all_open_where_each_takes_a_second(
    autojump_clock: MockClock, faults: Faults, *, ada_dials: bool
) -> None:
    async def answer_slowly(answer: Real, side: Side, stream: trio.SocketStream) -> None:
        await trio.sleep(1.2)  # two round trips between two homes, at worst
        await answer(side, stream)

    faults.around(Side, "answer_acceptor", answer_slowly)
    async with two_sides(ada_dials=ada_dials) as (ada, bob):
        edges = [edge(number) for number in range(64)]  # from each of 8 ranks to each of 8
        for of in edges:
            ada.rendezvous.offer(of, B)
        for of in edges:
            for side in (ada, bob):
                (await take(side, sending=side is ada, of=of)).close()
        # One after the other they take 77 s, so many at once 19; but the connections are real, and
        # each that the system completes after the clock has jumped misses a turn.
        assert autojump_clock.current_time() < 2 * 64 / MAX_DIALS * 1.2


async def test_a_lane_is_known_from_its_offer_on_until_it_is_open(
    autojump_clock: MockClock,
) -> None:
    async with two_sides(ada_dials=True) as (ada, bob):
        offers = [made_offer(ada, edge(number), dial=False) for number in range(3)]
        expected, early, unknown = (encode_preamble(Preamble(each.lane)) for each in offers)
        bob.rendezvous.accept(A, offers[0])
        bob.has_roster = False
        bob.rendezvous.accept(A, offers[1])
        await wait_all_tasks_blocked()
        known = bob.rendezvous.is_offered
        assert [known(each) for each in (expected, early, unknown)] == [True, True, False]
        assert not known(encode_preamble(Preamble(offers[0].lane, 1)))
        assert not known(expected[:-1])
        bob.rendezvous.forget(JOB, below=6)
        await trio.sleep(1)
        assert [known(each) for each in (expected, early)] == [False, False]
        assert autojump_clock.current_time() < 2


async def test_whoever_still_waits_at_the_end_is_told() -> None:
    async with two_sides() as (ada, _), trio.open_nursery() as nursery:

        async def wait() -> None:
            with pytest.raises(LaneBroken, match="the agent ends"):
                await take(ada, sending=True)

        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        ada.rendezvous.close()


async def test_an_offer_whose_roster_is_over_before_its_turn_is_never_made(
    autojump_clock: MockClock,
) -> None:
    async with two_sides() as (ada, _):
        ada.rendezvous.offer(edge(), B)
        ada.rendezvous.forget(JOB, below=6)
        await trio.sleep(0.1)
        assert ada.offers == []
        assert ada.keeps_nothing
        assert autojump_clock.current_time() < 1


async def test_a_path_that_fails_breaks_the_lanes_between_its_interfaces_alone() -> None:
    async with two_sides() as (ada, bob):
        ada.rendezvous.offer(edge(), B)
        sending, receiving = await take(ada, sending=True), await take(bob, sending=False)
        sending.hosts = ("10.0.0.1", "10.0.0.2")
        ada.rendezvous.paths.lose({"10.0.0.1"}, {"10.0.0.3"})
        ada.rendezvous.paths.lose({"10.0.1.1"}, {"10.0.0.2"})
        sending.check_open()
        ada.rendezvous.paths.lose({"fd00::1", "10.0.0.1"}, {"10.0.0.2"})
        with pytest.raises(PathLost):
            sending.check_open()
        receiving.close()


@pytest.mark.parametrize("ada_dials", [True, False])
async def test_a_lane_that_is_being_opened_over_a_path_that_fails_is_opened_over_another_at_once(
    autojump_clock: MockClock, faults: Faults, *, ada_dials: bool
) -> None:
    silent: list[trio.SocketStream] = []
    paths = iter(("127.0.0.2", "127.0.0.1"))
    async with two_sides(ada_dials=ada_dials) as (ada, bob), trio.open_nursery() as nursery:

        async def dial_over_the_best_path(_: Member) -> trio.SocketStream:
            listener = socket.create_server((next(paths), 0))
            async with trio.SocketListener(trio.socket.from_stdlib_socket(listener)) as door:
                stream = await trio.open_tcp_stream(*listener.getsockname())
                accepted = await door.accept()
            if stream.socket.getpeername()[0] == "127.0.0.2":
                silent.append(accepted)
            else:
                nursery.start_soon(answerer.answer_acceptor, accepted)
            return stream

        dialler, answerer = (ada, bob) if ada_dials else (bob, ada)
        faults.instead(dialler, "dial_member", dial_over_the_best_path)
        ada.rendezvous.offer(edge(), B)
        await trio.sleep(1)
        dialler.rendezvous.lose_path({"127.0.0.1"}, {"127.0.0.1"})
        await trio.sleep(1)
        assert len(silent) == 1
        dialler.rendezvous.lose_path({"127.0.0.1"}, {"127.0.0.2"})
        await opened(ada, bob)
        assert len(ada.offers) == 1
        assert autojump_clock.current_time() < 2.1
        await silent[0].aclose()


async def test_a_welcome_over_a_path_that_fails_ends_at_once_and_the_lane_is_still_awaited(
    autojump_clock: MockClock,
) -> None:
    async with two_sides(ada_dials=False) as (ada, bob), trio.open_nursery() as nursery:
        bob.unreachable = 1
        ada.rendezvous.offer(edge(), B)
        await trio.sleep(0.1)
        listener = socket.create_server(("127.0.0.1", 0))
        async with trio.SocketListener(trio.socket.from_stdlib_socket(listener)) as door:
            stalled = await trio.open_tcp_stream(*listener.getsockname())
            await stalled.send_all(encode_preamble(Preamble(ada.offers[0].lane)))
            nursery.start_soon(ada.answer_acceptor, await door.accept())
        await trio.sleep(0.1)
        ada.rendezvous.lose_path({"127.0.0.1"}, {"127.0.0.1"})
        assert await stalled.receive_some(1) == b""
        assert isinstance(ada.complaints[-1], PathLost)
        bob.rendezvous.accept(A, ada.offers[0])
        await opened(ada, bob)
        assert len(ada.offers) == 1
        assert autojump_clock.current_time() < 1
        await stalled.aclose()
