"""A door in a process of its own: prints its port, and its memory and counters when asked."""

import sys

import msgspec
import psutil
import trio

from pmesh.net.links import acceptor
from pmesh.net.links.acceptor import Acceptor, Authenticated
from pmesh.net.links.path import shake_hands
from tests.worlds.nodes import ADAS, ADAS_HELLO

PATIENCE_S = 60.0
"""With each; on a busy machine five seconds are over for the first before the last has come."""


async def on_link(stream: trio.SocketStream, first: bytes, authenticated: Authenticated) -> None:
    await shake_hands(
        stream,
        contexts=ADAS,
        server_side=True,
        hello=lambda _: ADAS_HELLO,
        first_bytes=first,
        timeout_s=PATIENCE_S,
    )
    authenticated()


async def on_lane(_stream: trio.SocketStream, _lane: bytes, _: Authenticated) -> None:
    await trio.sleep_forever()


def tell(value: object) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


async def main() -> None:
    setattr(acceptor, "PENDING_TIMEOUT_S", PATIENCE_S)  # noqa: B010 - it is final
    door = Acceptor(on_link=on_link, on_lane=on_lane)
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        await nursery.start(door.serve, listeners)
        tell(listeners[0].socket.getsockname()[1])
        while await trio.to_thread.run_sync(sys.stdin.readline):
            tell((psutil.Process().memory_info().rss, door.counters))
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
