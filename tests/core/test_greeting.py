import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.greeting import OtherProtocol, read_hello_untrusted
from pmesh.core.messages import PROTOCOL_VERSION, Address, Hello, Leaving, encode
from pmesh.errors import ProtocolError
from pmesh.ids import Incarnation, Member, NodeId

ADA = NodeId(b"a" * 32)
HELLO = Hello(PROTOCOL_VERSION, Member(ADA, Incarnation(7)), "ada", (Address("10.0.0.1", 24160),))


def test_a_hello_of_our_version_is_read_whole() -> None:
    assert read_hello_untrusted(encode(HELLO), proven=ADA) == HELLO


@given(
    st.integers(0, 2**63 - 1).filter(lambda version: version != PROTOCOL_VERSION),
    st.lists(st.one_of(st.none(), st.integers(0, 9), st.text(), st.lists(st.binary()))),
)
def test_another_version_is_recognized_whatever_its_hello_looks_like(
    version: int, rest: list[object]
) -> None:
    data = msgspec.msgpack.encode([1, version, *rest])
    assert read_hello_untrusted(data, proven=ADA) == OtherProtocol(version)


def test_a_hello_in_the_name_of_another_node_is_refused() -> None:
    with pytest.raises(ProtocolError, match="another node"):
        read_hello_untrusted(encode(HELLO), proven=NodeId(b"b" * 32))


@pytest.mark.parametrize(
    "data", [b"", b"\x91\x01", encode(Leaving()), msgspec.msgpack.encode([1, PROTOCOL_VERSION])]
)
def test_anything_but_a_hello_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_hello_untrusted(data, proven=ADA)


@given(st.one_of(st.binary(), st.binary().map(lambda rest: encode(HELLO)[:2] + rest)))
def test_garbage_raises_protocol_error_only(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        read_hello_untrusted(data, proven=ADA)
