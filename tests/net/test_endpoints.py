import socket
from dataclasses import dataclass

import pytest
import trio
import trio.testing

from pmesh.core.messages import Address
from pmesh.net.endpoints import UNKNOWN, local_address_of, remote_address_of


@dataclass
class FakeSocket:
    name: object

    def getpeername(self) -> object:
        if isinstance(self.name, OSError):
            raise self.name
        return self.name


def stream_from(name: object) -> trio.abc.HalfCloseableStream:
    stream, _ = trio.testing.memory_stream_pair()
    stream.socket = FakeSocket(name)  # type: ignore[attr-defined]
    return stream


async def test_both_ends_of_a_connection_have_an_address() -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    async with (
        listener,
        await trio.open_tcp_stream("127.0.0.1", port) as dialled,
        await listener.accept() as accepted,
    ):
        assert (
            remote_address_of(dialled) == local_address_of(accepted) == Address("127.0.0.1", port)
        )
        assert remote_address_of(accepted) == local_address_of(dialled)


def test_a_link_local_address_says_its_interface() -> None:
    index, interface = socket.if_nameindex()[0]
    stream = stream_from(("fe80::1", 5, 0, index))
    assert remote_address_of(stream) == Address(f"fe80::1%{interface}", 5)
    assert str(remote_address_of(stream)) == f"[fe80::1%{interface}]:5"


def test_a_global_address_has_no_scope() -> None:
    assert remote_address_of(stream_from(("2001:db8::1", 5, 0, 0))) == Address("2001:db8::1", 5)


@pytest.mark.parametrize("name", ["", OSError("not connected")])
def test_what_has_no_address_is_unknown(name: object) -> None:
    assert remote_address_of(stream_from(name)) == UNKNOWN
    assert remote_address_of(trio.testing.memory_stream_pair()[0]) == UNKNOWN
