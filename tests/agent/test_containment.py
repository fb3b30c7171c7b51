"""What nobody foresaw ends one thing, is told once, and leaves what was meant to pass alone."""

import contextlib
import errno
import gc
import weakref
from datetime import UTC, datetime
from typing import NoReturn

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock

from pmesh.agent import run
from pmesh.agent.containment import AGAIN_S, MAX_PLACES, ContainedTasks, Containment
from pmesh.agent.events import EventLog
from pmesh.agent.jobs import session
from pmesh.agent.jobs.ranks import LocalRank
from pmesh.agent.lanes import rendezvous
from pmesh.agent.run import Agent
from pmesh.core.jobs.progress import Progress
from pmesh.core.wire.control import AskStatus, StatusReply
from pmesh.core.wire.lanes import OfferLane
from pmesh.core.wire.session import SESSION_VERSION, Refused
from pmesh.errors import ProtocolError
from pmesh.ids import Incarnation, JobName, Member, NodeId, TrainerId
from pmesh.p2p.agent import router
from pmesh.p2p.wire import Attach, Attached, ReceiveMessage
from tests.worlds.faults import Faults, InjectedFault, Real
from tests.worlds.kept import kept
from tests.worlds.trainer import RefusedError, together
from tests.worlds.village import Machine, Village, training, village
from tests.worlds.village_ops import kinds_of_events, machine_of, ones, reduce_all

ME = Member(NodeId(b"a" * 32), Incarnation(1))


