"""What must not have happened among honest machines, whatever a member has sent to them."""

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pmesh.agent.mesh.keyring import all_keys, load_keys
from pmesh.agent.mesh.register import MAX_KNOWN, load_records
from pmesh.core.identity.removals import MAX_REMOVALS
from pmesh.core.identity.rotations import Rotation, supersedes
from pmesh.ids import NodeId, node_text
from tools.fuzz.agent import BANNED

MOST_HOME_BYTES = 64 << 20  # of an honest machine: keys, a log, and what launches have printed


def find_bans(output: str, honest: Iterable[str]) -> list[str]:
    """The honest node ids that an honest agent has banned, from what it has printed."""
    banned = set(re.findall(rf"^{BANNED}(\w+)$", output, re.MULTILINE))
    return sorted(banned & set(honest))


def find_unprintable(text: str) -> str:
    """Whatever surrounds the first character that could control a terminal; "" if there is none."""
    for at, character in enumerate(text):
        if not (character.isprintable() or character in "\n\t"):
            return repr(text[max(0, at - 100) : at + 100])
    return ""


def texts_in(picture: Any) -> Iterator[str]:  # noqa: ANN401 - of JSON
    """All texts of a status or of events."""
    if isinstance(picture, dict):
        for name, part in picture.items():
            yield name
            yield from texts_in(part)
    elif isinstance(picture, list):
        for part in picture:
            yield from texts_in(part)
    elif isinstance(picture, str):
        yield picture


def find_unprintable_in_json(data: bytes) -> str:
    return next(filter(None, map(find_unprintable, texts_in(json.loads(data)))), "")


def is_called(node: str, name: str, members: Iterable[dict[str, Any]]) -> bool:
    """Whether the machine has a seat, under its own name, perhaps with the start of its id."""
    shown = [member["name"] for member in members if member["id"] == node]
    return len(shown) == 1 and (shown[0] == name or shown[0].startswith(f"{name} ("))


def find_strange_files(folder: Path, expected: Iterable[str]) -> list[str]:
    """Files that nobody who is honest would have written into the folder of all homes."""
    allowed = set(expected)
    return sorted(entry.name for entry in folder.iterdir() if entry.name not in allowed)


def find_lost_places(home: Path, honest: Iterable[NodeId]) -> str:
    """What is wrong in an honest machine's list of members; "" if nothing is.

    An honest machine was removed, or there are more than the list may have.
    """
    records = load_records(home)
    removed = [node for node in honest if node in records.removals and records.removals[node].out]
    if removed:
        return f"{', '.join(map(node_text, removed))} is removed"
    known, removals = len(records.known), len(records.removals)
    too_many = known > MAX_KNOWN or removals > MAX_REMOVALS
    return f"{known} members and {removals} removals" if too_many else ""


def rotation_of(home: Path) -> Rotation | None:
    """By which a machine has its mesh key; None for a mesh's first key."""
    return next((load_keys(home, key).rotation for key in all_keys(home)), None)


def is_rolled_back(before: Rotation | None, now: Rotation | None) -> bool:
    """Whether a machine has gone back to an earlier mesh key."""
    return before is not None and now != before and (now is None or not supersedes(now, before))


def nbytes_of(home: Path) -> int:
    """What the disk holds of a home."""
    paths = (Path(where) / name for where, _, names in os.walk(home) for name in names)
    return sum(path.lstat().st_size for path in paths if path.exists())
