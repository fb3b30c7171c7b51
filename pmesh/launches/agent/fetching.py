"""Brings what ranks have written into their copies to the machine that started the launch.

`pmesh run --sync` sends a directory out; this brings back what is new. A machine gives it only to
the node for which it made the copy, while that node may still run commands there. Links are never
followed and never sent, nor is anything that has keys.
"""

import itertools
import os
import stat
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import trio

from pmesh.agent.containment import Contain
from pmesh.core.identity.keys import mesh_key_from_text
from pmesh.core.wire.stream import Part
from pmesh.errors import PmeshError, ProtocolError, UsageError
from pmesh.home_paths import HOME_NAMES
from pmesh.ids import Member, NodeId, PathName, node_text
from pmesh.launches.agent.copies import Copies, check_room, missing_of, why_no_copy
from pmesh.launches.agent.files import FileStore
from pmesh.launches.agent.shown import sentence
from pmesh.launches.agent.started import Deliver
from pmesh.launches.agent.syncing import Pull, Push, in_thread, wanted_of
from pmesh.launches.wire.messages import (
    MAX_SHOWN_FILES,
    AskNewContents,
    AskNewFiles,
    FetchedFiles,
    LaunchPart,
    NewFile,
    NewFiles,
    NewFilesMessage,
    TreeName,
)
from pmesh.launches.wire.tree import (
    MAX_ENTRIES,
    MAX_PATH,
    MAX_TREE_BYTES,
    Content,
    Entry,
    FileEntry,
    decode_tree_untrusted,
    encode_tree,
    flaw_of,
)

ANSWER_S: Final = 5.0  # to look at all names of a copy
MAX_KEY_BYTES: Final = 256  # of a file with a mesh key, which has 75 characters
_LEFT_OUT: Final = frozenset({".git", "__pycache__"})
_VIRTUAL_ENVIRONMENT: Final = "pyvenv.cfg"
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_HASH: Final = bytes(32)
_REPLACED: Final = "a later question has taken the place of this one; fetch it again"


# --- what is new in a copy; these functions block


class Written(NamedTuple):
    """What is new in a copy."""

    entries: list[FileEntry]
    left_out: str
    """Which files have names that can't be sent, and why; "" if none has."""


def new_files(copy: Path, since_ns: int, store: FileStore | None = None) -> Written:
    """Return the files of a copy that were written since then; store their contents, if asked.

    Raises:
        UsageError: There are too many, or one changes while it is read.
        OSError: One can't be read or stored.
    """
    found, flaws = list[FileEntry](), list[str]()
    for path, name, about, here in _written_since(copy, since_ns):
        flaw = _flaw_of(path)
        if flaw:
            flaws.append(flaw)
            continue
        content = Content(_NO_HASH, about.st_size)
        if store is not None:
            try:
                content = store.add_file(name, within=here)
            except FileNotFoundError:  # it was a temporary file
                continue
            except (UsageError, PermissionError) as e:
                raise UsageError(f"{path!r} can't be fetched: {e}") from e
        found.append(FileEntry(path, *content))
        if len(found) > MAX_ENTRIES:
            raise UsageError(f"there are more than {MAX_ENTRIES} new files in its copy")
    many = f"{len(flaws)} file{'s' * (len(flaws) > 1)} can't be fetched"
    return Written(found, f"{many}: {flaws[0]}" if flaws else "")


def _written_since(copy: Path, since_ns: int) -> Iterator[tuple[str, str, os.stat_result, int]]:
    for top, inner, names, here in os.fwalk(copy):  # it follows no links
        keys = not {*HOME_NAMES, _VIRTUAL_ENVIRONMENT}.isdisjoint(names)
        inner[:] = [] if keys else sorted(set(inner) - _LEFT_OUT)
        for name in () if keys else sorted(names):
            try:
                about = os.stat(name, dir_fd=here, follow_symlinks=False)
            except FileNotFoundError:  # it was a temporary file
                continue
            # Not the mtime, which programs set to that of another file.
            is_new = stat.S_ISREG(about.st_mode) and about.st_ctime_ns > since_ns
            if is_new and not _is_key(name, about.st_size, here):
                yield os.path.relpath(f"{top}/{name}", copy), name, about, here


def _flaw_of(path: str) -> str:
    if len(path) > MAX_PATH:
        return f"its path has more than {MAX_PATH} characters: {path!r}"
    return flaw_of([FileEntry(path, _NO_HASH, 0)])


