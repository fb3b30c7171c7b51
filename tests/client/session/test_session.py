"""What the trainer does when the agent, the user or another thread do the unexpected."""

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import pmesh
from pmesh.client.session import connection
from pmesh.core.values import Verdict
from pmesh.core.wire.control import StatusReply
from pmesh.core.wire.framing import frame
from pmesh.core.wire.session import (
    ArenaGone,
    ArenaGranted,
    DropArena,
    Refused,
    SessionMessage,
    encode,
)
from pmesh.core.wire.trainer import Joined, Leave, OpFailed, StartOp, StillWaiting
from pmesh.ids import OpNumber
from simulation.wire import AnyRequest
from tests.worlds.faults import Faults, Real
from tests.worlds.lanes import shared_memory
from tests.worlds.scripted_agent import (
    ALONE,
    VIEW,
    ScriptedAgent,
    Step,
    TrainerSocket,
    joins,
    op_done,
    replies,
    says,
)
from tests.worlds.system import Terminal, forked
from tests.worlds.watched_agent import WatchedAgent, watched_agent

ONE = np.ones(1)
LOST = Verdict("RankLost", "rank 1 is lost")


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[ScriptedAgent]:
    with ScriptedAgent(tmp_path, joins) as running:
        yield running


GARBAGE: dict[str, Step] = {
    "4 GiB": says(b"\xff\xff\xff\xff"),
    "not msgpack": says(frame(b"\xc1")),
    "empty": says(frame(b"")),
    "a request": says(frame(encode(Leave()))),
    "another answer": replies(StatusReply(json=b"{}")),
    "joined again": replies(Joined(ALONE, VIEW)),
    "another op": replies(op_done(5)),
    "another op's failure": replies(OpFailed(OpNumber(5), LOST)),
    "no descriptor": replies(ArenaGranted(1, "output", 65536), op_done(0, 1)),
    "no such arena": replies(op_done(0, 77)),
    "no result": replies(op_done(0, -1)),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_an_agent_that_talks_nonsense_ends_the_mesh_with_one_clear_error(
    scripted: ScriptedAgent, garbage: Step
) -> None:
    scripted.steps += [scripted.grants("input", 8), garbage]
    mesh = pmesh.connect("job", home=scripted.home)
    with pytest.raises(pmesh.AgentStopped, match=r"what no agent sends .* 'pmesh down'"):
        mesh.all_reduce(ONE)
    with pytest.raises(pmesh.AgentStopped, match=r"what no agent sends .* mesh\.sync\(state\)"):
        mesh.barrier()
    mesh.close()


@pytest.mark.parametrize("claim", [0, -1, 2**40, 2**70])
def test_an_arena_of_a_false_size_is_not_touched(scripted: ScriptedAgent, claim: int) -> None:
    scripted.steps.append(scripted.grants("input", 8, claim=min(claim, 2**63)))
    mesh = pmesh.connect("job", home=scripted.home)
    with pytest.raises(pmesh.AgentStopped):
        mesh.all_reduce(ONE)
    mesh.close()


def test_an_input_arena_that_is_too_small_is_not_overrun(scripted: ScriptedAgent) -> None:
    scripted.steps.append(scripted.grants("input", 8))
    mesh = pmesh.connect("job", home=scripted.home)
    with pytest.raises(pmesh.AgentStopped, match=r"100000 values of float64 in an arena"):
        mesh.all_reduce(np.ones(100_000))
    mesh.close()


def test_a_result_larger_than_its_arena_is_not_read(scripted: ScriptedAgent) -> None:
    def answer(trainer: TrainerSocket, request: AnyRequest | None) -> None:
        assert isinstance(request, StartOp)
        arena = scripted.grant(trainer, "output", 8)
        trainer.send(op_done(0, arena.number))

    scripted.steps += [scripted.grants("input", 800_000), answer]
    mesh = pmesh.connect("job", home=scripted.home)
    with pytest.raises(pmesh.AgentStopped, match=r"100000 values of float64 in an arena"):
        mesh.all_reduce(np.ones(100_000))
    mesh.close()


def test_nothing_is_left_open_by_a_mesh_that_ends_badly(scripted: ScriptedAgent) -> None:
    arena = scripted.arena("input", 8)

    def too_many(trainer: TrainerSocket, request: AnyRequest | None) -> None:
        del request
        granted = ArenaGranted(arena.number, "input", arena.nbytes)
        trainer.send(granted, *[arena.descriptor] * 3)

    scripted.steps += [too_many, says(b"\xff\xff\xff\xff")]
    before = shared_memory()
    mesh = pmesh.connect("job", home=scripted.home)
    with pytest.raises(pmesh.AgentStopped):
        mesh.all_reduce(ONE)
    scripted.wait_until_closed()
    assert shared_memory() == before


@pytest.mark.parametrize("step", [says(b""), says(b"\x00\x00")])
def test_an_agent_that_goes_away_in_mid_call_is_named(scripted: ScriptedAgent, step: Step) -> None:
    scripted.steps.append(step)
    with (
        pytest.raises(pmesh.AgentStopped, match=r"agent\.sock has ended"),
        pmesh.connect("job", home=scripted.home) as mesh,
    ):
        mesh.barrier()


def test_an_agent_that_has_gone_between_calls_is_named(scripted: ScriptedAgent) -> None:
    mesh = pmesh.connect("job", home=scripted.home)
    scripted.wait_until_closed()
    with pytest.raises(pmesh.AgentStopped):
        mesh.all_reduce(ONE)
    mesh.close()


def test_what_an_agent_said_last_between_calls_is_the_error_of_the_next_one(tmp_path: Path) -> None:
    why = "it ended with an error inside pmesh; the agent's log has its traceback"
    last = replies(Joined(ALONE, VIEW), Refused(Verdict("AgentStopped", why)))
    with ScriptedAgent(tmp_path, last) as scripted:
        mesh = pmesh.connect("job", home=tmp_path)
        scripted.wait_until_closed()
        with pytest.raises(pmesh.AgentStopped, match=f"^{why}$"):
            mesh.barrier()
        with pytest.raises(pmesh.AgentStopped, match=f"^{why}; mesh.sync"):
            mesh.barrier()
        mesh.close()


def test_leaving_an_agent_that_has_gone_is_no_error(scripted: ScriptedAgent) -> None:
    mesh = pmesh.connect("job", home=scripted.home)
    scripted.wait_until_closed()
    mesh.close()
    mesh.close()


def test_a_silent_agent_is_not_waited_for_forever(scripted: ScriptedAgent, faults: Faults) -> None:
    faults.limit(connection, "SILENCE_S", 0.05)
    faults.limit(connection, "FIRST_ANSWER_S", 0.5)
    silent_until = threading.Event()

    def stay_silent(trainer: TrainerSocket, request: AnyRequest | None) -> None:
        del trainer, request
        silent_until.wait(20)

    scripted.steps.append(stay_silent)
    mesh = pmesh.connect("job", home=scripted.home)
    with pytest.raises(pmesh.AgentStopped, match=r"has not answered for 0\.05 s"):
        mesh.barrier()
    silent_until.set()
    mesh.close()


def test_waiting_is_told_with_names(
    scripted: ScriptedAgent, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = (
        StillWaiting(-1, 1.0, ("1 of 3 trainers", "mac-2 has none")),
        StillWaiting(-1, 2.0, ("1 of 3 trainers", "mac-2 has none")),  # nothing new
        StillWaiting(-1, 3.0, ("2 of 3 trainers",)),
        StillWaiting(0, 20.4, ("missing: rank 1 (mac-2)",)),
        StillWaiting(0, 30.0, ("its data are on their way",)),
    )
    scripted.steps.append(replies(*waiting, op_done(0)))
    with (
        caplog.at_level(logging.WARNING, "pmesh"),
        pmesh.connect("job", home=scripted.home) as mesh,
    ):
        mesh.barrier()
    assert caplog.messages == [
        "waiting: 1 of 3 trainers; mac-2 has none",
        "waiting: 2 of 3 trainers",
        "waiting for op 0 for 20 s; missing: rank 1 (mac-2)",
        "waiting for op 0 for 30 s; its data are on their way",
    ]


def test_an_error_does_not_stand_in_the_line_that_counts_the_seconds(
    scripted: ScriptedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = (StillWaiting(-1, seconds, ("1 of 3 trainers",)) for seconds in (1.0, 2.0, 3.0))
    scripted.steps.append(replies(*waiting))
    terminal = Terminal()
    mesh = pmesh.connect("job", home=scripted.home)
    monkeypatch.setattr("sys.stderr", terminal)
    with pytest.raises(pmesh.AgentStopped):
        mesh.barrier()
    assert terminal.getvalue().endswith("\r2 s \r3 s \n")


def numbers_of(requests: list[AnyRequest | None]) -> list[int]:
    return [request.op for request in requests if isinstance(request, StartOp)]


@pytest.mark.parametrize("numbers", [[0, 1], [0, 0]])
def test_a_failed_op_keeps_its_number_unless_it_was_an_earlier_ones_failure(
    scripted: ScriptedAgent,
    numbers: list[int],
) -> None:
    seen: list[AnyRequest | None] = []

    def fails(trainer: TrainerSocket, request: AnyRequest | None) -> None:
        seen.append(request)
        trainer.send(OpFailed(OpNumber(0), LOST, consumed=numbers == [0, 1]))

    def succeeds(trainer: TrainerSocket, request: AnyRequest | None) -> None:
        seen.append(request)
        trainer.send(op_done(numbers[1]))

    scripted.steps += [fails, succeeds]
    mesh = pmesh.connect("job", home=scripted.home)
    with pytest.raises(pmesh.RankLost, match="rank 1 is lost"):
        mesh.barrier()
    mesh.barrier()
    mesh.close()
    assert numbers_of(seen) == numbers


def test_an_output_arena_that_the_agent_takes_back_is_used_no_more(scripted: ScriptedAgent) -> None:
    def answers(trainer: TrainerSocket, request: AnyRequest | None) -> None:
        assert isinstance(request, StartOp)
        for gone in trainer.outputs:
            trainer.send(ArenaGone(gone.number))
        result = scripted.grant(trainer, "output", 8)
        result.memory[:8] = np.float64(request.op).tobytes()
        trainer.outputs = [result]
        trainer.send(op_done(request.op, result.number))

    scripted.steps += [scripted.grants("input", 8), answers, answers]
    mesh = pmesh.connect("job", home=scripted.home)
    assert [mesh.all_reduce(ONE).tolist() for _ in range(2)] == [[0], [1]]
    mesh.close()


def test_a_refused_arena_raises_and_the_rank_stays_in_step(scripted: ScriptedAgent) -> None:
    refused = Refused(Verdict("UsageError", "no shared memory for 99 MiB more"))
    scripted.steps += [replies(refused), replies(op_done(0))]
    mesh = pmesh.connect("job", home=scripted.home)
    with pytest.raises(pmesh.UsageError, match="no shared memory"):
        mesh.all_reduce(ONE)
    mesh.barrier()
    mesh.close()


def sums(scripted: ScriptedAgent) -> Step:
    """A step that answers an op with its number, in an arena of its own."""

    def step(trainer: TrainerSocket, request: AnyRequest | None) -> None:
        assert isinstance(request, StartOp)
        result = scripted.grant(trainer, "output", 8)
        result.memory[:8] = np.float64(request.op).tobytes()
        trainer.send(op_done(request.op, result.number))

    return step


def noting(seen: list[AnyRequest | None], step: Step) -> Step:
    """The same step, which notes what it answers."""

    def note(trainer: TrainerSocket, request: AnyRequest | None) -> None:
        seen.append(request)
        step(trainer, request)

    return note


def test_an_input_arena_that_was_dropped_for_a_larger_one_is_used_no_more(
    scripted: ScriptedAgent,
) -> None:
    refused = replies(Refused(Verdict("UsageError", "no shared memory for 16 bytes more")))
    granted, seen = scripted.grants("input", 8), list[AnyRequest | None]()
    steps = [granted, sums(scripted), replies(), refused, granted, sums(scripted)]
    scripted.steps += [noting(seen, step) for step in steps]
    mesh = pmesh.connect("job", home=scripted.home)
    mesh.all_reduce(ONE)
    with pytest.raises(pmesh.UsageError, match="no shared memory"):
        mesh.all_reduce(np.ones(100_000))
    assert mesh.all_reduce(ONE).tolist() == [1]
    mesh.close()
    first, second = (each.arena for each in seen if isinstance(each, StartOp))
    assert first != second
    assert [each for each in seen if isinstance(each, DropArena)] == [DropArena(first)]


def test_a_broadcast_leaves_the_memory_of_other_calls_as_it_is(scripted: ScriptedAgent) -> None:
    """A call repeats without the interpreter only if its values lie in the same arena again."""
    granted, seen = scripted.grants("input", 8), list[AnyRequest | None]()
    steps = [granted, sums(scripted), granted, replies(op_done(1)), replies(), sums(scripted)]
    scripted.steps += [noting(seen, step) for step in steps]
    mesh = pmesh.connect("job", home=scripted.home)
    mesh.all_reduce(ONE)
    mesh.broadcast(ONE, root=0)
    mesh.all_reduce(ONE)
    mesh.close()
    reduced, sent, again = (each.arena for each in seen if isinstance(each, StartOp))
    assert reduced == again != sent
    assert DropArena(sent) in seen


def test_a_broadcast_without_room_beside_other_calls_takes_theirs(scripted: ScriptedAgent) -> None:
    refused = replies(Refused(Verdict("UsageError", "no shared memory for 8 bytes more")))
    granted, seen = scripted.grants("input", 8), list[AnyRequest | None]()
    steps = [granted, sums(scripted), refused, replies(), granted, replies(op_done(1))]
    scripted.steps += [noting(seen, step) for step in steps]
    mesh = pmesh.connect("job", home=scripted.home)
    mesh.all_reduce(ONE)
    assert mesh.broadcast(ONE, root=0) == ONE
    mesh.close()
    reduced, sent = (each.arena for each in seen if isinstance(each, StartOp))
    assert reduced != sent
    assert DropArena(reduced) in seen


def test_an_interrupt_in_mid_op_ends_the_mesh_because_the_reply_would_be_taken_for_another(
    agent: WatchedAgent, faults: Faults
) -> None:
    mesh = pmesh.connect("job", home=agent.home)
    calls = itertools.count()

    def interrupted(
        receive: Real, self: connection.AgentConnection[SessionMessage], *, due_s: float
    ) -> object:
        if next(calls) == 1:  # after the arena
            raise KeyboardInterrupt
        return receive(self, due_s=due_s)

    faults.around(connection.AgentConnection, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mesh.all_reduce(ONE)
    with pytest.raises(pmesh.MeshClosed, match="KeyboardInterrupt"):
        mesh.all_reduce(ONE)
    mesh.close()


def test_leaving_with_an_exception_is_a_crash_and_without_one_is_not(tmp_path: Path) -> None:
    def crash() -> None:
        with pmesh.connect("one", home=tmp_path):
            raise ZeroDivisionError

    with watched_agent(tmp_path) as agent:
        with pytest.raises(ZeroDivisionError):
            crash()
        with pmesh.connect("two", home=tmp_path):
            pass
    assert (agent.crashed, agent.left) == ([0], [0])


@pytest.mark.parametrize(
    "call",
    [
        lambda mesh: mesh.all_reduce(ONE),
        lambda mesh: mesh.broadcast(ONE),
        lambda mesh: mesh.barrier(),
        lambda mesh: mesh.average_gradients([ONE]),
    ],
)
def test_a_closed_mesh_says_so(agent: WatchedAgent, call: Callable[[pmesh.Mesh], object]) -> None:
    mesh = pmesh.connect("job", home=agent.home)
    mesh.close()
    mesh.close()
    with pytest.raises(pmesh.MeshClosed, match="it was closed"):
        call(mesh)


def test_closing_from_another_thread_ends_a_call_that_waits(scripted: ScriptedAgent) -> None:
    started, closed = threading.Event(), threading.Event()

    def never_answers(trainer: TrainerSocket, request: AnyRequest | None) -> None:
        del trainer
        assert isinstance(request, StartOp)
        started.set()
        closed.wait(20)

    scripted.steps.append(never_answers)
    mesh = pmesh.connect("job", home=scripted.home)

    def close() -> None:
        started.wait(20)
        mesh.close()

    thread = threading.Thread(target=close)
    thread.start()
    with pytest.raises(pmesh.MeshClosed, match="it was closed"):
        mesh.barrier()
    closed.set()
    thread.join()
    with pytest.raises(pmesh.MeshClosed, match="it was closed"):
        mesh.barrier()


def test_a_forked_child_neither_uses_nor_closes_its_parents_mesh(agent: WatchedAgent) -> None:
    mesh = pmesh.connect("job", home=agent.home)
    with forked():
        with pytest.raises(pmesh.MeshClosed, match="forked"):
            mesh.barrier()
        mesh.close()
    mesh.barrier()
    mesh.close()
