"""Files of a launch, between one machine and fake peers that may lie."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace
from trio.testing import wait_all_tasks_blocked

from pmesh.core.wire.stream import PART_BYTES, WINDOW_BYTES
from pmesh.errors import ProtocolError
from pmesh.ids import Incarnation, Member, PathName
from pmesh.launches.agent import syncing
from pmesh.launches.agent.copies import Copies
from pmesh.launches.agent.files import FileStore
from pmesh.launches.agent.started import StartedHere
from pmesh.launches.wire.messages import (
    AskFiles,
    BeginRanks,
    Command,
    Launch,
    LaunchPart,
    LaunchPrepared,
    LaunchTerms,
    PrepareLaunch,
    RankGroup,
    SignalRanks,
    TreeName,
)
from pmesh.launches.wire.tree import Entry, FileEntry, LinkEntry, content_of
from tests.launches.copies import (
    DATA,
    SCRIPT,
    TREE,
    TREE_DATA,
    answer,
    asks_in,
    copy_in,
    file_part,
    files_stored,
    launch_of_anna,
    question,
    refusal_of,
    tree_of,
)
from tests.launches.here import ANNA, EVE, ID, Here, launches_in
from tests.worlds.faults import Faults, Real


async def await_that(condition: Callable[[], bool]) -> None:
    with trio.fail_after(20):
        while not condition():  # noqa: ASYNC110 - nobody tells of it
            await trio.sleep(0.01)


# --- a machine takes files


async def test_a_command_runs_in_a_copy_of_the_starter_s_directory(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        here.launches.receive(ANNA, asks_in(TREE))
        assert (await answer(here, TREE_DATA)).wanted == ()
        assert (await answer(here, DATA + SCRIPT)).wanted == (0, 1)
        assert await refusal_of(here) == ""
        here.begin()
        assert (await here.output())[0] == SCRIPT.decode()
        copy = copy_in(tmp_path)
        assert copy.name == f"{ID}-{TREE.sha256.hex()[:8]}"
        assert (copy / "data.bin").read_bytes() == DATA
        assert (copy / "pkg" / "again.py").read_bytes() == SCRIPT


async def test_only_what_is_missing_is_asked_for(tmp_path: Path) -> None:
    FileStore(tmp_path).add_bytes(DATA)
    async with launches_in(tmp_path) as here:
        here.launches.receive(ANNA, asks_in(TREE))
        await answer(here, TREE_DATA)
        assert (await answer(here, SCRIPT)).wanted == (1,)
        assert await refusal_of(here) == ""
        here.begin()
        await here.output()
        here.launches.receive(ANNA, asks_in(TREE, "sh", "-c", "rm train.py; ls"))
        assert await refusal_of(here) == ""
    again = replace(asks_in(TREE), launch="ba9876543210")
    async with launches_in(tmp_path) as here:
        here.launches.receive(ANNA, again)
        assert await refusal_of(here) == ""  # a new copy, and nothing was asked for
    assert len(list((tmp_path / "sync" / "copies").iterdir())) == 2


async def test_launches_that_begin_at_once_remove_old_copies_one_after_the_other(
    tmp_path: Path, faults: Faults
) -> None:
    """Each would look for what the other has just removed."""
    seen, goes_on = list[str](), threading.Event()

    def prune(real: Real, copies: Copies, launches: frozenset[str]) -> None:
        seen.append("begins")
        goes_on.wait()
        real(copies, launches)
        seen.append("ends")

    faults.around(Copies, "prune", prune)
    async with launches_in(tmp_path) as here, trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(here.launches.syncing.prune, frozenset())
        await wait_all_tasks_blocked(0.05)
        goes_on.set()
    assert seen == ["begins", "ends"] * 2


async def test_a_command_is_told_the_copy_in_which_it_runs(tmp_path: Path) -> None:
    show = 'test "$PMESH_COPY" -ef . && echo "in a copy"'
    async with launch_of_anna(tmp_path, show) as (_, output):
        assert output == "in a copy\n"


async def test_a_rank_that_starts_again_finds_what_it_has_written(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        here.launches.receive(ANNA, asks_in(TREE, "touch", "checkpoint"))
        await answer(here, TREE_DATA)
        await answer(here, DATA + SCRIPT)
        assert await refusal_of(here) == ""
        here.begin()
        await here.output()
    async with launches_in(tmp_path) as here:  # the agent was restarted, too
        here.launches.receive(ANNA, asks_in(TREE, "ls"))
        assert await refusal_of(here) == ""
        here.begin()
        assert "checkpoint" in (await here.output())[0]


async def test_a_machine_that_works_long_says_so(
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    async with launches_in(tmp_path) as here:
        here.launches.receive(ANNA, asks_in(TREE))
        assert isinstance(await here.anna.next(), AskFiles)
        for _ in range(3):
            await trio.testing.wait_all_tasks_blocked()
            assert not here.anna.sent
            mock_clock.jump(syncing.BEAT_S)
            assert isinstance(await here.anna.next(), LaunchPart)


@pytest.mark.parametrize("cancel", ["signal", "link", "asked again"])
async def test_nothing_more_is_done_for_a_starter_that_is_gone(tmp_path: Path, cancel: str) -> None:
    async with launches_in(tmp_path) as here:
        here.launches.receive(ANNA, asks_in(TREE))
        asked = await question(here)
        match cancel:
            case "signal":
                here.launches.receive(EVE, SignalRanks(ID, 9))  # she has no say
                await answer_late(here, asked)
                here.launches.receive(ANNA, SignalRanks(ID, 9))
            case "link":
                del here.links[ANNA.node]
            case _:
                here.launches.receive(ANNA, asks_in(TREE))
                await question(here)
                here.launches.receive(ANNA, SignalRanks(ID, 9))
        await await_that(lambda: not here.launches.questions)
        assert not here.launches.parts
        assert not list((tmp_path / "sync" / "files").rglob("new-*"))


async def answer_late(here: Here, asked: AskFiles) -> None:
    """The tree comes, and the next question."""
    here.launches.receive(ANNA, file_part(asked.pull, 0, TREE_DATA))
    await question(here)


# --- attacks


async def test_a_member_that_is_not_allowed_can_not_send_a_byte(tmp_path: Path) -> None:
    async with launches_in(tmp_path, None) as here:
        here.launches.receive(ANNA, asks_in(TREE))
        assert (await refusal_of(here)).startswith("it does not run what others ask for")
        here.launches.receive(ANNA, file_part(1, 0, b"unasked"))
        assert not list((tmp_path / "sync").rglob("*"))


async def test_another_member_can_not_add_to_what_a_starter_sends(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        here.launches.receive(ANNA, asks_in(TREE))
        asked = await question(here)
        for member in (EVE, Member(ANNA.node, Incarnation(99))):
            here.launches.receive(member, file_part(asked.pull, 0, b"forged"))
        here.launches.receive(ANNA, file_part(asked.pull + 1, 0, b"of another question"))
        here.launches.receive(EVE, asks_in(TREE))  # a launch of its own, of the same id
        assert isinstance(await here.eve.next(), AskFiles)
        await answer_late(here, asked)


@pytest.mark.parametrize(
    ("offset", "data"),
    [(0, TREE_DATA + b"x"), (WINDOW_BYTES, b"x"), (0, bytes(PART_BYTES))],
)
async def test_bytes_that_were_not_asked_for_end_the_link(
    tmp_path: Path, offset: int, data: bytes
) -> None:
    async with launches_in(tmp_path) as here:
        here.launches.receive(ANNA, asks_in(TREE))
        asked = await question(here)
        with pytest.raises(ProtocolError):
            here.launches.receive(ANNA, file_part(asked.pull, offset, data))


async def test_a_starter_that_does_not_wait_ends_the_link(tmp_path: Path) -> None:
    big, data = tree_of([FileEntry("x", bytes(32), 2 * WINDOW_BYTES)])
    async with launches_in(tmp_path) as here:
        here.launches.receive(ANNA, asks_in(big))
        await answer(here, data)
        asked = await question(here)
        for offset in range(0, WINDOW_BYTES, PART_BYTES):
            here.launches.receive(ANNA, file_part(asked.pull, offset, bytes(PART_BYTES)))
        with pytest.raises(ProtocolError, match="do not fit the window"):
            here.launches.receive(ANNA, file_part(asked.pull, WINDOW_BYTES, b"x"))


async def test_a_content_with_another_hash_is_refused_and_not_kept(tmp_path: Path) -> None:
    lie = TREE_DATA.replace(b"train.py", b"evil_.py")
    async with launches_in(tmp_path) as here:
        here.launches.receive(ANNA, asks_in(TREE))
        asked = await question(here)
        here.launches.receive(ANNA, file_part(asked.pull, 0, lie))
        assert await refusal_of(here) == "a file that was sent is not what was announced"
        assert not [path for path in (tmp_path / "sync").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "entries",
    [
        [FileEntry("../out", *content_of(SCRIPT))],
        [FileEntry("/tmp/out", *content_of(SCRIPT))],  # noqa: S108 - it is refused
        [LinkEntry("out", ".."), FileEntry("x", *content_of(SCRIPT))],
        [LinkEntry("out", "/"), FileEntry("out/etc/x", *content_of(SCRIPT))],
        [LinkEntry("a", "b"), FileEntry("a/x", *content_of(SCRIPT))],
    ],
)
async def test_a_tree_that_leads_out_of_its_directory_is_refused(
    tmp_path: Path, entries: list[Entry]
) -> None:
    tree, data = tree_of(entries)
    async with launches_in(tmp_path) as here:
        here.launches.receive(ANNA, asks_in(tree))
        await answer(here, data)
        assert "not the tree of a directory" in await refusal_of(here)
        assert not (tmp_path / "sync" / "copies").exists()


async def test_many_small_files_come_in_few_messages(tmp_path: Path) -> None:
    texts = [b"%d" % number for number in range(1000)]
    entries = [FileEntry(f"d{n % 50}/{n}", *content_of(text)) for n, text in enumerate(texts)]
    tree, data = tree_of(entries)
    by_path = sorted((entry.path, text) for entry, text in zip(entries, texts, strict=True))
    async with launches_in(tmp_path) as here:
        here.launches.receive(ANNA, asks_in(tree, "true"))
        await answer(here, data)
        asked = await answer(here, b"".join(text for _, text in by_path))
        assert len(asked.wanted) == 1000
        assert await refusal_of(here) == ""
        assert len(list(copy_in(tmp_path).rglob("*"))) == 1050


async def test_more_than_the_disk_has_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    huge, data = tree_of([FileEntry("x", bytes(32), 2**48)])
    async with launches_in(tmp_path) as here:
        here.launches.receive(ANNA, asks_in(huge))
        await answer(here, data)
        assert "free some space there" in await refusal_of(here)


# --- a starter sends files


async def start(here: Here, tree: TreeName | None = TREE) -> StartedHere:
    """Start a launch; Anna has been asked to prepare it."""
    name = here.view.seats[1].name
    command = Command(("true",), "/", tree=tree)
    here.launches.start(Launch("", command, LaunchTerms(), on=(name,)))
    assert isinstance(await here.anna.next(), PrepareLaunch)
    return here.launches.started[ID]


async def refusal(launch: StartedHere) -> str:
    with trio.fail_after(20):
        await launch.over.wait()
    return launch.refusal


async def taken(here: Here, pull: int) -> bytes:
    """What the starter sends until it has sent all that was asked for."""
    data = b""
    while True:
        message = await here.anna.next()
        assert isinstance(message, LaunchPart)
        assert (message.number, message.offset) == (pull, len(data))
        data += message.data
        here.launches.receive(ANNA, files_stored(pull, len(data)))
        if data.endswith((SCRIPT, TREE_DATA)):
            return data


def store_all(home: Path, *files: bytes) -> None:
    for data in files or (TREE_DATA, DATA, SCRIPT):
        FileStore(home).add_bytes(data)


BIG = bytes(3 * WINDOW_BYTES)
BIG_TREE, BIG_TREE_DATA = tree_of([FileEntry("x", *content_of(BIG))])


async def test_a_starter_sends_what_was_asked_for_as_fast_as_it_is_stored(tmp_path: Path) -> None:
    store_all(tmp_path)
    async with launches_in(tmp_path) as here:
        launch = await start(here)
        here.launches.receive(ANNA, AskFiles(ID, 1))
        assert await taken(here, 1) == TREE_DATA
        here.launches.receive(ANNA, AskFiles(ID, 2, (0, 1)))
        assert await taken(here, 2) == DATA + SCRIPT
        (sent,) = here.launches.syncing.sent(launch)
        assert (sent.nbytes, sent.total) == (len(DATA + SCRIPT), len(DATA + SCRIPT))
        here.launches.receive(ANNA, LaunchPrepared(ID, "", (7000, 7001)))
        assert isinstance(await here.anna.next(), BeginRanks)
        here.launches.receive(ANNA, AskFiles(ID, 3))  # too late
        here.launches.receive(ANNA, files_stored(3, 10**9))
        await trio.testing.wait_all_tasks_blocked()
        assert not here.anna.sent


async def test_a_full_window_holds_a_starter_up(tmp_path: Path) -> None:
    store_all(tmp_path, BIG_TREE_DATA, BIG)
    async with launches_in(tmp_path) as here:
        await start(here, BIG_TREE)
        here.launches.receive(ANNA, AskFiles(ID, 1, (0,)))
        parts = [await here.anna.next() for _ in range(WINDOW_BYTES // PART_BYTES)]
        assert all(isinstance(part, LaunchPart) for part in parts)
        await trio.testing.wait_all_tasks_blocked()
        assert not here.anna.sent
        with pytest.raises(ProtocolError, match="beyond what was sent"):
            here.launches.receive(ANNA, files_stored(1, WINDOW_BYTES + 1))
        here.launches.receive(ANNA, files_stored(1, PART_BYTES))
        assert isinstance(await here.anna.next(), LaunchPart)
        here.launches.receive(ANNA, AskFiles(ID, 2, (0,)))  # it begins anew
        while (part := await here.anna.next()).number != 2:  # type: ignore[union-attr]
            pass
        assert part.offset == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("wanted", [(2,), (1, 0), (0, 0)])
async def test_a_machine_that_wants_what_is_not_there_is_refused(
    tmp_path: Path, wanted: tuple[int, ...]
) -> None:
    store_all(tmp_path)
    async with launches_in(tmp_path) as here:
        launch = await start(here)
        here.launches.receive(ANNA, AskFiles(ID, 1, wanted))
        assert "it wants files that are not there" in await refusal(launch)


async def test_a_member_that_takes_no_part_gets_no_file(tmp_path: Path) -> None:
    store_all(tmp_path)
    async with launches_in(tmp_path) as here:
        await start(here)
        here.launches.receive(EVE, AskFiles(ID, 1))
        here.launches.receive(ANNA, AskFiles(PathName("ba9876543210"), 1))
        await trio.testing.wait_all_tasks_blocked()
        assert not here.eve.sent
        assert not here.anna.sent


async def test_files_of_a_launch_without_any_are_refused(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        launch = await start(here, None)
        here.launches.receive(ANNA, AskFiles(ID, 1))
        assert await refusal(launch)


async def test_a_starter_that_has_lost_its_files_says_so(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        launch = await start(here)
        here.launches.receive(ANNA, AskFiles(ID, 1))
        assert "the starter can't read the files" in await refusal(launch)


async def test_nothing_is_sent_over_a_link_that_is_lost(tmp_path: Path) -> None:
    store_all(tmp_path, BIG_TREE_DATA, BIG)
    async with launches_in(tmp_path) as here:
        await start(here, BIG_TREE)
        here.launches.receive(ANNA, AskFiles(ID, 1, (0,)))
        await here.anna.next()
        del here.links[ANNA.node]
        await await_that(lambda: not here.launches.syncing.sent(here.launches.started[ID]))


async def test_a_machine_that_takes_files_has_time(
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    store_all(tmp_path)
    async with launches_in(tmp_path) as here:
        launch = await start(here)
        here.launches.receive(ANNA, AskFiles(ID, 1))
        for _ in range(10):
            mock_clock.jump(15)
            await trio.testing.wait_all_tasks_blocked()
            here.launches.receive(ANNA, files_stored(1, 0))
        assert not launch.is_over
        mock_clock.jump(30)
        await launch.over.wait()
        assert launch.refusal.endswith("has not answered")


async def test_a_prepared_machine_waits_for_those_that_take_files(
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    store_all(tmp_path)
    async with launches_in(tmp_path) as here:
        here.launches.receive(ANNA, asks_in(TREE, "true"))
        assert await refusal_of(here) == ""
        mock_clock.jump(1800)
        await trio.testing.wait_all_tasks_blocked()
        here.launches.receive(ANNA, BeginRanks(ID, 0, 0, (RankGroup(1),)))
        assert (await here.output())[1].code == 0
