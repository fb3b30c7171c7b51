from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.identity.advertisement import (
    FRESH_MINUTES,
    MAX_ADDRESSES,
    MAX_NAME_BYTES,
    Advertisement,
    ForgedAdvertisement,
    decode_untrusted,
    encode,
    host_name,
    instance_name,
    node_of_instance_untrusted,
    read_packet_untrusted,
)
from pmesh.core.identity.keys import AdvertisementKey, MeshKey, NodeKey
from pmesh.core.wire.link import PROTOCOL_VERSION, Address
from pmesh.errors import ProtocolError
from pmesh.ids import Incarnation, Member

KEY = NodeKey.from_seed(bytes(range(32)))
OTHER_KEY = NodeKey.from_seed(bytes(32))
INSTANCE = instance_name(KEY.node)
MESH = AdvertisementKey.of(MeshKey(b"m" * 32))
STRANGER = AdvertisementKey(MESH.tag, b"guessed")


def an_advertisement(
    *,
    name: str = "mac-1",
    port: int = 24160,
    incarnation: int = 7,
    tag: bytes = MESH.tag,
    protocol: int = PROTOCOL_VERSION,
    hosts: tuple[str, ...] = ("192.168.1.7", "fe80::1"),
    minute: int = 29_000_000,
    invitation: int = 0,
) -> Advertisement:
    return Advertisement(
        tag=tag,
        node=KEY.node,
        incarnation=Incarnation(incarnation),
        port=port,
        name=name,
        protocol=protocol,
        hosts=hosts,
        minute=minute,
        invitation=invitation,
    )


@given(
    name=st.text(max_size=MAX_NAME_BYTES // 4),
    port=st.integers(1, 65535),
    incarnation=st.integers(1, 2**63 - 1),
    tag=st.binary(min_size=8, max_size=8) | st.just(MESH.tag),
    hosts=st.lists(st.ip_addresses().map(str), max_size=MAX_ADDRESSES).map(tuple),
    minute=st.integers(1, 2**32 - 1),
    invitation=st.integers(0, 2**16 - 1),
)
def test_what_is_advertised_is_read(  # noqa: PLR0917 - Hypothesis names them
    name: str,
    port: int,
    incarnation: int,
    tag: bytes,
    hosts: tuple[str, ...],
    minute: int,
    invitation: int,
) -> None:
    said = an_advertisement(
        name=name,
        port=port,
        incarnation=incarnation,
        tag=tag,
        hosts=hosts,
        minute=minute,
        invitation=invitation,
    )
    assert decode_untrusted(encode(said, KEY, MESH), instance=INSTANCE, key=MESH) == said


def test_who_holds_no_mesh_key_reads_the_number_of_an_invitation_of_any_version() -> None:
    nobody = AdvertisementKey(b"", b"")
    for protocol in (PROTOCOL_VERSION, PROTOCOL_VERSION + 1):
        said = an_advertisement(invitation=7, protocol=protocol)
        read = decode_untrusted(encode(said, KEY, MESH), instance=INSTANCE, key=nobody)
        assert (read.invitation, read.protocol) == (7, protocol)


def test_it_names_one_process_start() -> None:
    assert an_advertisement(incarnation=9).member == Member(KEY.node, Incarnation(9))


@given(st.text(max_size=300))
def test_every_entry_fits_a_txt_record(name: str) -> None:
    entries = encode(an_advertisement(name=name, incarnation=2**63 - 1), KEY, MESH)
    assert all(len(key) + 1 + len(value) <= 255 for key, value in entries.items())


def test_a_name_that_is_too_long_is_cut_between_characters() -> None:
    entries = encode(an_advertisement(name="x" + "é" * 100), KEY, MESH)
    assert decode_untrusted(entries, instance=INSTANCE, key=MESH).name == "x" + "é" * 63


def test_labels_fit_dns() -> None:
    assert len(INSTANCE.split(".")[0]) <= 63
    assert len(host_name(KEY.node).split(".")[0]) <= 63
    assert node_of_instance_untrusted(INSTANCE) == KEY.node


@pytest.mark.parametrize(
    "key", [b"v", b"tag", b"node", b"inc", b"port", b"name", b"at", b"addr", b"mac", b"sig"]
)
def test_an_entry_that_is_missing_or_empty_is_refused(key: bytes) -> None:
    entries: dict[bytes, bytes | None] = dict(encode(an_advertisement(), KEY, MESH))
    with pytest.raises(ProtocolError):
        decode_untrusted(entries | {key: None}, instance=INSTANCE, key=MESH)
    del entries[key]
    with pytest.raises(ProtocolError):
        decode_untrusted(entries, instance=INSTANCE, key=MESH)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"v", b"%d" % (PROTOCOL_VERSION + 1)),
        (b"tag", b"00" * 8),
        (b"inc", b"8"),
        (b"port", b"24161"),
        (b"name", b"mac-2"),
        (b"more", b"of a later version"),
    ],
)
def test_an_entry_that_was_changed_or_added_is_refused(key: bytes, value: bytes) -> None:
    entries = encode(an_advertisement(), KEY, MESH) | {key: value}
    with pytest.raises(ProtocolError, match=r"not signed|without our mesh key|not an advertis"):
        decode_untrusted(entries, instance=INSTANCE, key=MESH)
    theirs = encode(an_advertisement(tag=b"another!"), KEY, STRANGER) | {key: value}
    with pytest.raises(ProtocolError, match=r"not signed|not an advertisement|our mesh key"):
        decode_untrusted(theirs, instance=INSTANCE, key=AdvertisementKey(b"00000000", b""))


