"""What machines are called here: a name that was seen once belongs to its node.

The file `names` in the agent's home holds the names, as `known_hosts` of ssh does. A machine that
says the name of another one still trains: it is shown with the start of its id, and `pmesh run`
does not take it for the other.
"""

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import structlog
import trio

from pmesh.agent.events import News
from pmesh.agent.home import move_away, read_private, write_private
from pmesh.core.values import Seat, View
from pmesh.errors import ConfigError, KeyFileError, UsageError
from pmesh.ids import NodeId, node_from_text, node_text, short_node, tell_apart

NAMES_NAME: Final = "names"
MAX_NAMES: Final = 256  # whoever has the mesh key can invent nodes; a mesh at home has 8
MAX_NAMES_OF_NODE: Final = 8  # a container may have another host name after each start
MAX_FILE_BYTES: Final = 256 * 1024  # 256 names of 64 characters, each up to 12 bytes in JSON
AGAIN_S: Final = 300.0  # after a disk was full
_START_OF_ID = re.compile(r"[a-z2-7]{8,52}")  # from 8 on, as shown: nobody finds a key for that

_log = structlog.get_logger()


class _StoredNames(msgspec.Struct, frozen=True):
    names: dict[str, str]


def load_names(home: Path) -> dict[str, NodeId]:
    """Return whose each name is; nothing if there is no such file.

    Raises ConfigError if the file is not this user's own, can be read by others, or is not ours.
    """
    path = home / NAMES_NAME
    try:
        content = read_private(path, most_bytes=MAX_FILE_BYTES)
        stored = {} if content is None else msgspec.json.decode(content, type=_StoredNames).names
        return {name: node_from_text(text) for name, text in stored.items()}
    except KeyFileError as e:
        raise ConfigError(str(e)) from e
    except ValueError as e:  # msgspec's, too
        raise ConfigError(f"{path} is not what the agent writes: {move_away(path)}") from e


def store_names(home: Path, owners: dict[str, NodeId]) -> None:
    """Write whose each name is. Raises KeyFileError if that fails."""
    names = {name: node_text(node) for name, node in owners.items()}
    write_private(home / NAMES_NAME, msgspec.json.encode(_StoredNames(names)) + b"\n")


