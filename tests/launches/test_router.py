"""Who may have this machine run what; attacked by members that lie. Real processes run."""

import itertools
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing
from msgspec.structs import replace

from pmesh.core.wire.stream import PART_BYTES, WINDOW_BYTES
from pmesh.errors import ConfigError, ProtocolError, UsageError
from pmesh.ids import Incarnation, JobName, Member, PathName, node_text
from pmesh.launches.agent import here as part_here
from pmesh.launches.agent import router
from pmesh.launches.agent.permission import (
    PERMISSION_NAME,
    Permission,
    load_permission,
    store_permission,
    why_not,
)
from pmesh.launches.agent.router import MAX_RUNNING
from pmesh.launches.wire.messages import (
    BeginRanks,
    Command,
    GiveUpRank,
    Launch,
    LaunchPart,
    LaunchPrepared,
    LaunchTerms,
    PrepareLaunch,
    RankEnded,
    RankGroup,
    SignalRanks,
    StopLaunch,
)
from tests.launches.copies import DATA, SCRIPT, TREE, TREE_DATA, answer, asks_in, refusal_of
from tests.launches.here import ANNA, EVE, EVERYONE, ID, ME, FakePeer, Here, asks, launches_in
from tests.worlds.builders import make_view
from tests.worlds.faults import Faults

# --- who may


async def test_a_member_that_is_not_allowed_is_refused_and_it_is_noted_once(tmp_path: Path) -> None:
    async with launches_in(tmp_path, None) as here:
        for _ in range(2):
            refusal = await here.prepare(asks("touch", "x\ny"))
            assert refusal.startswith("it does not run what others ask for")
        here.begin()
        assert not here.launches.parts
        (news,) = here.news
        assert news.kind == "command refused"
        assert "wanted to run here: touch 'x\\ny'" in news.text


async def test_only_the_members_that_are_named_may(tmp_path: Path) -> None:
    named = Permission(members=(node_text(ANNA.node),), as_root=True)
    async with launches_in(tmp_path, named) as here:
        assert await here.prepare(asks("true"), EVE)
        assert await here.prepare(asks("true")) == ""


async def test_a_permission_that_is_taken_back_counts_from_the_next_request_on(
    tmp_path: Path,
) -> None:
    async with launches_in(tmp_path) as here:
        assert await here.prepare(asks("true")) == ""
        here.begin()
        await here.output()
        store_permission(tmp_path, Permission())
        assert await here.prepare(asks("true"))  # also for the launch that it ran before


def test_root_must_be_allowed_by_itself() -> None:
    nobody, everyone = Permission(), Permission(everyone=True)
    assert "runs as root" in why_not(everyone, ANNA.node, allowed_by_option=False, is_root=True)
    assert "runs as root" in why_not(nobody, ANNA.node, allowed_by_option=True, is_root=True)
    assert why_not(EVERYONE, ANNA.node, allowed_by_option=False, is_root=True) == ""


@pytest.mark.parametrize("content", [b"everyone", b'{"everyone": 1}', b"\xff"])
async def test_a_permission_file_that_is_not_ours_allows_nothing(
    tmp_path: Path, content: bytes
) -> None:
    async with launches_in(tmp_path) as here:
        (tmp_path / PERMISSION_NAME).write_bytes(content)
        assert "is not what 'pmesh allow' writes" in await here.prepare(asks("true"))


def test_a_permission_that_others_can_read_or_write_is_refused(tmp_path: Path) -> None:
    store_permission(tmp_path, EVERYONE)
    path = tmp_path / PERMISSION_NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_permission(tmp_path) == EVERYONE
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="other users can read"):
        load_permission(tmp_path)


# --- forged and repeated


