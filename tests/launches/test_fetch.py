"""`pmesh fetch`: where the new files of copies come to lie, and what is said of them."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from pmesh.cli.app import run
from pmesh.core.wire.framing import FrameReader, frame
from pmesh.core.wire.session import encode
from pmesh.home_paths import home_directory, socket_path
from pmesh.launches.agent.files import FileStore
from pmesh.launches.cli.fetch import tell_new_files
from pmesh.launches.wire.messages import (
    Fetched,
    FetchedFiles,
    FetchFiles,
    LaunchBegan,
    LaunchOver,
    LaunchReply,
    LaunchRows,
    NewFile,
    TreeName,
)
from pmesh.launches.wire.tree import Entry, FileEntry, LinkEntry, encode_tree
from simulation.wire import decode_request_untrusted
from tests.worlds.fake_status_agent import agent_at

ONE, TWO = "a" * 52, "b" * 52


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("PMESH_HOME", str(home))
    monkeypatch.chdir(tmp_path)
    return home


def answer_by(*machines: FetchedFiles, contents: bool = True) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        reader = FrameReader(max_bytes=1 << 20)
        while (message := reader.next_message_untrusted()) is None:
            reader.receive_data(connection.recv(4096))
        request = decode_request_untrusted(message)
        assert isinstance(request, FetchFiles)
        assert request.contents == contents
        connection.sendall(frame(encode(Fetched("0123456789ab", machines))))

    return answer


def fetch(*arguments: str, machines: tuple[FetchedFiles, ...]) -> int:
    with agent_at(socket_path(home_directory()), answer_by(*machines)):
        return run(["fetch", "night", *arguments])


def has(home: Path, name: str, id_: str, *entries: Entry) -> FetchedFiles:
    """A machine whose files are in the store of this one's agent."""
    data = encode_tree(entries)
    tree = TreeName(FileStore(home).add_bytes(data).sha256, len(data))
    return FetchedFiles(name, id_, "", len(entries), 3, (), tree)


def a_file(home: Path, path: str, text: str = "one") -> FileEntry:
    content = FileStore(home).add_bytes(text.encode())
    return FileEntry(path, *content, executable=True)


def test_each_machine_s_files_come_into_a_directory_of_its_own(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machines = (
        has(home, "mac-1", ONE, a_file(home, "out/model"), a_file(home, "log", "two")),
        FetchedFiles("mac-2", TWO),
    )
    assert fetch(machines=machines) == 0
    folder = tmp_path / "pmesh-0123456789ab" / "mac-1"
    assert (folder / "out" / "model").read_text() == "one"
    assert (folder / "log").read_text() == "two"
    assert not (folder / "log").stat().st_mode & 0o111
    assert capsys.readouterr().out.splitlines() == [
        f"mac-1: 2 files, 3 B, in {folder}",
        "mac-2: nothing new",
    ]


def test_names_that_can_not_be_a_directory_s_or_are_alike_are_told_apart(
    home: Path, tmp_path: Path
) -> None:
    entries = (a_file(home, "x"),)
    names = ["../Studio, left", "mac-1", "MAC 1", "é"]
    ids = [ONE, ONE, TWO, TWO]
    machines = tuple(has(home, *each, *entries) for each in zip(names, ids, strict=True))
    assert fetch("--to", "new/dir", machines=machines) == 0
    assert sorted(path.name for path in (tmp_path / "new" / "dir").iterdir()) == [
        *("-bbbbbbbb", "mac-1-aaaaaaaa", "mac-1-bbbbbbbb", "studio-left")
    ]


def test_nothing_is_overwritten_and_no_link_is_made(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machines = (has(home, "mac-1", ONE, a_file(home, "x"), LinkEntry("y", "x")),)
    assert fetch("--to", "new", machines=machines) == 0
    assert [path.name for path in (tmp_path / "new" / "mac-1").iterdir()] == ["x"]
    assert fetch("--to", "new", machines=machines) == 1
    assert "mac-1 is there already; give another --to" in capsys.readouterr().err


def test_a_directory_that_can_not_be_is_named_for_each_machine(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machines = (has(home, "mac-1", ONE, a_file(home, "x")),)
    assert fetch("--to", "x" * 300, machines=machines) == 1
    assert capsys.readouterr().err == ("mac-1: it can't write the files: File name too long\n")


def test_who_can_not_give_its_files_is_named_and_the_others_come(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = FetchedFiles("mac-2", TWO, "it does not answer any more")
    assert fetch(machines=(lost, has(home, "mac-1", ONE, a_file(home, "x")))) == 1
    assert capsys.readouterr().err == "mac-2: it does not answer any more\n"
    assert list(tmp_path.glob("pmesh-*/mac-1/x"))


def test_what_a_machine_had_to_leave_out_is_told(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machines = (
        replace(has(home, "mac-1", ONE, a_file(home, "x")), left_out="1 file can't"),
        FetchedFiles("mac-2", TWO, left_out="2 files can't"),
    )
    assert fetch(machines=machines) == 1
    said = capsys.readouterr()
    assert said.out.startswith("mac-1: 1 file, 3 B, in ")
    assert said.out.endswith("mac-2: nothing new that can be had\n")
    assert said.err.splitlines() == ["mac-1: 1 file can't", "mac-2: 2 files can't"]


def test_at_the_end_of_a_launch_what_can_not_be_had_is_told(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left = FetchedFiles("mac-2", TWO, left_out="2 files can't")
    with agent_at(socket_path(home_directory()), answer_by(left, contents=False)):
        tell_new_files(home_directory(), "night")
    assert capsys.readouterr().err == "mac-2: 2 files can't\n"
    del home


def test_without_a_copy_anywhere_it_says_how_many_are_kept(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del home
    assert fetch(machines=()) == 1
    assert "the copies of the latest 20 launches are kept" in capsys.readouterr().err


def test_what_was_lost_from_the_store_is_an_error(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = FetchedFiles("mac-1", ONE, "", 1, 3, (NewFile("x", 3),), TreeName(bytes(32), 5))
    assert fetch(machines=(gone,)) == 1
    assert "mac-1: the list of its files can't be read" in capsys.readouterr().err
    del home


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "give --sync"),
        (["--sync", "--detach"], "and not --detach"),
        (["--sync"], "there is something in it"),
    ],
)
def test_a_collection_that_can_not_be_is_refused_before_anything_starts(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    del home
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "old").touch()
    words = ["run", "--on", "all", *options, "--collect", "results", "--", "true"]
    assert run(words) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 3])
def test_a_collection_that_fails_does_not_hide_with_which_code_the_command_has_failed(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    began = LaunchBegan("0123456789ab", "job", ("mac-1",), (1,), (ONE,))
    answers = (
        reply_with(LaunchRows(())),
        reply_with(began, LaunchOver(code)),
        reply_with(Fetched("0123456789ab", ())),
    )
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").touch()
    words = ["--sync", "--cwd", "project", "--collect", "results", "--", "true"]
    with agent_at(socket_path(home), *answers):
        assert run(["run", "--on", "all", *words]) == (code or 1)
    assert "UsageError: no machine that is linked now has a copy" in capsys.readouterr().err


def reply_with(*replies: LaunchReply) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        connection.recv(1 << 20)
        connection.sendall(b"".join(map(frame, map(encode, replies))))

    return answer
