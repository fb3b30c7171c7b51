"""The schedules: each action has what it needs, no rank waits forever, and torch's tables."""

import importlib
from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pmesh.errors import UsageError
from pmesh.mlx.pipeline.rules.schedules import (
    AHEAD,
    MOST_SENDING,
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    eager_one_f_one_b,
    gpipe,
    interleaved,
    make_schedule,
    one_f_one_b,
    zero_bubble,
)
from pmesh.mlx.pipeline.rules.timeline import bubble, ends, needs

MOST_RANKS = 8
MICRO_BATCHES = [*range(1, 2 * MOST_RANKS + 2), 24, 31, 32]
"""Fewer than ranks, as many, twice as many, with each remainder; and some more."""
SIZES = [(p, m) for p in range(1, MOST_RANKS + 1) for m in MICRO_BATCHES]
FAMILIES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager_1f1b": eager_one_f_one_b,
    "interleaved, 2": lambda p, m: interleaved(p, m, 2),
    "interleaved, 3": lambda p, m: interleaved(p, m, 3),
    "zero_bubble, 1": zero_bubble,
    "zero_bubble, 2": lambda p, m: zero_bubble(p, m, 2),
}


class RanksOnSchedule:
    """Ranks that run a schedule as `Pipeline` does, with the rules of `send` and `recv`.

    A send is done once its receiver has asked for the message. A rank goes on before that, unless
    it has `most_sending` sends that are not done: then it waits for the oldest. It asks for `ahead`
    messages before it needs them, in the order in which it will.
    """

    def __init__(self, schedule: Schedule, *, most_sending: int, ahead: int) -> None:
        self.schedule, self.most_sending, self.ahead = schedule, most_sending, ahead
        self.size = len(schedule)
        self.stages = 1 + max(a.stage for actions in schedule for a in actions)
        self.at = [0] * self.size
        self.sending = [deque[Action]() for _ in schedule]
        self.done = set[Action]()
        self.place = {
            message: i
            for own in schedule
            for i, message in enumerate(m for a in own for m in self.receives(a))
        }
        self.taken = [0] * self.size

    def receives(self, action: Action) -> list[Action]:
        return [m for m in needs(action, self.stages) if (m.stage - action.stage) % self.size]

    def asked_for(self, message: Action) -> bool:
        to = self.receiver(message)
        return self.place[message] < self.taken[to] + self.ahead

    def receiver(self, message: Action) -> int:
        return (message.stage + (1 if message.kind == "F" else -1)) % self.size

    def move(self, rank: int) -> bool:
        """Run the rank's next action, if it can."""
        actions, sending = self.schedule[rank], self.sending[rank]
        if self.at[rank] == len(actions):
            return False
        while sending and self.asked_for(sending[0]):
            sending.popleft()
        action = actions[self.at[rank]]
        if len(sending) >= self.most_sending or not self.done.issuperset(
            needs(action, self.stages)
        ):
            return False
        messages = self.receives(action)
        assert [self.place[m] for m in messages] == [self.taken[rank]][: len(messages)]
        self.taken[rank] += len(messages)
        self.done.add(action)
        if action in self.place:
            sending.append(action)
        self.at[rank] += 1
        return True

    def run(self) -> None:
        while sum(self.move(rank) for rank in range(self.size)):
            pass
        left = [own[i] for own, i in zip(self.schedule, self.at, strict=True) if i < len(own)]
        assert not left, f"a deadlock before {[str(action) for action in left]}"


