"""Which machines have a place in the mesh: those that this agent was linked with, and removals.

The file `members` in the agent's home holds both. A removal counts from the moment in which the
register takes it: `Peers` then refuses the node. What tells the others is `pmesh.members`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
import structlog
import trio
from msgspec import Meta

from pmesh.agent.events import News
from pmesh.agent.home import move_away, read_private, write_private
from pmesh.agent.mesh.names import MachineNames, begins_id
from pmesh.core.identity.keys import NodeKey
from pmesh.core.identity.removals import (
    check_removal_untrusted,
    merge,
    newer,
    sign_removal,
)
from pmesh.core.values import Name, Removal, Version
from pmesh.core.wire.link import Address
from pmesh.errors import ConfigError, KeyFileError, MachineRemoved, UsageError
from pmesh.ids import NodeId, node_from_text, node_text, short_node

REGISTER_NAME: Final = "members"
MAX_KNOWN: Final = 256  # as many as names of machines; a mesh at home has 8
MAX_KEPT_ADDRESSES: Final = 4  # of one machine: its cable and its Wi-Fi, v4 and v6
MAX_FILE_BYTES: Final = 2 * 1024 * 1024  # names and hosts, each character up to 12 bytes in JSON
KEEP_S: Final = 300.0  # the times at which linked machines were last seen are written so often
RETRY_S: Final = 10.0  # a removal that is not written is forgotten as the agent ends
MOST_NEWS: Final = 30  # of removals, as lines of the log; a member may make them without end
NEWS_WITHIN_S: Final = 60.0
WRITES_EVERY_S: Final = 1.0  # a member may say something else of itself all the time

_SELF: Final = "; type it on another member, or 'pmesh down' here"

_log = structlog.get_logger()


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that was linked with this one. Times are Unix seconds, by our clock."""

    name: Name
    """What it is called here."""
    version: Version = ""
    """Of its pmesh; "" until it has said it."""
    first_seen: float
    last_seen: float
    addresses: Annotated[tuple[Address, ...], Meta(max_length=MAX_KEPT_ADDRESSES)] = ()
    """Where it listened when it was last seen."""


class _StoredMembers(msgspec.Struct, frozen=True):
    members: dict[str, Known] = {}
    removals: tuple[Removal, ...] = ()


@dataclass(frozen=True, slots=True)
class Records:
    """What the file `members` holds."""

    known: Mapping[NodeId, Known]
    removals: Mapping[NodeId, Removal]


def load_records(home: Path) -> Records:
    """Return what the home's file holds; nothing if there is none.

    Raises ConfigError if the file is not this user's own, can be read by others, or is not ours.
    """
    path = home / REGISTER_NAME
    try:
        content = read_private(path, most_bytes=MAX_FILE_BYTES)
        stored = (
            _StoredMembers()
            if content is None
            else msgspec.json.decode(content, type=_StoredMembers)
        )
        known = {node_from_text(text): each for text, each in stored.members.items()}
    except KeyFileError as e:
        raise ConfigError(str(e)) from e
    except ValueError as e:  # msgspec's, too
        raise ConfigError(f"{path} is not what the agent writes: {move_away(path)}") from e
    return Records(known, merge({}, stored.removals))


def store_records(home: Path, records: Records) -> None:
    """Write what is known of members. Raises KeyFileError if that fails."""
    members = {node_text(node): each for node, each in records.known.items()}
    stored = _StoredMembers(members, tuple(records.removals.values()))
    write_private(home / REGISTER_NAME, msgspec.json.encode(stored) + b"\n")


