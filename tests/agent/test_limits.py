"""Which trainers an agent takes in, and what extreme requests of theirs may cost.

The limit of open files, on systems of three kinds; only the system calls are faked.
"""

import errno
import math
import os
import resource
from contextlib import ExitStack

import pytest
import trio
from trio.testing import MockClock

from pmesh.agent.limits import (
    FEW_OPEN_FILES,
    MAX_TRAINERS,
    OPEN_FILES,
    Admission,
    open_files_limit,
    plan_files,
    raise_open_files,
)
from pmesh.agent.mesh.peers import Peers
from pmesh.core.wire.control import AskEvents, AskStatus, StatusReply, StopAgent, Stopping
from pmesh.core.wire.framing import frame
from pmesh.core.wire.session import SESSION_VERSION, ArenaGranted, Refused, WantArena, encode
from pmesh.core.wire.trainer import Connect
from pmesh.errors import UsageError
from pmesh.ids import JobName
from pmesh.net.sessions.sessions import MAX_VISITORS, VISIT_S
from pmesh.p2p import rules as p2p_rules
from pmesh.p2p.rules import Inbox, Wanted
from pmesh.p2p.wire import Attach, Attached, ReceiveMessage
from tests.worlds.faults import Faults, Real
from tests.worlds.trainer import together, until
from tests.worlds.village import small_machine, training, village
from tests.worlds.village_ops import machine_of, ones, reduce_all


class FileLimits:
    """A system's limit of open files, and the most that it grants (None: as the hard limit)."""

    def __init__(self, soft: int, hard: int, *, fails: bool = False) -> None:
        self.limits = (soft, hard)
        self.fails = fails

    def getrlimit(self, which: int) -> tuple[int, int]:
        assert which == resource.RLIMIT_NOFILE
        return self.limits

    def setrlimit(self, which: int, limits: tuple[int, int]) -> None:
        assert which == resource.RLIMIT_NOFILE
        if self.fails:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        self.limits = limits


