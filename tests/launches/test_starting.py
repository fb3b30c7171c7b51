"""One launch from the first question to its exit code, as its starter decides."""

from dataclasses import replace
from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from pmesh.ids import NodeId
from pmesh.launches.rules.restarts import AT_ONCE_S
from pmesh.launches.rules.starting import (
    ANSWER_S,
    MOST_AT_ONCE,
    REPORT_S,
    Action,
    AskMachine,
    Begin,
    LaunchMember,
    NoRestart,
    Over,
    SeatPhase,
    Signal,
    Started,
    Step,
    Tell,
    first_step,
    hang,
    interrupt,
    machine_back,
    machine_lost,
    pass_time,
    prepared,
    prepares,
    rank_ended,
    rank_fails,
    rank_is,
)
from pmesh.launches.wire.messages import Failure

A, B, C = (NodeId(bytes([n]) * 32) for n in (1, 2, 3))
STRANGER = NodeId(bytes(32))


class Play:
    """A launch on three machines, with what has been decided last."""

    def __init__(self, *, elastic: bool = True, restarts: int = 1, count: int = 1) -> None:
        seats = tuple(LaunchMember(node=n, name=f"mac-{n[0]}", count=count) for n in (A, B, C))
        self.now = 100.0
        self.launch = Started(elastic=elastic, restarts=restarts, grace_s=3.0, seats=seats)
        self.all: list[Action] = []
        self.actions: tuple[Action, ...] = ()
        self.take(first_step(self.launch, now=self.now))

    def take(self, step: Step) -> tuple[Action, ...]:
        self.launch, self.actions = step.launch, step.actions
        self.all += step.actions
        return step.actions

    def answer(self, *nodes: NodeId, refusal: str = "") -> tuple[Action, ...]:
        for node in nodes:
            self.take(prepared(self.launch, node, refusal, now=self.now))
        return self.actions

    def ended(self, node: NodeId, code: int = 0, rank: int | None = None) -> tuple[Action, ...]:
        seat = self.launch.seat_of(node)
        assert seat is not None
        rank = seat.ranks[0] if rank is None else rank
        return self.take(rank_ended(self.launch, node, rank, code, now=self.now))

    def fails(self, node: NodeId, rank: int, how: Failure = "at once") -> tuple[Action, ...]:
        return self.take(rank_fails(self.launch, node, rank, how))

    def lost(self, node: NodeId) -> tuple[Action, ...]:
        return self.take(machine_lost(self.launch, node, "gone", now=self.now))

    def back(self, node: NodeId) -> tuple[Action, ...]:
        return self.take(machine_back(self.launch, node, now=self.now))

    def ranks(self) -> list[tuple[int, ...]]:
        return [seat.ranks for seat in self.launch.seats]


def running(*, elastic: bool = True, restarts: int = 1, count: int = 1) -> Play:
    play = Play(elastic=elastic, restarts=restarts, count=count)
    play.answer(A, B, C)
    assert play.actions == (Begin(A), Begin(B), Begin(C))
    return play


def test_nothing_starts_before_all_have_agreed() -> None:
    play = Play(count=2)
    assert play.actions == (AskMachine(A), AskMachine(B), AskMachine(C))
    assert play.answer(A, C) == ()
    assert play.answer(B) == (Begin(A), Begin(B), Begin(C))
    assert play.ranks() == [(0, 1), (2, 3), (4, 5)]


def test_every_refusal_is_named_and_the_others_are_cancelled() -> None:
    play = Play()
    play.answer(A, refusal="mac-1: no")
    play.answer(C)
    assert play.answer(B, refusal="mac-2: no") == (Signal(C, 9), Over(1, "mac-1: no; mac-2: no"))
    assert play.answer(B) == ()


def test_a_machine_that_is_lost_or_silent_before_the_start_is_a_refusal() -> None:
    play = Play()
    play.answer(A)
    assert play.lost(B) == ()
    assert play.take(pass_time(play.launch, now=play.now + ANSWER_S - 0.1)) == ()
    actions = play.take(pass_time(play.launch, now=play.now + ANSWER_S))
    assert actions == (Signal(A, 9), Over(1, "mac-2 is lost: gone; mac-3 has not answered"))


