"""What members claim about launches: which, how much, and when. None can part honest machines."""

import errno
import itertools
from pathlib import Path

import pytest
import trio
import trio.testing
from msgspec.structs import replace
from trio.testing import MockClock

from pmesh.core.wire.stream import PART_BYTES, WINDOW_BYTES
from pmesh.errors import ProtocolError, UsageError
from pmesh.ids import Incarnation, JobName, Member, NodeId, node_text, path_name, short_node
from pmesh.launches.agent import router
from pmesh.launches.agent.here import PartHere
from pmesh.launches.agent.permission import Permission, store_permission
from pmesh.launches.agent.router import KEPT, MAX_ASKED, MAX_STARTED
from pmesh.launches.agent.sessions import LINES_BYTES
from pmesh.launches.agent.shown import MAX_SHOWN, described
from pmesh.launches.agent.started import MAX_QUESTIONS, StartedHere
from pmesh.launches.rules.starting import ANSWER_S
from pmesh.launches.wire.engines import Engine
from pmesh.launches.wire.messages import (
    MAX_PORTS,
    AnyLaunchMessage,
    AskFiles,
    BeginRanks,
    Command,
    Launch,
    LaunchPart,
    LaunchPrepared,
    LaunchTerms,
    PrepareLaunch,
    RankEnded,
    RankGroup,
    SignalRanks,
    StopLaunch,
    WayTo,
)
from tests.launches.copies import TREE, files_stored
from tests.launches.here import ANNA, EVE, ID, ME, FakePeer, Here, asks, launches_in
from tests.worlds.builders import make_view
from tests.worlds.faults import Faults
from tests.worlds.kept import kept

LINE = b"0 o one\n"
TORN = b"0 o a line that "
PORTS = (7000, 7001)
QUIET = LaunchTerms(engine="pmesh", grace_s=0.1)


def start(
    here: Here, *, on: int = 2, terms: LaunchTerms = QUIET, tree: bool = False
) -> StartedHere:
    """A launch of this machine on Anna's, and also on Eve's if `on` is 2."""
    names = tuple(seat.name for seat in here.view.seats[1 : on + 1])
    command = Command(("true",), "/", tree=TREE if tree else None)
    return here.launches.start(Launch("", command, terms, on=names))


def agree(here: Here, *members: Member) -> None:
    for member in members:
        here.launches.receive(member, LaunchPrepared(ID, "", PORTS))
        here.offsets[member] = 0


def sent_to(peer: FakePeer, kind: type[AnyLaunchMessage]) -> list[AnyLaunchMessage]:
    """What it was sent of a kind; it forgets all that it was sent."""
    sent = [message for message in peer.sent if isinstance(message, kind)]
    peer.sent.clear()
    return sent


def output_is_taken(here: Here, launch: StartedHere, member: Member) -> bool:
    """Send a line; whether it is stored. It is acknowledged in any case."""
    peer = here.anna if member == ANNA else here.eve
    before = launch.spool.end
    offset = here.offsets[member]
    here.launches.receive(member, LaunchPart(ID, offset, 0, LINE, to_starter=True))
    here.offsets[member] += len(LINE)
    assert sent_to(peer, LaunchPart) == [LaunchPart(ID, 0, offset + len(LINE))]
    return launch.spool.end > before


# --- output


async def test_a_machine_that_has_refused_or_not_begun_can_not_fill_the_disk(
    tmp_path: Path,
) -> None:
    async with launches_in(tmp_path) as here:
        launch = start(here)
        assert not output_is_taken(here, launch, ANNA)
        agree(here, ANNA)
        assert not output_is_taken(here, launch, ANNA)
        here.launches.receive(EVE, LaunchPrepared(ID, "no"))
        assert launch.is_over
        assert not output_is_taken(here, launch, EVE)
        assert not output_is_taken(here, launch, ANNA)
        assert not launch.spool.directory.exists()


