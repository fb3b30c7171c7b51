"""`pmesh run --sync`: which files of the working directory are sent, and how far they are.

They are stored below the agent's home as they are now; what changes later, the launch does not see.
"""

import functools
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from msgspec import structs
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from pmesh.agent.home import reason
from pmesh.core.identity.keys import mesh_key_from_text
from pmesh.errors import ConfigError, UsageError
from pmesh.home_paths import holds_keys, path_below
from pmesh.launches.agent.files import FileStore
from pmesh.launches.cli.same_code import named_code
from pmesh.launches.wire.messages import FilesSent, Launch, TreeName
from pmesh.launches.wire.tree import (
    MAX_ENTRIES,
    MAX_TREE_BYTES,
    DirectoryEntry,
    Entry,
    FileEntry,
    LinkEntry,
    encode_tree,
    flaw_of,
)
from pmesh.terminal.lines import complain
from pmesh.terminal.rows import output
from pmesh.terminal.sizes import rounded
from pmesh.texts import printable

NEVER_SENT: Final = frozenset({".git", "__pycache__"})
VIRTUAL_ENVIRONMENT: Final = "pyvenv.cfg"  # the file that makes a directory one
_LARGEST = 5  # files that a message names
_NO_HASH = bytes(32)
_IGNORE = "list it in .gitignore"
_LONGEST_KEY = 256  # bytes of a file with a mesh key, which has 75 characters
_NO_CODE_OF_CHECKOUTS = ("-c", "core.fsmonitor=")
"""Options of git: the configuration of a checkout, which may be somebody else's, can name a program
that git runs whenever it lists files. The other such programs fetch what a checkout lacks."""
_NO_FETCHING: Final = {"GIT_ALLOW_PROTOCOL": ""}
_INCOMPLETE = ("could not open directory", "not allowed")  # what git says, and goes on


def with_tree(request: Launch, home: Path, cwd: Path, *, most_bytes: int) -> Launch:
    """Store the working directory, and return the request with its tree.

    Args:
        request: The launch.
        home: Of the agent, as `home_directory` returns it.
        cwd: The working directory.
        most_bytes: How much all files may hold.

    Raises:
        ConfigError: The directory can't be sent; nothing has been started.
    """
    entries = entries_in(cwd, home, most_bytes=most_bytes)
    sent = {entry.path for entry in entries}
    for name in named_code(request.command.words[1:], cwd):
        path = path_below(cwd, cwd / name)
        if (cwd / name).is_file() and not Path(name).is_absolute() and str(path) not in sent:
            raise ConfigError(f"{name} is not sent, as git ignores it; take it out of .gitignore")
    tree = store_tree(FileStore(home), cwd, entries)
    return structs.replace(request, command=structs.replace(request.command, tree=tree))


def entries_in(root: Path, home: Path, *, most_bytes: int) -> list[Entry]:
    """Return what is sent of a directory, without the homes of agents; files without their hashes.

    Raises:
        ConfigError: It can't be sent: it is too large, or has something that others can't get.
    """
    try:
        uses_git, paths = _paths_in(root)
        _check_not_in(home, root)
        may_be_sent = _sent_directories(root, home)
        entries = [
            entry
            for path in paths
            if may_be_sent(path.rpartition("/")[0])
            for entry in _entry(root, path)
        ]
    except OSError as e:
        where = f"--sync can't read {e.filename!r}: {e.strerror}"
        raise ConfigError(f"{where}; make it readable, or move it elsewhere") from e
    cure = _IGNORE if uses_git else "move it out of the directory"
    flaw = flaw_of(entries)
    if flaw:
        raise ConfigError(f"--sync can't send {root}: {flaw}; rename it, or {cure}")
    if not entries:
        why = "git ignores all that is in it" if uses_git else "it is empty"
        raise ConfigError(f"--sync has nothing to send of {root}: {why}")
    _check_limit(entries, most_bytes, uses_git=uses_git)
    for entry in entries:
        if isinstance(entry, FileEntry) and _is_mesh_key(root / entry.path, entry.nbytes):
            raise ConfigError(
                f"{entry.path!r} is a mesh key, which --sync never sends: whoever has it can join; "
                f"move it out of the directory, or {_IGNORE}"
            )
    return entries


