"""Whom this agent dials and when, and what it remembers of those who turn it away."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import trio
from structlog.testing import capture_logs
from trio.testing import MockClock, wait_all_tasks_blocked

from pmesh.agent.mesh.dial_targets import (
    DIALS_AGAIN_S,
    MAX_DIALS,
    MAX_INTRODUCED,
    MAX_REFUSALS,
    MAX_TARGETS,
    MAX_UNPROVEN_DIALS,
    Refusal,
    Targets,
)
from pmesh.core.links.dialing import LONGEST_UNPROVEN_DELAY_S
from pmesh.core.wire.link import Address
from pmesh.errors import MeshKeyMismatch, PeerUnreachable, PmeshError, ProtocolVersionMismatch
from pmesh.ids import NodeId
from tests.worlds.builders import ANNA, BERT

A, B = ANNA.node, BERT.node
HOME, OFFICE = Address("10.0.0.1", 24160), Address("10.0.0.2", 24160)

SILENT = PeerUnreachable("nobody answers")
OTHER_KEY = MeshKeyMismatch("another key")


class Switchboard:
    """Who answers at which address, and who was dialled when."""

    def __init__(self, clock: MockClock) -> None:
        self._clock = clock
        self.answers: dict[Address, NodeId | PmeshError] = {}
        self.calls: list[tuple[float, tuple[Address, ...]]] = []
        self.before_answer: Callable[[], Awaitable[object]] = trio.lowlevel.checkpoint

    @property
    def times(self) -> list[float]:
        return [round(at, 3) for at, _ in self.calls]

    async def dial(self, addresses: tuple[Address, ...]) -> NodeId:
        self.calls.append((self._clock.current_time(), addresses))
        await self.before_answer()
        answer = self.answers.get(addresses[0], SILENT)
        if isinstance(answer, PmeshError):
            raise answer
        return answer


@asynccontextmanager
async def running(clock: MockClock) -> AsyncGenerator[tuple[Targets, Switchboard]]:
    """Targets that dial over a switchboard; the jitter is what gives the longest delays."""
    board = Switchboard(clock)
    async with trio.open_nursery() as nursery:
        targets = Targets(board.dial, nursery=nursery, jitter=lambda: 1.0)
        nursery.start_soon(targets.run)
        yield targets, board
        nursery.cancel_scope.cancel()


async def test_a_machine_is_dialled_as_soon_as_it_is_named(clock: MockClock) -> None:
    async with running(clock) as (targets, board):
        board.answers[HOME] = A
        assert targets.wanted == {}
        targets.name(A, (HOME, OFFICE), linked=False)
        assert targets.wanted == {A: (HOME, OFFICE)}
        await trio.sleep(60)
        assert board.calls == [(clock.current_time() - 60, (HOME, OFFICE))]
        assert targets.wanted == {}
        assert targets.refusals == {}


async def test_a_machine_is_wanted_until_it_answers_itself(clock: MockClock) -> None:
    """Its address may be that of another by now, or of this machine too."""
    async with running(clock) as (targets, board):
        board.answers[HOME] = B
        targets.name(A, (HOME,), linked=False)
        await trio.sleep(60)
        assert targets.wanted == {A: (HOME,)}
        assert "another agent answers" in str(targets.refusals[A].error)
        board.answers[HOME] = A
        await trio.sleep(60)
        assert (targets.wanted, targets.refusals) == ({}, {})


async def test_who_is_linked_already_is_not_dialled_until_the_link_is_lost(
    clock: MockClock,
) -> None:
    async with running(clock) as (targets, board):
        targets.name(A, (HOME,), linked=True)
        await trio.sleep(60)
        assert board.calls == []
        lost_at = clock.current_time()
        targets.link_lost(A)
        await wait_all_tasks_blocked()
        assert board.calls == [(lost_at, (HOME,))]


async def test_a_peer_of_the_user_is_dialled_for_ever_ever_more_rarely(clock: MockClock) -> None:
    async with running(clock) as (targets, board):
        began = clock.current_time()
        targets.aim_at(HOME)
        await trio.sleep(3600)
        gaps = [b - a for a, b in zip(board.times, board.times[1:], strict=False)]
        assert [round(gap, 1) for gap in gaps[:8]] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0]
        assert max(gaps) <= 10.001
        assert board.times[-1] > began + 3580
        assert targets.wanted == {HOME: (HOME,)}


async def test_several_targets_keep_their_own_time(clock: MockClock) -> None:
    async with running(clock) as (targets, board):
        targets.aim_at(HOME)
        await trio.sleep(5)
        early = len(board.calls)
        board.answers[OFFICE] = B
        targets.aim_at(OFFICE)
        await wait_all_tasks_blocked()
        assert [addresses for _, addresses in board.calls[early:]] == [(OFFICE,)]
        assert clock.current_time() == board.calls[-1][0]


async def test_another_address_of_a_known_machine_is_dialled_at_once(clock: MockClock) -> None:
    async with running(clock) as (targets, board):
        board.answers[OFFICE] = A
        targets.name(A, (HOME,), linked=False)
        await trio.sleep(30)
        now = clock.current_time()
        targets.name(A, (OFFICE,), linked=False)
        await wait_all_tasks_blocked()
        assert board.calls[-1] == (now, (OFFICE,))
        assert targets.wanted == {}


async def test_a_machine_that_withdrew_and_stays_silent_is_given_up(clock: MockClock) -> None:
    async with running(clock) as (targets, board):
        targets.withdraw(B)  # nobody ever named it
        assert targets.wanted == {}
        targets.name(A, (HOME,), linked=False)
        targets.withdraw(A)
        await trio.sleep(50)
        assert targets.wanted == {A: (HOME,)}
        await trio.sleep(50)
        assert targets.wanted == {}
        calls = len(board.calls)
        await trio.sleep(1000)
        assert len(board.calls) == calls


async def test_a_steady_link_that_is_lost_is_redialled_at_once_whatever_named_it(
    clock: MockClock,
) -> None:
    async with running(clock) as (targets, board):
        board.answers[HOME] = board.answers[OFFICE] = A
        targets.aim_at(HOME)
        targets.name(A, (OFFICE,), linked=False)
        await trio.sleep(10)
        assert len(board.calls) == 2
        lost_at = clock.current_time()
        targets.link_lost(A)
        targets.link_lost(B)  # nobody's target
        await wait_all_tasks_blocked()
        assert len(board.calls) == 4
        assert set(board.calls[2:]) == {(lost_at, (HOME,)), (lost_at, (OFFICE,))}


async def test_a_loss_while_a_target_is_being_dialled_changes_nothing(clock: MockClock) -> None:
    async with running(clock) as (targets, board):
        board.before_answer = trio.sleep_forever
        targets.name(A, (HOME,), linked=False)
        await wait_all_tasks_blocked()
        targets.link_lost(A)
        await trio.sleep(60)
        assert len(board.calls) == 1
        assert targets.wanted == {A: (HOME,)}


async def test_a_dial_that_fails_after_the_peers_own_has_succeeded_changes_nothing(
    clock: MockClock,
) -> None:
    async with running(clock) as (targets, board):
        answering = trio.Event()
        board.before_answer = answering.wait
        targets.name(A, (HOME,), linked=False)
        await wait_all_tasks_blocked()
        targets.link_up(A)
        answering.set()
        await trio.sleep(60)
        assert len(board.calls) == 1
        assert targets.wanted == {}


async def test_a_dial_that_fails_after_the_peers_own_link_has_come_and_gone_changes_nothing(
    clock: MockClock,
) -> None:
    async with running(clock) as (targets, board):
        answering = trio.Event()
        board.before_answer = answering.wait
        targets.name(A, (HOME,), linked=False)
        await wait_all_tasks_blocked()
        targets.link_up(A)
        targets.link_lost(A)  # it never held: the next dial is not due yet
        answering.set()
        await wait_all_tasks_blocked()
        assert len(board.calls) == 1
        board.answers[HOME] = A
        await trio.sleep(1)
        assert len(board.calls) == 2
        assert targets.wanted == {}


async def test_a_refusal_is_said_once_until_its_kind_changes(clock: MockClock) -> None:
    async with running(clock) as (targets, board):
        board.answers[HOME] = OTHER_KEY
        with capture_logs() as logs:
            targets.aim_at(HOME)
            await trio.sleep(100)
        said = [(log["log_level"], log["error"], log["reason"]) for log in logs]
        assert said == [("warning", "MeshKeyMismatch", "another key")]
        assert targets.refusals == {HOME: Refusal(OTHER_KEY, HOME)}
        board.answers[HOME] = ProtocolVersionMismatch("version 2")
        with capture_logs() as logs:
            await trio.sleep(100)
        assert [log["error"] for log in logs] == ["ProtocolVersionMismatch"]


async def test_a_silent_machine_is_news_only_if_the_user_asked_for_it(clock: MockClock) -> None:
    async with running(clock) as (targets, _):
        with capture_logs() as logs:
            targets.name(A, (HOME,), linked=False)
            await trio.sleep(100)
            targets.aim_at(OFFICE)
            await trio.sleep(100)
        assert [log["log_level"] for log in logs] == ["debug", "warning"]
        assert targets.refusals == {A: Refusal(SILENT, HOME, A), OFFICE: Refusal(SILENT, OFFICE)}


async def test_refusals_are_forgotten_when_the_link_is_up(clock: MockClock) -> None:
    async with running(clock) as (targets, board):
        targets.aim_at(HOME)
        targets.name(A, (OFFICE,), linked=False)
        targets.refuse("10.0.0.9", OTHER_KEY, Address("10.0.0.9", 50_000))
        await trio.sleep(1)
        assert set(targets.refusals) == {HOME, A, "10.0.0.9"}
        board.answers[HOME] = A  # dialled by us: what the address and the node are known by
        await trio.sleep(20)
        assert set(targets.refusals) == {A, "10.0.0.9"}
        targets.link_up(A)  # what `Peers` says of any link
        assert set(targets.refusals) == {"10.0.0.9"}
        assert targets.wanted == {}


async def test_only_the_latest_refusals_are_kept(clock: MockClock) -> None:
    async with running(clock) as (targets, _):
        for number in range(MAX_REFUSALS + 5):
            targets.refuse(f"host-{number}", OTHER_KEY, HOME)
        targets.refuse("host-5", OTHER_KEY, HOME)  # the oldest left becomes the newest
        targets.refuse("host-new", OTHER_KEY, HOME)
        assert len(targets.refusals) == MAX_REFUSALS
        assert "host-6" not in targets.refusals
        assert list(targets.refusals)[-2:] == ["host-5", "host-new"]


async def test_who_dials_no_longer_is_forgotten_and_who_is_dialled_is_not(
    clock: MockClock,
) -> None:
    async with running(clock) as (targets, _):
        targets.aim_at(HOME)
        targets.refuse("10.0.0.9", OTHER_KEY, Address("10.0.0.9", 50_000))
        await trio.sleep(LONGEST_UNPROVEN_DELAY_S)
        assert set(targets.refusals) == {HOME, "10.0.0.9"}
        targets.refuse("10.0.0.9", OTHER_KEY, Address("10.0.0.9", 50_001))  # it has come again
        await trio.sleep(LONGEST_UNPROVEN_DELAY_S)
        assert set(targets.refusals) == {HOME, "10.0.0.9"}
        await trio.sleep(DIALS_AGAIN_S)
        assert set(targets.refusals) == {HOME}


def an_address(number: int) -> Address:
    return Address(f"10.1.{number // 256}.{number % 256}", 24160)


def a_node(number: int) -> NodeId:
    return NodeId(number.to_bytes(32, "big"))


async def test_what_one_peer_names_is_bounded_and_forgotten_with_it(clock: MockClock) -> None:
    async with running(clock) as (targets, board):
        board.before_answer = trio.sleep_forever
        for number in range(100):
            targets.introduce(A, a_node(number), (an_address(number),))
        targets.introduce(B, a_node(500), (OFFICE,))
        assert len(targets.wanted) == MAX_INTRODUCED + 1
        targets.forget(A)
        assert targets.wanted == {(B, a_node(500)): (OFFICE,)}
        targets.introduce(A, a_node(501), (HOME,))
        assert len(targets.wanted) == 2


async def test_inventions_are_dialled_a_few_at_a_time_and_leave_room_for_others(
    clock: MockClock,
) -> None:
    async with running(clock) as (targets, board):
        board.before_answer = trio.sleep_forever
        for number in range(10):
            targets.introduce(A, a_node(number), (an_address(number),))
        await wait_all_tasks_blocked()
        assert len(board.calls) == MAX_UNPROVEN_DIALS
        for number in range(20, 40):
            targets.name(a_node(number), (an_address(number),), linked=False)
        await wait_all_tasks_blocked()
        assert len(board.calls) == MAX_DIALS
        found = {(an_address(number),) for number in range(20, 40)}
        assert {addresses for _, addresses in board.calls[MAX_UNPROVEN_DIALS:]} <= found


async def test_who_must_wait_for_a_turn_gets_it_when_a_dial_ends(clock: MockClock) -> None:
    async with running(clock) as (targets, board):
        board.before_answer = partial(trio.sleep, 5)
        for number in range(2 * MAX_DIALS):
            board.answers[an_address(number)] = a_node(number)
            targets.name(a_node(number), (an_address(number),), linked=False)
        await trio.sleep(4)
        assert len(board.calls) == MAX_DIALS
        await trio.sleep(4)
        assert len(board.calls) == 2 * MAX_DIALS


async def test_who_has_answered_before_is_dialled_before_who_has_not(clock: MockClock) -> None:
    async with running(clock) as (targets, board):
        board.before_answer = trio.sleep_forever
        targets.name(A, (HOME,), linked=True)
        await trio.sleep(2)
        for number in range(MAX_DIALS):
            targets.name(a_node(number), (an_address(number),), linked=False)
        targets.link_lost(A)
        await wait_all_tasks_blocked()
        assert len(board.calls) == MAX_DIALS
        assert (HOME,) in [addresses for _, addresses in board.calls]


async def test_a_peers_word_does_not_change_what_mdns_has_said(clock: MockClock) -> None:
    async with running(clock) as (targets, board):
        board.before_answer = trio.sleep_forever
        targets.name(A, (HOME,), linked=False)
        targets.introduce(B, A, (OFFICE,))
        assert targets.wanted == {A: (HOME,)}


async def test_two_introductions_of_one_machine_stand_side_by_side(clock: MockClock) -> None:
    """The first may be a lie; the second leads to it."""
    async with running(clock) as (targets, board):
        board.answers[OFFICE] = A
        targets.introduce(a_node(1), A, (HOME,))
        targets.introduce(a_node(2), A, (OFFICE,))
        await trio.sleep(1)
        targets.link_up(A)
        assert targets.wanted == {}
        targets.forget(a_node(2))
        targets.link_lost(A)
        assert (OFFICE,) in targets.wanted.values()


async def test_an_introduction_may_be_told_again_with_other_addresses(clock: MockClock) -> None:
    async with running(clock) as (targets, board):
        board.answers[OFFICE] = A
        targets.introduce(B, A, (HOME,))
        await trio.sleep(1)
        targets.introduce(B, A, (OFFICE,))
        await trio.sleep(1)
        assert targets.wanted == {}


async def test_of_too_many_machines_the_one_that_fails_most_makes_way(clock: MockClock) -> None:
    async with running(clock) as (targets, _):
        targets.name(A, (HOME,), linked=False)
        await trio.sleep(1)
        for number in range(MAX_TARGETS):
            targets.name(a_node(number), (an_address(number),), linked=True)
        assert A not in targets.wanted
        targets.introduce(B, a_node(999), (OFFICE,))
        assert targets.wanted == {}
        targets.aim_at(HOME)
        assert targets.wanted == {HOME: (HOME,)}


async def test_an_invention_makes_way_for_another_and_its_late_answer_counts_for_nothing(
    clock: MockClock,
) -> None:
    async with running(clock) as (targets, board):
        answering = trio.Event()
        board.before_answer = answering.wait
        targets.introduce(a_node(1000), A, (HOME,))
        targets.introduce(a_node(1001), B, (OFFICE,))
        board.answers[OFFICE] = B
        await wait_all_tasks_blocked()
        targets.forget(a_node(1000))
        targets.forget(a_node(1001))
        answering.set()
        await wait_all_tasks_blocked()
        assert (targets.wanted, targets.refusals) == ({}, {})
        for number in range(MAX_TARGETS):
            targets.introduce(a_node(2000 + number), a_node(number), (an_address(number),))
        targets.introduce(a_node(5000), a_node(500), (an_address(500),))
        assert len(targets.wanted) <= MAX_TARGETS
        assert (a_node(5000), a_node(500)) in targets.wanted
