"""Opens TCP connections to agents, and turns failures into errors of pmesh."""

import errno
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, TypeAlias

import psutil
import trio

from pmesh.core.links.addresses import BoundAddress, LocalAddress
from pmesh.core.wire.link import Address
from pmesh.errors import LocalNetworkDenied, NetworkError, PeerUnreachable
from pmesh.net.links.interfaces import SO_BINDTODEVICE

DIAL_TIMEOUT_S: Final = 5.0  # a lost SYN is sent again after 1 s and 3 s
STAGGER_S: Final = 0.25  # RFC 8305 section 8: between the starts of two attempts
AT_ONCE: Final = 4  # each costs a descriptor, and a peer may name addresses that do not exist

Connect: TypeAlias = Callable[[str, int], Awaitable[trio.SocketStream]]
"""Opens a TCP connection to a host and a port, as `trio.open_tcp_stream`."""

_IP_BOUND_IF: Final = 25  # <netinet/in.h> of macOS
_IPV6_BOUND_IF: Final = 125  # <netinet6/in6.h> of macOS


async def dial(
    address: Address,
    *,
    via: LocalAddress | None = None,
    timeout_s: float = DIAL_TIMEOUT_S,
    connect: Connect = trio.open_tcp_stream,
) -> trio.SocketStream:
    """Open a TCP connection to this address, without delay (TCP_NODELAY).

    Args:
        address: A host name's addresses are tried in parallel, as in RFC 8305.
        via: Packets leave by its interface, whatever the routes say; None for as they say. A host
            name must then have an address of the same version of IP; the first one is dialled.
        timeout_s: The limit.
        connect: Opens the connection, unless it is bound to an interface.

    Raises:
        PeerUnreachable: There was no answer, or the name is unknown.
        LocalNetworkDenied: macOS may be withholding its permission.
    """
    where = str(address)
    try:
        with trio.fail_after(timeout_s):
            if via is not None:
                return await _dial_bound(address, via)
            return await connect(address.host, address.port)
    except trio.TooSlowError as e:
        raise PeerUnreachable(f"{where} does not answer ({timeout_s:g} s)") from e
    except (OSError, ValueError, RuntimeError) as e:
        # ValueError: a name that can't be one. RuntimeError: no thread is left that could look up.
        # What trio has noted refers to the frames that noted it: they would wait for the collector.
        for leaf in (e, *_leaves(e)):
            leaf.__traceback__ = None
        raise _explain(e, address) from e


async def _dial_bound(address: Address, via: LocalAddress) -> trio.SocketStream:
    family = socket.AF_INET6 if ":" in via.host else socket.AF_INET
    found = await trio.socket.getaddrinfo(
        address.host, address.port, family=family, type=socket.SOCK_STREAM
    )
    connecting = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        await _bind_to_interface(connecting, via)
        await connecting.connect(found[0][4])
    except BaseException:
        connecting.close()
        raise
    return trio.SocketStream(connecting)


async def _bind_to_interface(connecting: trio.socket.SocketType, via: LocalAddress) -> None:
    """Let the socket's packets leave by the interface. Raises OSError if it is gone."""
    number = socket.if_nametoindex(via.interface)
    if psutil.MACOS:  # one route covers all of 169.254.0.0/16, and points at Wi-Fi
        if connecting.family == socket.AF_INET6:
            connecting.setsockopt(socket.IPPROTO_IPV6, _IPV6_BOUND_IF, number)
        else:
            connecting.setsockopt(socket.IPPROTO_IP, _IP_BOUND_IF, number)
        return
    try:
        connecting.setsockopt(socket.SOL_SOCKET, SO_BINDTODEVICE, via.interface.encode())
    except PermissionError:  # before Linux 5.7; the source address may choose the route
        scope = (0, number) if via.is_link_local_v6 else ()
        await connecting.bind((via.host, 0, *scope))


