"""`pmesh members`, `remove` and `key rotate`: who has a place in the mesh, and by which key."""

from datetime import datetime
from pathlib import Path

import msgspec

from pmesh.client.control import ask
from pmesh.home_paths import home_directory
from pmesh.ids import SHORT_ID
from pmesh.members.wire import (
    MEMBERS_REPLIES,
    AskMembers,
    KeyRotated,
    MachineTold,
    MemberRow,
    MemberRows,
    RemoveMachine,
    RotateKey,
)
from pmesh.terminal.lines import complain, say
from pmesh.terminal.rows import Rows, output
from pmesh.texts import printable

MOST_LISTED = 16  # twice the machines of a home
_HEADERS = ("machine", "id", "pmesh", "first seen", "last seen", "")


def show_members(home: Path | None, *, as_json: bool) -> int:
    """Print the machines that have, or had, a place in the mesh."""
    rows = ask(home_directory(home), AskMembers(), MemberRows, replies=MEMBERS_REPLIES).rows
    if as_json:
        found = [_without_tag(row) for row in rows]
        say(msgspec.json.encode({"schema": 1, "members": found}).decode())
        return 0
    output().print(Rows(_HEADERS, [_cells(row) for row in rows], compact=True))
    return 0


def remove_machine(home: Path | None, name: str, *, undo: bool) -> int:
    """Shut a machine out, or let it in again. Raises UsageError if none has this name."""
    request = RemoveMachine(name, not undo)
    reply = ask(home_directory(home), request, MachineTold, replies=MEMBERS_REPLIES)
    whom = printable(reply.name)
    say(f"{whom} may be a member again" if undo else f"{whom} is shut out of the mesh")
    if reply.told:
        say(f"told now: {_listed(reply.told)}")
    if reply.away:
        say(f"told when they are back: {_listed(reply.away)}")
    if reply.unwritten:
        complain(
            f"this machine {reply.unwritten}; it tries again, and forgets what you have typed if "
            "its agent ends before that"
        )
    if not undo:
        complain(
            f"{whom} still holds the mesh key, with which it could come back as another machine; "
            "if it was stolen, type: pmesh key rotate"
        )
    return 0


def rotate_key(home: Path | None, without: tuple[str, ...]) -> int:
    """Give the mesh a new key, which these machines do not get."""
    request = RotateKey(without)
    reply = ask(home_directory(home), request, KeyRotated, replies=MEMBERS_REPLIES)
    say("The mesh has a new key, and this machine uses it. Jobs go on.")
    for what, names in (
        ("have it now", reply.told),
        ("get it when they are back", reply.away),
        ("get none, as they were removed", reply.removed),
    ):
        if names:
            say(f"{what}: {_listed(names)}")
    if reply.given:
        complain(
            "this agent was started with a mesh key from PMESH_KEY or --key-file, which is an old "
            "one now: change it there; until then the agent takes the new one from its home"
        )
    return 0


def _cells(row: MemberRow) -> tuple[str, ...]:
    state = "this machine" if row.me else row.state
    if row.removed_by is not None:
        state += f" by {row.removed_by}"
    last = "now" if row.state == "here" else _day(row.last_seen)
    first = "" if row.me else _day(row.first_seen)
    cells = row.name, row.id[:SHORT_ID], row.version, first, last, state
    return tuple(map(printable, cells))


def _without_tag(row: MemberRow) -> dict[str, object]:
    return {name: getattr(row, name) for name in row.__struct_fields__}


def _day(seconds: float) -> str:
    """Return a time of this machine's clock; nothing for one that is not known."""
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}" if seconds else ""  # noqa: DTZ006


def _listed(names: tuple[str, ...]) -> str:
    """Return the names on a line; a member can have made up hundreds."""
    more = len(names) - MOST_LISTED
    rest = f", and {more} more: 'pmesh members' lists all" if more > 0 else ""
    return ", ".join(map(printable, names[:MOST_LISTED])) + rest
