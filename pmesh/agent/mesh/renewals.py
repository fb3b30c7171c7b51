"""Takes the latest mesh key from members that have it, and gives it to those that were away."""

import math
from collections.abc import Callable, Iterable, Sequence

import structlog
import trio

from pmesh.agent.events import News
from pmesh.agent.mesh.keyring import Keyring
from pmesh.agent.mesh.register import Register
from pmesh.core.identity.advertisement import Advertisement
from pmesh.core.identity.refused_keys import RefusedKeys
from pmesh.core.identity.rotations import Rotation
from pmesh.core.links.addresses import BoundAddress
from pmesh.core.wire.link import Address
from pmesh.errors import KeyFileError, NetworkError, PmeshError
from pmesh.ids import NodeId
from pmesh.net.links.dialer import dial_any
from pmesh.net.links.renewal import ask_for_rotation, give_rotation

MAX_MET = 64  # hosts; strangers may dial as they like
LOOK_S = 1.0  # how often to look for members that mDNS shows with another key
LONGEST_WAIT_S = 10.0  # as for the dials of machines that were linked before

_log = structlog.get_logger()


class Renewals:
    """One agent's part in rotations of the mesh key.

    Args:
        me: This machine.
        keyring: Its keys.
        register: Who has a place in the mesh.
        elsewhere: Returns what mDNS shows of machines with another key, and whether each is fresh.
        in_order: Returns how to dial addresses, the best first.
        found: Called with a machine that has the key in use, so that it is dialled at once.
        noticed: Takes what is news to the owner of this machine.
    """

    def __init__(
        self,
        me: NodeId,
        keyring: Keyring,
        register: Register,
        *,
        elsewhere: Callable[[], Iterable[tuple[Advertisement, bool]]],
        in_order: Callable[[Iterable[Address]], Sequence[BoundAddress]],
        found: Callable[[NodeId, tuple[Address, ...]], None],
        noticed: Callable[[News], None],
    ) -> None:
        self._me = me
        self.keyring = keyring
        self._register = register
        self._elsewhere = elsewhere
        self._in_order = in_order
        self._found = found
        self._noticed = noticed
        self._due: dict[tuple[NodeId, int], tuple[float, float]] = {}
        """When to ask for an advertisement, of which node and minute, and the last wait."""
        self._met: dict[str, None] = {}
        self._refused = RefusedKeys()
        self._given_by: Rotation | None = None
        self._given: set[NodeId] = set()
        """The machines that were away, and got the key of this rotation."""
        self._not_written: Rotation | None = None
        """The rotation that was last news as one that can't be written."""

    async def run(self) -> None:
        """Ask members that mDNS shows with another key, until cancelled."""
        while True:
            now, before, self._due = trio.current_time(), self._due, {}
            for theirs, fresh in list(self._elsewhere()):
                if not self._is_member(theirs.node):
                    continue
                key = theirs.node, theirs.minute
                due, waited_s = before.get(key, (now, LOOK_S / 2))
                if due <= now:
                    waited_s = min(2 * waited_s, LONGEST_WAIT_S)
                    due = now + waited_s if fresh else math.inf  # it may be replayed
                    if await self.ask(theirs.addresses):
                        self._found(theirs.node, theirs.addresses)
                self._due[key] = due, waited_s
            met, self._met = self._met, {}
            for host in met:
                for addresses in self._register.known_at(host):
                    await self.ask(addresses)
            await trio.sleep(LOOK_S)

    def meet(self, host: str) -> None:
        """Note that a machine with another key has dialled this one from there: ours may be old.

        It is news to the owner of this machine, too.
        """
        text = self._refused.refuse(host, now=trio.current_time())
        if text is not None:
            self._noticed(News(kind="key refused", text=text))
        if len(self._met) < MAX_MET:
            self._met[host] = None

    async def ask(self, addresses: Iterable[Address]) -> bool:
        """Ask the agent at these addresses for a later key; return whether one is now in use."""
        ordered = self._in_order(addresses)
        for tag, contexts in self.keyring.ways() if ordered else ():
            try:
                stream, _ = await dial_any(ordered)
            except NetworkError:
                return False
            try:
                trusts = self._is_member if contexts is self.keyring.contexts else self._is_named
                rotation = await ask_for_rotation(stream, tag=tag, contexts=contexts, trusts=trusts)
            except PmeshError as e:
                _log.debug("no later mesh key", reason=str(e))
            else:
                return await self.adopt(rotation)
        return False

    async def give(
        self, stream: trio.SocketStream, first: bytes, authenticated: Callable[[], None]
    ) -> None:
        """Answer an agent that has missed a rotation. Raises PmeshError if it gets nothing."""
        node = await give_rotation(
            stream,
            first,
            contexts=self.keyring.former_contexts,
            rotation_for=self._rotation_for,
            authenticated=authenticated,
        )
        if self._given_by != self.keyring.rotation:
            self._given_by, self._given = self.keyring.rotation, set()
        if node in self._given:
            return  # it may ask again and again; once is news
        self._given.add(node)
        name = self._register.name_of(node)
        text = f"{name} was away, and gets the latest mesh key"
        self._noticed(News(kind="key changed", text=text, names=(name,)))

    async def adopt(self, rotation: Rotation) -> bool:
        """Use the key of a rotation, if it is later than ours, and for us; return whether it is."""
        name, before = self._register.name_of(rotation.by), self.keyring.mesh_key
        try:
            adopted = await self.keyring.adopt(rotation, fits=self.is_for_us)
        except KeyFileError as e:
            if self._not_written != rotation:  # it is tried again and again; once is news
                self._not_written = rotation
                text = f"{name} has changed the mesh key, and this machine can't take it yet: {e}"
                self._noticed(News(kind="key changed", text=text))
            return False
        if adopted and rotation.key != before and rotation.by != self._me:
            text = f"{name} has changed the mesh key, and this machine has the new one"
            self._noticed(News(kind="key changed", text=text, names=(name,)))
        return adopted

    def is_for_us(self, rotation: Rotation) -> bool:
        """Return whether this machine may use its key: not if a removed machine has made it."""
        removed = self._register.removal_of(rotation.by) is not None
        if rotation.key == self.keyring.mesh_key or (self._me in rotation.entitled and not removed):
            return True
        name = self._register.name_of(rotation.by)
        why = "it was removed" if removed else "it did not know this machine"
        _log.warning("no mesh key is taken", of=name, reason=why)
        return False

    def _rotation_for(self, node: NodeId) -> Rotation | None:
        rotation = self.keyring.rotation
        if rotation is None or node not in rotation.entitled:
            return None
        return None if self._register.removal_of(node) is not None else rotation

    def _is_named(self, node: NodeId) -> bool:
        """Return whether our rotation names a member; one that it left out has the former key."""
        rotation = self.keyring.rotation
        return rotation is not None and node in rotation.entitled and self._is_member(node)

    def _is_member(self, node: NodeId) -> bool:
        return node in self._register.known and self._register.removal_of(node) is None
