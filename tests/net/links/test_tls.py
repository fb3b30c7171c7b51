import os
import ssl
import warnings
from dataclasses import dataclass, field, replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.identity.certificates import issue_credentials, node_of_certificate_untrusted
from pmesh.net.links.tls import (
    MAX_HANDSHAKE_BYTES,
    ConnectionCut,
    DataReceived,
    GoodbyeReceived,
    HandshakeCompleted,
    TlsContexts,
    TlsEvent,
    TlsFailed,
    TlsProtocol,
)
from tests.worlds.nodes import (
    ADA,
    ADAS,
    BOB,
    BOBS,
    MESH,
    OTHER_MESH,
    naive_client,
    odd_leaf,
)


@dataclass
class TlsEnds:
    """A client and a server joined by a fake wire, and what has happened at each."""

    client: TlsProtocol
    server: TlsProtocol
    at_client: list[TlsEvent] = field(default_factory=list)
    at_server: list[TlsEvent] = field(default_factory=list)

    def converse(self) -> None:
        """Carry bytes to and fro until neither side has anything to say."""
        while True:
            take_events(self.client, self.at_client)
            take_events(self.server, self.at_server)
            to_server, to_client = self.client.data_to_send(), self.server.data_to_send()
            if not to_server + to_client:
                return
            self.server.receive_data(to_server)
            self.client.receive_data(to_client)


def take_events(tls: TlsProtocol, events: list[TlsEvent]) -> None:
    while (event := tls.next_event()) is not None:
        if events and event == events[-1] and not isinstance(event, DataReceived):
            return  # an end stays an end
        events.append(event)


def pair(client: TlsContexts, server: TlsContexts) -> TlsEnds:
    both = TlsEnds(TlsProtocol(client, server_side=False), TlsProtocol(server, server_side=True))
    both.converse()
    return both


def nodes_proven(events: list[TlsEvent]) -> list[bytes]:
    return [
        node_of_certificate_untrusted(event.certificate)
        for event in events
        if isinstance(event, HandshakeCompleted)
    ]


def with_client(context: ssl.SSLContext) -> TlsContexts:
    return replace(ADAS, client=context)


def test_holders_of_one_mesh_key_prove_their_node_keys_to_each_other() -> None:
    both = pair(ADAS, BOBS)
    assert nodes_proven(both.at_client) == [BOB.node]
    assert nodes_proven(both.at_server) == [ADA.node]


@given(st.binary(min_size=1, max_size=70_000), st.binary(min_size=1, max_size=100))
def test_bytes_arrive_as_they_were_sent(there: bytes, back: bytes) -> None:
    both = pair(ADAS, BOBS)
    both.client.send(there)
    both.server.send(back)
    both.converse()
    received = [e.data for e in both.at_server if isinstance(e, DataReceived)]
    assert b"".join(received) == there
    assert both.at_client[-1] == DataReceived(back)


@given(st.integers(1, 50))
def test_a_handshake_works_however_the_network_cuts_it(piece: int) -> None:
    client, server = TlsProtocol(ADAS, server_side=False), TlsProtocol(BOBS, server_side=True)
    events: list[TlsEvent] = []
    for _ in range(3):  # client hello; server's flight; client's
        for source, sink in ((client, server), (server, client)):
            take_events(source, events)
            data = source.data_to_send()
            for at in range(0, len(data), piece):
                sink.receive_data(data[at : at + piece])
                take_events(sink, events)
    assert sorted(nodes_proven(events)) == sorted([ADA.node, BOB.node])


def test_the_version_is_1_3_and_no_session_can_be_resumed() -> None:
    both = pair(ADAS, BOBS)
    both.server.send(b"tickets come with the first data")
    both.converse()
    tls = both.client._tls  # noqa: SLF001 - nothing public tells
    assert tls.version() == "TLSv1.3"
    assert tls.session is None or not tls.session.has_ticket


@pytest.mark.parametrize("years", [(2099, 9999), (1970, 1971)])
def test_a_clock_that_is_wrong_by_years_changes_nothing(years: tuple[int, int]) -> None:
    leaf = odd_leaf(Ed25519PrivateKey.from_private_bytes(BOB.seed), years=years)
    both = pair(TlsContexts.of(leaf), ADAS)
    assert nodes_proven(both.at_server) == [BOB.node]
    both.server.send(b"come in")
    both.converse()
    assert both.at_client[-1] == DataReceived(b"come in")