@pytest.mark.parametrize("name", FAMILIES)
def test_each_size_computes_everything_once_and_in_an_order_that_can_be(name: str) -> None:
    for ranks, micro_batches in SIZES:
        schedule = FAMILIES[name](ranks, micro_batches)
        stages = len({action.stage for actions in schedule for action in actions})
        kinds = "FBW" if name.startswith("zero") else "FB"
        count = Counter(action for actions in schedule for action in actions)
        assert count == Counter(
            Action(kind, stage, i)  # type: ignore[arg-type]
            for kind in kinds
            for stage in range(stages)
            for i in range(micro_batches)
        )
        assert all(a.stage % ranks == rank for rank, own in enumerate(schedule) for a in own)
        assert len(ends(schedule, lambda _: 1.0)) == len(count)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_channel_has_its_messages_in_the_order_in_which_they_are_received(name: str) -> None:
    for ranks, micro_batches in SIZES:
        for actions in FAMILIES[name](ranks, micro_batches):
            for kind in "FBW":
                for stage in {action.stage for action in actions}:
                    own = [a.micro_batch for a in actions if (a.kind, a.stage) == (kind, stage)]
                    assert own == sorted(own)


@pytest.mark.unmeasured
@pytest.mark.parametrize("name", FAMILIES)
def test_no_size_deadlocks_with_sends_and_receives_as_they_are(name: str) -> None:
    for ranks, micro_batches in SIZES:
        RanksOnSchedule(
            FAMILIES[name](ranks, micro_batches), most_sending=MOST_SENDING, ahead=AHEAD
        ).run()


def test_the_simulated_ranks_deadlock_when_every_send_waits_for_its_receiver() -> None:
    """So `MOST_SENDING` matters: two ranks that both send first wait for each other."""
    with pytest.raises(AssertionError, match="a deadlock before"):
        RanksOnSchedule(one_f_one_b(4, 8), most_sending=1, ahead=0).run()
    wrong = ((Action("F", 0, 0), Action("B", 0, 0)), (Action("B", 1, 0), Action("F", 1, 0)))
    with pytest.raises(AssertionError, match=r"\['B0.0', 'B1.0'\]"):
        RanksOnSchedule(wrong, most_sending=MOST_SENDING, ahead=AHEAD).run()
    with pytest.raises(ValueError, match=r"wait for each other: B0\.0, B1\.0"):
        ends(wrong, lambda _: 1.0)


# --- torch


TORCH_KINDS: dict[str, Kind] = {
    "FORWARD": "F",
    "FULL_BACKWARD": "B",
    "BACKWARD_INPUT": "B",
    "BACKWARD_WEIGHT": "W",
}


def torch_schedules() -> Any:  # noqa: ANN401 - torch may be missing
    pytest.importorskip("torch")
    return importlib.import_module("torch.distributed.pipelining.schedules")


def as_torch_runs(name: str, ranks: int, micro_batches: int, rank: int) -> list[Action]:
    """Run torch's own loop over the micro-batches with a stage that notes what it computes."""
    ran = list[Action]()
    nothing: list[Any] = []
    stage = SimpleNamespace(
        stage_index=rank,
        forward_one_chunk=lambda i, *_, **__: ran.append(Action("F", rank, i)),
        backward_one_chunk=lambda i, **_: ran.append(Action("B", rank, i)),
        perform_reduce_grad=lambda *_: None,
        **{
            f"get_{way}_{call}_ops": lambda _: nothing
            for way in ("fwd", "bwd")
            for call in ("send", "recv")
        },
        has_backward=True,
        is_first=rank == 0,
        is_last=rank == ranks - 1,
    )
    module = torch_schedules()
    kind: Any = getattr(module, {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}[name])

    class BareSchedule(kind):  # type: ignore[misc] # torch may be missing
        def __init__(self) -> None:
            self._stage, self._num_stages, self._n_microbatches = stage, ranks, micro_batches
            self._has_backward, self.scale_grads = True, True

        def _initialize_stage(self, *_: object) -> None: ...
        def _maybe_compute_loss(self, *_: object) -> None: ...
        def _maybe_get_loss(self, *_: object) -> None: ...
        def _update_losses(self, *_: object) -> None: ...
        def _check_inputs(self, *_: object) -> tuple[list[None], list[None]]:
            return [None] * micro_batches, [None] * micro_batches

    BareSchedule()._step_microbatches()  # noqa: SLF001 - torch prints another order
    return ran


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_torch_runs_the_same(name: str) -> None:
    for ranks, micro_batches in SIZES[::3]:  # each number of ranks
        schedule = make_schedule(name, ranks, micro_batches)
        for rank, actions in enumerate(schedule):
            assert list(actions) == as_torch_runs(name, ranks, micro_batches, rank)


