"""On loopback, which every machine has; two cables are in tests/e2e/test_interfaces.py."""

import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest
import trio
import trio.testing

from pmesh.core.links.addresses import LocalAddress
from pmesh.net.links import acceptor
from pmesh.net.links.acceptor import listen_at_interfaces
from pmesh.net.links.interfaces import POLL_S, SO_BINDTODEVICE, AddressWatch
from tests.worlds.faults import Faults, Real

pytestmark = pytest.mark.skipif(not psutil.LINUX, reason="only Linux answers by its routes")

LOOPBACK = LocalAddress(interface="lo", host="127.0.0.1", prefix_bits=8, kind="wired")
GONE = LocalAddress(interface="gone9", host="127.0.0.2", prefix_bits=8, kind="wired")


class MovableWatch(AddressWatch):
    """A watch that a test moves by hand."""

    async def become(self, *addresses: LocalAddress) -> None:
        self._read = lambda: addresses
        await self._poll()
        await trio.testing.wait_all_tasks_blocked()


@asynccontextmanager
async def listening_beside(
    host: str, watch: AddressWatch
) -> AsyncIterator[tuple[trio.SocketListener, list[trio.SocketListener]]]:
    """The agent's own listener, and those that it gets besides."""
    (own,) = await trio.open_tcp_listeners(0, host=host)
    added: list[trio.SocketListener] = []
    async with own, trio.open_nursery() as nursery:
        nursery.start_soon(listen_at_interfaces, [own], watch, added.append)
        yield own, added
        nursery.cancel_scope.cancel()
    for listener in added:
        await listener.aclose()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_connection_stays_at_the_interface_at_which_it_came_in(host: str) -> None:
    watch = MovableWatch(only=["lo"])
    async with listening_beside(host, watch) as (own, added):
        await watch.become(LOOPBACK)
        (bound,) = added
        assert bound.socket.getsockname() == own.socket.getsockname()
        async with (
            await trio.open_tcp_stream(host, own.socket.getsockname()[1]),
            await bound.accept() as stream,
        ):
            name = stream.getsockopt(socket.SOL_SOCKET, SO_BINDTODEVICE, 16)
            assert name.rstrip(b"\0") == b"lo"
            assert watch.uses(stream)
            await watch.become(GONE)
            assert not watch.uses(stream)  # whatever its address
        assert bound.socket.fileno() == -1


async def test_the_port_stays_taken_for_another_agent() -> None:
    watch = MovableWatch(only=["lo"])
    async with listening_beside("127.0.0.1", watch) as (own, added):
        await watch.become(LOOPBACK)
        assert len(added) == 1
        with pytest.raises(OSError) as raised:  # noqa: PT011 - its number says which
            await trio.open_tcp_listeners(own.socket.getsockname()[1], host="127.0.0.1")
        assert raised.value.errno == errno.EADDRINUSE


async def test_interfaces_are_told_apart_only_where_two_have_one_network() -> None:
    watch = MovableWatch()
    async with listening_beside("127.0.0.1", watch) as (_, added):
        await watch.become(LOOPBACK)
        assert added == []
        await watch.become(LOOPBACK, GONE)  # the second one has just been pulled out
        assert len(added) == 1


async def test_a_system_that_refuses_keeps_the_agents_own_listener(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(acceptor, "SO_BINDTODEVICE", 9999)
    watch = MovableWatch(only=["lo"])
    async with listening_beside("127.0.0.1", watch) as (own, added):
        await watch.become(LOOPBACK)
        assert added == []
        async with (
            await trio.open_tcp_stream(*own.socket.getsockname()),
            await own.accept() as stream,
        ):
            assert watch.uses(stream)  # by its address alone
            await watch.become(GONE)
            assert not watch.uses(stream)


async def test_no_descriptor_to_ask_for_the_interfaces_is_no_end_of_listening(
    faults: Faults, autojump_clock: trio.testing.MockClock
) -> None:
    failures = [OSError(errno.EMFILE, "Too many open files")]

    def if_nameindex(real: Real) -> object:
        if failures:
            raise failures.pop()
        return real()

    faults.around(socket, "if_nameindex", if_nameindex)
    watch = MovableWatch(only=["lo"])
    async with listening_beside("127.0.0.1", watch) as (_, added):
        await watch.become(LOOPBACK)
        assert added == []
        await trio.sleep(POLL_S + 1)
        assert len(added) == 1
    assert autojump_clock.current_time() > POLL_S