def start_on(system: FileLimits, monkeypatch: pytest.MonkeyPatch) -> str | None:
    monkeypatch.setattr(resource, "getrlimit", system.getrlimit)
    monkeypatch.setattr(resource, "setrlimit", system.setrlimit)
    return raise_open_files()


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (256, resource.RLIM_INFINITY, OPEN_FILES),  # macOS: no more than OPEN_MAX is granted
        (1024, 524_288, OPEN_FILES),  # Linux under systemd
        (1024, 4096, 4096),  # Linux elsewhere
        (20_000, 20_000, 20_000),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY),
    ],
)
def test_the_soft_limit_is_raised(
    soft: int, hard: int, raised: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = FileLimits(soft, hard)
    assert start_on(system, monkeypatch) is None
    assert system.limits == (raised, hard)


@pytest.mark.parametrize(
    ("system", "words"),
    [
        (FileLimits(256, 512), "only 512 files may be open at once (the system allows no more)"),
        (FileLimits(512, 512), "only 512 files may be open at once (the system allows no more)"),
        (FileLimits(256, 4096, fails=True), "only 256 files may be open at once ([Errno 1]"),
    ],
)
def test_too_few_files_are_said(
    system: FileLimits, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    complaint = start_on(system, monkeypatch)
    assert complaint is not None
    assert complaint.startswith(words)
    assert f"ulimit -n {FEW_OPEN_FILES}" in complaint


def test_a_refusal_above_what_is_needed_is_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start_on(FileLimits(2048, 4096, fails=True), monkeypatch) is None


@pytest.mark.parametrize("limit", [8, 64, 100, 256, 1024, 4096, OPEN_FILES, 2**20])
def test_local_programs_leave_half_of_the_files_to_the_agent(limit: int) -> None:
    plan = plan_files(limit)
    local = plan.visitors + plan.followers + 2 * plan.trainers + plan.arenas
    assert local <= limit // 2
    assert 1 <= plan.visitors <= MAX_VISITORS
    assert 1 <= plan.trainers <= MAX_TRAINERS
    assert plan.arenas >= plan.trainers or limit < 64


def test_what_a_user_can_change_about_too_few_files_is_said() -> None:
    few, many = plan_files(256), plan_files(OPEN_FILES)
    assert few.describe_trainers().startswith(
        "this agent serves at most 16 trainer connections, and a program may have half"
    )
    assert "because only 256 files may be open" in few.describe_trainers()
    assert "ulimit -n 1024" in few.describe_trainers()
    assert "ulimit" not in many.describe_trainers()


@pytest.mark.parametrize(("soft", "limit"), [(77, 77), (resource.RLIM_INFINITY, OPEN_FILES)])
def test_an_unlimited_number_of_files_is_planned_as_what_is_asked_for(
    soft: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", FileLimits(soft, soft).getrlimit)
    assert open_files_limit() == limit


MIB = 2**20


def test_a_program_has_half_of_the_connections_that_others_leave() -> None:
    admission = Admission(plan_files(256), memory_bytes=2**30)
    with ExitStack() as sessions:
        for _ in range(8):
            sessions.enter_context(admission.admit(1))
        with pytest.raises(UsageError, match=r"at most 16 .*; 8 are in use, 8 by this program"):
            sessions.enter_context(admission.admit(1))
        for _ in range(4):
            sessions.enter_context(admission.admit(2))


async def test_who_does_not_fit_is_refused_by_name_and_commands_are_answered(
    clock: MockClock,
) -> None:
    async with small_machine(clock, files=64) as (here, machine):
        trainers = await here.job(machine, machine)
        for request in (
            Connect(SESSION_VERSION, JobName("words"), 1, 5.0, "test.py"),
            Attach(SESSION_VERSION, JobName("digits"), trainers[0].id),
        ):
            reply = await (await here.trainer(machine)).ask(request)
            assert isinstance(reply, Refused)
            assert reply.verdict.error == "UsageError"
            assert "only 64 files may be open" in reply.verdict.message
        assert isinstance(await (await here.trainer(machine)).ask(AskStatus()), StatusReply)
        await reduce_all(trainers)
        await trainers[1].die()
        await until(lambda: len(machine.agent.jobs.ranks) == 1)
        await (await here.trainer(machine)).join("words", 1)


async def test_what_trainers_hold_is_bounded_over_all_of_them(clock: MockClock) -> None:
    """Each asks for the largest arena there is, again and again, and gives none back."""
    async with small_machine(clock, memory_bytes=64 * MIB) as (here, machine):
        refusals = list[str]()
        for number in range(3):
            trainer = await here.trainer(machine)
            clock.autojump_threshold = 0
            await trainer.join(f"job {number}", 1)
            clock.autojump_threshold = math.inf  # arenas are made in threads
            size = 2**62
            while size > MIB:
                reply = await trainer.ask(WantArena(size))
                if isinstance(reply, Refused):
                    refusals.append(reply.verdict.message)
                    size //= 2
                else:
                    assert isinstance(reply, ArenaGranted)
        assert "hold 16 MiB, 16 MiB are allowed" in refusals[-1]  # all are of one process


async def test_a_result_too_large_for_the_share_fails_the_op_by_name(clock: MockClock) -> None:
    async with small_machine(clock, memory_bytes=4 * MIB) as (here, machine):
        (trainer,) = await here.job(machine)
        verdict = await trainer.verdict_of(trainer.reduce(ones(200_000)))
        assert verdict.error == "UsageError"
        assert "no shared memory" in verdict.message
        assert (await trainer.reduce(ones(4)))[0] == 1.0


async def test_memory_comes_back_when_a_trainer_ends(clock: MockClock) -> None:
    async with small_machine(clock, memory_bytes=4 * MIB) as (here, machine):
        for _ in range(5):
            (trainer,) = await here.job(machine)
            await trainer.reduce(ones(100_000))
            await trainer.die()
            await until(lambda: not machine.agent.membership.view.rosters)
        (trainer,) = await here.job(machine)
        whole_share = WantArena(MIB)  # half of what others leave of half of the memory
        assert isinstance(await trainer.ask(whole_share), ArenaGranted)


async def test_who_reads_no_replies_to_its_messages_is_not_read_from_either(
    clock: MockClock,
) -> None:
    async with training(clock, 2) as (here, pair):
        machine = machine_of(here, pair[0])
        deaf = await here.trainer(machine)
        assert await deaf.ask(Attach(SESSION_VERSION, JobName("digits"), pair[0].id)) == Attached()
        before = trio.lowlevel.current_statistics().tasks_living
        sent = 0

        async def send_for_ever() -> None:
            nonlocal sent
            while True:
                requests = [ReceiveMessage(sent + i, (pair[1].id,), 0, 1e-9) for i in range(40)]
                await deaf.stream.send_all(b"".join(frame(encode(r)) for r in requests))
                sent += 40
                await trio.sleep(0.01)

        with trio.move_on_after(60):
            await send_for_ever()
        assert sent > 400
        assert trio.lowlevel.current_statistics().tasks_living <= before + 60
        await together(*[t.barrier for t in pair])


async def test_a_source_named_again_and_again_is_one(clock: MockClock, faults: Faults) -> None:
    """What a message is chosen by grows with the ranks of the job, not with the request."""
    wanted = list[Wanted]()

    def want(real: Real, inbox: Inbox, call: int, what: Wanted) -> object:
        wanted.append(what)
        return real(inbox, call, what)

    faults.around(p2p_rules, "want", want)
    async with training(clock, 2) as (here, pair):
        machine = machine_of(here, pair[0])
        envelopes = await here.trainer(machine)
        await envelopes.ask(Attach(SESSION_VERSION, JobName("digits"), pair[0].id))
        await envelopes.send(ReceiveMessage(0, (pair[1].id,) * 1024, 0, 5.0))
        await until(lambda: bool(wanted))
        assert [each.sources for each in wanted] == [(pair[1].id,)]


async def test_who_stops_the_agent_sees_its_end_however_long_it_takes(
    clock: MockClock, faults: Faults
) -> None:
    async def leave(_: Peers) -> None:
        await trio.sleep(2 * VISIT_S)

    faults.instead(Peers, "leave", leave)
    async with village(clock, 1) as here:
        asker = await here.trainer(here.machines[0])
        began = trio.current_time()
        assert isinstance(await asker.ask(StopAgent()), Stopping)
        with pytest.raises(trio.EndOfChannel):
            await asker.receive()
        assert trio.current_time() - began >= 2 * VISIT_S


async def test_events_after_any_number_are_answered(clock: MockClock) -> None:
    async with village(clock, 1) as here:
        (machine,) = here.machines
        asker = await here.trainer(machine)
        await asker.send(AskEvents(2**63 - 1))
        with pytest.raises(trio.EndOfChannel):
            await asker.receive()
        assert isinstance(await (await here.trainer(machine)).ask(AskStatus()), StatusReply)
