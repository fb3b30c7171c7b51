import socket
import struct
from collections.abc import Callable

import msgspec
import pytest
import trio
import trio.testing
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pmesh.core.identity.keys import NodeKey
from pmesh.core.identity.removals import sign_removal
from pmesh.core.links.delivery import pack
from pmesh.core.values import Removal
from pmesh.core.wire.channels import encode
from pmesh.core.wire.framing import frame
from pmesh.core.wire.link import PROTOCOL_VERSION, Leaving
from pmesh.errors import (
    MeshKeyMismatch,
    PeerUnreachable,
    ProtocolError,
    ProtocolVersionMismatch,
)
from pmesh.net.links.interfaces import UNKNOWN, local_address_of
from pmesh.net.links.path import MAX_QUEUED_BYTES, MAX_QUEUED_MESSAGES, Path, shake_hands
from pmesh.net.links.tls import TlsContexts, TlsFailed
from simulation.wire import decode_untrusted
from tests.net.links.links import answer, crash, linked, outcomes, tcp_streams, wire_of
from tests.worlds.faults import Faults
from tests.worlds.kept import kept
from tests.worlds.nodes import (
    ADA,
    ADAS,
    ADAS_HELLO,
    BOB,
    BOBS,
    BOBS_HELLO,
    OTHER_MESH,
    STRANGERS,
    hello_of,
    odd_leaf,
)


async def test_messages_arrive_in_order_both_ways() -> None:
    async with linked() as (ada, bob):
        sent = [answer(size) for size in (0, 100_000, 0, 300, 40_000)] + [Leaving()] * 50
        for message in sent:
            ada.send(message)
            bob.send(message)
        assert [decode_untrusted((await bob.receive()).message) for _ in sent] == sent
        assert [decode_untrusted((await ada.receive()).message) for _ in sent] == sent
        assert ada.messages_received == bob.messages_received == len(sent)
        assert ada.bytes_sent == bob.bytes_received


async def test_queued_messages_leave_in_one_record_and_one_send() -> None:
    streams = trio.testing.memory_stream_pair()
    sends = 0

    async with linked(streams) as (ada, bob):
        deliver = streams[0].send_stream.send_all_hook
        assert deliver is not None

        async def count() -> None:
            nonlocal sends
            sends += 1
            await deliver()

        streams[0].send_stream.send_all_hook = count
        before = ada.bytes_sent
        for _ in range(100):
            ada.send(Leaving())
        for _ in range(100):
            await bob.receive()
        assert sends == 1
        record = 5 + 1 + 16  # header, content type, tag: RFC 8446, 5.2
        assert ada.bytes_sent - before == record + 100 * len(frame(pack(0, 0, encode(Leaving()))))


async def test_a_receiver_may_give_up_and_come_back() -> None:
    async with linked() as (ada, bob):
        with trio.move_on_after(0):
            await bob.receive()
        ada.send(answer(60_000))
        assert decode_untrusted((await bob.receive()).message) == answer(60_000)


async def test_a_flood_of_messages_leaves_other_tasks_their_turn() -> None:
    async with linked() as (ada, bob):
        for _ in range(100):
            ada.send(Leaving())
        await bob.receive()
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                await trio.lowlevel.checkpoint()
                turns += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            for _ in range(99):
                await bob.receive()
            nursery.cancel_scope.cancel()
        assert turns >= 90


async def test_a_closed_link_delivers_what_was_queued_and_then_ends() -> None:
    async with tcp_streams() as streams, linked(streams) as (ada, bob):
        bob.send(answer(100_000))  # unread by Ada: a plain close would reset the connection
        await trio.testing.wait_all_tasks_blocked()
        ada.send(Leaving())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ada.aclose)
            assert decode_untrusted((await bob.receive()).message) == Leaving()
            with pytest.raises(trio.EndOfChannel):
                await bob.receive()
            await bob.aclose()
        await ada.aclose()  # again: nothing happens
        ada.send(Leaving())  # dropped
        with pytest.raises(trio.ClosedResourceError):
            await ada.receive()


