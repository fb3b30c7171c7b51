"""What ranks have written goes back to who started the launch, and to nobody else."""

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace

from pmesh.core.identity.keys import MeshKey, mesh_key_text
from pmesh.core.wire.stream import PART_BYTES
from pmesh.errors import ProtocolError, UsageError
from pmesh.ids import Member, node_text
from pmesh.launches.agent import fetching
from pmesh.launches.agent.files import FileStore
from pmesh.launches.agent.permission import Permission, store_permission
from pmesh.launches.wire.messages import (
    AskNewContents,
    AskNewFiles,
    FetchedFiles,
    Launch,
    LaunchPart,
    LaunchTerms,
    NewFile,
    NewFiles,
    TreeName,
)
from pmesh.launches.wire.tree import (
    Content,
    DirectoryEntry,
    Entry,
    FileEntry,
    LinkEntry,
    content_of,
    decode_tree_untrusted,
    encode_tree,
)
from tests.launches.copies import TREE, asks_in, copy_in, launch_of_anna
from tests.launches.here import ANNA, EVE, ID, ME, FakePeer, Here, launches_in
from tests.worlds.faults import Faults

WRITES = "mkdir -p out && printf one >out/a.txt && printf two >b.txt"
NEW = (NewFile("b.txt", 3), NewFile("out/a.txt", 3))


def new_part(number: int, offset: int, data: bytes) -> LaunchPart:
    return LaunchPart(ID, offset, 0, data, to_starter=True, stream="new files", number=number)


def new_stored(offset: int) -> LaunchPart:
    return LaunchPart(ID, 0, offset, stream="new files", number=7)


async def told(here: Here, member: Member = ANNA, *, contents: bool = False) -> NewFiles:
    """What this machine says to a question about its new files."""
    here.launches.receive(member, AskNewFiles(ID, 7, contents))
    answered = await (here.anna if member == ANNA else here.eve).next()
    assert isinstance(answered, NewFiles)
    assert answered.number == 7
    return answered


async def contents(here: Here, *wanted: int, nbytes: int) -> bytes:
    here.launches.receive(ANNA, AskNewContents(ID, 7, wanted))
    data = b""
    while len(data) < nbytes:
        part = await here.anna.next()
        assert isinstance(part, LaunchPart)
        assert part.offset == len(data)
        data += part.data
        here.launches.receive(ANNA, new_stored(len(data)))
    return data


# --- a machine gives


async def test_the_starter_gets_what_its_ranks_have_written(tmp_path: Path) -> None:
    async with launch_of_anna(tmp_path, WRITES) as (here, _):
        assert await told(here) == NewFiles(ID, 7, "", 2, 6, NEW)
        offer = await told(here, contents=True)
        assert offer.tree is not None
        entries = decode_tree_untrusted(await contents(here, nbytes=offer.tree.nbytes))
        assert [entry.path for entry in entries] == ["b.txt", "out/a.txt"]
        assert await contents(here, 1, nbytes=3) == b"one"


async def test_nobody_else_gets_it_nor_learns_of_it(tmp_path: Path) -> None:
    async with launch_of_anna(tmp_path, WRITES) as (here, _):
        assert await told(here, EVE, contents=True) == NewFiles(ID, 7)  # as of one never heard of
        here.launches.receive(EVE, AskNewContents(ID, 7))
        refused = await here.eve.next()
        assert isinstance(refused, NewFiles)
        assert "fetch it again" in refused.refusal
        store_permission(tmp_path, Permission())
        assert "it does not run what others ask for" in (await told(here)).refusal


async def test_what_was_not_written_by_ranks_or_has_keys_is_left_out(tmp_path: Path) -> None:
    key = mesh_key_text(MeshKey(bytes(range(32))))
    script = (
        f"{WRITES} && ln -s /etc/passwd link && ln -s /etc out/etc && mkfifo pipe"
        " && mkdir -p __pycache__ home env && touch __pycache__/x home/node_key home/y"
        f" env/pyvenv.cfg env/z && echo {key} >key.txt && printf x >>data.bin"
    )
    async with launch_of_anna(tmp_path, script) as (here, _):
        found = await told(here)
        assert [file.path for file in found.shown] == ["b.txt", "data.bin", "out/a.txt"]


