from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.advertisement import (
    MAX_NAME_BYTES,
    Advertisement,
    decode_untrusted,
    encode,
    host_name,
    instance_name,
    node_of_instance_untrusted,
)
from pmesh.core.identity import NodeKey
from pmesh.core.messages import PROTOCOL_VERSION
from pmesh.errors import ProtocolError
from pmesh.ids import Incarnation, Member

KEY = NodeKey.from_seed(bytes(range(32)))
OTHER_KEY = NodeKey.from_seed(bytes(32))
INSTANCE = instance_name(KEY.node)


def an_advertisement(
    *,
    name: str = "mac-1",
    port: int = 24160,
    incarnation: int = 7,
    tag: bytes = b"meshmesh",
    protocol: int = PROTOCOL_VERSION,
) -> Advertisement:
    return Advertisement(
        tag=tag,
        node=KEY.node,
        incarnation=Incarnation(incarnation),
        port=port,
        name=name,
        protocol=protocol,
    )


@given(
    name=st.text(max_size=MAX_NAME_BYTES // 4),
    port=st.integers(1, 65535),
    incarnation=st.integers(1, 2**63 - 1),
    tag=st.binary(min_size=8, max_size=8),
    protocol=st.integers(1, 65535),
)
def test_what_is_advertised_is_read(
    name: str, port: int, incarnation: int, tag: bytes, protocol: int
) -> None:
    said = an_advertisement(
        name=name, port=port, incarnation=incarnation, tag=tag, protocol=protocol
    )
    assert decode_untrusted(encode(said, KEY), instance=INSTANCE) == said


def test_it_names_one_process_start() -> None:
    assert an_advertisement(incarnation=9).member == Member(KEY.node, Incarnation(9))


@given(st.text(max_size=300))
def test_every_entry_fits_a_txt_record(name: str) -> None:
    entries = encode(an_advertisement(name=name, incarnation=2**63 - 1), KEY)
    assert all(len(key) + 1 + len(value) <= 255 for key, value in entries.items())


def test_a_name_that_is_too_long_is_cut_between_characters() -> None:
    entries = encode(an_advertisement(name="x" + "é" * 100), KEY)
    assert decode_untrusted(entries, instance=INSTANCE).name == "x" + "é" * 63


def test_labels_fit_dns() -> None:
    assert len(INSTANCE.split(".")[0]) <= 63
    assert len(host_name(KEY.node).split(".")[0]) <= 63
    assert node_of_instance_untrusted(INSTANCE) == KEY.node


@pytest.mark.parametrize("key", [b"v", b"tag", b"node", b"inc", b"port", b"name", b"sig"])
def test_an_entry_that_is_missing_or_empty_is_refused(key: bytes) -> None:
    entries: dict[bytes, bytes | None] = dict(encode(an_advertisement(), KEY))
    with pytest.raises(ProtocolError):
        decode_untrusted(entries | {key: None}, instance=INSTANCE)
    del entries[key]
    with pytest.raises(ProtocolError):
        decode_untrusted(entries, instance=INSTANCE)


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
    entries = encode(an_advertisement(), KEY) | {key: value}
    with pytest.raises(ProtocolError, match="not signed"):
        decode_untrusted(entries, instance=INSTANCE)


def test_a_signature_of_another_length_is_refused() -> None:
    entries = encode(an_advertisement(), KEY) | {b"sig": b"AAAA"}
    with pytest.raises(ProtocolError, match="not signed"):
        decode_untrusted(entries, instance=INSTANCE)


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
        (b"sig", b"%%%"),
    ],
)
def test_a_value_that_can_not_be_is_refused(key: bytes, value: bytes) -> None:
    with pytest.raises(ProtocolError, match="not an advertisement"):
        decode_untrusted(encode(an_advertisement(), KEY) | {key: value}, instance=INSTANCE)


def test_an_advertisement_under_another_nodes_name_is_refused() -> None:
    with pytest.raises(ProtocolError, match="another node's instance"):
        decode_untrusted(encode(an_advertisement(), KEY), instance=instance_name(OTHER_KEY.node))


def test_only_the_node_itself_can_sign() -> None:
    with pytest.raises(ValueError, match="signed by the node"):
        encode(an_advertisement(), OTHER_KEY)


KEYS = st.sampled_from([b"v", b"tag", b"node", b"inc", b"port", b"name", b"sig"]) | st.binary()


@given(
    entries=st.dictionaries(KEYS, st.none() | st.binary()), instance=st.just(INSTANCE) | st.text()
)
def test_noise_raises_nothing_but_protocol_error(
    entries: dict[bytes, bytes | None], instance: str
) -> None:
    forged = encode(an_advertisement(), KEY) | entries
    with suppress(ProtocolError):
        assert decode_untrusted(forged, instance=instance) == an_advertisement()


@given(st.text())
def test_noise_is_no_instance(instance: str) -> None:
    with pytest.raises(ProtocolError):
        node_of_instance_untrusted(instance)