class MachineNames:
    """Whose each name is, and what the machines are called that are here."""

    def __init__(self, owners: dict[str, NodeId], *, noticed: Callable[[News], None]) -> None:
        self._owners = owners
        self._noticed = noticed
        self._view: View | None = None
        self._shown: dict[NodeId, str] = {}
        self._said_full = False
        self._changed = trio.Event()

    def follow(self, view: View) -> None:
        """Call the machines of a new view by names, which are theirs from now on."""
        self._view = view
        said = {seat.member.node: seat.name for seat in view.seats}
        shown = tell_apart(said, self._owners)
        left = {node: name for node, name in self._shown.items() if node not in shown}
        for node, name in shown.items():
            if self._owners.get(name) != node:
                self._give(node, name, said[node])
        # Those that have just left are still spoken of.
        self._shown = dict(list(left.items())[-MAX_NAMES:]) | shown

    def of(self, node: NodeId, said: str) -> str:
        """Return what to call a machine that says this."""
        return self._shown.get(node) or tell_apart({node: said}, self._owners)[node]

    def known(self, node: NodeId) -> str | None:
        """Return what to call a machine that is not here; None if it never was."""
        names = [name for name, owner in self._owners.items() if owner == node]
        return self._shown.get(node) or (names[-1] if names else None)

    def of_seat(self, seat: Seat) -> str:
        return self.of(seat.member.node, seat.name)

    def find(self, text: str) -> NodeId:
        """Return the node that a name belongs to, or whose id begins with the text.

        Raises UsageError if there is none, or if several could be meant.
        """
        named = self._owners.get(text)
        found = {node for node in self._known() if begins_id(node, text)}
        if named is not None:
            found.add(named)
        if not found:
            raise UsageError(f"no machine is called {text!r}; there are {self._list_here()}")
        if len(found) > 1:
            ids = ", ".join(sorted(map(node_text, found)))
            raise UsageError(f"{text!r} may be one of several machines; type one of these: {ids}")
        return found.pop()

    def find_each_here(self, texts: Sequence[str]) -> set[NodeId]:
        """Return the nodes as `find_here` does, of texts that stood between commas.

        A name may have commas itself.
        """
        wholes = [whole for comma in (", ", ",") if (whole := comma.join(texts)) in self._owners]
        return {self.find_here(text) for text in wholes[:1] or texts}

    def find_here(self, text: str) -> NodeId:
        """Return the node as `find` does, if it has a seat in the view.

        Raises UsageError if not, also if another machine says that it has this name.
        """
        node = self.find(text)
        seats = () if self._view is None else self._view.seats
        if any(seat.member.node == node for seat in seats):
            return node
        others = [seat.member.node for seat in seats if seat.name == text]
        if not others:
            raise UsageError(f"{text} is not here now; there are {self._list_here()}")
        raise UsageError(
            f"the machine that calls itself {text!r} now, {short_node(others[0])}, is not the one "
            f"that had this name before, {short_node(node)}; {_how_to_forget(text)}"
        )

    def forget(self, text: str) -> NodeId:
        """Let another machine have this name. Raises UsageError if it belongs to none."""
        node = self._owners.pop(text, None)
        if node is None:
            known = ", ".join(self._owners)
            raise UsageError(f"no machine was ever called {text!r}; known names are {known}")
        self._changed.set()
        if self._view is not None:
            self.follow(self._view)
        return node

    async def keep(self, home: Path) -> None:
        """Write the names whenever they change; again after a while if that has failed."""
        while True:
            await self._changed.wait()
            self._changed = trio.Event()
            try:
                await trio.to_thread.run_sync(store_names, home, dict(self._owners))
            except KeyFileError as e:
                _log.warning("names are not kept", reason=str(e))
                await trio.sleep(AGAIN_S)
                self._changed.set()

    def _give(self, node: NodeId, name: str, said: str) -> None:
        """Let a name that was free belong to the node."""
        own = [known for known, owner in self._owners.items() if owner == node]
        if len(own) >= MAX_NAMES_OF_NODE:
            del self._owners[own[0]]
        if len(self._owners) >= MAX_NAMES:
            self._say_full()
            return
        self._owners[name] = node
        self._changed.set()
        before = self._owners.get(said, node)
        if before != node:
            self._say_taken(node, name, said, before)

    def _say_taken(self, node: NodeId, name: str, said: str, before: NodeId) -> None:
        seats = () if self._view is None else self._view.seats
        away = all(seat.member.node != before for seat in seats)
        hint = _how_to_forget(said) if away else "start one with 'pmesh up --name OTHER'"
        self._noticed(
            News(
                kind="name refused",
                text=(
                    f"{said} is the name of {short_node(before)}, and {short_node(node)} says that "
                    f"it has this name, too: here it is called {name}; {hint}"
                ),
                names=(name,),
            )
        )

    def _say_full(self) -> None:
        if not self._said_full:
            self._said_full = True
            text = (
                f"{MAX_NAMES} names of machines are known, and no more are kept: 'pmesh run --on' "
                f"takes others by their ids; 'pmesh forget NAME' makes room"
            )
            self._noticed(News(kind="name refused", text=text))

    def _known(self) -> set[NodeId]:
        seats = () if self._view is None else self._view.seats
        return {*self._owners.values(), *(seat.member.node for seat in seats)}

    def _list_here(self) -> str:
        seats = () if self._view is None else self._view.seats
        return ", ".join(sorted(map(self.of_seat, seats)))


def begins_id(node: NodeId, text: str) -> bool:
    """Return whether the text is a machine's id, or the first 8 or more characters of it."""
    return _START_OF_ID.fullmatch(text) is not None and node_text(node).startswith(text)


def _how_to_forget(name: str) -> str:
    return f"if you have reinstalled that machine, type: pmesh forget {shlex.quote(name)}"
