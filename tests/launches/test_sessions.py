"""What local programs are shown of a launch."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn, cast

import psutil
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from pmesh.agent.limits import Admission, plan_files
from pmesh.core.wire.control import AskStatus, StatusReply
from pmesh.core.wire.session import MAX_SESSION_MESSAGE_BYTES, Refused, encode
from pmesh.ids import path_name
from pmesh.launches.agent.router import Launches
from pmesh.launches.agent.sessions import LaunchFeature
from pmesh.launches.agent.spool import Spool
from pmesh.launches.rules.lines import NOTE, OUT, STARTER, read_lines
from pmesh.launches.wire.messages import (
    MAX_COMMAND_WORDS,
    AskLaunches,
    Command,
    EndLaunch,
    FollowLaunch,
    Launch,
    LaunchBegan,
    LaunchEnding,
    LaunchInput,
    LaunchLines,
    LaunchOver,
    LaunchQuestion,
    LaunchRows,
    LaunchTerms,
    PrepareLaunch,
    StopLaunch,
)
from pmesh.net.sessions.sessions import Session
from simulation.wire import AnyReply
from tests.launches.here import ANNA, ID, launches_in
from tests.worlds.trainer import TrainerClient, until
from tests.worlds.village import Machine, Village, small_machine


class QuestionSession:
    def __init__(self) -> None:
        self.sent: list[AnyReply] = []

    async def send(self, reply: AnyReply) -> None:
        self.sent.append(reply)

    async def receive(self, _: object) -> NoReturn:
        await self.await_end()

    async def await_end(self) -> NoReturn:
        await trio.sleep_forever()

    def stay(self) -> None: ...


async def serve(session: QuestionSession, request: LaunchQuestion, launches: Launches) -> None:
    admission = Admission(plan_files(1024), memory_bytes=2**30)
    feature = LaunchFeature(launches, lambda: admission)
    await feature.serve(cast("Session", session), request)


async def test_lines_that_a_reader_was_too_slow_for_are_counted(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        there = (here.view.seats[1].name,)
        launch = here.launches.start(
            Launch("night", Command(("true",), "/"), LaunchTerms(), on=there)
        )
        launch.spool = Spool(tmp_path / "spool", segment_bytes=1, segments=2)
        for number in range(4):
            launch.spool.append(b"0 0 o line %d\n" % number)
        session = QuestionSession()
        await serve(session, FollowLaunch("night"), here.launches)
        data = b"".join(reply.data for reply in session.sent if isinstance(reply, LaunchLines))
        lines = [(line.seat, line.kind, line.text) for line in read_lines(data)]
        gone = 2 * len(b"0 0 o line 0\n")
        assert lines == [
            (STARTER, NOTE, b"%d bytes of output are not kept any more" % gone),
            (0, OUT, b"line 2"),
            (0, OUT, b"line 3"),
        ]


async def test_output_whose_file_was_removed_is_counted_once_and_not_waited_for(
    tmp_path: Path,
) -> None:
    async with launches_in(tmp_path) as here, trio.open_nursery() as nursery:
        there = (here.view.seats[1].name,)
        launch = here.launches.start(
            Launch("night", Command(("true",), "/"), LaunchTerms(), on=there)
        )
        launch.spool = Spool(tmp_path / "spool")
        launch.spool.append(b"0 0 o line\n")
        for file in (tmp_path / "spool").iterdir():
            file.unlink()
        gone = b"11 bytes of output are not kept any more"
        for follow in (False, True):  # an agent that asks for it again and again hangs here
            session = QuestionSession()
            nursery.start_soon(serve, session, FollowLaunch("night", follow), here.launches)
            await wait_all_tasks_blocked()
            shown = [reply.data for reply in session.sent if isinstance(reply, LaunchLines)]
            assert [line.text for data in shown for line in read_lines(data)] == [gone]
        nursery.cancel_scope.cancel()


async def test_many_long_commands_can_be_listed(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        here.ids = (path_name(f"{number:012x}") for number in range(30))
        there = (here.view.seats[1].name,)
        words = ("true", *("x" * 180,) * (MAX_COMMAND_WORDS - 1))
        for _ in range(30):
            here.launches.start(Launch("", Command(words, "/"), LaunchTerms(), on=there))
        session = QuestionSession()
        await serve(session, AskLaunches(), here.launches)
        assert sum(len(reply.rows) for reply in session.sent if isinstance(reply, LaunchRows)) == 30
        assert session.sent[-1] == LaunchRows(())
        assert all(len(encode(reply)) < MAX_SESSION_MESSAGE_BYTES for reply in session.sent)


async def test_a_detached_launch_that_is_stopped_before_it_begins_does_not_count_as_begun(
    tmp_path: Path,
) -> None:
    async with launches_in(tmp_path) as here, trio.open_nursery() as nursery:
        there = (here.view.seats[1].name,)
        request = Launch("", Command(("true",), "/"), LaunchTerms(detach=True), on=there)
        session = QuestionSession()
        nursery.start_soon(serve, session, request, here.launches)
        assert isinstance(await here.anna.next(), PrepareLaunch)
        here.launches.receive(ANNA, StopLaunch(ID))
        await wait_all_tasks_blocked()
        (refused,) = session.sent
        assert isinstance(refused, Refused)
        assert refused.verdict.message == f"launch {ID} was stopped before it began"


# --- real sessions


@asynccontextmanager
async def quiet_launch(
    clock: MockClock, *, files: int = 1024
) -> AsyncGenerator[tuple[Village, Machine]]:
    """An agent with so many files, that runs a launch which prints nothing."""
    async with small_machine(clock, files=files) as (here, machine):
        terms = LaunchTerms(detach=True, grace_s=0.1)
        request = Launch("night", Command(("sh", "-c", "echo up; exec sleep 86400"), "/"), terms)
        clock.autojump_threshold = 60  # looking for the program takes real time
        launch = machine.part(LaunchFeature).launches.start(request)
        with trio.fail_after(60):
            await launch.spool.grown_beyond(0)
        clock.autojump_threshold = 0
        yield here, machine


async def follow(here: Village, machine: Machine) -> TrainerClient:
    program = await here.trainer(machine)
    assert isinstance(await program.ask(FollowLaunch("night", follow=True)), LaunchBegan)
    assert await program.receive() == LaunchLines(b"0 0 o up\n")
    return program


async def test_who_follows_a_quiet_launch_and_goes_leaves_nothing(clock: MockClock) -> None:
    async with quiet_launch(clock) as (here, machine):
        descriptors = psutil.Process().num_fds()
        programs = [await follow(here, machine) for _ in range(10)]
        for program in programs:
            await program.stream.aclose()
        await until(lambda: psutil.Process().num_fds() == descriptors)


async def test_who_speaks_while_it_follows_a_launch_is_closed(clock: MockClock) -> None:
    async with quiet_launch(clock) as (here, machine):
        program = await follow(here, machine)
        await program.send(LaunchInput(b"x"))
        with pytest.raises(trio.EndOfChannel):
            await program.receive()


async def test_a_follower_sees_the_end_at_once(clock: MockClock) -> None:
    async with quiet_launch(clock) as (here, machine):
        program = await follow(here, machine)
        clock.autojump_threshold = 60  # a process ends in real time
        stopped = await (await here.trainer(machine)).ask(EndLaunch("night"))
        assert isinstance(stopped, LaunchEnding)
        assert await program.receive() == LaunchOver(128 + 15)


async def test_with_few_files_followers_are_refused_and_commands_are_answered(
    clock: MockClock,
) -> None:
    async with quiet_launch(clock, files=64) as (here, machine):
        for _ in range(4):
            await follow(here, machine)
        refused = await (await here.trainer(machine)).ask(FollowLaunch("night", follow=True))
        assert isinstance(refused, Refused)
        assert "4 programs show launches here" in refused.verdict.message
        assert isinstance(await (await here.trainer(machine)).ask(AskStatus()), StatusReply)
        assert isinstance(await (await here.trainer(machine)).ask(AskLaunches()), LaunchRows)