def test_a_machine_that_takes_files_has_more_time_to_answer() -> None:
    play = Play()
    play.answer(A)
    play.launch = prepares(play.launch, B, now=play.now + ANSWER_S - 0.1)
    assert play.take(pass_time(play.launch, now=play.now + ANSWER_S)) == ()
    for node in (A, STRANGER):  # they were not asked, or have answered
        assert prepares(play.launch, node, now=play.now + 10 * ANSWER_S) is play.launch
    play.answer(B, C)
    assert prepares(play.launch, B, now=play.now) is play.launch


def test_all_zeros_are_a_success() -> None:
    play = running()
    play.ended(A)
    play.ended(B)
    assert play.ended(C) == (Over(0),)
    assert play.lost(A) == ()
    assert play.take(interrupt(play.launch, 2, now=play.now)) == ()


def test_the_first_failure_is_the_exit_code_and_the_others_go_on() -> None:
    play = running()
    assert play.ended(B, -9) == (Tell("rank 1 on mac-2 ended by SIGKILL"),)
    play.ended(A, 3)
    assert play.ended(C) == (Over(137),)


def test_a_rank_is_called_by_the_number_that_its_script_knows() -> None:
    play = running()
    play.launch = rank_is(rank_is(play.launch, A, 0, 5), STRANGER, 0, 7)
    assert Tell("rank 5 on mac-1 ended with exit code 3") in play.ended(A, 3)


def test_a_report_that_comes_twice_or_from_a_stranger_counts_nothing() -> None:
    play = running(count=2)
    play.ended(A, 0, rank=0)
    before = play.launch
    assert play.ended(A, 1, rank=0) == ()
    assert play.ended(A, 1, rank=5) == ()
    for step in (
        rank_ended(before, STRANGER, 0, 1, now=1.0),
        prepared(before, STRANGER, "", now=1.0),
        machine_lost(before, STRANGER, "", now=1.0),
        machine_back(before, STRANGER, now=1.0),
    ):
        assert step == Step(before)


def test_a_lost_machine_starts_its_ranks_again_when_it_is_back() -> None:
    play = running()
    assert play.lost(B) == (Tell("mac-2 is lost: gone"),)
    assert play.back(B) == (Tell("mac-2 is back: its ranks are started again"), AskMachine(B))
    assert play.answer(B) == (Begin(B),)
    assert play.ranks() == [(0,), (1,), (2,)]
    play.ended(A)
    play.ended(B)
    assert play.ended(C) == (Over(0),)


def test_a_machine_that_is_back_and_refuses_stays_lost() -> None:
    play = running()
    play.lost(B)
    play.back(B)
    assert play.answer(B, refusal="mac-2: no") == (Tell("mac-2: no"),)
    play.back(B)
    now = play.now + ANSWER_S
    assert play.take(pass_time(play.launch, now=now)) == (Tell("mac-2 has not answered"),)


def test_a_machine_that_is_back_begins_though_another_one_is_lost_or_silent_again() -> None:
    def asked_two() -> Play:
        play = running()
        for node in (B, C):
            play.lost(node)
        for node in (B, C):
            play.back(node)
        assert play.answer(B) == ()
        return play

    assert asked_two().lost(C) == (Tell("mac-3 is lost: gone"), Begin(B))
    play = asked_two()
    actions = play.take(pass_time(play.launch, now=play.now + ANSWER_S))
    assert actions == (Tell("mac-3 has not answered"), Begin(B))
    play.ended(A)
    assert play.ended(B) == (Over(0),)


def test_without_the_lost_machine_the_others_are_a_success() -> None:
    play = running()
    play.lost(B)
    play.ended(A)
    assert play.ended(C) == (Over(0),)


def test_when_all_machines_are_lost_the_launch_has_failed() -> None:
    play = running()
    play.lost(A)
    play.lost(B)
    assert play.lost(C) == (Tell("mac-3 is lost: gone"), Over(1))


def test_an_interrupt_signals_and_the_second_one_kills() -> None:
    play = running()
    play.ended(A)
    assert play.take(interrupt(play.launch, 2, now=play.now)) == (Signal(B, 2), Signal(C, 2))
    play.ended(B, -2)
    assert play.take(interrupt(play.launch, 2, now=play.now)) == (Signal(C, 9),)
    assert play.ended(C, -9) == (Over(130),)


