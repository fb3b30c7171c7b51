"""Handshakes and links between Ada, who dials, and Bob."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import trio
import trio.testing

from pmesh.core.wire.link import Hello
from pmesh.core.wire.views import Flushed
from pmesh.errors import (
    PmeshError,
)
from pmesh.net.links.path import Path, shake_hands
from pmesh.net.links.tls import TlsContexts
from tests.worlds.builders import (
    completed,
    make_flushed,
    make_member,
    make_report,
    make_roster,
    make_view,
)
from tests.worlds.nodes import ADAS, ADAS_HELLO, BOBS, BOBS_HELLO

Streams = tuple[trio.abc.HalfCloseableStream, trio.abc.HalfCloseableStream]
Outcome = Path | PmeshError


@asynccontextmanager
async def tcp_streams() -> AsyncIterator[Streams]:
    """A real connection: only there a reset can destroy what was said last."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        port = listener.socket.getsockname()[1]
        dialled = await trio.open_tcp_stream("127.0.0.1", port)
        async with dialled, await listener.accept() as accepted:
            yield dialled, accepted


async def outcomes(
    streams: Streams,
    *,
    client: tuple[TlsContexts, Hello] = (ADAS, ADAS_HELLO),
    server: tuple[TlsContexts, Hello] = (BOBS, BOBS_HELLO),
) -> list[Outcome]:
    """What comes of a handshake at the one that dials, and at the one that accepts."""
    results: list[Outcome] = []

    async def side(who: tuple[TlsContexts, Hello], *, server_side: bool) -> Outcome:
        contexts, hello = who
        try:
            return await shake_hands(
                streams[server_side],
                contexts=contexts,
                server_side=server_side,
                hello=lambda _: hello,
            )
        except PmeshError as e:
            return e

    async def accepting() -> None:
        results.append(await side(server, server_side=True))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(accepting)
        dialled = await side(client, server_side=False)
    return [dialled, *results]


def wire_of(link: Path) -> Any:  # noqa: ANN401 - trio's streams have no common type
    """What sends and receives the bytes of a link, for what only a faulty member does."""
    return link._wire  # noqa: SLF001


async def crash(link: Path) -> None:
    """End the connection of one side as a crash of its agent does."""
    await trio.aclose_forcefully(wire_of(link).stream)


@asynccontextmanager
async def linked(streams: Streams | None = None) -> AsyncIterator[tuple[Path, Path]]:
    """Ada, who dialled, and Bob; their writers run."""
    ada, bob = await outcomes(streams or trio.testing.memory_stream_pair())
    assert isinstance(ada, Path)
    assert isinstance(bob, Path)
    async with AsyncExitStack() as stack:
        for link in (ada, bob):
            stack.push_async_callback(crash, link)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ada.run_writer)
            nursery.start_soon(bob.run_writer)
            yield ada, bob
            nursery.cancel_scope.cancel()


def answer(size: int) -> Flushed:
    """A message of about so many bytes, up to 200 KiB."""
    bob = make_member("b")
    op = completed(0, *[2**62] * 220)  # 2 KiB
    report = make_report(make_roster(bob), {place: [op] for place in range(size // 2048)})
    return make_flushed(bob, make_view(1, bob), jobs=[report])
