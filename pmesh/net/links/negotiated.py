"""What the two ends of a network cable have said that they can do; only Linux tells."""

import array
import fcntl
import socket
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_SIOCETHTOOL: Final = 0x8946  # <linux/sockios.h>
_ETHTOOL_GSET: Final = 1
# struct ethtool_cmd of <linux/ethtool.h>: cmd, supported, and lp_advertising further on.
_COMMAND: Final = struct.Struct("=III20xI8x")
_IFREQ: Final = struct.Struct("16sP16x")
_MODES: Final[Mapping[int, int]] = MappingProxyType(  # SUPPORTED_..., of twisted pair
    {10_000: 1 << 12, 1000: 1 << 4 | 1 << 5, 100: 1 << 2 | 1 << 3, 10: 1 << 0 | 1 << 1}
)


def able_mbit_s(interface: str) -> int:
    """Return the highest speed that both ends of the cable can do; 0 if the system doesn't say.

    May wait some milliseconds for the port.
    """
    answer = array.array("B", _COMMAND.pack(_ETHTOOL_GSET, 0, 0, 0))
    question = _IFREQ.pack(interface.encode(), answer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            fcntl.ioctl(any_socket, _SIOCETHTOOL, question)
        except OSError:  # macOS; no cable; the interface is gone
            return 0
    _, supported, _, theirs = _COMMAND.unpack(answer)
    return next((speed for speed, bits in _MODES.items() if supported & bits and theirs & bits), 0)