async def test_a_reader_whose_end_is_the_writers_end_loses_no_farewell() -> None:
    """As agents run a link: one nursery for both, and what ends the reader ends the writer."""
    ada, bob = await outcomes(trio.testing.memory_stream_pair())
    assert isinstance(ada, Path)
    assert isinstance(bob, Path)

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ada.run_writer)
            with pytest.raises(trio.ClosedResourceError):
                await ada.receive()
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await trio.testing.wait_all_tasks_blocked()
        ada.send(Leaving())
        await trio.lowlevel.checkpoint()  # the writer has taken it
        nursery.start_soon(ada.aclose)
        assert decode_untrusted((await bob.receive()).message) == Leaving()
        with pytest.raises(trio.EndOfChannel):
            await bob.receive()
        await bob.aclose()


async def test_what_is_queued_in_the_moment_in_which_a_path_is_given_up_arrives() -> None:
    """As an agent ends a link: it tells why, and cancels whatever runs the path."""
    async with tcp_streams() as streams:
        ada, bob = await outcomes(streams)
        assert isinstance(ada, Path)
        assert isinstance(bob, Path)
        scope = trio.CancelScope()

        async def run() -> None:
            with scope:
                await ada.run_writer()
            await ada.aclose()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await trio.testing.wait_all_tasks_blocked()
            ada.send(Leaving())
            scope.cancel()
            assert decode_untrusted((await bob.receive()).message) == Leaving()
            with pytest.raises(trio.EndOfChannel):
                await bob.receive()
            await bob.aclose()


async def test_closing_wakes_whoever_receives(autojump_clock: trio.testing.MockClock) -> None:
    async with linked() as (ada, _), trio.open_nursery() as nursery:

        async def receive() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await ada.receive()

        nursery.start_soon(receive)
        await trio.testing.wait_all_tasks_blocked()
        await ada.aclose()
    assert autojump_clock.current_time() < 1


