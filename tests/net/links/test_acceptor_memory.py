"""What strangers cost an agent, measured from outside: at most 16 MiB for all of them."""

import contextlib
import datetime as dt
import resource
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from pmesh.core.wire.preamble import Preamble, encode_preamble
from pmesh.net.links.acceptor import MAX_PENDING, DoorCounters
from pmesh.net.links.tls import MAX_HANDSHAKE_BYTES
from tests.worlds.nodes import naive_client

LIMIT_BYTES = 16 * 1024 * 1024
Attack = Callable[[socket.socket], None]


class AttackedAcceptor:
    """The door under attack."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.port = int(self._line())

    def ask(self) -> tuple[int, DoorCounters]:
        """Its resident memory in bytes, and its counters."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._line(), type=tuple[int, DoorCounters])

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@pytest.fixture
def agent() -> Iterator[AttackedAcceptor]:
    command = [sys.executable, "-m", "tests.net.links.foreign_acceptor"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    ) as process:
        yield AttackedAcceptor(process)
        process.kill()


@pytest.fixture(autouse=True)
def _room_for_a_thousand_sockets() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = 2048 if hard == resource.RLIM_INFINITY else min(2048, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, enough), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connect(agent: AttackedAcceptor, number: int) -> socket.socket:
    """Connect from one of many addresses, where the system has more than one on loopback."""
    caller = socket.socket()
    caller.settimeout(5)
    if sys.platform == "linux":
        caller.bind((f"127.0.1.{1 + number % 16}", 0))
    caller.connect(("127.0.0.1", agent.port))
    return caller


def silence(_caller: socket.socket) -> None:
    pass


def half_a_preamble(caller: socket.socket) -> None:
    caller.sendall(encode_preamble(Preamble(bytes(16)))[:20])


def lane_that_stalls(caller: socket.socket) -> None:
    caller.sendall(encode_preamble(Preamble(bytes(16))))


@dataclass
class HalfAHandshake:
    """Sends a TLS handshake, as much of it as the agent takes in, but never the end."""

    context: ssl.SSLContext
    flights: int

    def __call__(self, caller: socket.socket) -> None:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = self.context.wrap_bio(incoming, outgoing)
        allowed = MAX_HANDSHAKE_BYTES
        for flight in range(self.flights):
            while not outgoing.pending:
                with contextlib.suppress(ssl.SSLWantReadError):
                    tls.do_handshake()
                if flight and not outgoing.pending:
                    incoming.write(caller.recv(65536))
            data = outgoing.read()[: allowed - 1]
            allowed -= len(data)
            caller.sendall(data)


def with_an_enormous_certificate(folder: Path) -> ssl.SSLContext:
    """A client whose certificate is just below the 100 KiB that OpenSSL takes from a peer."""
    key, day = Ed25519PrivateKey.generate(), dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
    noise = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4"), bytes(90 * 1024))
    certificate = (
        x509.CertificateBuilder(x509.Name([]), x509.Name([]), key.public_key(), 1, day, day)
        .add_extension(noise, critical=False)
        .sign(key, None)
    )
    pem = folder / "certificate.pem"
    pem.write_bytes(
        certificate.public_bytes(Encoding.PEM)
        + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    context = naive_client()
    context.load_cert_chain(pem)
    return context


def cost(agent: AttackedAcceptor, attack: Attack, *, connections: int) -> tuple[int, DoorCounters]:
    """How much the agent grows under so many connections, in bytes; and its counters then."""
    before, _ = agent.ask()
    with contextlib.ExitStack() as callers:
        for number in range(connections):
            caller = callers.enter_context(connect(agent, number))
            with contextlib.suppress(ConnectionError):  # sent away, for one that came later
                attack(caller)
        after, counters = agent.ask()
        while counters.accepted < connections:  # the backlog
            after, counters = agent.ask()
    return after - before, counters


@pytest.mark.parametrize("attack", [silence, half_a_preamble, lane_that_stalls])
def test_a_thousand_that_never_prove_anything_cost_less_than_16_mib(
    agent: AttackedAcceptor, attack: Attack
) -> None:
    bytes_used, counters = cost(agent, attack, connections=1000)
    assert bytes_used < LIMIT_BYTES
    assert counters.pending <= MAX_PENDING
    assert counters.authenticated == 0


@pytest.mark.parametrize("flights", [1, 2])
def test_those_who_stop_in_the_middle_of_a_handshake_cost_less_than_16_mib(
    agent: AttackedAcceptor, tmp_path: Path, flights: int
) -> None:
    """One flight makes the agent build TLS objects, two make it believe a large certificate."""
    attack = HalfAHandshake(with_an_enormous_certificate(tmp_path), flights)
    bytes_used, counters = cost(agent, attack, connections=MAX_PENDING)
    if sys.platform == "linux":  # elsewhere loopback has one address, and that 8 places
        assert counters.pending == MAX_PENDING
        if flights > 1:
            assert bytes_used > MAX_PENDING * 64 * 1024  # else this did not attack anything
    assert bytes_used < LIMIT_BYTES