def test_an_interrupt_before_the_start_cancels() -> None:
    play = Play()
    play.answer(A)
    assert play.take(interrupt(play.launch, 15, now=play.now)) == (
        Signal(A, 9),
        Signal(B, 9),
        Signal(C, 9),
        Over(143),
    )


def test_a_machine_that_does_not_report_its_end_is_given_up() -> None:
    play = running()
    play.take(interrupt(play.launch, 15, now=play.now))
    play.ended(A, -15)
    play.ended(B, -15)
    actions = play.take(pass_time(play.launch, now=play.now + 3.0 + REPORT_S))
    assert actions == (Tell("mac-3 has not answered"), Over(143))


def test_an_engine_that_needs_all_ranks_begins_a_new_generation_without_the_lost() -> None:
    play = running(elastic=False)
    assert play.lost(A) == (
        Tell("mac-1 is lost: gone; all ranks are started again (1 of 1)"),
        Signal(B, 15),
        Signal(C, 15),
    )
    play.ended(B, -15)
    assert play.ended(C, -15) == (AskMachine(B), AskMachine(C))
    assert play.answer(B, C) == (Begin(B), Begin(C))
    assert play.launch.generation == 1
    assert play.ranks()[1:] == [(0,), (1,)]
    play.ended(B)
    assert play.ended(C) == (Over(0),)


def test_a_machine_that_is_back_takes_part_in_the_next_generation() -> None:
    play = running(elastic=False, restarts=2)
    play.lost(A)
    play.ended(B, -15)
    play.ended(C, -15)
    play.answer(B, C)
    assert play.back(A) == ()
    play.ended(B, 1)
    assert play.ended(C, -15) == (AskMachine(A), AskMachine(B), AskMachine(C))


def test_a_machine_that_is_back_before_the_others_begin_again_takes_part() -> None:
    for elastic in (True, False):
        play = running(elastic=elastic, restarts=2)
        play.lost(A)
        play.take(hang(play.launch, 60.0, now=play.now))
        play.back(A)
        play.ended(B, -15)
        assert play.ended(C, -15) == (AskMachine(A), AskMachine(B), AskMachine(C))


def test_a_machine_that_is_back_while_the_others_are_asked_takes_part() -> None:
    play = running(elastic=False, restarts=2)
    play.lost(A)
    play.ended(B, -15)
    play.ended(C, -15)
    play.back(A)
    assert play.answer(B, C) == (Begin(B), Begin(C))
    play.ended(B, 1)
    assert play.ended(C, -15) == (AskMachine(A), AskMachine(B), AskMachine(C))
    play = running()
    play.lost(A)
    play.take(hang(play.launch, 60.0, now=play.now))
    play.ended(B, -15)
    play.ended(C, -15)
    assert AskMachine(A) in play.back(A)
    assert play.answer(A, B, C) == (Begin(A), Begin(B), Begin(C))


def test_a_machine_that_is_back_counts_no_more_as_one_that_has_refused() -> None:
    play = running(elastic=False, restarts=2)
    play.ended(A, 1)
    play.ended(B, -15)
    play.ended(C, -15)
    play.answer(A, refusal="mac-1: no")
    play.answer(B, C)
    play.back(A)
    play.ended(B, 1)
    play.ended(C, -15)
    play.answer(A, B, C)
    seat = play.launch.seat_of(A)
    assert seat is not None
    assert (seat.ranks, seat.prints) == ((0,), True)


def test_a_generation_goes_on_with_those_that_agree() -> None:
    play = running(elastic=False)
    play.ended(A, 1)
    play.ended(B, -15)
    play.ended(C, -15)
    play.answer(A, refusal="mac-1: no")
    assert play.answer(B, C) == (Tell("mac-1: no"), Begin(B), Begin(C))


def test_when_nobody_is_left_to_restart_the_launch_has_failed() -> None:
    play = running(elastic=False)
    play.lost(A)
    play.lost(B)
    assert play.lost(C) == (Tell("mac-3 is lost: gone"), Over(1))