@pytest.mark.parametrize(
    ("name", "torch_name", "stages_per_rank"),
    [
        ("interleaved", "ScheduleInterleaved1F1B", 2),
        ("interleaved", "ScheduleInterleaved1F1B", 3),
        ("zero_bubble", "ScheduleInterleavedZeroBubble", 1),
        ("zero_bubble", "ScheduleInterleavedZeroBubble", 2),
    ],
)
def test_the_table_is_that_of_torch(name: str, torch_name: str, stages_per_rank: int) -> None:
    kind = getattr(torch_schedules(), torch_name)
    for ranks, micro_batches in SIZES:
        rounds = max(1, micro_batches // ranks)
        if micro_batches % rounds:
            continue  # torch refuses these
        theirs = kind.__new__(kind)
        theirs.pp_group_size, theirs.n_local_stages = ranks, stages_per_rank
        theirs._n_microbatches, theirs.number_of_rounds = micro_batches, rounds  # noqa: SLF001
        theirs.microbatches_per_round = micro_batches // rounds
        schedule = make_schedule(name, ranks, micro_batches, stages_per_rank)
        for rank, actions in enumerate(schedule):
            table = theirs._calculate_single_rank_operations(rank)  # noqa: SLF001
            assert list(actions) == [
                Action(TORCH_KINDS[each[1].name], each[0], each[2])
                for each in table
                if each is not None
            ]


# --- the bubble


def test_the_bubble_of_gpipe_and_1f1b_is_as_in_the_papers() -> None:
    for ranks, micro_batches in SIZES:
        expected = (ranks - 1) / (micro_batches + ranks - 1)
        for name in ("gpipe", "1f1b", "eager_1f1b"):
            found = bubble(make_schedule(name, ranks, micro_batches))
            assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_eager_1f1b_hides_messages_that_take_half_as_long_as_a_micro_batch(ranks: int) -> None:
    def takes(schedule: Schedule, travel_s: float) -> float:
        return max(ends(schedule, lambda _: 1.0, travel_s).values())

    eager, plain = eager_one_f_one_b(ranks, 32), one_f_one_b(ranks, 32)
    of_one_message = 2 * (ranks - 1)  # on its way to the last stage and back
    assert takes(eager, 1.0) == takes(eager, 0.0) + of_one_message
    assert takes(plain, 1.0) > takes(eager, 1.0) + 8


def test_interleaving_divides_the_bubble_and_zero_bubble_takes_it_to_a_third() -> None:
    for ranks, stages_per_rank in ((2, 2), (4, 2), (4, 4), (8, 3)):
        micro_batches = 4 * ranks
        found = bubble(interleaved(ranks, micro_batches, stages_per_rank))
        rest = (ranks - 1) / stages_per_rank
        assert found == pytest.approx(rest / (micro_batches + rest))
    for ranks in (2, 4, 8):
        rest = (ranks - 1) / 3  # of F, B and W together
        assert bubble(zero_bubble(ranks, 32)) == pytest.approx(rest / (32 + rest))


def test_what_is_no_schedule_is_refused() -> None:
    with pytest.raises(UsageError, match=f"one of {', '.join(SCHEDULES)}, not 'zero'"):
        make_schedule("zero", 2, 4)
    with pytest.raises(UsageError, match="'1f1b' takes one stage on each rank, not 2"):
        make_schedule("1f1b", 2, 4, 2)
    with pytest.raises(UsageError, match="several stages on each rank: pass stages_per_rank=2"):
        make_schedule("interleaved", 2, 4)
