"""One question for a later mesh key: what each end does with whatever the other says."""

from collections.abc import Callable

import msgspec
import pytest
import trio
import trio.testing

from pmesh.core.identity.keys import MeshKey, namespace_tag
from pmesh.core.identity.rotations import MAX_ROTATION_BYTES, Rotation, sign_rotation
from pmesh.core.wire.framing import RENEWAL_BYTES, RENEWAL_MAGIC, FirstBytes, frame, recognize
from pmesh.errors import MeshKeyMismatch, PeerUnreachable, PmeshError, ProtocolError
from pmesh.ids import NodeId
from pmesh.net.links.path import Wire
from pmesh.net.links.renewal import ask_for_rotation, give_rotation
from pmesh.net.links.tls import TlsContexts, TlsProtocol
from tests.net.links.links import tcp_streams
from tests.worlds.nodes import ADA, ADAS, BOB, BOBS, MESH, STRANGERS

TAG = namespace_tag(MESH)
ROTATION = sign_rotation(BOB, MeshKey(bytes(range(32))), [ADA.node, BOB.node], before=None)


async def meet(
    *,
    client: TlsContexts = ADAS,
    contexts: Callable[[bytes], TlsContexts | None] = lambda tag: BOBS if tag == TAG else None,
    rotation_for: Callable[[NodeId], Rotation | None] = lambda _: ROTATION,
    trusts: Callable[[NodeId], bool] = lambda node: node == BOB.node,
    tag: bytes = TAG,
) -> list[Rotation | NodeId | PmeshError]:
    """What comes of it for the one that asks, and for the one that is asked."""
    results: dict[str, Rotation | NodeId | PmeshError] = {}
    async with tcp_streams() as (dialled, accepted), trio.open_nursery() as nursery:

        async def give() -> None:
            first = bytes(await accepted.receive_some(RENEWAL_BYTES + 3))
            try:
                results["asked"] = await give_rotation(
                    accepted,
                    first,
                    contexts=contexts,
                    rotation_for=rotation_for,
                    authenticated=lambda: None,
                )
            except PmeshError as e:
                results["asked"] = e
                await accepted.aclose()

        nursery.start_soon(give)
        assert isinstance(dialled, trio.SocketStream)
        try:
            results["asks"] = await ask_for_rotation(
                dialled, tag=tag, contexts=client, trusts=trusts
            )
        except PmeshError as e:
            results["asks"] = e
    return [results["asks"], results["asked"]]


async def test_a_member_with_the_old_key_gets_the_rotation_and_both_know_the_other() -> None:
    assert await meet() == [ROTATION, ADA.node]


@pytest.mark.parametrize(
    ("what", "asks", "asked"),
    [
        pytest.param({"tag": bytes(8)}, PeerUnreachable, PeerUnreachable, id="an unknown tag"),
        pytest.param(
            {"rotation_for": lambda _: None}, PeerUnreachable, PeerUnreachable, id="no place"
        ),
        pytest.param({"client": STRANGERS}, MeshKeyMismatch, MeshKeyMismatch, id="another key"),
        pytest.param(
            {"contexts": lambda _: STRANGERS}, MeshKeyMismatch, MeshKeyMismatch, id="not that key"
        ),
    ],
)
async def test_who_proves_less_gets_nothing(
    what: dict[str, object], asks: type[PmeshError], asked: type[PmeshError]
) -> None:
    results = await meet(**what)  # type: ignore[arg-type] # of the right kinds
    assert [type(result) for result in results] == [asks, asked]


async def test_nothing_is_taken_from_a_node_that_is_not_trusted() -> None:
    asks, _ = await meet(trusts=lambda _: False)
    assert isinstance(asks, PeerUnreachable)
    assert "no member that this machine knows" in str(asks)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        pytest.param(b"", "not a rotation", id="nothing"),
        pytest.param(b"\xc1garbage", "not a rotation", id="garbage"),
        pytest.param(b"\x91" * 5000, "not a rotation", id="arrays all the way down"),
        pytest.param(bytes(MAX_ROTATION_BYTES + 1), "are allowed", id="too long"),
        pytest.param(
            msgspec.msgpack.encode(msgspec.structs.replace(ROTATION, number=9)),
            "has not signed",
            id="another number",
        ),
    ],
)
async def test_an_answer_that_no_pmesh_gives_is_a_protocol_error(answer: bytes, why: str) -> None:
    async with tcp_streams() as (dialled, accepted), trio.open_nursery() as nursery:

        async def lie() -> None:
            await accepted.receive_some(RENEWAL_BYTES)
            wire = Wire(accepted, TlsProtocol(BOBS, server_side=True))
            await wire.handshake(b"")
            await wire.send(frame(answer))
            await wire.part()

        nursery.start_soon(lie)
        assert isinstance(dialled, trio.SocketStream)
        with pytest.raises(ProtocolError, match=why):
            await ask_for_rotation(dialled, tag=TAG, contexts=ADAS, trusts=lambda _: True)
        nursery.cancel_scope.cancel()


async def test_who_does_not_answer_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    async with tcp_streams() as (dialled, _):
        assert isinstance(dialled, trio.SocketStream)
        with pytest.raises(PeerUnreachable, match="no later mesh key"):
            await ask_for_rotation(dialled, tag=TAG, contexts=ADAS, trusts=lambda _: True)
    assert autojump_clock.current_time() == pytest.approx(5)


def test_its_first_bytes_are_recognized_as_early_as_they_are_certain() -> None:
    first = RENEWAL_MAGIC + TAG
    kinds = [recognize(first[:count]) for count in range(RENEWAL_BYTES + 1)]
    assert kinds == [FirstBytes.TOO_FEW] * RENEWAL_BYTES + [FirstBytes.RENEWAL]
    assert recognize(first[:7] + b"x") is FirstBytes.GARBAGE