async def test_closing_takes_half_a_second_at_most_when_the_peer_does_not_answer(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with linked() as (ada, _):
        began = autojump_clock.current_time()
        await ada.aclose()
        assert autojump_clock.current_time() - began == pytest.approx(0.5)


async def test_a_connection_without_a_goodbye_is_broken() -> None:
    async with linked() as (ada, bob):
        await crash(ada)
        with pytest.raises(PeerUnreachable, match="without a goodbye"):
            await bob.receive()
        bob.send(Leaving())
        await trio.testing.wait_all_tasks_blocked()  # the writer has noticed, and has ended
        with pytest.raises(PeerUnreachable, match="broke"):
            await bob.receive()
        await bob.aclose()


async def test_a_reset_connection_is_broken() -> None:
    async with tcp_streams() as streams, linked(streams) as (_, bob):
        assert isinstance(streams[0], trio.SocketStream)
        # Closing with a linger time of 0 sends a reset.
        streams[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await streams[0].aclose()
        with pytest.raises(PeerUnreachable, match="broke"):
            await bob.receive()


async def speak(link: Path, data: bytes) -> None:
    await wire_of(link).send(data)  # as only a faulty member could


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff", frame(b"\xc1"), frame(encode(Leaving()) + b"!")]
)
async def test_a_member_that_sends_garbage_is_named(data: bytes) -> None:
    async with linked() as (ada, bob):
        await speak(ada, data)
        with pytest.raises(ProtocolError, match="unknown:0"):
            await bob.receive()


async def test_a_forged_record_ends_the_link_and_is_not_blamed_on_the_peer() -> None:
    async with linked() as (ada, bob):
        await wire_of(ada).stream.send_all(b"\x17\x03\x03\x00\x20" + bytes(32))
        with pytest.raises(PeerUnreachable, match=r"is garbled: .*bad record mac"):
            await bob.receive()


async def stuffed(link: Path, queue: Callable[[], None]) -> None:
    """Stop the peer's reading, then queue."""
    async with trio.open_nursery() as nursery:

        async def receive() -> None:
            with pytest.raises(PeerUnreachable, match="has stopped reading"):
                await link.receive()

        nursery.start_soon(receive)
        await trio.testing.wait_all_tasks_blocked()
        queue()
    with pytest.raises(PeerUnreachable, match="has stopped reading"):
        await link.receive()


@pytest.mark.parametrize(
    ("size", "count"),
    [(0, MAX_QUEUED_MESSAGES), (200_000, MAX_QUEUED_BYTES // 200_000)],
)
async def test_a_peer_that_stops_reading_ends_the_link(size: int, count: int) -> None:
    message = answer(size)
    queued = len(frame(encode(message))) if size else 0
    count = MAX_QUEUED_BYTES // queued if queued else count
    async with linked() as (ada, _):

        def queue() -> None:
            for _ in range(count + 1):
                ada.send(message)

        before = ada.bytes_sent
        await stuffed(ada, queue)
        await trio.testing.wait_all_tasks_blocked()
        assert ada.bytes_sent == before
        assert not kept(ada)["queue"]  # the memory is free
        began = trio.current_time()
        await ada.aclose()  # at once: nobody listens
        assert trio.current_time() - began < 0.4


async def test_a_full_queue_is_still_delivered() -> None:
    async with linked() as (ada, bob):
        for _ in range(MAX_QUEUED_MESSAGES):
            ada.send(Leaving())
        for _ in range(MAX_QUEUED_MESSAGES):
            await bob.receive()
        ada.send(Leaving())
        assert decode_untrusted((await bob.receive()).message) == Leaving()


async def test_what_has_been_sent_no_longer_counts_as_queued() -> None:
    async with linked() as (ada, bob):
        message = answer(200_000)
        for _ in range(MAX_QUEUED_BYTES // 200_000 + 2):
            ada.send(message)
            assert decode_untrusted((await bob.receive()).message) == message


async def test_a_member_can_not_pass_its_late_failure_off_as_another_key(faults: Faults) -> None:
    failed = TlsFailed(other_key=True, detail="tlsv1 alert unknown ca")
    async with linked() as (_, bob):
        faults.instead(wire_of(bob).tls, "next_event", lambda: failed)
        with pytest.raises(PeerUnreachable, match="is garbled: tlsv1 alert unknown ca"):
            await bob.receive()


async def test_no_goodbye_goes_into_the_middle_of_a_record() -> None:
    streams = trio.testing.memory_stream_pair()
    async with linked(streams) as (ada, bob):
        deliver = streams[0].send_stream.send_all_hook
        assert deliver is not None

        async def deliver_and_stall() -> None:
            await deliver()
            await trio.sleep_forever()

        streams[0].send_stream.send_all_hook = deliver_and_stall
        ada.send(Leaving())
        await trio.testing.wait_all_tasks_blocked()
        ada._writing.cancel()  # noqa: SLF001 - as the agent's nursery does
        await trio.testing.wait_all_tasks_blocked()
        before = ada.bytes_sent
        await ada.aclose()
        assert ada.bytes_sent == before
        assert decode_untrusted((await bob.receive()).message) == Leaving()
        with pytest.raises(PeerUnreachable, match="without a goodbye"):
            await bob.receive()


async def test_closing_a_broken_link_is_quiet() -> None:
    async with linked() as (ada, bob):
        await crash(bob)
        ada._writing.cancel()  # noqa: SLF001 - so that aclose itself finds out
        ada.send(Leaving())
        await ada.aclose()


async def test_both_sides_know_each_other_when_a_link_is_up() -> None:
    ada, bob = await outcomes(trio.testing.memory_stream_pair())
    assert isinstance(ada, Path)
    assert isinstance(bob, Path)
    assert (ada.peer, bob.peer) == (BOBS_HELLO, ADAS_HELLO)
    assert (ada.node, bob.node) == (BOB.node, ADA.node)
    assert ada.remote_address == UNKNOWN
    await crash(ada)
    await crash(bob)


async def test_a_link_knows_both_addresses_of_its_connection() -> None:
    async with tcp_streams() as streams, linked(streams) as (ada, bob):
        assert ada.remote_address == bob.local_address
        assert ada.local_address == bob.remote_address == local_address_of(streams[0])
        assert ada.remote_address.host == "127.0.0.1"
        assert str(ada.remote_address) in str(ada)


async def test_what_was_read_before_the_handshake_belongs_to_it() -> None:
    dialled, accepted = trio.testing.memory_stream_pair()
    results: list[Path] = []

    async def accept() -> None:
        first = bytes(await accepted.receive_some(21))
        link = await shake_hands(
            accepted, contexts=BOBS, server_side=True, hello=lambda _: BOBS_HELLO, first_bytes=first
        )
        results.append(link)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept)
        link = await shake_hands(
            dialled, contexts=ADAS, server_side=False, hello=lambda _: ADAS_HELLO
        )
    assert results[0].peer == ADAS_HELLO
    # Both have counted every byte at the socket, the handshake's too.
    assert (link.bytes_sent, link.bytes_received) == (
        results[0].bytes_received,
        results[0].bytes_sent,
    )


@pytest.mark.parametrize("stranger_dials", [True, False])
async def test_another_mesh_key_is_named_on_both_sides(*, stranger_dials: bool) -> None:
    stranger = (STRANGERS, BOBS_HELLO)
    async with tcp_streams() as streams:
        if stranger_dials:
            results = await outcomes(streams, client=stranger, server=(ADAS, ADAS_HELLO))
        else:
            results = await outcomes(streams, server=stranger)
    for result in results:
        assert isinstance(result, MeshKeyMismatch)
        assert "127.0.0.1:" in str(result)
        assert "holds another mesh key; copy this one with 'pmesh key show'" in str(result)


async def test_a_dialler_whom_only_the_server_refuses_learns_why() -> None:
    forged = odd_leaf(Ed25519PrivateKey.from_private_bytes(BOB.seed), mesh_key=OTHER_MESH)
    for _ in range(20):  # a reset would overtake the alert only now and then
        async with tcp_streams() as streams:
            results = await outcomes(streams, client=(TlsContexts.of(forged), BOBS_HELLO))
            assert [type(result) for result in results] == [MeshKeyMismatch, MeshKeyMismatch]


@pytest.mark.parametrize("newer_dials", [True, False])
async def test_another_version_is_named_on_both_sides_with_both_versions(
    autojump_clock: trio.testing.MockClock, *, newer_dials: bool
) -> None:
    newer = msgspec.structs.replace(BOBS_HELLO, protocol=PROTOCOL_VERSION + 1)
    streams = trio.testing.memory_stream_pair()
    if newer_dials:
        theirs, ours = await outcomes(streams, client=(BOBS, newer), server=(ADAS, ADAS_HELLO))
    else:
        ours, theirs = await outcomes(streams, server=(BOBS, newer))
    assert isinstance(ours, ProtocolVersionMismatch)
    assert f"speaks protocol {PROTOCOL_VERSION + 1}, this machine {PROTOCOL_VERSION};" in str(ours)
    # Whatever a newer version does with it: it has got the Hello of the one that refuses it. Here
    # it takes it for a link, and doesn't answer the goodbye.
    assert isinstance(theirs, Path)
    assert theirs.peer == ADAS_HELLO
    assert autojump_clock.current_time() == pytest.approx(0.5)


CARL = NodeKey.from_seed(b"carl" * 8)
REMOVED = sign_removal(CARL, ADA.node, {}, out=True)


async def test_a_hello_says_by_which_removal_its_receiver_gets_no_link() -> None:
    refuses = msgspec.structs.replace(BOBS_HELLO, removal=REMOVED)
    ada, bob = await outcomes(trio.testing.memory_stream_pair(), server=(BOBS, refuses))
    assert isinstance(ada, Path)
    assert ada.peer.removal == REMOVED
    assert isinstance(bob, Path)
    assert bob.peer.removal is None


@pytest.mark.parametrize(
    "removal",
    [
        pytest.param(msgspec.structs.replace(REMOVED, signature=bytes(64)), id="not signed"),
        pytest.param(sign_removal(CARL, BOB.node, {}, out=True), id="of another machine"),
        pytest.param(sign_removal(CARL, ADA.node, {}, out=False), id="that was undone"),
    ],
)
async def test_a_hello_with_any_other_removal_is_refused(removal: Removal) -> None:
    refuses = msgspec.structs.replace(BOBS_HELLO, removal=removal)
    ada, _ = await outcomes(trio.testing.memory_stream_pair(), server=(BOBS, refuses))
    assert isinstance(ada, ProtocolError)


async def test_a_node_can_not_pass_for_another(autojump_clock: trio.testing.MockClock) -> None:
    results = await outcomes(
        trio.testing.memory_stream_pair(), client=(ADAS, hello_of(BOB, "ada, really"))
    )
    assert isinstance(results[1], ProtocolError)
    assert "another node" in str(results[1])
    assert autojump_clock.current_time() < 1


async def test_a_leaf_over_a_p256_key_is_refused() -> None:
    leaf = TlsContexts.of(odd_leaf(ec.generate_private_key(ec.SECP256R1())))
    results = await outcomes(trio.testing.memory_stream_pair(), client=(leaf, ADAS_HELLO))
    assert isinstance(results[1], ProtocolError)
    assert "Ed25519" in str(results[1])
    assert isinstance(results[0], PeerUnreachable)
    assert "left before it sent a Hello" in str(results[0])


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 8, bytes(100_000)])
async def test_garbage_is_not_pmesh(garbage: bytes) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    await theirs.send_all(garbage)
    await theirs.send_eof()
    with pytest.raises(ProtocolError, match="does not speak pmesh"):
        await shake_hands(ours, contexts=ADAS, server_side=True, hello=lambda _: ADAS_HELLO)


async def test_silence_ends_after_5_s_and_closes_the_connection(
    autojump_clock: trio.testing.MockClock,
) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    began = autojump_clock.current_time()
    with pytest.raises(PeerUnreachable, match="did not finish the handshake within 5 s"):
        await shake_hands(ours, contexts=ADAS, server_side=True, hello=lambda _: ADAS_HELLO)
    assert autojump_clock.current_time() - began == pytest.approx(5.0)
    assert await theirs.receive_some() == b""


@pytest.mark.parametrize("server_side", [True, False])
async def test_a_connection_that_ends_early_is_unreachable(*, server_side: bool) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    await theirs.send_eof()
    with pytest.raises(PeerUnreachable, match="without a goodbye"):
        await shake_hands(ours, contexts=ADAS, server_side=server_side, hello=lambda _: ADAS_HELLO)


async def test_a_connection_that_breaks_in_the_handshake_is_unreachable() -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    await trio.aclose_forcefully(theirs)
    with pytest.raises(PeerUnreachable, match="broke"):
        await shake_hands(ours, contexts=ADAS, server_side=False, hello=lambda _: ADAS_HELLO)


async def test_a_cancelled_handshake_closes_its_connection() -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:

        async def shake() -> None:
            await shake_hands(ours, contexts=ADAS, server_side=True, hello=lambda _: ADAS_HELLO)

        nursery.start_soon(shake)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert await theirs.receive_some() == b""
