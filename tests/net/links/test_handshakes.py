import msgspec
import pytest
import trio
import trio.testing
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pmesh.core.wire.link import PROTOCOL_VERSION
from pmesh.errors import (
    MeshKeyMismatch,
    PeerUnreachable,
    ProtocolError,
    ProtocolVersionMismatch,
)
from pmesh.net.links.interfaces import UNKNOWN, local_address_of
from pmesh.net.links.link import Link, shake_hands
from pmesh.net.links.tls import TlsContexts
from tests.worlds.links import linked, outcomes, tcp_streams
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


async def test_both_sides_know_each_other_when_a_link_is_up() -> None:
    ada, bob = await outcomes(trio.testing.memory_stream_pair())
    assert isinstance(ada, Link)
    assert isinstance(bob, Link)
    assert (ada.peer, bob.peer) == (BOBS_HELLO, ADAS_HELLO)
    assert (ada.node, bob.node) == (BOB.node, ADA.node)
    assert ada.remote_address == UNKNOWN
    await trio.aclose_forcefully(ada._wire.stream)  # noqa: SLF001
    await trio.aclose_forcefully(bob._wire.stream)  # noqa: SLF001


async def test_a_link_knows_both_addresses_of_its_connection() -> None:
    async with tcp_streams() as streams, linked(streams) as (ada, bob):
        assert ada.remote_address == bob.local_address
        assert ada.local_address == bob.remote_address == local_address_of(streams[0])
        assert ada.remote_address.host == "127.0.0.1"
        assert str(ada.remote_address) in str(ada)


async def test_what_was_read_before_the_handshake_belongs_to_it() -> None:
    dialled, accepted = trio.testing.memory_stream_pair()
    results: list[Link] = []

    async def accept() -> None:
        first = bytes(await accepted.receive_some(21))
        link = await shake_hands(
            accepted, contexts=BOBS, server_side=True, hello=BOBS_HELLO, first_bytes=first
        )
        results.append(link)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept)
        link = await shake_hands(dialled, contexts=ADAS, server_side=False, hello=ADAS_HELLO)
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
    assert isinstance(theirs, Link)
    assert theirs.peer == ADAS_HELLO
    assert autojump_clock.current_time() == pytest.approx(0.5)


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
        await shake_hands(ours, contexts=ADAS, server_side=True, hello=ADAS_HELLO)


async def test_silence_ends_after_5_s_and_closes_the_connection(
    autojump_clock: trio.testing.MockClock,
) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    began = autojump_clock.current_time()
    with pytest.raises(PeerUnreachable, match="did not finish the handshake within 5 s"):
        await shake_hands(ours, contexts=ADAS, server_side=True, hello=ADAS_HELLO)
    assert autojump_clock.current_time() - began == pytest.approx(5.0)
    assert await theirs.receive_some() == b""


@pytest.mark.parametrize("server_side", [True, False])
async def test_a_connection_that_ends_early_is_unreachable(*, server_side: bool) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    await theirs.send_eof()
    with pytest.raises(PeerUnreachable, match="without a goodbye"):
        await shake_hands(ours, contexts=ADAS, server_side=server_side, hello=ADAS_HELLO)


async def test_a_connection_that_breaks_in_the_handshake_is_unreachable() -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    await trio.aclose_forcefully(theirs)
    with pytest.raises(PeerUnreachable, match="broke"):
        await shake_hands(ours, contexts=ADAS, server_side=False, hello=ADAS_HELLO)


async def test_a_cancelled_handshake_closes_its_connection() -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:

        async def shake() -> None:
            await shake_hands(ours, contexts=ADAS, server_side=True, hello=ADAS_HELLO)

        nursery.start_soon(shake)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert await theirs.receive_some() == b""
