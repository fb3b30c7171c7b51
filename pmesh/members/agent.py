"""Tells the other agents who has no place in the mesh any more, and answers `pmesh members`."""

import math
import secrets
from collections.abc import Collection, Iterator, Sequence
from typing import Final, assert_never

import structlog
import trio

from pmesh.agent.events import News
from pmesh.agent.features import Feature, Kernel
from pmesh.agent.mesh.links import Link, LinkNumbers
from pmesh.agent.mesh.register import store_records
from pmesh.core.identity.keys import KEY_BYTES, MeshKey
from pmesh.core.identity.rotations import (
    Rotation,
    check_rotation_untrusted,
    sign_rotation,
    supersedes,
)
from pmesh.core.values import Removal
from pmesh.errors import KeyFileError, ProtocolError, UsageError
from pmesh.ids import MAX_COUNTER, Member, NodeId, node_text
from pmesh.members.wire import (
    MEMBERS,
    AskMembers,
    KeyRotated,
    MachineTold,
    MemberRow,
    MemberRows,
    MembersMessage,
    MembersQuestion,
    RemoveMachine,
    RotateKey,
    TellRemovals,
    TellRotation,
)
from pmesh.net.sessions.sessions import Session

ADOPT_EVERY_S: Final = 5.0  # mDNS begins anew with each key; two at once are settled soon
CHECKS: Final = 64  # signatures between two polls: some 8 ms, whatever members send

_log = structlog.get_logger()
_PLACES: Final = ("here", "away", "removed")


