"""Invitations of one agent: the code that `pmesh invite` shows, and who tries it.

A machine that joins reaches the agent's port as any stranger does, and stays one until it has
proven that it knows the code: `pmesh.net.links.acceptor` limits how many there are and how long
they stay. SPAKE2 takes 10 ms of a core; it begins at most once for each code.
"""

import functools
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Never

import trio

from pmesh.agent.events import News
from pmesh.agent.features import Feature
from pmesh.agent.limits import Admission
from pmesh.core.identity.keys import MeshKey, namespace_tag
from pmesh.core.wire.framing import GUEST_MAGIC, FrameReader, frame
from pmesh.errors import PeerUnreachable, PmeshError, ProtocolError
from pmesh.ids import NodeId, short_node
from pmesh.invites.rules.codes import Code, draw_code
from pmesh.invites.rules.exchange import Inviter, WrongCodeError
from pmesh.invites.rules.invitations import LASTS_S, Invitations
from pmesh.invites.wire import (
    MAX_GUEST_BYTES,
    AnyGuestMessage,
    Declined,
    GuestMessage,
    InvitationOver,
    Invite,
    Invited,
    KeyStored,
    Knock,
    Outcome,
    Party,
    Proof,
    Reason,
    decode_guest_untrusted,
    encode_guest,
)
from pmesh.net.links.acceptor import Authenticated
from pmesh.net.links.interfaces import remote_address_of
from pmesh.net.sessions.sessions import Session

EXCHANGE_S = 10.0  # between two machines, without a person in between; usually 0.1 s

LET_IN = frozenset({"joined", "key sent"})


