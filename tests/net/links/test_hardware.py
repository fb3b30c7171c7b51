"""What both ends of a cable can do, as Linux says; interfaces are in test_interfaces.py."""

import ctypes
import fcntl
import struct

import pytest

from pmesh.net.links.hardware import able_mbit_s
from tests.worlds.faults import Faults

TENTH, GIGABIT, TENFOLD = 1 << 3, 1 << 5, 1 << 12


@pytest.mark.parametrize(
    ("supported", "theirs", "able"),
    [
        (TENTH | GIGABIT, TENTH | GIGABIT, 1000),
        (TENTH | GIGABIT, TENTH, 100),
        (GIGABIT | TENFOLD, GIGABIT | TENFOLD, 10_000),
        (TENTH | GIGABIT, 0, 0),  # the other end does not say
        (0, 0, 0),
    ],
)
def test_the_highest_speed_counts_that_both_ends_have(
    supported: int, theirs: int, able: int, faults: Faults
) -> None:
    def ioctl(_socket: object, request: int, question: bytes) -> bytes:
        name, address = struct.unpack_from("16sP", question)
        assert (request, name.rstrip(b"\0")) == (0x8946, b"eth0")
        assert ctypes.string_at(address, 4) == struct.pack("=I", 1)
        ctypes.memmove(address + 4, struct.pack("=I", supported), 4)
        ctypes.memmove(address + 32, struct.pack("=I", theirs), 4)
        return question

    faults.instead(fcntl, "ioctl", ioctl)
    assert able_mbit_s("eth0") == able


def test_of_an_interface_without_a_cable_nothing_is_known() -> None:
    assert able_mbit_s("lo") == able_mbit_s("lo0") == 0
