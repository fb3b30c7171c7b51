"""What a trainer's session does with the residuals of compressed all-reduces."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pmesh.client.session.arenas import KeptValues, Residuals
from pmesh.client.session.connection import AgentConnection
from pmesh.client.session.session import Done, TrainerSession
from pmesh.core.values import Verdict
from pmesh.core.wire.calls import Call
from pmesh.core.wire.session import (
    SESSION_VERSION,
    ArenaGranted,
    DropArena,
    Refused,
)
from pmesh.core.wire.trainer import TRAINER_REPLIES, Connect, OpDone, OpFailed, StartOp, World
from pmesh.errors import AgentStopped, RankLost, UsageError
from pmesh.ids import JobName, OpNumber, TrainerId
from pmesh.net.sessions.arenas import Arena
from simulation.wire import AnyReply, AnyRequest
from tests.worlds.scripted_agent import ScriptedAgent, Step, TrainerSocket, joins, replies

COUNT = 100
LOST = Verdict("RankLost", "rank 1 is lost")
MET = World(0, (TrainerId(0), TrainerId(1)), ("here", "there"))


class Scripted:
    """A session, what it has asked, and the arenas that it has been given."""

    def __init__(self, agent: ScriptedAgent) -> None:
        self.agent = agent
        self.asked: list[AnyRequest | None] = []
        self.arenas: list[Arena] = []

    def join(self, *steps: Step) -> TrainerSession:
        self.agent.steps += steps
        session = TrainerSession(AgentConnection(self.agent.home, TRAINER_REPLIES))
        session.join(Connect(SESSION_VERSION, JobName("job"), 1, 30.0, "test.py"))
        return session

    def used(self) -> Step:
        """A step that grants an arena in which another op has left values."""

        def step(trainer: TrainerSocket, request: AnyRequest | None) -> None:
            self.asked.append(request)
            arena = self.agent.arena("input", 4 * COUNT)
            arena.memory[:] = b"\x40" * arena.nbytes
            self.arenas.append(arena)
            trainer.send(ArenaGranted(arena.number, "input", arena.nbytes), arena.descriptor)

        return step

    def sees(self, *answers: AnyReply) -> Step:
        """A step that notes the request and sends these."""

        def step(trainer: TrainerSocket, request: AnyRequest | None) -> None:
            self.asked.append(request)
            replies(*answers)(trainer, request)

        return step

    def ends(self, op: int, *, clipped: int = 0, world: World | None = None) -> Step:
        """A step in which the agent has written a residual and says that the op is done."""

        def step(trainer: TrainerSocket, request: AnyRequest | None) -> None:
            self.asked.append(request)
            assert isinstance(request, StartOp)
            kept = next(a for a in self.arenas if a.number == request.residual_out)
            np.frombuffer(kept.memory, np.float32)[:COUNT] = op + 1
            output = self.agent.grant(trainer, "output", 4 * COUNT)
            trainer.send(OpDone(OpNumber(op), output.number, world, clipped))

        return step


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Scripted]:
    with ScriptedAgent(tmp_path, joins) as agent:
        yield Scripted(agent)


def reduce(session: TrainerSession, residuals: Residuals | None, count: int = COUNT) -> Done:
    session.input_values("float32", count, room_bytes=0).fill(1)
    call = Call("all_reduce", "float32", (count,), "mean", compression="fp16")
    return session.run_op(call, "float32", count, timeout_s=5.0, residuals=residuals)


def started(scripted: Scripted) -> list[tuple[int, int]]:
    """The arenas of residuals that each op has named."""
    ops = [request for request in scripted.asked if isinstance(request, StartOp)]
    return [(op.residual, op.residual_out) for op in ops]


def test_they_begin_as_zeros_and_change_places_with_each_op(scripted: Scripted) -> None:
    used, ends = scripted.used(), scripted.ends
    session = scripted.join(used, used, used, ends(0, clipped=3), ends(1, world=MET))
    residuals = session.residuals(COUNT)
    assert not residuals.values.any()
    assert not residuals.attempt.values.any()
    one, two = (arena.number for arena in scripted.arenas[:2])
    assert reduce(session, residuals).clipped == 3
    np.testing.assert_array_equal(residuals.values, np.ones(COUNT))
    residuals.values[:] = 9  # as a checkpoint that is loaded
    done = reduce(session, residuals)
    assert (done.clipped, done.world) == (0, MET)
    np.testing.assert_array_equal(residuals.values, np.full(COUNT, 2))
    assert (np.frombuffer(scripted.arenas[1].memory, np.float32)[:COUNT] == 9).all()
    assert started(scripted) == [(one, two), (two, one)]
    session.leave()


@pytest.mark.parametrize("world", [None, MET])
def test_an_op_that_fails_leaves_them_as_they_were(scripted: Scripted, world: World | None) -> None:
    used = scripted.used()
    failed = scripted.sees(OpFailed(OpNumber(0), LOST, world=world))
    session = scripted.join(used, used, used, failed, scripted.ends(1))
    residuals = session.residuals(COUNT)
    with pytest.raises(RankLost):
        reduce(session, residuals)
    assert not residuals.values.any()
    reduce(session, residuals)
    first, second = started(scripted)
    assert first == second
    session.leave()


def test_of_an_op_without_this_rank_nothing_is_kept(scripted: Scripted) -> None:
    used, apart = scripted.used(), World(-1, (TrainerId(1),), ("there",))
    session = scripted.join(used, used, used, scripted.ends(0, world=apart))
    residuals = session.residuals(COUNT)
    reduce(session, residuals)
    assert not residuals.values.any()
    session.leave()


def test_an_op_without_them_names_none(scripted: Scripted) -> None:
    session = scripted.join(scripted.used(), scripted.sees(OpFailed(OpNumber(0), LOST)))
    with pytest.raises(RankLost):
        reduce(session, None)
    assert started(scripted) == [(-1, -1)]
    session.leave()


def test_those_of_another_session_or_of_other_values_are_refused_before_anything_is_sent(
    scripted: Scripted,
) -> None:
    used = scripted.used()
    session = scripted.join(used, used, used, used)
    foreign = Residuals(*[KeptValues(-1, np.zeros(COUNT, np.float32)) for _ in range(2)])
    assert not session.has(foreign)
    with pytest.raises(ValueError, match="of another session"):
        reduce(session, foreign)
    session.drop(foreign)
    own = session.residuals(COUNT - 1)
    assert session.has(own)
    with pytest.raises(ValueError, match="99 residuals of 100 values"):
        reduce(session, own)
    assert started(scripted) == []
    session.leave()


def test_dropped_ones_give_their_arenas_back_once(scripted: Scripted) -> None:
    used, note = scripted.used(), scripted.sees()
    session = scripted.join(used, used, note, note, note)
    residuals = session.residuals(COUNT)
    session.drop(residuals)
    session.drop(residuals)
    assert not session.has(residuals)
    session.leave()
    scripted.agent.wait_until_closed()
    given_back = [r.arena for r in scripted.asked if isinstance(r, DropArena)]
    assert given_back == [arena.number for arena in scripted.arenas]


def test_without_room_for_both_none_is_kept(scripted: Scripted) -> None:
    refused = scripted.sees(Refused(Verdict("UsageError", "no shared memory")))
    session = scripted.join(scripted.used(), refused, scripted.sees())
    with pytest.raises(UsageError, match="no shared memory"):
        session.residuals(COUNT)
    session.leave()
    scripted.agent.wait_until_closed()
    assert scripted.asked[-1] == DropArena(scripted.arenas[0].number)


def test_of_no_values_there_is_nothing_to_keep(scripted: Scripted) -> None:
    done = scripted.sees(OpDone(OpNumber(0), -1))
    session = scripted.join(done, scripted.sees())
    residuals = session.residuals(0)
    assert reduce(session, residuals, 0).values.size == 0
    session.drop(residuals)
    session.leave()
    assert started(scripted) == [(-1, -1)]


def test_they_can_be_read_when_the_session_has_ended(scripted: Scripted) -> None:
    used = scripted.used()
    session = scripted.join(used, used, used, scripted.ends(0))
    residuals = session.residuals(COUNT)
    reduce(session, residuals)
    with pytest.raises(AgentStopped):
        reduce(session, residuals)
    assert not session.has(residuals)
    np.testing.assert_array_equal(residuals.values, np.ones(COUNT))


def test_both_halves_are_of_one_length() -> None:
    with pytest.raises(ValueError, match="3 values beside 2"):
        Residuals(KeptValues(0, np.zeros(2, np.float32)), KeptValues(1, np.zeros(3, np.float32)))
