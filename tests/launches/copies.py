"""Anna's directory, and the messages that copy it to this machine."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec.structs import replace

from pmesh.core.wire.stream import PART_BYTES
from pmesh.launches.wire.messages import (
    AskFiles,
    Command,
    LaunchPart,
    LaunchPrepared,
    PrepareLaunch,
    TreeName,
)
from pmesh.launches.wire.tree import Entry, FileEntry, content_of, encode_tree
from tests.launches.here import ANNA, ID, Here, asks, launches_in

SCRIPT = b"import model\n"
DATA = bytes(range(256)) * 512  # 4 parts


def tree_of(entries: Sequence[Entry]) -> tuple[TreeName, bytes]:
    data = encode_tree(entries)
    return TreeName(*content_of(data)), data


ENTRIES: list[Entry] = [
    FileEntry("data.bin", *content_of(DATA)),
    FileEntry("train.py", *content_of(SCRIPT)),
    FileEntry("pkg/again.py", *content_of(SCRIPT)),
]
TREE, TREE_DATA = tree_of(ENTRIES)


def asks_in(tree: TreeName, *words: str) -> PrepareLaunch:
    message = asks(*(words or ("cat", "train.py")))
    command = Command(message.command.words, "/nowhere", tree=tree)
    return replace(message, command=command)


def file_part(number: int, offset: int, data: bytes) -> LaunchPart:
    return LaunchPart(ID, offset, 0, data, stream="files", number=number)


def files_stored(number: int, offset: int) -> LaunchPart:
    return LaunchPart(ID, 0, offset, to_starter=True, stream="files", number=number)


async def question(here: Here) -> AskFiles:
    """The next one that this machine asks; where the disk is slow, signs of life come before."""
    while isinstance(asked := await here.anna.next(), LaunchPart):
        pass
    assert isinstance(asked, AskFiles), asked
    return asked


async def answer(here: Here, data: bytes) -> AskFiles:
    """Send what is asked for, part by part, and wait until each is stored."""
    asked = await question(here)
    for offset in range(0, len(data), PART_BYTES):
        part = data[offset : offset + PART_BYTES]
        here.launches.receive(ANNA, file_part(asked.pull, offset, part))
        while (stored := await here.anna.next()) != files_stored(asked.pull, offset + len(part)):
            assert isinstance(stored, LaunchPart)  # a sign of life, where the disk is slow
    return asked


async def refusal_of(here: Here) -> str:
    while isinstance(answered := await here.anna.next(), LaunchPart):
        pass  # a sign of life, where the disk is slow
    assert isinstance(answered, LaunchPrepared), answered
    return answered.refusal


def copy_in(home: Path) -> Path:
    (copy,) = (home / "sync" / "copies").iterdir()
    return copy


@asynccontextmanager
async def launch_of_anna(home: Path, script: str) -> AsyncGenerator[tuple[Here, str]]:
    """Anna has run a script here, in a copy of her directory; it is over, with this output."""
    async with launches_in(home) as here:
        here.launches.receive(ANNA, asks_in(TREE, "sh", "-c", script))
        await answer(here, TREE_DATA)
        await answer(here, DATA + SCRIPT)
        assert await refusal_of(here) == ""
        here.begin()
        yield here, (await here.output())[0]