def test_without_restarts_the_first_failure_ends_all() -> None:
    play = running(elastic=False, restarts=0)
    assert play.ended(B, 7) == (
        Tell("rank 1 on mac-2 ended with exit code 7; all ranks are ended"),
        Signal(A, 15),
        Signal(C, 15),
    )
    play.ended(A, -15)
    assert play.ended(C, -15) == (Over(7),)


def test_ranks_that_hang_are_ended_and_started_again() -> None:
    play = running(elastic=False)
    said, *signals = play.take(hang(play.launch, 60.0, now=play.now))
    assert said == Tell(
        "no rank has printed anything for 60 s; all ranks are started again (1 of 1)"
    )
    assert signals == [Signal(A, 15), Signal(B, 15), Signal(C, 15)]
    assert play.take(hang(play.launch, 60.0, now=play.now)) == ()


def test_a_machine_that_is_back_while_all_hang_begins_with_the_others() -> None:
    play = running()
    play.lost(B)
    play.back(B)
    play.take(hang(play.launch, 60.0, now=play.now))
    assert play.answer(B) == (Signal(B, 9),)
    play.ended(A, -15)
    assert play.ended(C, -15) == (AskMachine(A), AskMachine(B), AskMachine(C))


def test_what_was_agreed_before_all_hang_is_cancelled() -> None:
    play = running()
    for node in (B, C):
        play.lost(node)
    for node in (B, C):
        play.back(node)
    play.answer(B)
    assert Signal(B, 9) in play.take(hang(play.launch, 60.0, now=play.now))
    play.ended(A, -15)
    actions = play.take(pass_time(play.launch, now=play.now + 3.0 + REPORT_S))
    assert actions == (Tell("mac-3 has not answered"), AskMachine(A), AskMachine(B))


def test_when_all_hang_and_none_may_start_again_one_that_is_back_does_not_begin() -> None:
    play = running(restarts=0)
    play.lost(B)
    play.back(B)
    play.take(hang(play.launch, 60.0, now=play.now))
    play.answer(B)
    play.ended(A, -15)
    assert play.ended(C, -15) == (Over(1),)


@given(st.data())
def test_whatever_happens_it_ends_once_and_after_an_interrupt_always(data: st.DataObject) -> None:
    play = Play(elastic=data.draw(st.booleans()), restarts=data.draw(st.integers(0, 2)))
    nodes = st.sampled_from([A, B, C])
    for _ in range(data.draw(st.integers(0, 30))):
        node = data.draw(nodes)
        match data.draw(st.integers(0, 7)):
            case 0:
                play.answer(node, refusal=data.draw(st.sampled_from(["", "", "no"])))
            case 1:
                play.take(rank_ended(play.launch, node, data.draw(st.integers(0, 2)), 1, now=0.0))
            case 2:
                play.lost(node)
            case 3:
                play.back(node)
            case 4:
                how = data.draw(st.sampled_from(get_args(Failure)))
                play.take(rank_fails(play.launch, node, data.draw(st.integers(0, 2)), how))
            case 5:
                play.now += 1.0
                play.take(pass_time(play.launch, now=play.now))
            case 6:
                play.take(hang(play.launch, 60.0, now=play.now))
            case _:
                play.take(rank_ended(play.launch, node, data.draw(st.integers(0, 2)), 0, now=0.0))
    play.take(interrupt(play.launch, 2, now=play.now))
    play.take(pass_time(play.launch, now=play.now + 3.0 + REPORT_S))
    assert sum(isinstance(action, Over) for action in play.all) == 1
    assert play.launch.phase == "over"


def test_output_counts_only_of_machines_that_have_begun_and_not_ended() -> None:
    ran = LaunchMember(node=A, name="mac-1", count=1, ranks=(0,))
    counts = {phase for phase in get_args(SeatPhase) if replace(ran, phase=phase).prints}
    assert counts == {"asked", "runs", "lost"}
    assert not replace(ran, phase="lost", refusal="no").prints
    assert not replace(ran, phase="lost", ranks=()).prints


def given_up(actions: tuple[Action, ...]) -> list[NoRestart]:
    return [action for action in actions if isinstance(action, NoRestart)]


