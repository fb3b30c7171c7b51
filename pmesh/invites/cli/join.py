"""`pmesh join`: gets the mesh key from the machine that has shown a code."""

import contextlib
import dataclasses
import functools
import getpass
import os
import secrets
import shlex
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, assert_never

import trio

from pmesh.agent.config import AgentSettings, load_settings
from pmesh.agent.home import (
    NODE_KEY_BYTES,
    hold_home,
    load_mesh_key,
    load_node_key,
    open_home,
    write_private,
)
from pmesh.agent.host_port import parse_host_port
from pmesh.agent.mesh.keyring import latest_key, store_first_key
from pmesh.core.identity.keys import MeshKey, NodeKey, mesh_key_text, namespace_tag
from pmesh.core.wire.framing import GUEST_MAGIC
from pmesh.core.wire.link import PROTOCOL_VERSION, Address
from pmesh.errors import (
    ConfigError,
    KeyFileError,
    MachineRemoved,
    PeerUnreachable,
    PmeshError,
    ProtocolError,
    ProtocolVersionMismatch,
    UsageError,
)
from pmesh.home_paths import MESH_KEY_NAME, check_home, home_directory
from pmesh.ids import short_node
from pmesh.invites.agent import EXCHANGE_S, GuestStream
from pmesh.invites.cli.find import find_inviter
from pmesh.invites.rules.codes import Code, parse_code
from pmesh.invites.rules.exchange import Guest, WrongCodeError
from pmesh.invites.wire import Declined, InviterHalf, KeyStored, Knock, Party, SealedKey, WrongCode
from pmesh.net.links.dialer import dial
from pmesh.terminal.lines import complain, say

_PROMPT: Final = "Type the code that 'pmesh invite' shows (you don't see it), and press Return: "
_AGAIN: Final = "a code is good for one try: for a new one, type there 'pmesh invite'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Newcomer:
    """The machine that is to join."""

    settings: AgentSettings
    node_key: NodeKey
    mesh_key: MeshKey | None = field(repr=False)
    """The one that it has already."""

    @property
    def party(self) -> Party:
        return Party(self.node_key.node, self.settings.name, PROTOCOL_VERSION)


def join_mesh(
    home: Path | None, typed: Sequence[str], *, peer: str | None, then_up: bool, replace: bool
) -> None:
    """Get the mesh key, and store it as `pmesh key set` does.

    Args:
        home: The agent's home directory; None for the usual one.
        typed: The code, in one or several words; none to ask for it.
        peer: HOST:PORT of the machine that invites; None to look for it by mDNS.
        then_up: False to say what to type next.
        replace: Take the key also if this machine holds that of another mesh.

    Raises:
        ConfigError: This is no code, or no address.
        KeyFileError: This machine holds the key of another mesh, or the key can't be written.
        AgentAlreadyRunning: It would go on with the key that is to be replaced.
        UsageError: The code is wrong, or was used, or is over.
        PeerUnreachable: No machine invites by this number, or it can't be reached.
    """
    directory = home_directory(home)
    check_home(directory, holds_keys=True)  # before the user is asked for anything
    address = _parse_peer(peer)
    code = _parse_code(" ".join(typed) or _ask_code())
    newcomer = _load(open_home(directory))
    if address is None:
        complain(f"looking for the machine that invites by the number {code.number} …")

    def join(newcomer: Newcomer) -> Party:
        return trio.run(_join, code, newcomer, address)

    former = None
    with hold_home(directory) if replace else contextlib.nullcontext():
        try:
            inviter = join(newcomer)
        except KeyFileError:
            if not replace or newcomer.mesh_key is None:
                raise
            former = _keep_beside(newcomer.settings.home, newcomer.mesh_key)
            inviter = join(dataclasses.replace(newcomer, mesh_key=None))
    if newcomer.mesh_key is not None and former is None:
        say(f"this machine is already a member of the mesh of {inviter.name}")
    else:
        say(f"This machine has the mesh key of {inviter.name}, in {directory / MESH_KEY_NAME}.")
    if former is not None:
        say(f"The key of the mesh that it has left is in {former}.")
    if not then_up:
        words = ["pmesh", "up"]
        words += [] if home is None else ["--home", str(home)]
        words += [] if address is None else ["--peer", str(address)]
        say(f"Type next: {shlex.join(words)}")


def _load(home: Path) -> Newcomer:
    settings = load_settings(home, flags={}, environment=os.environ, host_name=socket.gethostname())
    node_key = load_node_key(home, entropy=secrets.token_bytes(NODE_KEY_BYTES))
    key = load_mesh_key(home)
    key = None if key is None else latest_key(home, key)
    return Newcomer(settings=settings, node_key=node_key, mesh_key=key)


def _keep_beside(home: Path, key: MeshKey) -> Path:
    """Write the key of the mesh that is left where `pmesh key set` can read it."""
    path = home / f"{MESH_KEY_NAME}.replaced"
    write_private(path, f"{mesh_key_text(key)}\n".encode())
    return path


def _parse_code(text: str) -> Code:
    try:
        return parse_code(text)
    except ValueError as e:
        raise ConfigError(f"{e}; 'pmesh invite' on a machine of the mesh shows a code") from e