class WatchedContainment:
    """A containment, what it has told, and a clock moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.event_log = EventLog(
            ME,
            "studio",
            clock=lambda: self.now,
            wall_clock=lambda: datetime.now(UTC),
            listener=lambda _: None,
        )
        containment = Containment(self.event_log, clock=lambda: self.now)
        self.contain = containment.contain
        self.containment = containment

    @property
    def events(self) -> list[str]:
        return [event.text for event in self.event_log.since(-1).events]


def fail(*_: object, **__: object) -> NoReturn:
    raise ZeroDivisionError("division by zero")


def test_an_error_ends_the_block_and_is_told_with_its_traceback() -> None:
    watched, heard = WatchedContainment(), list[str]()
    with capture_logs() as logs, watched.contain("the link to mac-2", heard.append):
        fail()
    text = (
        "the link to mac-2 ended with an error inside pmesh (ZeroDivisionError: division by zero)"
    )
    assert heard == [text]
    assert watched.events == [f"{text}; the log has its traceback"]
    ((entry),) = logs
    assert (entry["event"], entry["what"]) == ("internal error", "the link to mac-2")
    assert isinstance(entry["exc_info"], ZeroDivisionError)


def test_the_same_error_is_told_once_a_minute_and_counted_meanwhile() -> None:
    watched, heard = WatchedContainment(), list[str]()
    with capture_logs() as logs:
        for second in range(100):
            watched.now = float(second)
            with watched.contain("a link", heard.append):
                fail()
        with watched.contain("a link"):
            raise KeyError
    assert AGAIN_S == 60.0
    assert len(heard) == 100
    assert [entry["event"] for entry in logs] == [
        "internal error",
        "internal error, 59 more times in the last minutes",
        "internal error",
    ]
    assert len(watched.events) == 3


def test_errors_from_many_places_are_not_remembered_for_ever() -> None:
    watched = WatchedContainment()
    kinds = [type(f"Error{number}", (Exception,), {}) for number in range(MAX_PLACES + 5)]
    with capture_logs():
        for kind in [*kinds, kinds[0], kinds[-1]]:
            with watched.contain("a link"):
                raise kind
    assert len(watched.events) == len(kinds) + 1  # the first was forgotten, the last was not
    assert kept(watched.containment)["seen"] == MAX_PLACES


def test_what_the_caller_has_foreseen_passes() -> None:
    watched = WatchedContainment()
    with pytest.raises(ProtocolError), watched.contain("a link", passing=(ProtocolError,)):
        raise ProtocolError("garbage")
    assert watched.events == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_whole_program_passes(error: type[BaseException]) -> None:
    watched = WatchedContainment()
    with pytest.raises(error), watched.contain("a link"):
        raise error
    assert watched.events == []


async def test_cancellation_passes_and_the_tasks_of_the_block_end() -> None:
    watched, ended = WatchedContainment(), list[str]()

    async def wait(name: str) -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append(name)

    with trio.CancelScope() as scope, watched.contain("a link"):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, "one")
            nursery.start_soon(wait, "other")
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
    assert scope.cancelled_caught
    assert sorted(ended) == ["one", "other"]
    assert watched.events == []


async def test_an_error_while_the_block_is_cancelled_is_told_and_the_cancellation_passes() -> None:
    watched = WatchedContainment()

    async def fail_at_the_end() -> None:
        try:
            await trio.sleep_forever()
        finally:
            fail()

    with trio.CancelScope() as scope:
        with capture_logs(), watched.contain("a link"):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fail_at_the_end)
                nursery.start_soon(trio.sleep_forever)
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
        raise AssertionError("the block was cancelled, and what is behind it runs")
    assert scope.cancelled_caught
    assert len(watched.events) == 1


async def test_of_several_errors_at_once_each_is_told_and_what_was_foreseen_passes() -> None:
    watched, heard = WatchedContainment(), list[str]()

    def groups() -> NoReturn:
        inner = ExceptionGroup("of a nursery", [KeyError("a"), ProtocolError("garbage")])
        raise BaseExceptionGroup("of another", [inner, ValueError("b")])

    with (
        capture_logs(),
        pytest.raises(ExceptionGroup) as caught,
        watched.contain("a link", heard.append, passing=(ProtocolError,)),
    ):
        groups()
    assert caught.group_contains(ProtocolError)
    assert not caught.group_contains((KeyError, ValueError))
    assert [text.partition("(")[2][:8] for text in heard] == ["KeyError", "ValueErr"]


class HeldByFrame:
    pass


@pytest.mark.parametrize("error", [ValueError, ProtocolError])
async def test_an_error_frees_the_memory_of_its_frames_at_once(error: type[Exception]) -> None:
    held = list[weakref.ref[HeldByFrame]]()

    async def hold_and_fail() -> None:
        memory = HeldByFrame()
        held.append(weakref.ref(memory))
        await trio.lowlevel.checkpoint()
        raise error

    gc.disable()
    try:
        contain = WatchedContainment().contain("the session", passing=(ProtocolError,))
        with contextlib.suppress(ExceptionGroup), capture_logs(), contain:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(hold_and_fail)
                await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        assert held[0]() is None
    finally:
        gc.enable()


async def test_a_task_that_fails_ends_no_other_and_says_what_it_was() -> None:
    watched, ended = WatchedContainment(), list[int]()

    async def work(number: int) -> None:
        await trio.lowlevel.checkpoint()
        if number == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        ended.append(number)

    with capture_logs():
        async with trio.open_nursery() as nursery:
            tasks = ContainedTasks(nursery, watched.contain, "a data connection")
            for number in range(3):
                tasks.start_soon(work, number)
    assert sorted(ended) == [0, 2]
    (event,) = watched.events
    assert event.startswith("a data connection ended with an error inside pmesh")
    assert "Too many open files" in event


async def test_an_agent_without_a_descriptor_for_a_lane_stays_and_the_job_goes_on(
    clock: MockClock, faults: Faults
) -> None:
    failures = 3

    async def dial_lane(
        real: Real, stream: trio.SocketStream, offer: OfferLane, *, peer: str
    ) -> object:
        nonlocal failures
        if failures:
            failures -= 1
            await trio.aclose_forcefully(stream)
            raise OSError(errno.EMFILE, "Too many open files")
        return await real(stream, offer, peer=peer)

    faults.around(rendezvous, "dial_lane", dial_lane)
    async with village(clock, 2) as here:
        before = [machine.agent for machine in here.machines]
        trainers = await here.job(*here.machines)
        assert [r[0] for r in await reduce_all(trainers)] == [2.0, 2.0]
        assert not failures
        assert [machine.agent for machine in here.machines] == before
        assert "internal error" in [k for m in here.machines for k in kinds_of_events(m)]


# --- sessions of local programs


async def still_serves(here: Village, machine: Machine) -> None:
    asker = await here.trainer(machine)
    assert isinstance(await asker.ask(AskStatus()), StatusReply)


async def test_an_error_in_a_command_ends_its_session_and_the_program_is_told(
    clock: MockClock, faults: Faults
) -> None:
    async with village(clock, 1) as here:
        (machine,) = here.machines
        with capture_logs() as logs, faults.instead(Agent, "snapshot", fail):
            for _ in range(3):
                asker = await here.trainer(machine)
                reply = await asker.ask(AskStatus())
                assert isinstance(reply, Refused)
                assert reply.verdict.error == "AgentStopped"
                assert "ZeroDivisionError" in reply.verdict.message
                with pytest.raises(trio.EndOfChannel):
                    await asker.receive()
        assert len(logs) == 1
        assert kinds_of_events(machine).count("internal error") == 1
        await still_serves(here, machine)


async def test_an_error_before_a_trainer_has_joined_leaves_nobody_waiting(
    clock: MockClock, faults: Faults
) -> None:
    async with village(clock, 1) as here:
        (machine,) = here.machines
        with (
            capture_logs(),
            faults.instead(run, "describe_unlinked", fail),  # after 1 s, of what it waits for
            pytest.raises(RefusedError, match="ZeroDivisionError"),
        ):
            await (await here.trainer(machine)).join("digits", 2)
        assert machine.agent.jobs.waiters == {}
        await reduce_all(await here.job(machine, machine))


def fails_for(faults: Faults, whom: TrainerId, where: object, name: str) -> InjectedFault:
    """What is called for a rank fails for this one."""

    def call(real: Real, *arguments: object) -> object:
        if any(isinstance(a, LocalRank) and a.id == whom for a in arguments):
            fail()
        return real(*arguments)

    return faults.around(where, name, call)


@pytest.mark.parametrize(
    ("where", "name"),
    [
        pytest.param(session, "run_op", id="in an op"),
        pytest.param(Progress, "stopped", id="beside an op"),  # in a task of its own
    ],
)
async def test_an_error_in_a_trainers_session_makes_it_depart_and_the_others_go_on(
    clock: MockClock,
    faults: Faults,
    where: object,
    name: str,
) -> None:
    async with training(clock, 3) as (here, everyone):
        await reduce_all(everyone)
        lost, *others = everyone
        machine = machine_of(here, lost)

        async def meet_the_error() -> None:
            with (
                fails_for(faults, lost.id, where, name),
                pytest.raises(AssertionError) as caught,  # no reply to an op
            ):
                await lost.reduce(ones(1000))
            (reply,) = caught.value.args
            assert isinstance(reply, Refused)
            assert reply.verdict.error == "AgentStopped"

        with capture_logs():
            await meet_the_error()
        sums = await reduce_all(others)
        assert [list(x[:1]) for x in sums] == [[2.0], [2.0]]
        assert "internal error" in kinds_of_events(machine)
        (loss,) = machine_of(here, others[0]).agent.membership.view.rosters[0].losses
        assert "its agent has made an error" in loss.message
        assert machine.agent.jobs.ranks == []
        await still_serves(here, machine)


async def test_an_error_in_the_session_for_messages_leaves_the_trainer_its_ops(
    clock: MockClock, faults: Faults
) -> None:
    async with training(clock, 2) as (here, pair):
        machine = machine_of(here, pair[0])
        envelopes = await here.trainer(machine)
        attach = Attach(SESSION_VERSION, JobName("digits"), pair[0].id)
        assert await envelopes.ask(attach) == Attached()
        with capture_logs(), faults.instead(router, "_Pending", fail):
            reply = await envelopes.ask(ReceiveMessage(0, (pair[1].id,), 0, 5.0))
        assert isinstance(reply, Refused)
        assert reply.verdict.error == "AgentStopped"
        await together(*[t.barrier for t in pair])