class Members(Feature[MembersMessage, MembersQuestion]):
    """What this agent knows of the mesh's members, and passes on."""

    channel = MEMBERS
    openings = (AskMembers, RemoveMachine, RotateKey)

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._register = kernel.register
        self._peers = kernel.peers
        self._keyring = kernel.renewals.keyring
        self._told: dict[NodeId, tuple[LinkNumbers, int]] = {}
        """On which link, and up to which revision, each peer was told our removals."""
        self._keys_told: dict[NodeId, tuple[LinkNumbers, Rotation]] = {}
        self._heard: dict[NodeId, tuple[Removal, ...]] = {}
        """What peers have said of removals and was not checked yet."""
        self._rotations_heard: dict[NodeId, Rotation] = {}
        """The latest rotation that each peer has told and that was not checked yet."""
        self._checks_left = CHECKS
        self._may_pass_on = True
        self._later: Rotation | None = None
        """A later rotation of the mesh key than ours, which was not adopted yet."""
        self._adopts_again_at = -math.inf
        self._judged_by = self._keyring.mesh_key
        """The key by whose rotation links were ended: once, as a later rotation may repeat it."""

    def poll(self) -> None:
        """Note who is here, check what was heard, and pass on what is new."""
        for link in self._peers.links.values():
            self._see(link)
        self._checks_left = CHECKS
        for node in [*self._rotations_heard, *self._heard]:
            try:
                if node in self._rotations_heard:
                    self._check_rotation(node)
                else:
                    self._check_some(node, most=max(1, CHECKS // len(self._heard)))
            except ProtocolError as e:
                self._peers.ban(node, str(e))
        self._may_pass_on = True
        self._pass_on()
        self._begin_to_adopt()

    def receive(self, member: Member, message: MembersMessage) -> None:
        """Take what another agent knows. Raises ProtocolError for what nobody has signed."""
        match message:
            case TellRemovals():
                self._hear(member, message)
            case TellRotation(rotation):
                self._rotations_heard[member.node] = rotation  # in place of the one before
                if self._checks_left:
                    self._check_rotation(member.node)
            case _:
                assert_never(message)

    def _hear(self, member: Member, message: TellRemovals) -> None:
        if (link := self._peers.links.get(member.node)) is not None:
            self._see(link)
        self._register.note_version(member.node, message.version)
        self._heard[member.node] = message.removals  # all that it knows, in place of before
        self._check_some(member.node, most=self._checks_left)
        self._pass_on()

    async def serve(self, session: Session, request: MembersQuestion) -> None:
        """Answer a program. Raises UsageError for a machine that is not known."""
        match request:
            case AskMembers():
                await session.send(MemberRows(tuple(self.rows())))
            case RemoveMachine(name, out):
                with self._kernel.admission().follow():
                    session.stay()
                    await session.send(await self.remove(name, out=out))
            case RotateKey(without):
                with self._kernel.admission().follow():  # a slow disk may take seconds
                    session.stay()
                    await session.send(await self.rotate(without))
            case _:
                assert_never(request)

    async def remove(self, text: str, *, out: bool) -> MachineTold:
        """Remove a machine, or undo that, and tell all agents that are here; then write it."""
        node = self._register.find(text)
        self._register.remove(self._kernel.key, node, out=out)
        self._may_pass_on = True
        self._pass_on()
        unwritten = ""
        try:
            await self._register.write(self._kernel.settings.home)
        except KeyFileError as e:
            unwritten = str(e).partition(";")[0]
        rows = [row for row in self.rows() if not row.me and row.id != node_text(node)]
        return MachineTold(
            self._register.name_of(node),
            told=tuple(row.name for row in rows if row.state == "here"),
            away=tuple(row.name for row in rows if row.state == "away"),
            unwritten=unwritten,
        )

    async def rotate(self, without: Sequence[str]) -> KeyRotated:
        """Give a new mesh key to all members but those, which are removed.

        Raises UsageError if one of them is not known, and KeyFileError if the key can't be written:
        then nothing has changed.
        """
        nodes = {self._register.find(text) for text in without}
        entries = [
            self._register.sign(self._kernel.key, node, out=True)
            for node in nodes
            if self._register.removal_of(node) is None
        ]
        await self._change_key(leaving=nodes)
        # Nothing else has run since the key is in use: nobody gives it to who is removed here.
        self._register.take(entries)
        self._kernel.noticed(News(kind="key changed", text="this machine has changed the mesh key"))
        self._may_pass_on = True
        self._pass_on()
        rows = [row for row in self.rows() if not row.me]
        return KeyRotated(
            told=tuple(row.name for row in rows if row.state == "here"),
            away=tuple(row.name for row in rows if row.state == "away"),
            removed=tuple(row.name for row in rows if row.state == "removed"),
            given=self._kernel.settings.key_text is not None
            or self._kernel.settings.key_file is not None,
        )

    async def _change_key(
        self, *, leaving: Collection[NodeId] = (), instead_of: Rotation | None = None
    ) -> None:
        """Use a new mesh key, for all members but those that leave.

        Raises UsageError if the numbers are used up, and KeyFileError if it can't be written.
        """
        key = MeshKey(secrets.token_bytes(KEY_BYTES))
        while True:
            for link in self._peers.links.values():
                self._see(link)  # who came since the last poll is a member, too
            known = (n for n in self._register.known if self._register.removal_of(n) is None)
            members = {self._kernel.me.node, *known}.difference(leaving)
            before = self._keyring.rotation
            if instead_of is not None and supersedes(instead_of, before):
                before = instead_of
            try:
                rotation = sign_rotation(self._kernel.key, key, members, before=before)
            except ValueError as e:
                raise UsageError(
                    f"{e}; give the mesh a key by hand: docs/how-to/new-mesh-key.md"
                ) from e
            if await self._keyring.adopt(rotation, fits=self._follows_ours):
                return

    def _follows_ours(self, rotation: Rotation) -> bool:
        """Return False if another one was written since it was signed, or as late."""
        ours = self._keyring.rotation
        return ours is None or rotation.number > ours.number

    def rows(self) -> Iterator[MemberRow]:
        """Yield all machines that are known: those that are here first, then by name."""
        known, me = self._register.known, self._kernel.me.node
        nodes = {me, *known, *(n for n, entry in self._register.removals.items() if entry.out)}
        rows = [self._row(node) for node in nodes]
        yield from sorted(rows, key=lambda row: (_PLACES.index(row.state), row.name, row.id))

    def close(self) -> None:
        """Write when each machine was last seen, as the agent ends."""
        try:
            store_records(self._kernel.settings.home, self._register.records())
        except KeyFileError as e:
            _log.warning("members are not kept", reason=str(e))

    def _row(self, node: NodeId) -> MemberRow:
        removal, known = self._register.removal_of(node), self._register.known.get(node)
        is_me = node == self._kernel.me.node
        here = is_me or node in self._peers.links
        return MemberRow(
            id=node_text(node),
            name=self._kernel.settings.name if is_me else self._register.name_of(node),
            state="removed" if removal is not None else "here" if here else "away",
            version=self._kernel.version if is_me else known.version if known else "",
            first_seen=known.first_seen if known else 0.0,
            last_seen=known.last_seen if known else 0.0,
            removed_by=None if removal is None else self._register.name_of(removal.by),
            me=is_me,
        )

    def _check_some(self, node: NodeId, *, most: int) -> None:
        news = self._register.news_in(self._heard.pop(node))
        most = min(most, self._checks_left)
        if news[most:]:
            self._heard[node] = tuple(news[most:])
        self._checks_left -= len(news[:most])
        self._register.take_untrusted(news[:most])

    def _check_rotation(self, node: NodeId) -> None:
        """Take what a peer has told of the mesh key, if it replaces ours."""
        rotation = self._rotations_heard.pop(node)
        if supersedes(rotation, self._later or self._keyring.rotation):
            self._checks_left = max(0, self._checks_left - 1)
            check_rotation_untrusted(rotation)
            if self._concerns_us(rotation):
                self._later = rotation
                self._begin_to_adopt()

    def _concerns_us(self, rotation: Rotation) -> bool:
        return self._must_answer(rotation) or self._kernel.renewals.is_for_us(rotation)

    def _must_answer(self, rotation: Rotation) -> bool:
        """Return whether it would replace ours, which this machine made, for a removed machine.

        That is one by a removed machine, which others took before they knew of the removal, or one
        for it that was made at the same time as ours.
        """
        ours = self._keyring.rotation
        if ours is None or ours.by != self._kernel.me.node or rotation.number == MAX_COUNTER:
            return False
        gains = rotation.entitled if rotation.number == ours.number else ()
        has_gone = (self._register.removal_of(node) is not None for node in (rotation.by, *gains))
        return rotation.key != ours.key and any(has_gone)

    def _see(self, link: Link) -> None:
        name = self._peers.reach.name_of(link.member)
        self._register.see(link.node, name, link.peer.addresses)

    def _begin_to_adopt(self) -> None:
        if self._later is None or trio.current_time() < self._adopts_again_at:
            return
        later, self._later = self._later, None
        if supersedes(later, self._keyring.rotation):
            self._adopts_again_at = trio.current_time() + ADOPT_EVERY_S
            self._kernel.nursery.start_soon(self._adopt, later)

    async def _adopt(self, rotation: Rotation) -> None:
        with self._kernel.contain("a change of the mesh key"):
            take = self._answer if self._must_answer(rotation) else self._kernel.renewals.adopt
            if await take(rotation):
                self._pass_on()
            elif supersedes(rotation, self._later) and self._concerns_us(rotation):
                self._later = rotation  # the disk may be full: it is tried again

    async def _answer(self, rotation: Rotation) -> bool:
        """Change the key once more, instead of to one that a removed machine knows."""
        try:
            await self._change_key(instead_of=rotation)
        except KeyFileError as e:
            _log.warning("the mesh key is not changed again", reason=str(e))
            return False
        text = (
            "a removed machine has, or had made, the key that others took; so this machine has "
            "changed it again"
        )
        self._kernel.noticed(News(kind="key changed", text=text))
        return True

    def _pass_on(self) -> None:
        """Tell each peer our removals and our mesh key, once on each link and if they change.

        Removals once between two polls, so that who changes them all the time makes us send little.
        """
        links = self._peers.links
        self._told = {node: told for node, told in self._told.items() if node in links}
        self._keys_told = {node: told for node, told in self._keys_told.items() if node in links}
        if self._may_pass_on:
            for node, link in links.items():
                self._tell_removals(node, link)
        self._shut_out()
        rotation = self._keyring.rotation
        for node, link in self._peers.links.items():
            if rotation is not None and self._keys_told.get(node) != (link.numbers, rotation):
                self._keys_told[node] = link.numbers, rotation
                link.send(TellRotation(rotation))

    def _tell_removals(self, node: NodeId, link: Link) -> None:
        revision = self._register.revision
        if self._told.get(node) != (link.numbers, revision):
            self._told[node] = link.numbers, revision
            self._may_pass_on = False
            link.send(TellRemovals(self._kernel.version, tuple(self._register.removals.values())))

    def _shut_out(self) -> None:
        """End the links of those that were removed, and of those that get no new mesh key."""
        is_new, self._judged_by = self._keyring.mesh_key != self._judged_by, self._keyring.mesh_key
        for node, link in list(self._peers.links.items()):
            removal, rotation = self._register.removal_of(node), self._keyring.rotation
            if removal is not None:
                self._tell_removals(node, link)  # who did it
                self._peers.drop(node, f"it was removed by {self._register.name_of(removal.by)}")
            elif (
                is_new
                and rotation is not None
                and link.contexts is not self._keyring.contexts
                and node not in rotation.entitled
            ):
                self._peers.drop(node, "the mesh has a new key, which was not meant for it")