async def dial_any(
    addresses: Sequence[BoundAddress],
    *,
    timeout_s: float = DIAL_TIMEOUT_S,
    connect: Connect = trio.open_tcp_stream,
) -> tuple[trio.SocketStream, BoundAddress]:
    """Return the first connection that any of these addresses accepts, and which one did.

    They are tried in order, each 0.25 s after the previous one or as soon as that has failed, at
    most four at once: a machine may name interfaces that can't be reached from here.

    Args:
        addresses: At least one, the best first.
        timeout_s: The limit of each attempt.
        connect: As for `dial`.

    Raises:
        PeerUnreachable: None accepted; the message has each reason.
        LocalNetworkDenied: None accepted, and macOS may be withholding its permission.
    """
    winner: tuple[trio.SocketStream, BoundAddress] | None = None
    failures: list[tuple[Address, NetworkError]] = []
    turns = trio.Semaphore(AT_ONCE)

    async def attempt(bound: BoundAddress, failed: trio.Event, race: trio.CancelScope) -> None:
        nonlocal winner
        address, via = bound
        try:
            stream = await dial(address, via=via, timeout_s=timeout_s, connect=connect)
        except (PeerUnreachable, LocalNetworkDenied) as e:
            e.__traceback__ = None  # likewise: this frame refers to `failures`
            failures.append((address, e))
            failed.set()
            turns.release()
            return
        if winner is None:
            winner = stream, bound
            race.cancel()
        else:  # two connected in the same turn of the loop
            stream.socket.close()

    try:
        async with trio.open_nursery() as nursery:
            for address in addresses:
                await turns.acquire()
                failed = trio.Event()
                nursery.start_soon(attempt, address, failed, nursery.cancel_scope)
                with trio.move_on_after(STAGGER_S):
                    await failed.wait()
    except BaseException:  # cancelled in the same turn of the loop in which one connected
        if winner is not None:
            winner[0].socket.close()
        raise
    if winner is None:
        kind = LocalNetworkDenied if _any_denied(failures) else PeerUnreachable
        raise kind(_join(failures))
    return winner


def _explain(error: OSError | ValueError | RuntimeError, address: Address) -> NetworkError:
    where = str(address)
    codes = set(error_numbers(error))
    if psutil.MACOS and errno.EHOSTUNREACH in codes and _may_be_neighbour(address.host):
        return LocalNetworkDenied(
            f"{where} can't be reached: it is off, or macOS does not let this program talk to the "
            "local network; allow it in System Settings → Privacy & Security → Local Network"
        )
    if errno.ECONNREFUSED in codes:
        return PeerUnreachable(f"{where} refuses connections; does 'pmesh up' run there?")
    reasons = dict.fromkeys(_reasons(error))
    return PeerUnreachable(f"{where} can't be reached: {', '.join(reasons)}")


def _may_be_neighbour(host: str) -> bool:
    """True if macOS's local-network permission may apply; it may for every host name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return True
    return address.is_private and not address.is_loopback


def _leaves(error: BaseException) -> tuple[BaseException, ...]:
    """Return the errors in trio's "all attempts failed", one for each address of the name."""
    match error.__cause__:
        case BaseExceptionGroup(exceptions=attempts):
            return tuple(attempts)
        case _:
            return (error,)


def error_numbers(error: BaseException) -> Iterator[int]:
    """Yield the errno of an error, or of each attempt that trio grouped in it."""
    for leaf in _leaves(error):
        if isinstance(leaf, OSError) and leaf.errno is not None:
            yield leaf.errno


def _reasons(error: BaseException) -> Iterator[str]:
    for leaf in _leaves(error):
        text = (leaf.strerror or str(leaf)) if isinstance(leaf, OSError) else str(leaf)
        # trio adds the address as Python writes it, and ours is named already.
        yield text.rpartition("): ")[2] if text.startswith("Error connecting to (") else text


def _any_denied(failures: Sequence[tuple[Address, NetworkError]]) -> bool:
    return any(isinstance(failure, LocalNetworkDenied) for _, failure in failures)


def _join(failures: Sequence[tuple[Address, NetworkError]]) -> str:
    """Return each reason once: a machine that is off has the same one at all of its addresses."""
    found: dict[str, dict[str, None]] = {}
    for address, failure in failures:
        where = str(address)
        found.setdefault(str(failure).removeprefix(where), {})[where] = None
    return "; ".join(f"{_list_ends(list(ends))}{why}" for why, ends in found.items())


def _list_ends(ends: Sequence[str]) -> str:
    first, *others = ends
    if len(others) > 1:
        return f"{first} (and {len(others)} more addresses)"
    return f"{first} (and {others[0]})" if others else first