# --- what has keys


def _check_not_in(home: Path, root: Path) -> None:
    real = root.resolve()
    if holds_keys(real) or any(_is_same(above, home) for above in (real, *real.parents)):
        raise ConfigError(
            f"--sync does not send {root}: it is in the home of an agent, which has keys; start "
            "from another directory, or give --cwd"
        )


def _sent_directories(root: Path, home: Path) -> Callable[[str], bool]:
    """Return what says of a directory below the root, named as in it, if its files may be sent."""

    @functools.cache
    def may_be_sent(directory: str) -> bool:
        if not directory:
            return True
        here = root / directory
        if here.is_symlink() or not may_be_sent(directory.rpartition("/")[0]):
            return False  # git may list what was there before a link took its place
        is_home = holds_keys(here) or _is_same(here, home)
        if is_home:
            complain(f"--sync does not send {directory}: it is the home of an agent, with keys")
        return not is_home

    return may_be_sent


def _is_same(one: Path, other: Path) -> bool:
    """By what they are: a directory may have many names, by links and where a disk ignores case."""
    try:
        return one.samefile(other)
    except FileNotFoundError:
        return False


def _is_mesh_key(path: Path, nbytes: int) -> bool:
    if nbytes > _LONGEST_KEY:
        return False
    try:
        mesh_key_from_text(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # it is said later why it can't be read
        return False
    return True


def _check_limit(entries: Sequence[Entry], most_bytes: int, *, uses_git: bool) -> None:
    files = [entry for entry in entries if isinstance(entry, FileEntry)]
    total = sum(file.nbytes for file in files)
    cure = (
        "list data sets in .gitignore" if uses_git else "type 'git init', list them in .gitignore"
    )
    if total > most_bytes:
        largest = sorted(files, key=lambda file: -file.nbytes)[:_LARGEST]
        names = ", ".join(f"{file.path!r} {rounded(file.nbytes)}" for file in largest)
        raise ConfigError(
            f"the files to send have {rounded(total)}, more than --sync-limit "
            f"{rounded(most_bytes)}; the largest: {names}. Data sets are not to be sent: {cure} "
            f"and copy them to each machine, or give --sync-limit {(total >> 20) + 1}MiB"
        )
    if len(entries) > MAX_ENTRIES:
        raise ConfigError(
            f"there are {len(entries)} files to send, more than {MAX_ENTRIES}; {cure} and copy "
            "them to each machine"
        )


def store_tree(store: FileStore, root: Path, entries: Iterable[Entry]) -> TreeName:
    """Store all contents and the tree. Raises ConfigError if a file can't be read or stored."""
    data = encode_tree([_stored(store, root, entry) for entry in entries])
    if len(data) > MAX_TREE_BYTES:
        raise ConfigError(f"the names of all files to send have {rounded(len(data))}; send fewer")
    try:
        return TreeName(store.add_bytes(data).sha256, len(data))
    except OSError as e:
        raise ConfigError(f"--sync can't store the list of files: {reason(e)}") from e


def _stored(store: FileStore, root: Path, entry: Entry) -> Entry:
    if not isinstance(entry, FileEntry):
        return entry
    try:
        content = store.add_file(root / entry.path)
    except UsageError as e:
        raise ConfigError(f"{entry.path!r} can't be sent: {e}; {_IGNORE}") from e
    except FileNotFoundError as e:
        raise ConfigError(f"{entry.path!r} was removed meanwhile; start it again") from e
    except OSError as e:
        raise ConfigError(f"--sync can't send {entry.path!r}: {reason(e)}") from e
    return structs.replace(entry, sha256=content.sha256, nbytes=content.nbytes)


def _entry(root: Path, path: str) -> Iterator[Entry]:
    """Yield what is at a path; nothing if it is gone, or is a pipe, a socket or a device."""
    try:
        about = (root / path).lstat()
    except FileNotFoundError:  # removed, and git has not been told
        return
    if stat.S_ISREG(about.st_mode):
        is_executable = bool(about.st_mode & stat.S_IXUSR)
        yield FileEntry(path, _NO_HASH, about.st_size, is_executable)
    elif stat.S_ISLNK(about.st_mode):
        yield LinkEntry(path, os.readlink(root / path))  # noqa: PTH115 - as text, not normalised
    elif stat.S_ISDIR(about.st_mode):
        yield DirectoryEntry(path)


# --- which paths


def _paths_in(root: Path) -> tuple[bool, list[str]]:
    """Return whether git knows the directory, and the paths below it that may be sent."""
    if not root.is_dir():
        raise ConfigError(f"there is no directory {str(root)!r} to send")
    listed = _git_paths(root)
    if listed is None:
        return False, list(_walk(root))
    return True, _without_environments(listed)


def _git_paths(root: Path) -> list[str] | None:
    """Return what git does not ignore; None where there is no checkout."""
    command = [
        "git",
        "-C",
        str(root),
        *_NO_CODE_OF_CHECKOUTS,
        "ls-files",
        "-z",
        "-co",
        "--exclude-standard",
    ]
    try:
        ran = subprocess.run(  # noqa: S603 - git, as the user has it
            command,
            capture_output=True,
            check=False,
            stdin=subprocess.DEVNULL,
            env=os.environ | _NO_FETCHING | {"LC_ALL": "C"},
        )
    except FileNotFoundError as e:
        real = root.resolve()
        if not any((above / ".git").exists() for above in (real, *real.parents)):
            return None
        raise ConfigError(
            f"{root} is a git checkout, and there is no git to say what it ignores; install git"
        ) from e
    said = ran.stderr.decode(errors="replace").strip()
    if ran.returncode and "not a git repository" in said:
        return None
    if ran.returncode or any(what in said for what in _INCOMPLETE):
        cure = f"; if you trust {root}, let it fetch what it lacks: git -C {root} status"
        lacks = "not allowed" in said
        why = " ".join(said.split())
        raise ConfigError(f"git can't list the files to send: {why}{cure if lacks else ''}")
    paths: list[str] = []
    for path in dict.fromkeys(os.fsdecode(ran.stdout).split("\0")[:-1]):
        inner = path.rstrip("/")
        if (root / inner / ".git").exists():  # a submodule, or another checkout
            paths += (f"{inner}/{deeper}" for deeper in _git_paths(root / inner) or ())
        else:
            paths.append(inner)
    return paths


def _without_environments(paths: Sequence[str]) -> list[str]:
    """Leave out what no other machine can use, though git does not ignore it."""
    ends = f"/{VIRTUAL_ENVIRONMENT}"
    environments = tuple(path[: -len(ends) + 1] for path in paths if path.endswith(ends))
    return [
        path
        for path in paths
        if NEVER_SENT.isdisjoint(path.split("/")) and not path.startswith(environments)
    ]


def _walk(root: Path) -> Iterator[str]:
    for directory, inner, files in os.walk(root, onerror=_raise):
        here = Path(directory)
        links = [name for name in inner if (here / name).is_symlink()]
        below = [name for name in inner if name not in links and _may_be_sent(here / name)]
        if not inner and not files and here != root:
            yield str(here.relative_to(root))
        for name in (*files, *links):
            yield str((here / name).relative_to(root))
        inner[:] = below


def _may_be_sent(directory: Path) -> bool:
    return directory.name not in NEVER_SENT and not (directory / VIRTUAL_ENVIRONMENT).exists()


def _raise(error: OSError) -> None:
    raise error


# --- how far it is


class SendingShown:
    """Bars on standard error, one for each machine, if it is a terminal; `close` removes them."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            console=output(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._tasks: dict[str, TaskID] = {}

    def show(self, machines: Iterable[FilesSent]) -> None:
        """Draw how far the machines are."""
        self._progress.start()
        for machine in machines:
            task = self._tasks.get(machine.name)
            if task is None:
                name = f"files for {printable(machine.name)}"
                task = self._tasks[machine.name] = self._progress.add_task(name)
            self._progress.update(task, completed=machine.nbytes, total=machine.total)

    def close(self) -> None:
        self._progress.stop()