@pytest.mark.skipif(sys.platform != "linux", reason="macOS refuses such names")
async def test_a_name_that_can_not_be_sent_is_told_and_the_others_come(tmp_path: Path) -> None:
    odd = r"""o=$(printf 'b\377'); printf x >"$o"; mkdir "d$o"; printf x >"d$o/e" """
    async with launch_of_anna(tmp_path, f"{WRITES}; {odd}") as (here, _):
        for asks in (False, True):
            found = await told(here, contents=asks)
            assert found.shown == NEW
            assert found.left_out == (
                "2 files can't be fetched: the name 'b\\udcff' is not valid UTF-8, which some "
                "machines need"
            )


async def test_a_path_that_can_not_be_sent_is_told(tmp_path: Path, faults: Faults) -> None:
    async with launch_of_anna(tmp_path, WRITES) as (here, _):
        faults.limit(fetching, "MAX_PATH", 5)
        found = await told(here)
        assert found.shown == NEW[:1]
        assert found.left_out == (
            "1 file can't be fetched: its path has more than 5 characters: 'out/a.txt'"
        )


async def test_a_file_that_can_not_be_read_is_named(tmp_path: Path, faults: Faults) -> None:
    async with launch_of_anna(tmp_path, WRITES) as (here, _):
        faults.fail(FileStore, "add_file", UsageError("it changes while it is read"))
        refused = await told(here, contents=True)
        assert refused.refusal == "'b.txt' can't be fetched: it changes while it is read"
        faults.limit(fetching, "MAX_ENTRIES", 1)
        assert "more than 1 new files" in (await told(here)).refusal


async def test_a_file_that_its_rank_removes_meanwhile_is_left_out(
    tmp_path: Path, faults: Faults
) -> None:
    def removed(real: Callable[..., Content], store: FileStore, name: str, within: int) -> Content:
        if name == "b.txt":
            os.unlink(name, dir_fd=within)
        return real(store, name, within=within)

    async with launch_of_anna(tmp_path, WRITES) as (here, _):
        faults.around(FileStore, "add_file", removed)
        found = await told(here, contents=True)
        assert (found.refusal, found.count, found.shown) == ("", 1, NEW[1:])


async def test_what_was_not_offered_can_not_be_had(tmp_path: Path) -> None:
    async with launch_of_anna(tmp_path, WRITES) as (here, _):
        await told(here, contents=True)
        for wanted in ((2,), (1, 0), (0, 0)):
            with pytest.raises(ProtocolError, match="files that are not there"):
                here.launches.receive(ANNA, AskNewContents(ID, 7, wanted))
        here.launches.receive(ANNA, AskNewContents(ID, 7))
        with pytest.raises(ProtocolError, match="beyond what was sent"):
            here.launches.receive(ANNA, new_stored(10**9))


async def test_a_content_that_is_lost_meanwhile_ends_the_question(tmp_path: Path) -> None:
    async with launch_of_anna(tmp_path, WRITES) as (here, _):
        await told(here, contents=True)
        FileStore(tmp_path).path_of(content_of(b"one")).unlink()
        here.launches.receive(ANNA, AskNewContents(ID, 7, (1,)))
        refused = await here.anna.next()
        assert isinstance(refused, NewFiles)
        assert "No such file" in refused.refusal


async def test_a_copy_of_an_agent_before_is_still_the_starter_s(tmp_path: Path) -> None:
    async with launch_of_anna(tmp_path, WRITES):
        pass
    async with launches_in(tmp_path) as here:
        assert (await told(here)).shown == NEW
        assert (await told(here, EVE)).count == -1


# --- a machine takes

BYTES = b"w" * (2 * PART_BYTES)
MODEL = FileEntry("out/model.bin", *content_of(BYTES))


async def fetched(
    here: Here, *entries: Entry, most_bytes: int = 10**9, only_the_tree: bool = False
) -> FetchedFiles | None:
    """What comes of a question to Anna, who offers these; all files hold the same."""
    found = list[FetchedFiles | None]()

    async def ask() -> None:
        take = here.launches.fetching.fetch
        found.append(await take(ID, ANNA.node, "anna", contents=True, most_bytes=most_bytes))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        asked = await here.anna.next()
        assert isinstance(asked, AskNewFiles)
        tree = encode_tree(entries)
        name = TreeName(content_of(tree).sha256, len(tree))
        offer = NewFiles(ID, asked.number, "", len(entries), len(BYTES), (), name)
        here.launches.receive(EVE, replace(offer, refusal="no"))  # she was not asked
        here.launches.receive(ANNA, offer)
        await give(here, tree)
        if not only_the_tree:
            await give(here, BYTES)
    return found[0]