class Register:
    """Who was here, and who has no place any more.

    Args:
        me: This machine.
        records: What the home's file holds.
        names: What machines are called here.
        wall_clock: Returns the time, in Unix seconds.
        noticed: Takes what is news to the owner of this machine.
    """

    def __init__(
        self,
        me: NodeId,
        records: Records,
        *,
        names: MachineNames,
        wall_clock: Callable[[], float],
        noticed: Callable[[News], None],
    ) -> None:
        self._me = me
        self.known = dict(records.known)
        self.removals = dict(records.removals)
        self._names = names
        self._wall_clock = wall_clock
        self._noticed = noticed
        self._changed = trio.Event()
        self._writing = trio.Lock()
        self._told_at: list[float] = []
        """When removals were told of late."""
        self.revision = 0
        """How often the removals have changed since the start."""

    def see(self, node: NodeId, name: str, addresses: Sequence[Address]) -> None:
        """Note that a machine, which is called so and listens there, is linked now."""
        now, before = self._wall_clock(), self.known.get(node)
        if before is None:
            self._make_room()
            before = Known(name="", first_seen=now, last_seen=now)
        kept = tuple(addresses)[:MAX_KEPT_ADDRESSES]
        if (before.name, before.addresses) != (name, kept):
            self._changed.set()
        self.known[node] = msgspec.structs.replace(before, name=name, addresses=kept, last_seen=now)

    def note_version(self, node: NodeId, version: str) -> None:
        """Note which version of pmesh a machine has."""
        before = self.known.get(node)
        if before is not None and before.version != version:
            self.known[node] = msgspec.structs.replace(before, version=version)
            self._changed.set()

    def removal_of(self, node: NodeId) -> Removal | None:
        """Return by which entry a node has no place; None if it has one."""
        entry = self.removals.get(node)
        return entry if entry is not None and entry.out else None

    def remove(self, key: NodeKey, node: NodeId, *, out: bool) -> Removal:
        """Remove a node, or undo that, in the name of this machine. Raises as `sign` does."""
        entry = self.sign(key, node, out=out)
        self.take([entry])
        return entry

    def sign(self, key: NodeKey, node: NodeId, *, out: bool) -> Removal:
        """Return the entry by which this machine removes a node, or undoes that.

        Raises UsageError if that changes nothing, or if it is this machine.
        """
        if node == self._me:
            raise UsageError(
                f"this machine can't {'remove itself' if out else 'let itself in'}{_SELF}"
            )
        name = self.name_of(node)
        if out == (self.removal_of(node) is not None):
            done = "removed already" if out else "not removed"
            raise UsageError(f"{name} is {done}")
        try:
            return sign_removal(key, node, self.removals, out=out)
        except ValueError as e:
            raise UsageError(f"{name}: {e}") from e

    def news_in(self, entries: Iterable[Removal]) -> list[Removal]:
        """Return those entries that this register would take, if they are signed."""
        return newer(self.removals, entries)

    def take(self, entries: Iterable[Removal]) -> None:
        """Merge entries whose signatures are right."""
        before, self.removals = self.removals, merge(self.removals, entries, me=self._me)
        changed = [each for node, each in self.removals.items() if before.get(node) != each]
        for entry in changed:
            self.revision += 1
            self._changed.set()
            if entry.out != (entry.node in before and before[entry.node].out):
                self._tell(entry)

    def take_untrusted(self, entries: Iterable[Removal]) -> None:
        """Merge another agent's entries. Raises ProtocolError if one is not signed."""
        news = self.news_in(entries)
        for entry in news:
            check_removal_untrusted(entry)
        self.take(news)

    def refusal_of(self, node: NodeId, ours: Removal | None) -> MachineRemoved | None:
        """Return the error by which a machine gets no link; None if it may have one.

        Args:
            node: The machine.
            ours: How it refuses this one, if it does; that was checked.
        """
        if ours is not None:
            self.take(self.news_in([ours]))
        removal = ours or self.removal_of(node)
        if removal is None:
            return None
        by = self.name_of(removal.by)
        if removal.node == self._me:
            return MachineRemoved(f"{self._describe_own(by)}; {self._how_to_undo(self._me)}")
        name = self.name_of(node)
        return MachineRemoved(f"{name} was removed by {by}; {self._how_to_undo(node)}")

    def name_of(self, node: NodeId) -> str:
        """Return what a machine is called here, also one that is away."""
        known = self.known.get(node)
        return self._names.known(node) or (known.name if known else short_node(node))

    def find(self, text: str) -> NodeId:
        """Return the node that is meant by a name, or by its id or the start of that.

        Raises UsageError if there is none, or if it is not clear which.
        """
        try:
            return self._names.find(text)
        except UsageError:
            nodes = {*self.known, *self.removals}
            found = {n for n in nodes if self.name_of(n) == text or begins_id(n, text)}
            if len(found) != 1:
                raise
            return found.pop()

    def knows(self, text: str | None) -> bool:
        """Return whether this is the id of a machine that has a place in the mesh."""
        nodes = (node for node in self.known if node_text(node) == text)
        return any(self.removal_of(node) is None for node in nodes)

    def known_at(self, host: str) -> list[tuple[Address, ...]]:
        """Return where the members listen that were at this host when they were last seen."""
        return [
            each.addresses
            for node, each in self.known.items()
            if self.removal_of(node) is None and any(a.host == host for a in each.addresses)
        ]

    async def keep(self, home: Path) -> None:
        """Write the file when members or removals have changed, and now and then."""
        while True:
            with trio.move_on_after(KEEP_S):
                await self._changed.wait()
            try:
                await self.write(home)
            except KeyFileError as e:
                _log.warning("members are not kept", reason=str(e))
                await trio.sleep(RETRY_S)
            await trio.sleep(WRITES_EVERY_S)

    async def write(self, home: Path) -> None:
        """Write the file. Raises KeyFileError if that fails; `keep` tries again."""
        async with self._writing:
            self._changed = trio.Event()
            try:
                await trio.to_thread.run_sync(store_records, home, self.records())
            except KeyFileError:
                self._changed.set()
                raise

    def records(self) -> Records:
        """Return what is to be written to the home's file."""
        return Records(dict(self.known), dict(self.removals))

    def _tell(self, entry: Removal) -> None:
        """Note an event, but not for a machine that never was here, nor too many of them."""
        if entry.node not in {self._me, *self.known} and not self._names.known(entry.node):
            return
        now = trio.current_time()
        self._told_at = [at for at in self._told_at if now - at < NEWS_WITHIN_S]
        if len(self._told_at) > MOST_NEWS:
            return
        self._told_at.append(now)
        if len(self._told_at) > MOST_NEWS:
            text = "members remove machines, or let them in, more often than is told: pmesh members"
            self._noticed(News(kind="machine removed", text=text))
            return
        name, by = self.name_of(entry.node), self.name_of(entry.by)
        if entry.node == self._me:
            text = self._describe_own(by) if entry.out else f"{by} has let this machine in again"
        elif entry.out:
            text = f"{name} was removed from the mesh by {by}"
        else:
            text = f"{name} may be a member again, says {by}"
        self._noticed(News(kind="machine removed", text=text, names=(name,)))

    def _make_room(self) -> None:
        """Forget the machine that was away for the longest time, first one that was removed."""
        if len(self.known) >= MAX_KNOWN:
            seen = {node: each.last_seen for node, each in self.known.items()}
            del self.known[min(seen, key=lambda node: (self.removal_of(node) is None, seen[node]))]

    def _describe_own(self, by: str) -> str:
        return f"this machine was removed from the mesh by {by}"

    def _how_to_undo(self, node: NodeId) -> str:
        return f"to let it in again, type on a member: pmesh remove --undo {short_node(node)}"
