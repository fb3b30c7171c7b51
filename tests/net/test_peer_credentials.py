import array
import struct
import sys

import pytest

from pmesh.net import peer_credentials
from pmesh.net.peer_credentials import PeerCredentials


class FakeMac:
    """A Unix socket as macOS has it: only getsockopt, answered from sys/ucred.h."""

    def __init__(self, *, version: int = 0) -> None:
        self._version = version

    def getsockopt(self, level: int, option: int, buffersize: int, /) -> bytes:
        assert level == 0  # SOL_LOCAL
        if option == 1:  # LOCAL_PEERCRED
            assert buffersize == 76  # sizeof(struct xucred)
            groups = array.array("I", [20, 12] + [0] * 14).tobytes()
            return struct.pack("=IIhxx", self._version, 501, 2) + groups
        assert (option, buffersize) == (2, 4)  # LOCAL_PEERPID
        return (4321).to_bytes(4, "little")


def test_on_macos_the_kernel_is_asked_in_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert peer_credentials.credentials_of(FakeMac()) == PeerCredentials(pid=4321, uid=501)
    with pytest.raises(OSError, match="version 1"):
        peer_credentials.credentials_of(FakeMac(version=1))