async def test_output_counts_from_the_begin_to_the_end_of_a_machine_s_ranks(
    tmp_path: Path,
) -> None:
    async with launches_in(tmp_path) as here:
        launch = start(here)
        agree(here, ANNA, EVE)
        assert output_is_taken(here, launch, ANNA)
        here.launches.receive(ANNA, RankEnded(ID, 0, 0, 0))
        assert not output_is_taken(here, launch, ANNA)
        assert output_is_taken(here, launch, EVE)
        here.launches.receive(EVE, StopLaunch(ID))
        assert output_is_taken(here, launch, EVE)  # what its ranks print when they are ended
        here.launches.receive(EVE, RankEnded(ID, 0, 1, -15))
        assert launch.is_over
        assert not output_is_taken(here, launch, EVE)


async def test_a_machine_that_was_lost_and_is_back_may_send_its_last_lines(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        launch = start(here)
        agree(here, ANNA, EVE)
        launch.lose(ANNA, "the cable was out")
        assert output_is_taken(here, launch, ANNA)
        launch.find(ANNA)
        assert output_is_taken(here, launch, ANNA)
        here.launches.receive(ANNA, LaunchPrepared(ID, "not again"))
        assert not output_is_taken(here, launch, ANNA)


async def test_a_line_that_is_torn_is_stored_once_it_is_whole(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        launch = start(here)
        agree(here, ANNA, EVE)
        here.launches.receive(ANNA, LaunchPart(ID, 0, 0, LINE + TORN, to_starter=True))
        here.launches.receive(EVE, LaunchPart(ID, 0, 0, LINE, to_starter=True))
        assert launch.spool.read(0, 100).data == b"0 " + LINE + b"1 " + LINE
        rest = LaunchPart(ID, len(LINE + TORN), 0, b"ends\n", to_starter=True)
        here.launches.receive(ANNA, rest)
        here.launches.receive(ANNA, rest)  # over another link
        assert launch.spool.read(12 + len(LINE), 100).data == b"0 " + TORN + b"ends\n"


async def test_a_line_that_does_not_end_ends_the_link(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        launch = start(here)
        agree(here, ANNA, EVE)
        here.launches.receive(ANNA, LaunchPart(ID, 0, 0, bytes(PART_BYTES), to_starter=True))
        more = LaunchPart(ID, PART_BYTES, 0, b"x", to_starter=True)
        with pytest.raises(ProtocolError, match="does not end"):
            here.launches.receive(ANNA, more)
        assert launch.spool.end == 0


async def test_a_long_line_of_one_machine_hides_no_line_of_another(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        launch = start(here)
        agree(here, ANNA, EVE)
        long = LaunchPart(ID, 0, 0, bytes(PART_BYTES), to_starter=True)
        here.launches.receive(ANNA, long)
        end = LaunchPart(ID, PART_BYTES, 0, bytes(PART_BYTES - 1) + b"\n", to_starter=True)
        with pytest.raises(ProtocolError, match="does not end"):
            here.launches.receive(ANNA, end)
        here.launches.receive(EVE, LaunchPart(ID, 0, 0, LINE, to_starter=True))
        assert launch.spool.read(0, LINES_BYTES).data == b"1 " + LINE


async def test_files_that_are_refused_are_waited_for_no_more(tmp_path: Path) -> None:
    """Their machine gets nothing, and would wait and count among its launches for ever."""
    async with launches_in(tmp_path) as here:
        launch = start(here, on=1, tree=True)
        here.launches.receive(ANNA, AskFiles(ID, 1))
        with trio.fail_after(20):
            await launch.over.wait()
        assert "can't read the files" in launch.refusal
        assert here.anna.sent[1:] == [SignalRanks(ID, 15)]


async def test_an_honest_machine_ends_though_its_starter_has_forgotten_the_launch(
    tmp_path: Path,
) -> None:
    async with launches_in(tmp_path) as here:
        here.launches.receive(ANNA, LaunchPart(ID, 7, 0, LINE, to_starter=True))
        assert here.anna.sent == [LaunchPart(ID, 0, 7 + len(LINE))]
        here.launches.receive(ANNA, LaunchPart(ID, 7, 3, to_starter=True))
        assert len(here.anna.sent) == 1  # an acknowledgement needs none


async def test_an_end_can_not_be_put_off(tmp_path: Path, autojump_clock: MockClock) -> None:
    del autojump_clock
    async with launches_in(tmp_path) as here:
        launch = start(here)
        agree(here, ANNA, EVE)
        here.launches.receive(ANNA, RankEnded(ID, 0, 0, 0))
        while not launch.is_over:
            here.launches.receive(EVE, StopLaunch(ID))
            await trio.sleep(0.5)
        end = launch.spool.end
        here.launches.receive(EVE, StopLaunch(ID))
        assert launch.spool.end == end < 200


async def test_a_machine_can_not_make_others_that_have_agreed_wait(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """They wait for files; without any, for as long as it takes to look for a program."""
    del autojump_clock
    async with launches_in(tmp_path) as here:
        launch = start(here)
        agree(here, ANNA)
        with trio.move_on_after(ANSWER_S + 1):
            while True:
                here.launches.receive(EVE, files_stored(1, 0))
                await trio.sleep(1)
        assert launch.is_over
        assert "has not answered" in launch.refusal


async def test_files_that_are_asked_for_again_and_again_are_refused(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        launch = start(here, on=1, tree=True)
        for number in range(MAX_QUESTIONS):
            here.launches.receive(ANNA, AskFiles(ID, number))
            assert not launch.is_over
        here.launches.receive(ANNA, AskFiles(ID, MAX_QUESTIONS))
        assert "asks for the files again and again" in launch.refusal


# --- input


async def test_only_the_machine_of_rank_0_has_taken_its_input(tmp_path: Path) -> None:
    """Else the next input would come too early there, and it would ban the honest starter."""
    async with launches_in(tmp_path) as here:
        launch = start(here)
        agree(here, ANNA, EVE)
        inputs = [bytes([number]) * PART_BYTES for number in range(WINDOW_BYTES // PART_BYTES)]
        for data in inputs:
            launch.send_input(data)
        for member in (ANNA, EVE):
            here.launches.receive(member, LaunchPart(ID, 0, 0, LINE, to_starter=True))
        launch.lose(EVE, "it has left")
        with pytest.raises(ProtocolError, match="before the last one was taken"):
            launch.send_input(b"2\n")
        here.launches.receive(ANNA, LaunchPart(ID, 0, PART_BYTES, to_starter=True))
        launch.send_input(b"")
        with pytest.raises(ProtocolError, match="after its end"):
            launch.send_input(b"3\n")
        parts = [part for part in sent_to(here.anna, LaunchPart) if isinstance(part, LaunchPart)]
        assert [part.data for part in parts if part.data] == inputs
        assert [part for part in parts if part.ends] == parts[-1:]


# --- what an honest starter may send


async def test_a_begin_that_comes_after_the_machine_gave_up_is_answered(tmp_path: Path) -> None:
    """Others kept the starter waiting, or `pmesh stop` here crossed it: it must not be banned."""
    async with launches_in(tmp_path) as here:
        assert await here.prepare(asks("touch", str(tmp_path / "ran"))) == ""
        part = here.launches.find(ID)
        here.launches.end(part, 15)
        assert here.anna.sent == [StopLaunch(ID)]
        here.begin()
        assert here.anna.sent == [StopLaunch(ID), RankEnded(ID, 0, 0, -15)]
        assert not (tmp_path / "ran").exists()


async def test_what_was_sent_in_an_earlier_attempt_may_be_acknowledged_late(
    tmp_path: Path,
) -> None:
    async with launches_in(tmp_path) as here:
        words = ("python3", "-c", "print('x' * 99)")
        assert await here.prepare(asks(*words)) == ""
        here.begin()
        text, _ = await here.output()
        here.launches.receive(ANNA, asks(*words))
        answer = await here.anna.next()
        assert isinstance(answer, LaunchPrepared)
        assert answer.offset > len(text)
        here.launches.receive(ANNA, LaunchPart(ID, 0, answer.offset))
        here.begin()
        assert (await here.output())[0] == text


# --- which launch


async def test_a_launch_that_takes_the_id_of_one_of_ours_is_shown_and_can_be_named(
    tmp_path: Path,
) -> None:
    async with launches_in(tmp_path) as here:
        mine = start(here, on=1)
        assert await here.prepare(asks("true"), EVE) == ""
        theirs = here.launches.parts[EVE.node, ID]
        names = [f"{ID}@{short_node(member.node)}" for member in (ME, EVE)]
        assert sorted(row.launch for row in here.launches.rows()) == sorted(names)
        with pytest.raises(UsageError, match=f"several machines have started.*{names[0]}"):
            here.launches.find(ID)
        assert [here.launches.find(name) for name in names] == [mine, theirs]
        eve = here.view.seats[2].name
        assert here.launches.find(f"{ID}@{eve}") == theirs
        here.launches.end(here.launches.find(names[1]), 15)
        assert (mine.is_over, theirs.is_over) == (False, True)


async def test_a_job_named_like_a_launch_hides_no_launch(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        mine = start(here, on=1)
        for number, name in enumerate((ID, f"{ID}@{short_node(ME.node)}")):
            forged = replace(asks("true"), launch=f"{number:012x}", job=JobName(name))
            assert await here.prepare(forged, EVE) == ""
            assert here.launches.find(name) == mine


async def test_who_starts_many_pushes_out_its_own_and_no_other_output(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        for number, member in enumerate((ANNA, *(EVE,) * (KEPT + 3))):
            launch, job = path_name(f"{number:012x}"), JobName(f"job {number}")
            assert await here.prepare(replace(asks("true"), launch=launch, job=job), member) == ""
            here.launches.receive(member, SignalRanks(launch, 9))
        assert len(here.launches.parts) == KEPT
        assert (ANNA.node, f"{0:012x}") in here.launches.parts


# --- how many, how much


async def test_what_is_shown_of_a_command_is_short(tmp_path: Path) -> None:
    async with launches_in(tmp_path, None) as here:
        await here.prepare(asks("touch", *("\x1b" * 30_000,) * 6))
        (news,) = here.news
        assert len(news.text) < MAX_SHOWN + 200
    assert described(("a", "b" * MAX_SHOWN)) == f"a {'b' * (MAX_SHOWN - 2)}…"


async def test_a_member_has_few_questions_at_once(tmp_path: Path, faults: Faults) -> None:
    looks = 0

    async def look(*_: object) -> Permission:
        nonlocal looks
        looks += 1
        await trio.sleep_forever()
        return Permission()

    async with launches_in(tmp_path) as here:
        with faults.instead(trio.to_thread, "run_sync", look):
            for number in range(200):
                here.launches.receive(EVE, replace(asks("true"), launch=f"{number:012x}"))
            await trio.testing.wait_all_tasks_blocked()
            assert looks == MAX_ASKED
        assert len(here.eve.sent) == 200 - MAX_ASKED
        assert "already; try again" in str(here.eve.sent[0])
        assert await here.prepare(asks("true")) == ""  # another's questions take no place


async def test_who_was_refused_is_remembered_for_a_while(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    del autojump_clock
    async with launches_in(tmp_path, None) as here:
        for number in range(1, 10):
            member = Member(NodeId(number.to_bytes(32, "big")), Incarnation(number))
            here.launches._note_refusal(member, asks("true"), "no")  # noqa: SLF001 - a stranger
            await trio.sleep(30)
        assert 1 <= kept(here.launches)["refused_at"] <= 3  # now, without the threads of a request


async def test_so_many_launches_of_this_machine_run_at_once(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        here.ids = (path_name(f"{number:012x}") for number in itertools.count())
        for _ in range(MAX_STARTED):
            start(here, on=1)
        with pytest.raises(UsageError, match="has started 64 launches that go on"):
            start(here, on=1)


@pytest.mark.parametrize(
    ("engine", "ranks", "message"),
    [
        ("pmesh", {"per_node": MAX_PORTS}, "1088 ranks are too many: at most 1024"),
        ("jaccl", {"count": 65}, "--engine jaccl takes at most 64 ranks, not 65"),
    ],
)
async def test_ranks_that_no_machine_would_accept_are_not_asked_for(
    tmp_path: Path, engine: Engine, ranks: dict[str, int], message: str
) -> None:
    others = (Member(NodeId(bytes([n]) * 32), Incarnation(n)) for n in range(1, 17))
    async with launches_in(tmp_path) as here:
        here.view = make_view(1, ME, *others)
        request = Launch("", Command(("true",), "/"), LaunchTerms(engine=engine))
        with pytest.raises(UsageError, match=message):
            here.launches.start(replace(request, **ranks))


# --- the system fails


async def test_a_system_without_descriptors_refuses_one_launch(
    tmp_path: Path, faults: Faults
) -> None:
    async with launches_in(tmp_path) as here:
        with faults.fail(router, "free_ports", OSError(errno.EMFILE, "Too many open files")):
            refusal = await here.prepare(asks("true"))
            assert refusal == "it can't prepare the launch: Too many open files"
        assert not here.launches.parts
        assert not [news for news in here.news if news.kind == "internal error"]
        assert await here.prepare(asks("true")) == ""


async def test_an_error_of_ours_in_a_launch_leaves_no_rank_behind(
    tmp_path: Path, faults: Faults
) -> None:
    async def fail(_: PartHere) -> None:
        await trio.sleep(0.2)
        raise RuntimeError

    async with launches_in(tmp_path) as here:
        faults.instead(PartHere, "_keep_time", fail)
        assert await here.prepare(asks("sleep", "86400")) == ""
        here.begin()
        with trio.fail_after(20):
            await here.launches.parts[ANNA.node, ID].over.wait()


async def test_only_the_members_named_may_ask_whatever_others_do(tmp_path: Path) -> None:
    named = Permission(members=(node_text(ANNA.node),), as_root=True)
    async with launches_in(tmp_path) as here:
        store_permission(tmp_path, named)
        for number in range(MAX_ASKED):
            here.launches.receive(EVE, replace(asks("true"), launch=f"{number:012x}"))
        assert await here.prepare(asks("true")) == ""


async def test_a_begin_has_what_its_engine_needs_and_nothing_else(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        start(here, on=1, terms=LaunchTerms(engine="gloo"))
        assert isinstance(await here.anna.next(), PrepareLaunch)
        agree(here, ANNA)
        group = RankGroup(1, "127.0.0.1", (7000,), ("",))
        assert await here.anna.next() == BeginRanks(ID, 0, 0, (group,), "127.0.0.1")


async def test_machines_without_the_addresses_that_an_engine_needs_are_a_refusal(
    tmp_path: Path,
) -> None:
    async with launches_in(tmp_path) as here:
        launch = start(here, terms=LaunchTerms(engine="gloo", restarts=1))
        agree(here, ANNA, EVE)
        one, other = launch.names
        refusal = f"{one} has no IPv4 address of {other}, which --engine gloo needs"
        assert (launch.is_over, launch.code, launch.refusal) == (True, 1, refusal)
        for peer in (here.anna, here.eve):
            assert peer.sent[1:] == [SignalRanks(ID, 9)]


async def test_addresses_that_are_missing_at_a_restart_end_the_launch(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        launch = start(here, terms=LaunchTerms(engine="gloo", restarts=1))
        for member, far in ((ANNA, EVE), (EVE, ANNA)):
            ways = (WayTo(far.node, "10.0.0.1", "en0"),)
            here.launches.receive(member, LaunchPrepared(ID, "", PORTS, ways))
        for rank, member in enumerate((ANNA, EVE)):
            here.launches.receive(member, RankEnded(ID, 0, rank, 3))
        agree(here, ANNA, EVE)
        assert (launch.is_over, launch.code, launch.refusal) == (True, 1, "")
        assert b"has no IPv4 address of" in launch.spool.read(0, PART_BYTES).data
