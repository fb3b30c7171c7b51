"""TLS 1.3 between agents, as a byte protocol: bytes in, events and bytes out; it never waits.

`trio.SSLStream` drops the alert that explains a failed handshake, so that the other side would see
only a closed socket. Here the alert stays in `data_to_send()`.
"""

import os
import ssl
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Self, TypeAlias

from pmesh.core.identity.certificates import Credentials

MAX_HANDSHAKE_BYTES: Final = 32 * 1024
"""The most that a peer may send before its handshake has ended. Ours need 3 KiB."""

_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME, which Python does not name
_READ_BYTES = 16 * 1024  # the largest TLS record: OpenSSL never returns more from one read

# Alerts of the other side (RFC 8446, 6.2) if its authority did not sign our certificate. Its
# OpenSSL version decides which one it sends.
_OTHER_KEY_ALERTS = frozenset(
    {
        "TLSV1_ALERT_UNKNOWN_CA",
        "TLSV1_ALERT_DECRYPT_ERROR",
        "SSLV3_ALERT_BAD_CERTIFICATE",
        "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
    }
)


@dataclass(frozen=True, slots=True)
class HandshakeCompleted:
    """This side accepted the other. In TLS 1.3 a client learns later if it was accepted."""

    certificate: bytes
    """The other side's leaf in DER, signed by the mesh's authority."""


@dataclass(frozen=True, slots=True)
class DataReceived:
    """Decrypted bytes."""

    data: bytes


@dataclass(frozen=True, slots=True)
class GoodbyeReceived:
    """The other side closed the connection on purpose; nothing was cut off."""


@dataclass(frozen=True, slots=True)
class ConnectionCut:
    """The connection ended without a goodbye."""


@dataclass(frozen=True, slots=True)
class TlsFailed:
    """One side refused the other, or the input is not TLS 1.3."""

    other_key: bool
    """True if the two sides hold different mesh keys."""
    detail: str
    """OpenSSL's reason."""


TlsEnd: TypeAlias = GoodbyeReceived | ConnectionCut | TlsFailed
TlsEvent: TypeAlias = HandshakeCompleted | DataReceived | TlsEnd


@dataclass(frozen=True, slots=True)
class TlsContexts:
    """A node's TLS contexts for links that it dials and for links that it accepts."""

    client: ssl.SSLContext
    server: ssl.SSLContext

    @classmethod
    def of(cls, credentials: Credentials) -> Self:
        """Make contexts that accept only nodes with the same mesh key."""
        client = _context(ssl.PROTOCOL_TLS_CLIENT, credentials)
        server = _context(ssl.PROTOCOL_TLS_SERVER, credentials)
        server.num_tickets = 0  # no resumption: every link proves its node key again
        return cls(client, server)


class TlsProtocol:
    """One side of one TLS connection.

    Repeat: call `next_event` until it returns None, send what `data_to_send` returns, read, and
    pass the bytes to `receive_data`. The first call makes a client's first message.
    """

    def __init__(self, contexts: TlsContexts, *, server_side: bool) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        context = contexts.server if server_side else contexts.client
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._established = False
        self._handshake_bytes = 0
        self._cut = False
        self._end: TlsEnd | None = None

    def receive_data(self, data: bytes | bytearray) -> None:
        if self._end is not None:
            return
        if not self._established:
            self._handshake_bytes += len(data)
            if self._handshake_bytes > MAX_HANDSHAKE_BYTES:
                self._end = TlsFailed(other_key=False, detail="its handshake is too long")
                return
        self._incoming.write(data)

    def receive_eof(self) -> None:
        self._cut = True

    def next_event(self) -> TlsEvent | None:
        """Return the next event, or None until more bytes arrive. An end is returned again."""
        if self._end is not None:
            return self._end
        try:
            if not self._established:
                return self._shake_hands()
            data = self._tls.read(_READ_BYTES)
        except ssl.SSLWantReadError:
            self._end = ConnectionCut() if self._cut else None
            return self._end
        except ssl.SSLZeroReturnError:  # both sides have closed
            data = b""
        except ssl.SSLError as e:
            self._end = _failure(e)
            return self._end
        if data:
            return DataReceived(data)
        self._end = GoodbyeReceived()
        return self._end

    def send(self, data: bytes) -> None:
        """Encrypt into `data_to_send`. Only after HandshakeCompleted.

        If either side has ended, the data are dropped; `next_event` returns the end.
        """
        with suppress(ssl.SSLError):
            self._tls.write(data)  # a write to memory is always complete

    def say_goodbye(self) -> None:
        """Tell the other side that nothing more will come, if the connection still works."""
        if self._established and not isinstance(self._end, TlsFailed):
            with suppress(ssl.SSLError):  # "want read": the other side has not closed yet
                self._tls.unwrap()

    def data_to_send(self) -> bytes:
        """Take the bytes, alerts too, that must be sent to the other side."""
        return self._outgoing.read()

    def _shake_hands(self) -> HandshakeCompleted:
        self._tls.do_handshake()
        certificate = self._tls.getpeercert(binary_form=True)
        assert certificate is not None  # noqa: S101 - because of CERT_REQUIRED
        self._established = True
        return HandshakeCompleted(certificate)


def _failure(error: ssl.SSLError) -> TlsFailed:
    refused_by_us = isinstance(error, ssl.SSLCertVerificationError)
    refused_by_them = error.reason in _OTHER_KEY_ALERTS
    return TlsFailed(
        other_key=refused_by_us or refused_by_them,
        detail=(error.reason or "not TLS").lower().replace("_", " "),
    )


def _context(protocol: int, credentials: Credentials) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the node key is the name
    context.verify_mode = ssl.CERT_REQUIRED  # I7: nothing is read before it
    context.verify_flags |= ssl.VerifyFlags(_NO_CHECK_TIME)  # clocks at home may be years off
    context.load_verify_locations(cadata=credentials.ca_der)
    # Python loads our own certificate only by path: a pipe has one, and leaves no file.
    with ExitStack() as pipes:
        leaf = pipes.enter_context(_piped(credentials.leaf_pem))
        key = pipes.enter_context(_piped(credentials.key_pem))
        context.load_cert_chain(leaf, key)
    return context


@contextmanager
def _piped(data: bytes) -> Generator[str, None, None]:
    """Yield a path to read `data` from, which must fit a pipe's buffer (macOS: 4 KiB at least)."""
    reading, writing = os.pipe()
    try:
        with open(writing, "wb") as pipe:  # noqa: PTH123 - a descriptor has no Path
            pipe.write(data)
        yield f"/dev/fd/{reading}"  # exists on macOS and Linux
    finally:
        os.close(reading)
