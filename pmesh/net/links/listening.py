"""Lets Linux answer a connection over the interface at which it came in.

Linux answers by its routes. Of two interfaces in one network (two cables between two machines, with
self-assigned addresses; a cable and Wi-Fi to one router) only one has the route, and an answer that
leaves by the other reaches nobody, as the dialler is bound to an interface. A connection that was
accepted by a socket bound to an interface stays there. macOS answers from the interface that has
the address which was dialled.
"""

import contextlib
import socket
from collections.abc import Callable, Sequence

import trio

from pmesh.core.links.addresses import LocalAddress, interfaces_that_share_a_network
from pmesh.net.links.interfaces import POLL_S, SO_BINDTODEVICE, AddressWatch

BACKLOG = 128


async def listen_at_interfaces(
    listeners: Sequence[trio.SocketListener],
    watch: AddressWatch,
    add: Callable[[trio.SocketListener], None],
) -> None:
    """Listen at each interface that may share a network with another, until cancelled.

    Args:
        listeners: Those of all interfaces.
        watch: The interfaces.
        add: Called with each listener, which it must close.
    """
    bound: dict[tuple[str, int], list[trio.SocketListener]] = {}
    addresses: tuple[LocalAddress, ...] = ()
    while True:
        addresses = await watch.changed_from(addresses)
        try:
            numbers = {name: number for number, name in socket.if_nameindex()}
        except OSError:  # no descriptor is left now
            addresses = ()
            await trio.sleep(POLL_S)
            continue
        names = interfaces_that_share_a_network(addresses)
        if watch.is_restricted:  # with one that is not used
            names = frozenset(address.interface for address in addresses)
        # A cable that comes back may have another number.
        wanted = {(name, numbers[name]) for name in names if name in numbers}
        for gone in bound.keys() - wanted:
            for listener in bound.pop(gone):
                await listener.aclose()
        for new in wanted - bound.keys():
            bound[new] = [*_listen_at(new[0], listeners)]
            for listener in bound[new]:
                add(listener)
            watch.knows_arrivals = watch.is_restricted and len(bound[new]) == len(listeners)


def _listen_at(
    interface: str, listeners: Sequence[trio.SocketListener]
) -> list[trio.SocketListener]:
    """Return a listener at this interface beside each of these; fewer if the system refuses."""
    found: list[trio.SocketListener] = []
    for beside in listeners:
        with contextlib.suppress(OSError):  # before Linux 5.7; gone again; no descriptor is left
            found.append(_listen_beside(beside.socket, interface))
    return found


def _listen_beside(beside: trio.socket.SocketType, interface: str) -> trio.SocketListener:
    with contextlib.ExitStack() as on_error:
        bound = socket.socket(beside.family, socket.SOCK_STREAM)
        on_error.callback(bound.close)
        bound.setsockopt(socket.SOL_SOCKET, SO_BINDTODEVICE, interface.encode())
        if bound.family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # Two sockets may share a port if both allow it while the second begins to listen; later,
        # another agent must find it taken.
        for one in (beside, bound):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            bound.bind(beside.getsockname())
            bound.listen(BACKLOG)
        finally:
            for one in (beside, bound):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)
        on_error.pop_all()
    return trio.SocketListener(trio.socket.from_stdlib_socket(bound))