async def test_only_the_starter_of_a_launch_can_begin_signal_or_feed_it(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        assert await here.prepare(asks("cat")) == ""
        other_start = Member(ANNA.node, Incarnation(99))
        for member in (EVE, other_start):
            here.begin(member)
            here.launches.receive(member, SignalRanks(ID, 9))
        part = here.launches.parts[ANNA.node, ID]
        assert not part.has_begun
        assert not part.is_over
        here.begin()
        for member in (EVE, other_start):
            here.launches.receive(member, SignalRanks(ID, 9))
            here.launches.receive(member, LaunchPart(ID, 0, 0, b"forged\n"))
            here.launches.receive(member, LaunchPart(ID, 0, 2**40))
        here.launches.receive(ANNA, LaunchPart(ID, 0, 0, b"mine\n"))
        assert await here.anna.next() == LaunchPart(ID, 0, 5, to_starter=True)
        here.launches.receive(ANNA, LaunchPart(ID, 5, 0, ends=True))
        text = ""
        while not isinstance(message := await here.anna.next(), RankEnded):
            if isinstance(message, LaunchPart):
                text += message.data.decode()
        assert (text, message.code) == ("0 o mine\n", 0)


async def test_another_member_can_not_take_a_launch_over(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        assert await here.prepare(asks("true")) == ""
        other = replace(asks("sleep", "86400", grace_s=0.1), job=JobName("other"))
        assert await here.prepare(other, EVE) == ""  # a launch of its own, beside the first one
        here.begin(EVE)
        assert here.launches.parts[EVE.node, ID].has_begun
        part = here.launches.parts[ANNA.node, ID]
        assert (part.starter, part.has_begun) == (ANNA, False)
        here.launches.receive(EVE, SignalRanks(ID, 9))
        here.begin()
        assert (await here.output())[1].code == 0


async def test_a_begin_that_is_repeated_starts_nothing(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        assert await here.prepare(asks("true")) == ""
        here.begin()
        with pytest.raises(ProtocolError, match="began twice"):
            here.begin()
        assert (await here.output())[1].code == 0
        with pytest.raises(ProtocolError, match="began twice"):
            here.begin()


async def test_a_launch_that_was_cancelled_or_never_prepared_can_not_begin(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        here.begin()
        assert not here.launches.parts
        assert await here.prepare(asks("true")) == ""
        here.launches.receive(ANNA, SignalRanks(ID, 15))
        here.begin()
        assert not here.launches.parts[ANNA.node, ID].has_begun


async def test_more_ranks_than_were_prepared_are_refused(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        assert await here.prepare(asks("true")) == ""
        with pytest.raises(ProtocolError):
            here.launches.receive(ANNA, BeginRanks(ID, 0, 0, (RankGroup(2),)))


async def test_what_a_starter_can_not_know_is_refused(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        assert await here.prepare(asks("cat")) == ""
        here.begin()
        with pytest.raises(ProtocolError, match="beyond what was sent"):
            here.launches.receive(ANNA, LaunchPart(ID, 0, 1))
        with pytest.raises(ProtocolError, match="do not fit the window"):
            here.launches.receive(ANNA, LaunchPart(ID, WINDOW_BYTES, 0, b"1\n"))


async def test_a_member_can_start_only_so_many(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        for number in range(MAX_RUNNING + 1):
            request = replace(asks("true"), launch=f"{number:012x}", job=JobName(f"job {number}"))
            refusal = await here.prepare(request)
            assert bool(refusal) == (number == MAX_RUNNING)


async def test_a_job_that_runs_here_is_not_started_twice(tmp_path: Path) -> None:
    other = "ba9876543210"
    async with launches_in(tmp_path) as here:
        assert await here.prepare(asks("true")) == ""
        assert await here.prepare(replace(asks("true"), launch=other), EVE) == (
            f"launch {ID} runs the job 'digits' there already; end it by 'pmesh stop {ID}', "
            "or give another --job"
        )
        here.begin()
        await here.output()
        assert await here.prepare(replace(asks("true"), launch=other), EVE) == ""


@pytest.mark.parametrize("cancel", ["signal", "link", "another link"])
async def test_a_launch_that_is_cancelled_while_ports_are_looked_for_keeps_no_job(
    tmp_path: Path, faults: Faults, cancel: str
) -> None:
    def cancel_it() -> None:
        if cancel == "signal":
            here.launches.receive(ANNA, SignalRanks(ID, 9))
        else:
            del here.links[ANNA.node]
        if cancel == "another link":
            here.links[ANNA.node] = here.anna

    def run(real: Callable[[int], tuple[int, ...]], count: int) -> tuple[int, ...]:
        trio.from_thread.run_sync(cancel_it)
        return real(count)

    async with launches_in(tmp_path) as here:
        with faults.around(router, "free_ports", run):
            here.launches.receive(ANNA, asks("true"))
            if cancel == "another link":
                here.anna = FakePeer(ANNA)
            with trio.fail_after(20):
                while here.launches.questions:  # noqa: ASYNC110 - nobody tells of it
                    await trio.sleep(0.01)
        assert not here.launches.parts
        assert not here.anna.sent
        assert await here.prepare(replace(asks("true"), launch="ba9876543210"), EVE) == ""


async def test_of_two_launches_of_a_job_that_are_prepared_at_once_one_is_refused(
    tmp_path: Path,
) -> None:
    async with launches_in(tmp_path) as here:
        here.launches.receive(ANNA, asks_in(TREE))
        await answer(here, TREE_DATA)
        other = replace(asks("true"), launch="ba9876543210")
        assert await here.prepare(other, EVE) == ""  # Anna's files are still on their way
        await answer(here, DATA + SCRIPT)
        assert (await refusal_of(here)).startswith("launch ba9876543210 runs the job 'digits'")


# --- what runs


@pytest.mark.parametrize("name", ["LD_PRELOAD", "DYLD_INSERT_LIBRARIES", "BASH_ENV", "PMESH_KEY"])
async def test_a_variable_that_changes_the_loader_is_refused(tmp_path: Path, name: str) -> None:
    async with launches_in(tmp_path) as here:
        refusal = await here.prepare(asks("true", variables=((name, "x"),)))
        assert refusal.startswith(f"{name} may not be set")


async def test_arguments_are_never_read_by_a_shell(tmp_path: Path) -> None:
    words = ("$HOME", "a\nb", "; touch x", "`id`", "--", "")
    async with launches_in(tmp_path) as here:
        script = "import sys; print(sys.argv[1:])"
        assert await here.prepare(asks("python3", "-c", script, *words)) == ""
        here.begin()
        assert (await here.output())[0] == f"{list(words)}\n"
        (started, *_) = here.news
        assert "\n" not in started.text


async def test_the_mesh_key_does_not_reach_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMESH_KEY", "secret")
    async with launches_in(tmp_path) as here:
        assert await here.prepare(asks("env", variables=(("EPOCHS", "3"),))) == ""
        here.begin()
        text, _ = await here.output()
        assert "secret" not in text
        assert "EPOCHS=3\n" in text
        assert f"PMESH_HOME={tmp_path}\n" in text


async def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        assert await here.prepare(asks("no-such-program")) == (
            "there is no program 'no-such-program'; install it there, or give --python"
        )
        nowhere = Command(("true",), "/nowhere")
        refusal = await here.prepare(replace(asks("true"), command=nowhere))
        nobody = Command(("true",), "~no-such-user/x")
        assert "can't look for" in await here.prepare(replace(asks("true"), command=nobody))
        assert refusal == "there is no directory '/nowhere'; copy it there, or give --sync or --cwd"
        python = Command(("python3",), "/", (), "2.7")
        assert "and the starter's is Python 2.7" in await here.prepare(
            replace(asks("true"), command=python)
        )


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("-m no_such_module.train", True),
        ("-u -X dev -W error -m no_such_module", True),
        ("-m mine.train", False),
        ("-u", False),
        ("-u train.py -m no_such_module", False),
        ("-c pass -m no_such_module", False),
    ],
)
async def test_a_module_that_is_not_there_is_named(
    tmp_path: Path, words: str, *, refused: bool
) -> None:
    """Of an inner module only the outermost package is looked for: a look would run it."""
    (tmp_path / "mine").mkdir()
    version = ".".join(map(str, sys.version_info[:2]))
    command = Command((sys.executable, *words.split()), str(tmp_path), (), version)
    async with launches_in(tmp_path) as here:
        refusal = await here.prepare(replace(asks("true"), command=command))

    named = f"{sys.executable} has no module 'no_such_module'; install it there, or give --python"
    assert refusal == (f"{named} or --sync" if refused else "")


async def test_the_ranks_end_with_the_link_to_their_starter(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        assert await here.prepare(asks("sleep", "86400", grace_s=0.1)) == ""
        here.begin()
        del here.links[ANNA.node]
        with trio.fail_after(20):
            await here.launches.parts[ANNA.node, ID].over.wait()


async def test_a_rank_that_is_being_started_when_the_grace_is_over_is_killed(
    tmp_path: Path,
) -> None:
    async with launches_in(tmp_path) as here:
        assert await here.prepare(asks("sleep", "86400", grace_s=0)) == ""
        here.begin()
        here.launches.receive(ANNA, SignalRanks(ID, 15))
        _, ended = await here.output()
        assert ended.code == -9  # it may heed no other signal


async def test_a_rank_that_is_given_up_while_it_is_started_ends(
    tmp_path: Path, faults: Faults
) -> None:
    starts = list[object]()

    def start(real: Callable[..., object], *arguments: object, **named: object) -> object:
        if starts:
            here.launches.receive(ANNA, GiveUpRank(ID, 0, 0))
        starts.append(arguments)
        return real(*arguments, **named)

    script = f"cd {tmp_path}; [ -e ran ] && exec sleep 86400; touch ran; exit 3"
    async with launches_in(tmp_path) as here:
        with faults.around(part_here, "start_piped_group", start):
            assert await here.prepare(asks("sh", "-c", script)) == ""
            here.begin()
            while not isinstance(ended := await here.anna.next(), RankEnded):
                pass
        assert (ended.code, len(starts)) == (3, 2)


async def parts_sent(here: Here, until: int) -> list[LaunchPart]:
    """What comes up to this offset of the output."""
    parts = list[LaunchPart]()
    while not parts or parts[-1].offset + len(parts[-1].data) < until:
        part = await here.anna.next()
        assert isinstance(part, LaunchPart)
        parts.append(part)
    return parts


async def test_output_that_nobody_stores_stops_at_a_window_and_is_repeated_on_a_new_link(
    tmp_path: Path,
) -> None:
    async with launches_in(tmp_path) as here:
        assert await here.prepare(asks("sh", "-c", "yes | head -c 300000", detach=True)) == ""
        here.begin()
        parts = await parts_sent(here, WINDOW_BYTES - PART_BYTES)
        await trio.testing.wait_all_tasks_blocked()
        unread = parts + [p for p in here.anna.sent if isinstance(p, LaunchPart)]
        output = b"".join(part.data for part in unread)
        assert WINDOW_BYTES - PART_BYTES < len(output) <= WINDOW_BYTES
        here.launches.receive(ANNA, LaunchPart(ID, 0, 10_000))
        again = here.links[ANNA.node] = here.anna = FakePeer(ANNA)
        repeated = await parts_sent(here, len(output))
        assert repeated[0].offset == 10_000
        assert b"".join(part.data for part in repeated) == output[10_000:]
        here.launches.receive(ANNA, LaunchPart(ID, 0, len(output)))
        assert isinstance(await again.next(), LaunchPart)


# --- the starter


async def test_a_stranger_to_a_launch_can_not_speak_for_it(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        request = Launch("", Command(("true",), "/"), LaunchTerms(), on=(here.view.seats[1].name,))
        launch = here.launches.start(request)
        assert isinstance(await here.anna.next(), PrepareLaunch)
        here.launches.receive(EVE, LaunchPrepared(ID, "no"))
        here.launches.receive(EVE, StopLaunch(ID))
        assert not launch.begun.is_set()
        ports = tuple(range(7000, 7002))
        here.launches.receive(ANNA, LaunchPrepared(ID, "", ports))
        assert isinstance(await here.anna.next(), BeginRanks)
        forged = LaunchPart(ID, 0, 0, b"0 o forged\n", to_starter=True)
        here.launches.receive(EVE, forged)
        here.launches.receive(EVE, RankEnded(ID, 0, 0, 0))
        assert (launch.spool.end, launch.is_over) == (0, False)
        with pytest.raises(ProtocolError):
            launch.receive(ANNA.node, BeginRanks(ID, 0, 0, (RankGroup(1),)))
        here.launches.receive(ANNA, StopLaunch(ID))
        assert isinstance(await here.anna.next(), SignalRanks)


async def test_a_machine_that_is_not_there_is_named(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        with pytest.raises(UsageError, match="no machine is called 'mac-9'; there are"):
            here.launches.start(Launch("", Command(("true",), "/"), LaunchTerms(), on=("mac-9",)))
        with pytest.raises(UsageError, match="knows no launch 'x'"):
            here.launches.find("x")


async def test_the_ranks_begin_where_the_launch_was_started_and_follow_the_ring(
    tmp_path: Path,
) -> None:
    async with launches_in(tmp_path) as here:
        here.view = make_view(1, EVE, ME, ANNA)
        here.names.follow(here.view)
        everywhere = here.launches.start(Launch("", Command(("true",), "/"), LaunchTerms()))
        nodes = [seat.node for seat in everywhere.state.seats]
        assert nodes == [ME.node, ANNA.node, EVE.node]
        others = tuple(here.view.seats[i].name for i in (2, 0))
        apart = here.launches.start(Launch("", Command(("true",), "/"), LaunchTerms(), on=others))
        assert [seat.node for seat in apart.state.seats] == [EVE.node, ANNA.node]


async def test_more_ranks_than_a_machine_takes_are_not_asked_for(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        with pytest.raises(UsageError, match="65 ranks on one machine are too many: at most 64"):
            here.launches.start(Launch("", Command(("true",), "/"), LaunchTerms(), count=193))
        assert not here.launches.started


async def test_a_name_means_the_latest_launch_that_runs(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        here.ids = itertools.cycle([PathName("00000000000a"), PathName("00000000000b")])
        there = (here.view.seats[1].name,)
        request = Launch("night", Command(("true",), "/"), LaunchTerms(), on=there)
        one, two = here.launches.start(request), here.launches.start(request)
        assert here.launches.find("night") == two
        here.launches.end(two, 15)
        assert here.launches.find("night") == one
        with pytest.raises(UsageError, match="launch 00000000000b has ended already"):
            here.launches.end(two, 15)


async def test_a_name_means_the_launch_that_ran_rather_than_a_later_one_that_was_refused(
    tmp_path: Path,
) -> None:
    async with launches_in(tmp_path) as here:
        here.ids = itertools.cycle([PathName("00000000000a"), PathName("00000000000b")])
        there = here.view.seats[1].name
        request = Launch("night", Command(("true",), "/"), LaunchTerms(), on=(there,))
        one, two = here.launches.start(request), here.launches.start(request)
        two.refuse(two.state.seats[0].node, "it runs that job already")
        here.launches.end(one, 15)
        await one.over.wait()
        await two.over.wait()
        assert here.launches.find("night") == one


async def test_a_new_rank_0_learns_that_the_input_has_ended(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        terms = LaunchTerms(engine="gloo", restarts=1)
        launch = here.launches.start(
            Launch("", Command(("true",), "/"), terms, on=(here.view.seats[1].name,))
        )
        for generation in range(2):
            assert isinstance(await here.anna.next(), PrepareLaunch)
            here.launches.receive(ANNA, LaunchPrepared(ID, "", (7000, 7001)))
            assert isinstance(await here.anna.next(), BeginRanks)
            if generation == 0:
                launch.send_input(b"")
            assert await here.anna.next() == LaunchPart(ID, 0, 0, ends=True)
            here.launches.receive(ANNA, RankEnded(ID, generation, 0, 1))


# --- what it does at rest


async def test_links_are_looked_at_less_often_while_no_launch_goes_on(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with launches_in(tmp_path, None) as here:
        looks = list[float]()
        monkeypatch.setattr(
            here.launches, "_follow_links", lambda: looks.append(autojump_clock.current_time())
        )
        counts = list[int]()
        for going_on in (frozenset[str](), frozenset({ID})):
            monkeypatch.setattr(here.launches, "_in_use", lambda going_on=going_on: going_on)
            await trio.sleep(1)  # for which it may have begun to wait
            looks.clear()
            await trio.sleep(10)
            counts.append(len(looks))
        idle, busy = counts
        assert 20 <= idle <= 30
        assert 90 <= busy <= 110