def _parse_peer(text: str | None) -> Address | None:
    if text is None:
        return None
    try:
        host, port = parse_host_port(text)
    except ValueError as e:
        raise ConfigError(f"--peer {text}: {e}") from e
    if not (host and port):
        raise ConfigError(f"--peer {text}: it must be HOST:PORT")
    return Address(host, port)


def _ask_code() -> str:
    if not sys.stdin.isatty():
        raise ConfigError("'pmesh join' needs the code that 'pmesh invite' shows: pmesh join CODE")
    try:
        return getpass.getpass(_PROMPT)
    except EOFError:
        return ""


async def _join(code: Code, newcomer: Newcomer, address: Address | None) -> Party:
    if address is not None:
        stream = await dial(address)
    elif newcomer.settings.mdns:
        stream = await find_inviter(code.number, newcomer.settings, newcomer.node_key)
    else:
        raise ConfigError("mDNS is switched off here; type: pmesh join CODE --peer HOST:PORT")
    async with stream:
        store = functools.partial(store_first_key, newcomer.settings.home)
        with trio.move_on_after(EXCHANGE_S):
            return await get_key(stream, code, newcomer, store)
    raise PeerUnreachable(f"the other machine did not answer in {EXCHANGE_S:g} s; {_AGAIN}")


async def get_key(
    stream: trio.abc.Stream, code: Code, newcomer: Newcomer, store: Callable[[MeshKey], None]
) -> Party:
    """Get the mesh key over a connection and store it; return what the inviter says of itself.

    A newcomer that has a mesh key only asks whether it is the same.

    Raises:
        UsageError: The code is wrong, or was used, or is over; or the newcomer's key is another.
        ProtocolVersionMismatch: The other machine runs another version of pmesh.
        PeerUnreachable: The connection has ended, or something else than pmesh answers.
    """
    guest = GuestStream(stream)
    try:
        if newcomer.mesh_key is not None:
            tag = namespace_tag(newcomer.mesh_key)
            await guest.send(Knock(newcomer.party, code.number, None, tag), after=GUEST_MAGIC)
            return _member_of(await guest.receive(), newcomer)
        exchange = Guest(code, newcomer.party, entropy=secrets.token_bytes)
        await guest.send(exchange.knock, after=GUEST_MAGIC)
        return await _exchange(guest, exchange, newcomer, store)
    except (PeerUnreachable, ProtocolError) as e:
        raise PeerUnreachable(f"the machine did not finish the exchange: {e}; {_AGAIN}") from e


async def _exchange(
    guest: GuestStream, exchange: Guest, newcomer: Newcomer, store: Callable[[MeshKey], None]
) -> Party:
    offer = await guest.receive()
    if not isinstance(offer, InviterHalf):
        raise _why_declined(offer, newcomer)
    try:
        proof = exchange.prove(offer)
    except WrongCodeError:
        await guest.send(WrongCode())
        raise _wrong_code(offer.party) from None
    await guest.send(proof)
    sealed = await guest.receive()
    if not isinstance(sealed, SealedKey):
        raise _why_declined(sealed, newcomer)
    store(exchange.open(sealed))
    # It is stored, whether the inviter learns it or not, and however long the disk took.
    with trio.CancelScope(shield=True), contextlib.suppress(PeerUnreachable):
        await guest.send(KeyStored())
    return offer.party


def _member_of(reply: object, newcomer: Newcomer) -> Party:
    if isinstance(reply, Declined) and reply.reason == "member":
        return reply.party
    raise _why_declined(reply, newcomer)


def _wrong_code(party: Party) -> PmeshError:
    return UsageError(f"this is not the code that {party.name} shows; {_AGAIN}")


def _why_declined(reply: object, newcomer: Newcomer) -> PmeshError:  # noqa: PLR0911 - one for each reason
    if not isinstance(reply, Declined):
        return ProtocolError(f"it sent {type(reply).__name__}")
    name = reply.party.name
    match reply.reason:
        case "version":
            return ProtocolVersionMismatch(
                f"{name} speaks version {reply.party.protocol} of the protocol, this machine "
                f"{PROTOCOL_VERSION}; install the same version of pmesh on both"
            )
        case "removed":
            return MachineRemoved(
                f"this machine was removed from the mesh of {name}, and gets no key; to let it in "
                f"again, type there: pmesh remove --undo {short_node(newcomer.party.node)}; then "
                "'pmesh join' again, with the same code"
            )
        case "not invited":
            return UsageError(
                f"{name} shows no such code now: it is over after ten minutes or one try; for a "
                "new one, type there 'pmesh invite'"
            )
        case "other mesh":
            path = newcomer.settings.home / MESH_KEY_NAME
            return KeyFileError(
                f"this machine holds the key of another mesh than {name}, in {path}; to leave that "
                "mesh, type: pmesh down; then 'pmesh join --replace', with the same code"
            )
        case "wrong code":
            return _wrong_code(reply.party)
        case "member":
            return ProtocolError("it took this machine for a member")
        case _:
            assert_never(reply.reason)
