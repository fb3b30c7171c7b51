"""Transfers files: a machine that is asked to run a launch pulls the files that it lacks.

Only a machine that allows the launch asks for files, so nobody else can send any. The starter
sends them as fast as that machine stores them.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import trio
from msgspec import structs

from pmesh.agent.containment import Contain
from pmesh.core.wire.stream import PART_BYTES, Part, Stream
from pmesh.errors import ProtocolError, UsageError
from pmesh.ids import Member, NodeId, PathName
from pmesh.launches.agent.copies import Copies, check_room, copy_path, missing_of, why_no_copy
from pmesh.launches.agent.files import ContentsReceiver, FileStore
from pmesh.launches.agent.started import Deliver, StartedHere
from pmesh.launches.rules.pulling import Cutter
from pmesh.launches.wire.messages import (
    AskFiles,
    Command,
    FilesSent,
    LaunchPart,
    PrepareLaunch,
    TreeName,
)
from pmesh.launches.wire.tree import Content, Entry, contents_of, decode_tree_untrusted

BATCH_BYTES: Final = 4 * PART_BYTES  # read at once: half of the window
BEAT_S = 5.0  # a quarter of what the starter waits: hashing and copying on a slow disk take longer

_Result = TypeVar("_Result")


class Syncing:
    """The directories that this agent sends and receives."""

    def __init__(
        self,
        home: Path,
        *,
        send: Deliver,
        link_with: Callable[[NodeId], object | None],
        nursery: trio.Nursery,
        contain: Contain,
    ) -> None:
        self._home = home
        self._send = send
        self._link_with = link_with
        self._nursery = nursery
        self._contain = contain
        self._store = FileStore(home)
        self._copies = Copies(home, self._store)
        self._pulls: dict[tuple[NodeId, str], _LaunchPull] = {}
        """The pulls, by the starter and its launch: another starter may have chosen the same id."""
        self._pushes: dict[tuple[str, NodeId], _LaunchPush] = {}
        self._numbers = itertools.count(1)
        self._pruning = trio.Lock()
        self._needed: dict[str, frozenset[bytes]] = {}
        """The hashes that a launch may need again, when a machine comes back."""

    def clean(self) -> None:
        """Remove the copies that an agent before this one has begun and not finished."""
        self._copies.clean()

    def receive_untrusted(
        self, member: Member, message: AskFiles | LaunchPart, launch: StartedHere | None
    ) -> None:
        """Take a message; `launch` is the one that was started here, if it was.

        Raises ProtocolError for what no honest machine would send.
        """
        match message:
            case AskFiles():
                if launch is not None and launch.may_ask(member.node):
                    self._begin_push(launch, member.node, message)
            case LaunchPart(launch_id, to_starter=False):
                pull = self._pulls.get((member.node, launch_id))
                if pull is not None and (pull.starter, pull.number) == (member, message.number):
                    pull.receive_untrusted(message.part)
            case LaunchPart(launch_id):
                push = self._pushes.get((launch_id, member.node))
                if launch is not None and launch.is_preparing(member.node) and push is not None:
                    push.receive_untrusted(message)

    def follow_links(self) -> None:
        """End the transfers over links that have ended."""
        for key, push in list(self._pushes.items()):
            if push.launch.is_over or self._link_with(key[1]) is not push.link:
                push.scope.cancel()
                del self._pushes[key]

    # --- this machine takes files

    async def bring(self, starter: Member, message: PrepareLaunch) -> Command:
        """Return the command as it runs in a copy of the starter's directory, if it has one.

        Raises:
            UsageError: The directory can't be had here; the message says why.
            ProtocolError: What the starter sent is no directory.
        """
        tree = message.command.tree
        if tree is None:
            return message.command
        key = (starter.node, message.launch)
        pull = self._pulls[key] = _LaunchPull(starter)
        beating = trio.CancelScope()
        self._nursery.start_soon(self._beat, beating, pull, message.launch)
        try:
            path = await self._bring(pull, message.launch, tree)
        except OSError as e:
            raise UsageError(why_no_copy(e)) from e
        finally:
            beating.cancel()
            if self._pulls.get(key) is pull:
                del self._pulls[key]
        return structs.replace(message.command, cwd=str(path))

    async def prune(self, launches: frozenset[str]) -> None:
        """Remove files that were not used for long; these launches may still need theirs."""
        self._needed = {one: hashes for one, hashes in self._needed.items() if one in launches}
        needed = frozenset(itertools.chain.from_iterable(self._needed.values()))
        async with self._pruning:  # another launch may begin at the same time
            await in_thread(self._store.prune, needed)
            await in_thread(self._copies.prune, launches)

    async def _bring(self, pull: "_LaunchPull", launch: PathName, tree: TreeName) -> Path:
        path = copy_path(self._home, launch, tree)
        if await in_thread(path.is_dir):  # a rank is started again
            return path
        whole = Content(tree.sha256, tree.nbytes)
        if not await in_thread(self._store.has, whole):
            await self._take(pull, launch, [whole], [])
        entries = await in_thread(self._entries_of, launch, whole)
        missing = await in_thread(missing_of, self._store, entries)
        await in_thread(check_room, self._home, entries, missing.values())
        if missing:
            await self._take(pull, launch, list(missing.values()), list(missing))
        await in_thread(self._copies.make, path, entries)
        await in_thread(self._copies.note_starter, path, pull.starter.node)
        return path

    def _entries_of(self, launch: str, whole: Content) -> tuple[Entry, ...]:
        entries = decode_tree_untrusted(self._store.read_whole(whole))
        hashes = {content.sha256 for content in contents_of(entries)}
        self._needed[launch] = frozenset({whole.sha256, *hashes})
        return entries

    async def _take(
        self,
        pull: "_LaunchPull",
        launch: PathName,
        contents: Sequence[Content],
        wanted: Sequence[int],
    ) -> None:
        """Ask the starter for contents, and store them."""
        pull.begin(next(self._numbers), contents)
        self._send(pull.starter.node, AskFiles(launch, pull.number, tuple(wanted)))
        await pull.store_all(self._store, partial(self._acknowledge, pull, launch))

    def _acknowledge(self, pull: "_LaunchPull", launch: PathName, part: Part) -> None:
        message = LaunchPart(launch, *part, to_starter=True, stream="files", number=pull.number)
        self._send(pull.starter.node, message)

    async def _beat(self, scope: trio.CancelScope, pull: "_LaunchPull", launch: PathName) -> None:
        """Tell the starter that this machine is at work."""
        with scope:
            while True:
                await trio.sleep(BEAT_S)
                self._acknowledge(pull, launch, pull.stream.acknowledgement())

    # --- this machine sends files

    def sent(self, launch: StartedHere) -> tuple[FilesSent, ...]:
        """Return how far each machine is that has asked for files."""
        return tuple(
            FilesSent(launch.name_of(node), push.stream.acknowledged, push.cutter.total)
            for (launch_id, node), push in self._pushes.items()
            if launch_id == launch.launch and push.has_begun
        )

    def _begin_push(self, launch: StartedHere, node: NodeId, message: AskFiles) -> None:
        key = (launch.launch, node)
        before = self._pushes.get(key)
        if before is not None:
            before.scope.cancel()
        push = self._pushes[key] = _LaunchPush(launch, self._link_with(node), message.pull)
        self._nursery.start_soon(self._run_push, push, node, message.wanted)

    async def _run_push(self, push: "_LaunchPush", node: NodeId, wanted: Sequence[int]) -> None:
        failures, launch = list[str](), push.launch.launch
        with self._contain("files for a launch", failures.append), push.scope:
            try:
                push.begin(await in_thread(self._contents, push.launch, wanted))
                await push.send_all(
                    self._store,
                    lambda part: self._send(
                        node, LaunchPart(launch, *part, stream="files", number=push.number)
                    ),
                )
            except OSError as e:
                failures.append(f"the starter can't read the files: {e.strerror or e}")
            except ProtocolError as e:
                failures.append(str(e))
        for failure in failures:
            push.launch.refuse(node, failure)

    def _contents(self, launch: StartedHere, wanted: Sequence[int]) -> list[Content]:
        tree = launch.request.command.tree
        if tree is None:
            raise ProtocolError("it wants files of a launch that has none")
        whole = Content(tree.sha256, tree.nbytes)
        entries = self._entries_of(launch.launch, whole)
        return wanted_of(whole, entries, wanted)


class Pull:
    """Files that this machine gets from another one for one launch, in one stream."""

    def __init__(self) -> None:
        self.begin(0, ())
        self._came = trio.Event()

    def begin(self, number: int, contents: Sequence[Content]) -> None:
        self.number = number
        self.stream = Stream(again_s=math.inf)
        self._cutter = Cutter(contents)
        self._received = bytearray()

    def receive_untrusted(self, part: Part) -> None:
        data = self.stream.receive_untrusted(part, now=trio.current_time())
        if len(self._received) + len(data) > self._cutter.left:
            raise ProtocolError("more bytes of files came than were asked for")
        if data:
            self._received += data
            self._came.set()

    async def store_all(self, store: FileStore, send: Callable[[Part], None]) -> None:
        """Store all that comes, and acknowledge it. Raises UsageError or OSError."""
        receiver = ContentsReceiver(store)
        try:
            while self._cutter.left:
                await self._came.wait()
                self._came = trio.Event()
                data, self._received = bytes(self._received), bytearray()
                await in_thread(receiver.write, self._cutter.cut(len(data)), data)
                self.stream.consume(len(data))
                for part in self.stream.parts(now=trio.current_time()):
                    send(part)
        finally:
            receiver.close()


class Push:
    """Files that this machine sends to another one: the contents that it has asked for."""

    def __init__(self, link: object | None, number: int) -> None:
        self.link = link
        self.number = number
        self.scope = trio.CancelScope()
        self.stream = Stream(again_s=math.inf)
        self.cutter = Cutter(())
        self.has_begun = False
        self._changed = trio.Event()

    def begin(self, contents: Sequence[Content]) -> None:
        self.cutter = Cutter(contents)
        self.has_begun = True

    async def send_all(self, store: FileStore, send: Callable[[Part], None]) -> None:
        """Send as fast as the other one stores. Raises OSError if a content can't be read."""
        while self.cutter.left:
            nbytes = min(self.stream.room, self.cutter.left, BATCH_BYTES)
            if not nbytes:
                self._changed = trio.Event()
                await self._changed.wait()
                continue
            self.stream.write(await in_thread(store.read, self.cutter.cut(nbytes)))
            for part in self.stream.parts(now=trio.current_time()):
                send(part)

    def receive_untrusted(self, message: LaunchPart) -> None:
        if message.number == self.number:
            if self.stream.receive_untrusted(message.part, now=trio.current_time()):
                raise ProtocolError("bytes came from a machine that has asked for files")
            self._changed.set()


class _LaunchPull(Pull):
    """A pull from the starter of a launch."""

    def __init__(self, starter: Member) -> None:
        super().__init__()
        self.starter = starter


class _LaunchPush(Push):
    """A push for a launch that was started here."""

    def __init__(self, launch: StartedHere, link: object | None, number: int) -> None:
        super().__init__(link, number)
        self.launch = launch


def wanted_of(whole: Content, entries: Sequence[Entry], wanted: Sequence[int]) -> list[Content]:
    """Return the contents of a tree that were asked for. Raises ProtocolError if there are none."""
    contents = contents_of(entries)
    if not wanted:
        return [whole]
    if list(wanted) != sorted(set(wanted)) or wanted[-1] >= len(contents):
        raise ProtocolError("it wants files that are not there")
    return [contents[index] for index in wanted]


async def in_thread(function: Callable[..., _Result], *arguments: object) -> _Result:
    return await trio.to_thread.run_sync(partial(function, *arguments))