@pytest.mark.parametrize("entry", [b"v", b"tag", b"inc", b"port", b"name", b"at", b"addr"])
def test_without_our_mesh_key_nothing_can_be_advertised_under_our_tag(entry: bytes) -> None:
    """A stranger has a node key of its own, and what others have announced."""
    ours = encode(an_advertisement(), KEY, MESH)
    forged = encode(an_advertisement(name="liar", port=6666, minute=7), KEY, STRANGER)
    for entries in (forged, forged | {b"mac": ours[b"mac"]}, ours | {entry: forged[entry]}):
        if entries != ours:
            with pytest.raises(ProtocolError):
                decode_untrusted(entries, instance=INSTANCE, key=MESH)
    with pytest.raises(ForgedAdvertisement):
        decode_untrusted(forged, instance=INSTANCE, key=MESH)


def test_another_version_is_shown_by_what_all_versions_say() -> None:
    said = an_advertisement(protocol=PROTOCOL_VERSION + 1)
    read = decode_untrusted(encode(said, KEY, STRANGER), instance=INSTANCE, key=MESH)
    assert (read.name, read.protocol, read.addresses) == ("mac-1", PROTOCOL_VERSION + 1, ())


def test_the_first_fourteen_addresses_travel() -> None:
    hosts = tuple(f"2001:db8::{number:x}" for number in range(1, 20))
    entries = encode(an_advertisement(hosts=hosts), KEY, MESH)
    assert all(len(key) + 1 + len(value) <= 255 for key, value in entries.items())
    read = decode_untrusted(entries, instance=INSTANCE, key=MESH)
    assert read.addresses == tuple(Address(host, 24160) for host in hosts[:14])


@pytest.mark.parametrize(("minutes", "fresh"), [(0, True), (10, True), (-10, True), (11, False)])
def test_an_advertisement_is_fresh_for_ten_minutes(minutes: int, fresh: bool) -> None:  # noqa: FBT001 - a parameter of the test
    assert FRESH_MINUTES == 10
    assert an_advertisement().is_fresh(minute=29_000_000 + minutes) == fresh


def test_a_signature_of_another_length_is_refused() -> None:
    entries = encode(an_advertisement(), KEY, MESH) | {b"sig": b"AAAA"}
    with pytest.raises(ProtocolError, match="not signed"):
        decode_untrusted(entries, instance=INSTANCE, key=MESH)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"tag", b"00"),
        (b"tag", b"zz"),
        (b"port", b"0"),
        (b"port", b"65536"),
        (b"port", b" 80"),
        (b"port", b"8_0"),
        (b"port", "٨".encode()),
        (b"inc", b"0"),
        (b"inc", b"9" * 5000),
        (b"v", b"-1"),
        (b"name", b"\xff"),
        (b"name", b"x" * (MAX_NAME_BYTES + 1)),
        (b"node", b"aaaa"),
        (b"at", b"0"),
        (b"addr", b"\x03abc"),
        (b"addr", b"\x04ab"),
        (b"mac", b"%%%"),
        (b"sig", b"%%%"),
    ],
)
def test_a_value_that_can_not_be_is_refused(key: bytes, value: bytes) -> None:
    with pytest.raises(ProtocolError, match="not an advertisement"):
        decode_untrusted(
            encode(an_advertisement(), KEY, MESH) | {key: value}, instance=INSTANCE, key=MESH
        )


def test_an_advertisement_under_another_nodes_name_is_refused() -> None:
    with pytest.raises(ProtocolError, match="another node's instance"):
        decode_untrusted(
            encode(an_advertisement(), KEY, MESH), instance=instance_name(OTHER_KEY.node), key=MESH
        )


def test_only_the_node_itself_can_sign() -> None:
    with pytest.raises(ValueError, match="signed by the node"):
        encode(an_advertisement(), OTHER_KEY, MESH)


KEYS = (
    st.sampled_from([b"v", b"tag", b"node", b"inc", b"port", b"name", b"at", b"addr", b"sig"])
    | st.binary()
)


@given(
    entries=st.dictionaries(KEYS, st.none() | st.binary()), instance=st.just(INSTANCE) | st.text()
)
def test_noise_raises_nothing_but_protocol_error(
    entries: dict[bytes, bytes | None], instance: str
) -> None:
    forged = encode(an_advertisement(), KEY, MESH) | entries
    with suppress(ProtocolError):
        assert decode_untrusted(forged, instance=instance, key=MESH) == an_advertisement()


def packet(entries: dict[bytes, bytes]) -> bytes:
    """As an mDNS packet has them, after other records."""
    texts = [name + b"=" + value for name, value in entries.items()]
    return b"\0\0\x84\0other" + b"".join(bytes([len(text)]) + text for text in texts)


def test_a_packet_is_read_without_its_other_records() -> None:
    entries = encode(an_advertisement(), KEY, MESH)
    assert read_packet_untrusted(packet(entries), key=MESH) == an_advertisement()
    foreign = an_advertisement(tag=b"another!")
    read = read_packet_untrusted(packet(encode(foreign, KEY, STRANGER)), key=MESH)
    assert read == foreign


@pytest.mark.parametrize("changed", [{b"port": b"1"}, {b"node": b"nobody"}, {b"node": b"\xff"}])
def test_a_packet_that_was_changed_or_is_another_s_is_none(changed: dict[bytes, bytes]) -> None:
    entries = encode(an_advertisement(), KEY, MESH)
    assert read_packet_untrusted(packet(entries | changed), key=MESH) is None
    assert (
        read_packet_untrusted(packet(encode(an_advertisement(), KEY, STRANGER)), key=MESH) is None
    )


@given(st.binary())
def test_noise_is_no_advertisement(noise: bytes) -> None:
    assert read_packet_untrusted(noise, key=MESH) is None


@given(st.text())
def test_noise_is_no_instance(instance: str) -> None:
    with pytest.raises(ProtocolError):
        node_of_instance_untrusted(instance)
