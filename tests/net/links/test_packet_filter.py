"""What zeroconf need not read never reaches it."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zeroconf import DNSOutgoing, DNSQuestion  # type: ignore[attr-defined]
from zeroconf.asyncio import AsyncServiceInfo

from pmesh.core.identity.advertisement import (
    SERVICE_TYPE,
    Advertisement,
    encode,
    host_name,
    instance_name,
    judge_untrusted,
)
from pmesh.core.identity.keys import AdvertisementKey, MeshKey, NodeKey
from pmesh.core.wire.link import PROTOCOL_VERSION
from pmesh.ids import Incarnation
from pmesh.net.links.packet_filter import (
    PACKETS_PER_S,
    REPEATS_PER_S,
    DiscoveryCounters,
    FilteringLoop,
    PacketFilter,
)

MESH = AdvertisementKey.of(MeshKey(b"m" * 32))
OTHER_MESH = AdvertisementKey.of(MeshKey(b"o" * 32))
LACKS_KEY = AdvertisementKey(MESH.tag, b"guessed")
KEY, OWN_KEY = NodeKey.from_seed(b"k" * 32), NodeKey.from_seed(b"o" * 32)
THEIRS = Advertisement(
    tag=MESH.tag,
    node=KEY.node,
    incarnation=Incarnation(7),
    port=24160,
    name="mac-1",
    hosts=("10.0.0.1", "fe80::1"),
    minute=9,
)
RESPONSE, QUERY = 0x8400, 0x0000
PTR, CLASS_IN = 12, 1


def announcement(theirs: Advertisement = THEIRS, key: AdvertisementKey = MESH) -> bytes:
    """The packet in which zeroconf announces it."""
    service = AsyncServiceInfo(
        SERVICE_TYPE,
        instance_name(theirs.node),
        port=theirs.port,
        properties=encode(theirs, KEY, key),
        server=host_name(theirs.node),
        parsed_addresses=list(theirs.hosts),
    )
    out = DNSOutgoing(RESPONSE)
    for record in (
        service.dns_pointer(),
        service.dns_service(),
        service.dns_text(),
        *service.dns_addresses(),
    ):
        out.add_answer_at_time(record, 0)
    return b"".join(out.packets())


def question(name: str) -> bytes:
    out = DNSOutgoing(QUERY)
    out.add_question(DNSQuestion(name, PTR, CLASS_IN))
    return b"".join(out.packets())


class Filter:
    def __init__(self) -> None:
        self.now = 0.0
        self.counters = DiscoveryCounters()
        self.filter = PacketFilter(
            SERVICE_TYPE, OWN_KEY.node, MESH, self.counters, clock=lambda: self.now
        )

    def passed(self, packet: bytes, count: int) -> int:
        return sum(self.filter.passes(packet) for _ in range(count))


def test_each_announcement_of_our_mesh_passes_however_many_others_come() -> None:
    filter_ = Filter()
    for minute in range(1, 1000):
        assert filter_.passed(announcement(replace(THEIRS, minute=minute)), 1) == 1


def test_an_announcement_that_is_sent_again_and_again_passes_twice_a_second() -> None:
    """Whoever has heard it can change what is around it, so that it looks new."""
    filter_ = Filter()
    packets = [number.to_bytes(2, "big") + announcement()[2:] for number in range(1000)]
    assert sum(filter_.passed(packet, 1) for packet in packets) == 2 * REPEATS_PER_S
    filter_.now = 1.0
    assert sum(filter_.passed(packet, 1) for packet in packets) == REPEATS_PER_S


def test_announcements_with_our_tag_and_without_our_key_are_counted_and_dropped() -> None:
    filter_ = Filter()
    assert filter_.passed(announcement(key=LACKS_KEY), 1000) == 0
    cut = announcement().replace(b"mac=", b"mad=")
    assert filter_.passed(cut, 1) == 0
    assert filter_.counters.forged == 1001


@pytest.mark.parametrize(
    "packet",
    [
        pytest.param(
            announcement(replace(THEIRS, tag=OTHER_MESH.tag), OTHER_MESH), id="another mesh"
        ),
        pytest.param(
            announcement(replace(THEIRS, protocol=PROTOCOL_VERSION + 1)), id="another version"
        ),
        pytest.param(question(SERVICE_TYPE), id="a question"),
        pytest.param(question(host_name(OWN_KEY.node)), id="a question for our addresses"),
    ],
)
def test_of_what_others_send_a_few_a_second_pass(packet: bytes) -> None:
    filter_ = Filter()
    assert filter_.passed(packet, 1000) == 2 * PACKETS_PER_S
    filter_.now = 0.5
    assert filter_.passed(packet, 1000) == PACKETS_PER_S / 2
    filter_.now = 1000.0
    assert filter_.passed(packet, 1000) == 2 * PACKETS_PER_S
    assert filter_.passed(announcement(), 1) == 1
    assert filter_.counters.forged == 0


def test_what_does_not_concern_pmesh_is_dropped() -> None:
    assert Filter().passed(question("_ipp._tcp.local."), 10) == 0


@given(st.binary(max_size=300), st.integers(0))
def test_no_packet_makes_it_raise(noise: bytes, at: int) -> None:
    packet = announcement()
    place = at % len(packet)
    for forged in (noise, packet[:place] + noise + packet[place + len(noise) :], packet[:place]):
        Filter().filter.passes(forged)
        judge_untrusted(forged, key=MESH)


def test_an_entry_that_comes_twice_ends_the_record() -> None:
    entries = (b"v=%d" % PROTOCOL_VERSION, b"tag=" + MESH.tag.hex().encode(), b"tag=another")
    packet = b"".join(bytes([len(entry)]) + entry for entry in entries)
    assert judge_untrusted(packet, key=MESH) == "forged"  # by the first tag it claims to be ours


def test_a_loop_hands_on_only_what_passes() -> None:
    class DatagramRecorder(asyncio.DatagramProtocol):
        def __init__(self) -> None:
            self.heard: list[bytes] = []
            self.done = asyncio.Event()
            self.closed = asyncio.Event()

        def datagram_received(self, data: bytes, addr: object) -> None:
            del addr
            self.heard.append(data)
            self.done.set()

        def error_received(self, exc: Exception) -> None:
            del exc
            self.done.set()

        def connection_lost(self, exc: Exception | None) -> None:
            del exc
            self.closed.set()

    async def converse() -> DatagramRecorder:
        loop = asyncio.get_running_loop()
        transport, heard = await loop.create_datagram_endpoint(
            DatagramRecorder, local_addr=("127.0.0.1", 0)
        )
        where = transport.get_extra_info("sockname")
        transport.sendto(b"bad", where)
        transport.sendto(b"good", where)
        async with asyncio.timeout(10):
            await heard.done.wait()
        transport.close()
        await heard.closed.wait()
        return heard

    with asyncio.Runner(loop_factory=lambda: FilteringLoop(lambda data: data == b"good")) as runner:
        assert runner.run(converse()).heard == [b"good"]