def test_if_all_ranks_fail_at_once_none_is_started_again() -> None:
    play = running(restarts=10)
    assert play.fails(A, 0) == ()
    assert play.fails(C, 2) == ()
    said, *rest = play.fails(B, 1)
    assert isinstance(said, Tell)
    assert said.text.startswith("all ranks failed in their first 20 s, before any had completed an")
    assert rest == [NoRestart(A, 0), NoRestart(B, 1), NoRestart(C, 2)]
    assert play.fails(B, 1) == ()  # it is said once
    for node in (B, A, C):
        play.ended(node, 5)
    assert play.actions[-1] == Over(5)


def test_a_rank_that_works_has_all_others_started_again() -> None:
    play = running(restarts=10)
    play.fails(A, 0)
    play.fails(B, 1)
    play.fails(A, 0, "no more")
    assert play.fails(C, 2) == ()
    play = running(restarts=10)
    play.fails(A, 0)
    play.fails(B, 1)
    play.ended(C)  # it has done what it was there for
    assert play.actions == ()
    play = running(restarts=10)
    play.fails(A, 0)
    play.fails(B, 1)
    play.lost(C)
    play.back(C)
    assert play.fails(B, 1) == ()  # nobody knows yet what the third one does


def test_ranks_that_fail_since_a_machine_is_lost_are_started_again() -> None:
    play = running(restarts=10)
    play.lost(C)
    assert play.fails(A, 0) == ()
    assert play.fails(B, 1) == ()


def test_failures_of_strangers_and_of_ranks_that_have_ended_count_nothing() -> None:
    play = running(restarts=10)
    play.ended(A, 3)
    before = play.launch
    for node, rank in ((A, 0), (B, 0), (STRANGER, 0)):
        assert play.fails(node, rank, "in a fixed job") == ()
        assert play.launch == before


def test_a_rank_of_a_fixed_job_is_not_started_again_to_wait_for_one_that_has_finished() -> None:
    play = running(restarts=10)
    assert play.fails(B, 1, "in a fixed job") == ()
    said, give_up = play.ended(A)
    assert isinstance(said, Tell)
    assert said.text.startswith(
        "rank 1 on mac-2 is not started again: rank 0 on mac-1 has finished"
    )
    assert give_up == NoRestart(B, 1)
    assert given_up(play.fails(C, 2, "in a fixed job")) == [NoRestart(C, 2)]
    play.ended(B, -6)
    assert play.ended(C, -6)[-1] == Over(134)


def test_a_rank_that_can_enter_is_started_again_though_another_has_finished() -> None:
    play = running(restarts=10)
    play.ended(A)
    assert play.fails(B, 1, "at once") == ()
    assert play.fails(B, 1, "no more") == ()
    assert play.ended(C) == ()


def test_an_engine_whose_ranks_fail_at_each_start_is_not_started_ten_times() -> None:
    play = running(elastic=False, restarts=10)
    for start in range(1, MOST_AT_ONCE + 1):
        play.now += 1
        notes = [action.text for action in play.ended(A, 1) if isinstance(action, Tell)]
        again = start < MOST_AT_ONCE
        assert notes[0].endswith("of 10)") if again else "of each start; mend" in notes[0]
        for node in (B, C):
            play.ended(node, -15)
        if again:
            play.answer(A, B, C)
    assert play.actions == (Over(1),)


def test_an_engine_whose_ranks_are_killed_is_started_again_as_often_as_wanted() -> None:
    play = running(elastic=False, restarts=10)
    for _ in range(2 * MOST_AT_ONCE):
        play.ended(A, -9)
        for node in (B, C):
            play.ended(node, -15)
        play.answer(A, B, C)
    assert play.actions == (Begin(A), Begin(B), Begin(C))


def test_an_engine_that_has_worked_for_a_while_is_started_again_as_often_as_wanted() -> None:
    play = running(elastic=False, restarts=10)
    for _ in range(2 * MOST_AT_ONCE):
        play.now += AT_ONCE_S
        play.ended(A, 1)
        for node in (B, C):
            play.ended(node, -15)
        play.answer(A, B, C)
    assert play.actions == (Begin(A), Begin(B), Begin(C))
