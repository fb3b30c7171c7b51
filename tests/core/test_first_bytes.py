import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.first_bytes import FIRST_BYTES, MAX_CLIENT_HELLO_BYTES, FirstBytes, recognize
from pmesh.core.records import encode_preamble

PREAMBLE = encode_preamble(bytes(range(16)))
# What OpenSSL 3.0 sends first, as Python makes it; 225 bytes follow in all.
CLIENT_HELLO = bytes.fromhex("16030100dc010000d80303")


def client_hello(claims: int) -> bytes:
    return b"\x16\x03\x01\x40\x00\x01" + claims.to_bytes(3, "big")


@pytest.mark.parametrize(
    ("first", "kind"),
    [
        (b"", FirstBytes.TOO_FEW),
        (CLIENT_HELLO, FirstBytes.LINK),
        (client_hello(MAX_CLIENT_HELLO_BYTES), FirstBytes.LINK),
        (client_hello(MAX_CLIENT_HELLO_BYTES + 1), FirstBytes.GARBAGE),
        (client_hello(0xFFFFFF), FirstBytes.GARBAGE),
        (PREAMBLE, FirstBytes.LANE),
        (PREAMBLE[:-1], FirstBytes.TOO_FEW),
        (b"PMLN\x02" + bytes(16), FirstBytes.GARBAGE),
        (b"G", FirstBytes.GARBAGE),
        (b"\xff\xff\xff\xff", FirstBytes.GARBAGE),  # a frame that claims 4 GiB
        (b"\x16\x02", FirstBytes.GARBAGE),
        (b"\x16\x03\x01\x00\x05\x02", FirstBytes.GARBAGE),  # a ServerHello
        (b"\x15\x03\x01\x00\x02\x02\x28", FirstBytes.GARBAGE),  # an alert
    ],
)
def test_first_bytes_say_what_a_connection_is(first: bytes, kind: FirstBytes) -> None:
    assert recognize(first) is kind


@pytest.mark.parametrize("whole", [PREAMBLE, CLIENT_HELLO])
def test_the_beginning_of_a_good_connection_is_never_garbage(whole: bytes) -> None:
    for length in range(len(whole)):
        assert recognize(whole[:length]) is not FirstBytes.GARBAGE


@given(
    st.one_of(
        st.binary(max_size=FIRST_BYTES),
        st.binary(max_size=15).map(lambda rest: PREAMBLE[:6] + rest),
        st.binary(max_size=15).map(lambda rest: CLIENT_HELLO[:6] + rest),
    )
)
def test_a_decision_is_never_taken_back(first: bytes) -> None:
    decided = FirstBytes.TOO_FEW
    for length in range(len(first) + 1):
        kind = recognize(first[:length])
        assert decided in (FirstBytes.TOO_FEW, kind)
        decided = kind


@given(st.binary(min_size=FIRST_BYTES, max_size=FIRST_BYTES))
def test_all_is_decided_when_all_is_read(first: bytes) -> None:
    assert recognize(first) is not FirstBytes.TOO_FEW