class GuestStream:
    """A connection that carries messages about an invitation, in clear."""

    def __init__(self, stream: trio.abc.Stream, first: bytes = b"") -> None:
        """`first` are bytes that have been read from it already."""
        self._stream = stream
        self._reader = FrameReader(max_bytes=MAX_GUEST_BYTES)
        self._reader.receive_data(first)

    async def send(self, *messages: GuestMessage, after: bytes = b"") -> None:
        """Send messages, behind some bytes. Raises PeerUnreachable if the other end is gone."""
        try:
            await self._stream.send_all(after + b"".join(map(frame, map(encode_guest, messages))))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as e:
            raise PeerUnreachable("the other machine has closed the connection") from e

    async def receive(self) -> AnyGuestMessage:
        """Return the next message.

        Raises:
            PeerUnreachable: The other end is gone.
            ProtocolError: Something else than a message arrived.
        """
        while (message := self._reader.next_message_untrusted()) is None:
            try:
                data = await self._stream.receive_some(MAX_GUEST_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as e:
                raise PeerUnreachable("the connection broke") from e
            if not data:
                raise PeerUnreachable("the other machine has closed the connection")
            self._reader.receive_data(data)
        return decode_guest_untrusted(message)


@dataclass(eq=False, slots=True)
class _Shown:
    """A code that a `pmesh invite` shows now, and what has become of it."""

    over: InvitationOver = field(default_factory=lambda: InvitationOver("expired"))
    ended: trio.Event = field(default_factory=trio.Event)
    exchange: trio.CancelScope = field(default_factory=trio.CancelScope)


class Invites(Feature[Never, Invite]):
    """The invitations of one agent, and the sessions of `pmesh invite`."""

    openings = (Invite,)
    takes_guests = True

    def __init__(
        self,
        me: Party,
        key: Callable[[], MeshKey],
        *,
        advertise: Callable[[int], None],
        is_removed: Callable[[NodeId], bool],
        admission: Callable[[], Admission],
        noticed: Callable[[News], None],
        below: Callable[[int], int] = secrets.randbelow,
    ) -> None:
        """Make an agent's invitations.

        Args:
            me: What this machine says of itself.
            key: Returns the mesh key, which it gives to whoever knows a code.
            advertise: Announces the number of the open code by mDNS; 0 for none.
            is_removed: Returns whether a node was removed from the mesh; it gets no key.
            admission: Of programs that stay for long.
            noticed: Notes an event.
            below: Draws the parts of a code, as `secrets.randbelow`.
        """
        self._me = me
        self._key = key
        self._advertise = advertise
        self._is_removed = is_removed
        self._admission = admission
        self._noticed = noticed
        self._draw = functools.partial(draw_code, below)
        self._invitations = Invitations()
        self._shown: _Shown | None = None

    async def serve(self, session: Session, request: Invite) -> None:  # noqa: ARG002 - it asks for nothing more
        """Show a code until it is over, or until the program has gone."""
        with self._admission().follow():
            code = self._invitations.open(self._draw, now=trio.current_time())
            session.stay()
            shown = self._shown = _Shown()
            try:
                self._advertise(code.number)
                await session.send(Invited(code.text, LASTS_S))
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(session.await_end)
                    await self._await_end(shown)
                    nursery.cancel_scope.cancel()
                await session.send(shown.over)
            finally:
                self._shown = None
                self._advertise(0)
                self._invitations.withdraw()
                shown.exchange.cancel()

    async def _await_end(self, shown: _Shown) -> None:
        with trio.move_on_after(LASTS_S):
            await shown.ended.wait()
        if self._invitations.state == "taken":  # an exchange that began in time may end
            await shown.ended.wait()

    async def welcome(
        self, stream: trio.abc.HalfCloseableStream, first: bytes, authenticated: Authenticated
    ) -> None:
        """Serve a machine that wants the mesh key; whoever does not know the code is refused."""
        guest = GuestStream(stream, first[len(GUEST_MAGIC) :])
        knock = await guest.receive()
        if not isinstance(knock, Knock):
            raise ProtocolError(f"a connection that begins with {type(knock).__name__}")
        reason, shown = self._why_not(knock), self._shown
        code = None if reason else self._invitations.take(knock.number, now=trio.current_time())
        if code is None or shown is None:
            await guest.send(Declined(self._me, reason or "not invited"))
            return
        self._advertise(0)
        name, host = knock.party.name, remote_address_of(stream).host

        def reach(outcome: Outcome) -> None:
            shown.over = InvitationOver(outcome, name, host)

        reach("broken off")
        try:
            with shown.exchange, trio.move_on_after(EXCHANGE_S):
                await self._exchange(guest, knock, code, authenticated, reach)
        except PmeshError:
            pass  # what has been reached counts
        finally:
            self._invitations.finish(let_in=shown.over.outcome in LET_IN)
            shown.ended.set()
            self._note(shown.over, knock.party)
            await trio.aclose_forcefully(stream)

    def _why_not(self, knock: Knock) -> Reason | None:
        """Return why this machine can't get the key, before anything is computed for it."""
        if knock.party.protocol != self._me.protocol:
            return "version"
        if self._is_removed(knock.party.node):  # it would be refused with the key, too
            return "removed"
        if knock.tag:
            return "member" if knock.tag == namespace_tag(self._key()) else "other mesh"
        return None if knock.element is not None else "not invited"

    async def _exchange(
        self,
        guest: GuestStream,
        knock: Knock,
        code: Code,
        authenticated: Authenticated,
        reach: Callable[[Outcome], None],
    ) -> None:
        """Give the key to a guest that knows the code; call `reach` with what has been reached."""
        inviter = Inviter(code, self._me, self._key(), entropy=secrets.token_bytes)
        await guest.send(await trio.to_thread.run_sync(inviter.offer, knock))
        proof = await guest.receive()
        try:
            sealed = inviter.seal(proof) if isinstance(proof, Proof) else None
        except WrongCodeError:
            sealed = None
        if sealed is None:
            reach("wrong code")
            await guest.send(Declined(self._me, "wrong code"))
            return
        authenticated()
        reach("key sent")
        await guest.send(sealed)
        if isinstance(await guest.receive(), KeyStored):
            reach("joined")

    def _note(self, over: InvitationOver, party: Party) -> None:
        who = f"{over.name} ({short_node(party.node)}) at {over.host}"
        text = {
            "joined": f"{who} has the mesh key, by a code of 'pmesh invite'",
            "key sent": f"{who} was sent the mesh key, by a code of 'pmesh invite'",
            "wrong code": f"{who} tried a wrong code of 'pmesh invite'",
        }.get(over.outcome, f"{who} tried a code of 'pmesh invite', and broke off")
        self._noticed(News(kind="invitation", text=text, names=(over.name,)))
