"""Tells the other agents who has no place in the mesh any more, and answers `pmesh members`."""

from collections.abc import Iterator
from typing import Final, assert_never

import structlog

from pmesh.agent.features import Feature, Kernel
from pmesh.agent.mesh.links import Link, LinkNumbers
from pmesh.agent.mesh.register import store_records
from pmesh.core.values import Removal
from pmesh.errors import KeyFileError, ProtocolError
from pmesh.ids import Member, NodeId, node_text
from pmesh.members.wire import (
    MEMBERS,
    AskMembers,
    MachineTold,
    MemberRow,
    MemberRows,
    MembersQuestion,
    RemoveMachine,
    TellRemovals,
)
from pmesh.net.sessions.sessions import Session

CHECKS: Final = 64  # signatures between two polls: 6 ms, whatever members send

_log = structlog.get_logger()
_PLACES: Final = ("here", "away", "removed")


class Members(Feature[TellRemovals, MembersQuestion]):
    """What this agent knows of the mesh's members, and passes on."""

    channel = MEMBERS
    openings = (AskMembers, RemoveMachine)

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._register = kernel.register
        self._peers = kernel.peers
        self._told: dict[NodeId, tuple[LinkNumbers, int]] = {}
        """On which link, and up to which revision, each peer was told our removals."""
        self._heard: dict[NodeId, tuple[Removal, ...]] = {}
        """What peers have said and was not checked yet."""
        self._checks_left = CHECKS
        self._may_pass_on = True

    def poll(self) -> None:
        """Note who is here, check what was heard, and pass on what is new."""
        self._register.see(
            {node: self._peers.name_of(link.member) for node, link in self._peers.links.items()}
        )
        self._checks_left = CHECKS
        for node in list(self._heard):
            try:
                self._check_some(node, most=max(1, CHECKS // len(self._heard)))
            except ProtocolError as e:
                self._peers.ban(node, str(e))
        self._may_pass_on = True
        self._pass_on()

    def receive(self, member: Member, message: TellRemovals) -> None:
        """Take what another agent knows. Raises ProtocolError for what nobody has signed."""
        self._register.see({member.node: self._peers.name_of(member)})
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
                await session.send(self.remove(name, out=out))
            case _:
                assert_never(request)

    def remove(self, text: str, *, out: bool) -> MachineTold:
        """Remove a machine, or undo that, and tell all agents that are here."""
        node = self._register.find(text)
        self._register.remove(self._kernel.key, node, out=out)
        self._may_pass_on = True
        self._pass_on()
        rows = [row for row in self.rows() if not row.me and row.id != node_text(node)]
        return MachineTold(
            self._register.name_of(node),
            told=tuple(row.name for row in rows if row.state == "here"),
            away=tuple(row.name for row in rows if row.state == "away"),
        )

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

    def _pass_on(self) -> None:
        """Tell each peer our removals, once on each link and whenever they change.

        Once between two polls, so that who changes them all the time makes us send little.
        """
        if self._may_pass_on:
            links = self._peers.links
            self._told = {node: told for node, told in self._told.items() if node in links}
            for node, link in links.items():
                self._tell(node, link)
        self._shut_out()

    def _tell(self, node: NodeId, link: Link) -> None:
        revision = self._register.revision
        if self._told.get(node) != (link.numbers, revision):
            self._told[node] = link.numbers, revision
            self._may_pass_on = False
            link.send(TellRemovals(self._kernel.version, tuple(self._register.removals.values())))

    def _shut_out(self) -> None:
        """End the links of those that were removed, at once, and tell them who did it."""
        for node, link in list(self._peers.links.items()):
            removal = self._register.removal_of(node)
            if removal is not None:
                self._tell(node, link)
                self._peers.drop(node, f"it was removed by {self._register.name_of(removal.by)}")