def test_a_leaf_can_not_certify_another_one() -> None:
    # Bob's leaf as an authority: he holds no CA key of ours, only his node key.
    chain = odd_leaf(Ed25519PrivateKey.from_private_bytes(BOB.seed), mesh_key=OTHER_MESH)
    bobs_leaf = issue_credentials(MESH, BOB).leaf_pem
    both = pair(TlsContexts.of(replace(chain, leaf_pem=chain.leaf_pem + bobs_leaf)), ADAS)
    assert nodes_proven(both.at_server) == []


def test_whoever_shows_no_certificate_is_told_so() -> None:
    both = pair(with_client(naive_client()), ADAS)
    assert both.at_server == [
        TlsFailed(other_key=False, detail="peer did not return a certificate")
    ]
    assert isinstance(both.at_client[-1], TlsFailed)
    assert not both.at_client[-1].other_key


def test_tls_1_2_is_refused_with_an_alert() -> None:
    old = naive_client()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
    both = pair(with_client(old), ADAS)
    assert both.at_server == [TlsFailed(other_key=False, detail="unsupported protocol")]
    assert isinstance(both.at_client[-1], TlsFailed)


def test_a_goodbye_is_told_from_a_cut_connection() -> None:
    both = pair(ADAS, BOBS)
    both.client.send(b"last words")
    both.client.say_goodbye()
    both.converse()
    assert both.at_server[-2:] == [DataReceived(b"last words"), GoodbyeReceived()]
    cut = pair(ADAS, BOBS)
    cut.server.receive_eof()
    cut.converse()
    assert cut.at_server[-1] == ConnectionCut()


def test_two_goodbyes_cross_in_peace_and_nothing_is_sent_after_one() -> None:
    both = pair(ADAS, BOBS)
    both.client.say_goodbye()
    both.server.say_goodbye()
    both.converse()
    assert both.at_client[-1] == both.at_server[-1] == GoodbyeReceived()
    both.client.send(b"too late")
    assert both.client.data_to_send() == b""


def test_data_before_the_end_of_the_connection_is_not_lost() -> None:
    both = pair(ADAS, BOBS)
    both.client.send(b"x" * 40_000)
    both.server.receive_data(both.client.data_to_send())
    both.server.receive_eof()
    both.converse()
    assert sum(len(e.data) for e in both.at_server if isinstance(e, DataReceived)) == 40_000
    assert both.at_server[-1] == ConnectionCut()


def test_one_flipped_bit_ends_the_connection() -> None:
    both = pair(ADAS, BOBS)
    both.client.send(b"word")
    data = bytearray(both.client.data_to_send())
    data[-3] ^= 1
    both.server.receive_data(data)
    both.converse()
    assert both.at_server[-1] == TlsFailed(
        other_key=False, detail="decryption failed or bad record mac"
    )
    assert isinstance(both.at_client[-1], TlsFailed)  # it got the alert
    both.server.say_goodbye()  # too late: nothing more is said
    assert both.server.data_to_send() == b""


def test_a_handshake_that_never_ends_is_cut_off() -> None:
    server = TlsProtocol(ADAS, server_side=True)
    record = b"\x16\x03\x01\x40\x00" + b"\x01\x01\xff\xff" + bytes(16 * 1024 - 4)
    for _ in range(MAX_HANDSHAKE_BYTES // len(record) + 1):
        server.receive_data(record)
    assert server.next_event() == TlsFailed(other_key=False, detail="its handshake is too long")
    server.receive_data(record)  # ignored
    assert isinstance(server.next_event(), TlsFailed)


@given(st.binary(min_size=1, max_size=2000), st.booleans())
def test_garbage_is_an_event_and_never_an_exception(data: bytes, server_side: bool) -> None:  # noqa: FBT001 - Hypothesis passes it
    tls = TlsProtocol(ADAS, server_side=server_side)
    tls.next_event()
    tls.receive_data(data)
    tls.receive_eof()
    assert isinstance(tls.next_event(), TlsFailed | ConnectionCut)


def test_keys_reach_openssl_without_a_file_and_leave_no_descriptor() -> None:
    before = os.dup(0)
    os.close(before)
    TlsContexts.of(issue_credentials(MESH, ADA))
    after = os.dup(0)
    os.close(after)
    assert before == after