async def give(here: Here, data: bytes) -> None:
    asked = await here.anna.next()
    assert isinstance(asked, AskNewContents)
    for begin in range(0, len(data), PART_BYTES):
        part = data[begin : begin + PART_BYTES]
        here.launches.receive(ANNA, new_part(asked.number, begin, part))
    stored = 0
    while stored < len(data):
        message = await here.anna.next()
        assert isinstance(message, LaunchPart)
        stored = message.read


async def test_new_files_come_into_the_store(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        found = await fetched(here, MODEL)
        assert found is not None
        assert (found.name, found.id, found.count) == ("anna", node_text(ANNA.node), 1)
        assert FileStore(tmp_path).read_whole(content_of(BYTES)) == BYTES


@pytest.mark.parametrize("entry", [LinkEntry("out", "b"), DirectoryEntry("out")])
async def test_only_files_are_taken(tmp_path: Path, entry: Entry) -> None:
    async with launches_in(tmp_path) as here:
        found = await fetched(here, entry, only_the_tree=True)
        assert found is not None
        assert found.refusal == "it offers what is no file"


async def test_more_than_was_wanted_is_not_taken(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        found = await fetched(here, MODEL, most_bytes=len(BYTES) - 1, only_the_tree=True)
        assert found is not None
        assert "more than --limit" in found.refusal


async def test_a_tree_that_leads_out_of_its_directory_is_not_taken(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        found = await fetched(here, replace(MODEL, path="../.bashrc"), only_the_tree=True)
        assert found is not None
        assert "no path below a directory" in found.refusal


async def ask_all(here: Here, *, contents: bool) -> list[FetchedFiles | None]:
    take = here.launches.fetching.fetch
    return [await take(ID, ANNA.node, "anna", contents=contents, most_bytes=1)]


async def test_a_machine_that_is_silent_or_lost_is_given_up(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    del autojump_clock
    async with launches_in(tmp_path) as here:
        (found,) = await ask_all(here, contents=False)
        assert found is not None
        assert found.refusal == "it does not answer any more"

        async def lose() -> None:
            await here.anna.next()
            await here.anna.next()
            here.links[ANNA.node] = FakePeer(ANNA)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lose)
            (found,) = await ask_all(here, contents=True)
        assert found is not None
        assert found.refusal == "it does not answer any more"
        del here.links[ANNA.node]
        (found,) = await ask_all(here, contents=True)
        assert found is not None
        assert found.refusal == "it is not there now; fetch them later"


async def test_bytes_that_nobody_asked_for_end_the_link(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: ask_all(here, contents=True))
        asked = await here.anna.next()
        assert isinstance(asked, AskNewFiles)
        here.launches.receive(EVE, new_part(asked.number, 0, b"x"))
        with pytest.raises(ProtocolError):
            here.launches.receive(ANNA, new_part(asked.number, 0, b"x"))
        nursery.cancel_scope.cancel()


# --- who may have a copy


async def test_those_who_take_part_are_asked_and_after_a_restart_all(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        everyone = here.launches.copies_of("ffffffffffff")[1]
        assert everyone.keys() == {ME.node, ANNA.node, EVE.node}
        there = (here.view.seats[1].name,)
        command = asks_in(TREE).command
        here.launches.start(Launch("night", command, LaunchTerms(), on=there))
        assert here.launches.copies_of("night")[1].keys() == {ANNA.node}
        with pytest.raises(UsageError, match="knows no launch 'day'"):
            here.launches.copies_of("day")


async def test_what_has_no_copy_or_another_starter_is_said(tmp_path: Path) -> None:
    async with launch_of_anna(tmp_path, WRITES) as (here, _):
        for text in ("digits", ID):
            with pytest.raises(UsageError, match="; fetch its files there"):
                here.launches.copies_of(text)
        command = replace(asks_in(TREE).command, tree=None)
        here.launches.start(Launch("plain", command, LaunchTerms()))
        with pytest.raises(UsageError, match="ran without --sync"):
            here.launches.copies_of("plain")


async def test_the_record_of_a_copy_is_private(tmp_path: Path) -> None:
    async with launch_of_anna(tmp_path, WRITES):
        record = tmp_path / "sync" / "starters" / copy_in(tmp_path).name
        assert record.read_text() == node_text(ANNA.node)
        assert stat.S_IMODE(record.parent.stat().st_mode) == 0o700
