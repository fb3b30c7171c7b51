"""`pmesh fetch` and `pmesh run --collect`: what ranks have written into their copies, brought here.

`pmesh run --sync` names it at its end.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pmesh.client.control import ask
from pmesh.errors import ConfigError, PmeshError, UsageError
from pmesh.home_paths import expand_user, home_directory
from pmesh.ids import SHORT_ID, PathName, path_name
from pmesh.launches.agent.copies import Copies
from pmesh.launches.agent.files import FileStore
from pmesh.launches.wire.messages import LAUNCH_REPLIES, Fetched, FetchedFiles, FetchFiles
from pmesh.launches.wire.tree import Content, FileEntry, decode_tree_untrusted
from pmesh.terminal.lines import complain, say
from pmesh.terminal.sizes import rounded

DEFAULT_LIMIT: Final = 10 * 1024**3  # the checkpoints of a night
_FETCHED_IN_S: Final = 86400.0  # whatever the files' size: a machine that is lost ends it earlier
_SHOWN_NAME = 40  # characters of a machine's name in that of a directory


def show_fetch(home: Path | None, launch: str, to: Path | None, *, most_bytes: int) -> int:
    """Bring what is new, and say where it is; 1 if a machine has something that can't be had.

    Raises:
        UsageError: There is nothing that could be fetched.
    """
    directory = home_directory(home)
    found = _fetch(directory, FetchFiles(launch, contents=True, most_bytes=most_bytes))
    if not found.machines:
        raise UsageError(
            f"no machine that is linked now has a copy of launch {found.launch}: the copies of the "
            "latest 20 launches are kept, for the machine that has started them"
        )
    target = Path(f"pmesh-{path_name(found.launch)}") if to is None else expand_user(to)
    code = 0
    for files, name in zip(found.machines, _directories(found.machines), strict=True):
        try:
            say(_brought(directory, files, target.absolute() / path_name(name)))
        except UsageError as e:
            complain(f"{files.name}: {e}")
            code = 1
        if files.left_out:
            complain(f"{files.name}: {files.left_out}")
            code = 1
    return code


def check_target(to: Path) -> None:
    """Raise ConfigError for a directory that has something: it might be in the way at the end."""
    try:
        is_empty = not to.exists() or not any(to.iterdir())
    except OSError as e:
        raise ConfigError(f"--collect {to}: {e.strerror}; name a new directory") from e
    if not is_empty:
        raise ConfigError(f"--collect {to}: there is something in it; name a new directory")


def tell_new_files(home: Path, launch: str) -> None:
    """Name on standard error what the ranks of a launch that is over have written."""
    try:
        machines = _fetch(home, FetchFiles(launch)).machines
    except PmeshError as e:
        complain(f"it is not known what the ranks have written: {e}")
        return
    for files in machines:
        if files.refusal:
            complain(f"new files on {files.name} are not known: {files.refusal}")
        elif files.count:
            complain(f"new files on {files.name}: {_listed(files)}")
        if files.left_out:
            complain(f"{files.name}: {files.left_out}")
    if any(files.count for files in machines):
        complain(f"'pmesh fetch {launch}' brings them here")


def _fetch(home: Path, request: FetchFiles) -> Fetched:
    """Return what ranks have written into their copies; the agent's store gets the contents."""
    return ask(home, request, Fetched, replies=LAUNCH_REPLIES, timeout_s=_FETCHED_IN_S)


def _listed(files: FetchedFiles) -> str:
    named = ", ".join(f"{file.path} ({rounded(file.nbytes)})" for file in files.shown)
    more = files.count - len(files.shown)
    return f"{named} and {more} more, {rounded(files.nbytes)} in all" if more else named


def _brought(home: Path, files: FetchedFiles, target: Path) -> str:
    if files.refusal:
        raise UsageError(files.refusal)
    if files.tree is None:
        return f"{files.name}: nothing new{' that can be had' if files.left_out else ''}"
    if os.path.lexists(target):  # False for one that can't be: then `make` says why
        raise UsageError(f"{target} is there already; give another --to")
    store = FileStore(home)
    try:
        tree = store.read_whole(Content(files.tree.sha256, files.tree.nbytes))
    except OSError as e:
        raise UsageError(f"the list of its files can't be read: {e.strerror}") from e
    # Not links, nor what may be executed: another machine has chosen them.
    entries = [
        FileEntry(entry.path, entry.sha256, entry.nbytes)
        for entry in decode_tree_untrusted(tree)
        if isinstance(entry, FileEntry)
    ]
    Copies(home, store).make(target, entries)
    count = f"{len(entries)} file{'s' * (len(entries) > 1)}"
    return f"{files.name}: {count}, {rounded(files.nbytes)}, in {target}"


def _directories(machines: Sequence[FetchedFiles]) -> list[PathName]:
    """Return a directory's name for each machine: its own, as far as that can be one."""
    names = [
        re.sub(r"[^a-z0-9]+", "-", one.name.lower())[:_SHOWN_NAME].strip("-") for one in machines
    ]
    return [
        path_name(name if name and names.count(name) == 1 else f"{name}-{one.id[:SHORT_ID]}")
        for name, one in zip(names, machines, strict=True)
    ]