def _is_key(name: str, nbytes: int, here: int) -> bool:
    if nbytes > MAX_KEY_BYTES:
        return False
    try:
        with open(os.open(name, _READ, dir_fd=here), "rb") as file:  # noqa: PTH123 - a descriptor
            mesh_key_from_text(file.read(MAX_KEY_BYTES).decode())
    except (OSError, ValueError):  # a later read reports why it fails
        return False
    return True


class Fetching:
    """The new files that this agent sends and fetches."""

    def __init__(
        self,
        home: Path,
        me: NodeId,
        *,
        send: Deliver,
        link_with: Callable[[NodeId], object | None],
        why_not: Callable[[Member], Awaitable[str]],
        nursery: trio.Nursery,
        contain: Contain,
    ) -> None:
        self._home = home
        self._me = me
        self._send = send
        self._link_with = link_with
        self._why_not = why_not
        self._nursery = nursery
        self._contain = contain
        self._store = FileStore(home)
        self._copies = Copies(home, self._store)
        self._looking: set[NodeId] = set()
        """The nodes for which a thread looks at a copy: one question of each at a time."""
        self._offers: dict[NodeId, tuple[PathName, int, TreeName, Sequence[Entry]]] = {}
        """What each node was told last: the launch, the question's number, and the tree."""
        self._pushes: dict[NodeId, Push] = {}
        self._numbers = itertools.count(1)
        self._asked: dict[int, _Asked] = {}

    def receive_untrusted(self, member: Member, message: NewFilesMessage | LaunchPart) -> None:
        """Take a message. Raises ProtocolError for what no honest machine would send."""
        node = member.node
        match message:
            case AskNewFiles():
                self._nursery.start_soon(self._answer, member, message)
            case AskNewContents():
                self._begin_push(node, message)
            case LaunchPart(to_starter=False):
                if node in self._pushes:
                    self._pushes[node].receive_untrusted(message)
            case NewFiles():
                asked = self._asked.get(message.number)
                if asked is not None and asked.node == node:
                    asked.take(message)
            case LaunchPart():
                asked = self._asked.get(message.number)
                if asked is not None and asked.node == node:
                    asked.pull.receive_untrusted(message.part)

    def follow_links(self) -> None:
        """End the transfers over links that have ended."""
        for node, push in list(self._pushes.items()):
            if self._link_with(node) is not push.link:
                push.scope.cancel()
                del self._pushes[node]
        for node in [node for node in self._offers if node != self._me]:
            if self._link_with(node) is None:
                del self._offers[node]
        for asked in self._asked.values():
            if self._link_with(asked.node) is not asked.link:
                asked.scope.cancel()

    # --- this machine gives

    async def _answer(self, member: Member, message: AskNewFiles) -> None:
        node, refusals = member.node, list[str]()
        if node in self._looking:
            refusals.append("it looks for new files already; try again")
        else:
            self._looking.add(node)
            with self._contain("a question about new files", refusals.append):
                try:
                    self._send(node, await self._look(member, message))
                except PmeshError as e:
                    refusals.append(str(e))
                except OSError as e:
                    refusals.append(why_no_copy(e))
            self._looking.discard(node)
        for refusal in refusals:
            self._send(node, NewFiles(message.launch, message.number, sentence(refusal)))

    async def _look(self, member: Member, message: AskNewFiles) -> NewFiles:
        refusal = await self._why_not(member)
        if refusal:
            raise UsageError(refusal)
        found = await in_thread(self._copies.find, message.launch, member.node)
        if found is None:
            return NewFiles(message.launch, message.number)
        store = self._store if message.contents else None
        entries, left_out = await in_thread(new_files, *found, store)
        tree = None
        if message.contents and entries:
            data = encode_tree(entries)
            if len(data) > MAX_TREE_BYTES:
                raise UsageError(f"the names of its {len(entries)} new files are too long")
            tree = TreeName((await in_thread(self._store.add_bytes, data)).sha256, len(data))
            self._offers[member.node] = (message.launch, message.number, tree, entries)
        return NewFiles(
            message.launch,
            message.number,
            "",
            len(entries),
            sum(entry.nbytes for entry in entries),
            tuple(NewFile(entry.path, entry.nbytes) for entry in entries[:MAX_SHOWN_FILES]),
            tree,
            sentence(left_out),
        )

    def _begin_push(self, node: NodeId, message: AskNewContents) -> None:
        launch, number, tree, entries = self._offers.get(node, (message.launch, 0, None, ()))
        if tree is None or (launch, number) != (message.launch, message.number):
            self._send(node, NewFiles(message.launch, message.number, _REPLACED))
            return
        before = self._pushes.get(node)
        if before is not None:
            before.scope.cancel()
            if before.number != number:
                self._send(node, NewFiles(launch, before.number, _REPLACED))
        push = self._pushes[node] = Push(self._link_with(node), number)
        whole = Content(tree.sha256, tree.nbytes)
        push.begin(wanted_of(whole, sorted(entries, key=_path_of), message.wanted))
        self._nursery.start_soon(self._run_push, push, node, message.launch)

    async def _run_push(self, push: Push, node: NodeId, launch: PathName) -> None:
        def send(part: Part) -> None:
            number = push.number
            message = LaunchPart(launch, *part, to_starter=True, stream="new files", number=number)
            self._send(node, message)

        with self._contain("new files of a launch"), push.scope:
            try:
                await push.send_all(self._store, send)
            except OSError as e:
                self._send(node, NewFiles(launch, push.number, sentence(str(e.strerror or e))))

    # --- this machine takes

    async def fetch(
        self, launch: PathName, node: NodeId, name: str, *, contents: bool, most_bytes: int
    ) -> FetchedFiles | None:
        """Return what a machine has for this launch; with contents, once they are stored here.

        Args:
            launch: One that was started here.
            node: The machine.
            name: The machine's name.
            contents: Whether to store the contents here.
            most_bytes: How many bytes may come.

        Returns:
            None if it has no copy.
        """
        link = self._link_with(node)
        if link is None and node != self._me:
            return FetchedFiles(name, node_text(node), "it is not there now; fetch them later")
        number = next(self._numbers)
        asked = self._asked[number] = _Asked(number, node, link)
        refusal = ""
        try:
            with asked.scope:
                self._send(node, AskNewFiles(launch, number, contents))
                if not contents:
                    asked.scope.deadline = trio.current_time() + ANSWER_S
                await asked.answered.wait()
                if contents and asked.answer.tree is not None:
                    await self._take(asked, launch, asked.answer.tree, most_bytes)
        except (UsageError, ProtocolError) as e:
            refusal = str(e)
        except OSError as e:
            refusal = f"here: {why_no_copy(e)}"
        finally:
            del self._asked[number]
        if asked.scope.cancelled_caught:
            refusal = "it does not answer any more"
        id_, answer = node_text(node), asked.answer
        refusal = answer.refusal or refusal
        if refusal or answer.count < 0:
            return FetchedFiles(name, id_, refusal) if refusal else None
        counts = answer.count, answer.nbytes
        return FetchedFiles(name, id_, "", *counts, answer.shown, answer.tree, answer.left_out)

    async def _take(
        self, asked: "_Asked", launch: PathName, tree: TreeName, most_bytes: int
    ) -> None:
        whole = Content(tree.sha256, tree.nbytes)
        if not await in_thread(self._store.has, whole):
            await self._pull(asked, launch, [whole], [])
        entries = decode_tree_untrusted(await in_thread(self._store.read_whole, whole))
        if not all(isinstance(entry, FileEntry) for entry in entries):
            raise UsageError("it offers what is no file")
        total = sum(entry.nbytes for entry in entries if isinstance(entry, FileEntry))
        if total > most_bytes:
            raise UsageError(
                f"its new files have {total >> 20} MiB, more than --limit {most_bytes >> 20}MiB"
            )
        missing = await in_thread(missing_of, self._store, entries)
        await in_thread(check_room, self._home, entries, missing.values())
        if missing:
            await self._pull(asked, launch, list(missing.values()), list(missing))

    async def _pull(
        self, asked: "_Asked", launch: PathName, contents: Sequence[Content], wanted: Sequence[int]
    ) -> None:
        pull, node, number = asked.pull, asked.node, asked.number
        pull.begin(number, contents)
        self._send(node, AskNewContents(launch, number, tuple(wanted)))
        await pull.store_all(
            self._store,
            lambda part: self._send(
                node, LaunchPart(launch, *part, stream="new files", number=number)
            ),
        )


class _Asked:
    """A question to one machine, and its answer."""

    def __init__(self, number: int, node: NodeId, link: object | None) -> None:
        self.number = number
        self.node = node
        self.pull = Pull()
        self.link = link
        self.answer = NewFiles(PathName("0" * 12), 0)
        self.answered = trio.Event()
        self.scope = trio.CancelScope()

    def take(self, answer: NewFiles) -> None:
        """Take an answer; a second one says that the offered files can't be had."""
        if self.answered.is_set():
            self.scope.cancel()
        self.answer = answer
        self.answered.set()


def _path_of(entry: Entry) -> str:
    return entry.path
