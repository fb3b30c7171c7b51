"""A stream whose bytes a third agent forwards: windows, ends, and TLS from end to end."""

from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from pmesh.core.links.relaying import WINDOW_BYTES, Forwarding
from pmesh.core.wire.relays import MAX_RELAYED_BYTES, Relay
from pmesh.ids import NodeId
from pmesh.net.links.path import Path
from pmesh.net.links.relayed import RelayedStream
from tests.net.links.links import outcomes
from tests.worlds.nodes import ADAS, ADAS_HELLO, BOBS, BOBS_HELLO


class ForwardingAgent:
    """The agent between two ends, which forwards at once; ends are named by their node ids."""

    def __init__(self) -> None:
        small, large = BOBS_HELLO.member.node, ADAS_HELLO.member.node
        assert small < large  # the smaller one opens
        self.forwarding = Forwarding()
        self.said: list[Relay] = []
        self.closed: list[NodeId] = []
        self.small, self.large = self._end(small, large), self._end(large, small)

    def _end(self, own: NodeId, far: NodeId) -> RelayedStream:
        def tell(message: Relay) -> None:
            self.said.append(message)
            onward = self.forwarding.forward(own, message, reachable=True)
            if onward is not None:
                end = self.small if onward.to == self.large.far else self.large
                end.take(onward.message)

        return RelayedStream(far, 1, tell=tell, closed=lambda: self.closed.append(own))


async def is_blocked(send: Callable[[], Awaitable[None]]) -> bool:
    """Whether this waits for something else to happen."""
    done = False

    async def run() -> None:
        nonlocal done
        await send()
        done = True

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    return not done


async def test_bytes_arrive_in_order_in_pieces_of_a_limited_size() -> None:
    between = ForwardingAgent()
    sent = bytes(range(256)) * 1024
    received = bytearray()

    async def send() -> None:
        await between.small.send_all(sent)
        await between.small.send_eof()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        while data := await between.large.receive_some(10_000):
            received += data
    assert received == sent
    assert max(len(message.data) for message in between.said) == MAX_RELAYED_BYTES


async def test_a_sender_waits_until_the_other_end_has_read() -> None:
    between = ForwardingAgent()
    await between.small.send_all(bytes(WINDOW_BYTES))
    assert await is_blocked(lambda: between.small.send_all(b"x"))
    await between.large.receive_some(WINDOW_BYTES // 2)
    await between.small.send_all(bytes(WINDOW_BYTES // 2))
    assert await is_blocked(lambda: between.small.send_all(b"x"))


async def test_what_came_before_the_end_is_read_before_it() -> None:
    between = ForwardingAgent()
    await between.small.send_all(b"last words")
    await between.small.aclose()
    assert await between.large.receive_some() == b"last words"
    assert await between.large.receive_some() == b""
    await between.large.aclose()
    assert sorted(between.closed) == sorted([between.small.far, between.large.far])
    assert len(between.forwarding) == 0


async def test_who_waits_learns_that_nobody_forwards_any_more() -> None:
    between = ForwardingAgent()
    await between.small.send_all(bytes(WINDOW_BYTES))

    async def wait_to_receive() -> None:
        with pytest.raises(trio.BrokenResourceError):
            await between.small.receive_some()

    async def wait_to_send() -> None:
        with pytest.raises(trio.BrokenResourceError):
            await between.small.send_all(b"x")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_to_receive)
        nursery.start_soon(wait_to_send)
        await trio.testing.wait_all_tasks_blocked()
        between.small.break_off()
    said = len(between.said)
    await between.small.aclose()
    assert len(between.said) == said  # there is nobody to tell


async def test_a_closed_end_can_not_be_used() -> None:
    between = ForwardingAgent()
    await between.small.aclose()
    await between.small.aclose()
    with pytest.raises(trio.ClosedResourceError):
        await between.small.receive_some()
    with pytest.raises(trio.ClosedResourceError):
        await between.small.send_all(b"x")
    with pytest.raises(trio.ClosedResourceError):
        await between.small.send_eof()


@pytest.mark.parametrize(
    "message",
    [
        Relay(NodeId(b"x" * 32), 1, data=bytes(MAX_RELAYED_BYTES)),
        Relay(NodeId(b"x" * 32), 1, read=1),
    ],
    ids=["too much is sent", "more was read than sent"],
)
async def test_an_end_that_exceeds_the_window_is_given_up(message: Relay) -> None:
    between = ForwardingAgent()
    for _ in range(WINDOW_BYTES // MAX_RELAYED_BYTES + 1):
        between.small.take(message)
    with pytest.raises(trio.BrokenResourceError):
        await between.small.receive_some()


async def test_a_handshake_runs_through_it_and_the_one_between_sees_only_ciphertext() -> None:
    between = ForwardingAgent()
    bob, ada = await outcomes(
        (between.small, between.large), client=(BOBS, BOBS_HELLO), server=(ADAS, ADAS_HELLO)
    )
    assert isinstance(bob, Path)
    assert isinstance(ada, Path)
    assert (bob.peer, ada.peer) == (ADAS_HELLO, BOBS_HELLO)
    seen = b"".join(message.data for message in between.said)
    assert len(seen) > 1000
    assert not any(bytes(hello.member.node) in seen for hello in (ADAS_HELLO, BOBS_HELLO))
    for stream in (between.small, between.large):
        await trio.aclose_forcefully(stream)
