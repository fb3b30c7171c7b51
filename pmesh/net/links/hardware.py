"""What the system says of its interfaces: their kinds, the speeds of cables, carrier lost."""

import array
import fcntl
import re
import socket
import struct
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec
import psutil

from pmesh.core.links.addresses import InterfaceKind

TIMEOUT_S: Final = 5.0  # networksetup takes 50 ms, system_profiler 0.3 s

_SYS_CLASS_NET: Final = Path("/sys/class/net")
_NETWORKSETUP: Final = ("/usr/sbin/networksetup", "-listallhardwareports")
_SYSTEM_PROFILER: Final = ("/usr/sbin/system_profiler", "-json", "SPThunderboltDataType")
_IFCONFIG: Final = "/sbin/ifconfig"
_WIFI_PORT: Final = re.compile(r"Wi-?Fi|AirPort", re.IGNORECASE)

# From <net/if_media.h> and <sys/sockio.h> of macOS; the struct is packed to 4 bytes.
_IFMEDIAREQ: Final = struct.Struct("=16s5iQ")
_SIOCGIFMEDIA: Final = 0xC02C6938
_IFM_AVALID: Final = 1
_IFM_ACTIVE: Final = 2

_SIOCETHTOOL: Final = 0x8946  # <linux/sockios.h>
_ETHTOOL_GSET: Final = 1
# struct ethtool_cmd of <linux/ethtool.h>: cmd, supported, and lp_advertising further on.
_COMMAND: Final = struct.Struct("=III20xI8x")
_IFREQ: Final = struct.Struct("16sP16x")
_MODES: Final[Mapping[int, int]] = MappingProxyType(  # SUPPORTED_..., of twisted pair
    {10_000: 1 << 12, 1000: 1 << 4 | 1 << 5, 100: 1 << 2 | 1 << 3, 10: 1 << 0 | 1 << 1}
)


class Hardware(NamedTuple):
    """What an interface is."""

    kind: InterfaceKind
    speed_mbit_s: int = 0
    """Of the Thunderbolt cable, in each direction; 0 if it is no Thunderbolt, or not known."""


WIRED: Final = Hardware("wired")


def read_hardware(interfaces: Iterable[str]) -> Mapping[str, Hardware]:
    """Return what these interfaces are. Blocks for up to half a second on macOS."""
    return _of_macos(interfaces) if psutil.MACOS else _of_linux(interfaces)


def has_carrier(interface: str) -> bool:
    """Return False if macOS says that nothing is connected; its flags still say "running" then."""
    if not psutil.MACOS:
        return True  # psutil has asked already
    question = _IFMEDIAREQ.pack(interface.encode(), 0, 0, 0, 0, 0, 0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFMEDIA, question)
        except OSError:  # it has no medium
            return True
    _, _, _, status, *_ = _IFMEDIAREQ.unpack(answer)
    return not status & _IFM_AVALID or bool(status & _IFM_ACTIVE)


# --- Linux


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


def _of_linux(interfaces: Iterable[str]) -> Mapping[str, Hardware]:
    return {interface: _one_of_linux(interface) for interface in interfaces}


def _one_of_linux(interface: str) -> Hardware:
    directory = _SYS_CLASS_NET / interface
    if interface.startswith("thunderbolt"):  # the name that the kernel's thunderbolt-net gives
        return Hardware("thunderbolt", _thunderbolt_of_linux(directory))
    if (directory / "phy80211").exists():
        return Hardware("wifi")
    return _bridge_of(_one_of_linux(port.name) for port in directory.glob("brif/*"))


def _thunderbolt_of_linux(directory: Path) -> int:
    """Return the lanes of the cable times their speed; the other host is the device's parent."""
    host = (directory / "device").resolve().parent
    try:
        lanes, speed = ((host / name).read_text() for name in ("tx_lanes", "tx_speed"))
        return int(lanes) * _mbit_s(speed)
    except (OSError, ValueError):  # a kernel before 5.6 does not say it
        return 0


def _bridge_of(members: Iterable[Hardware]) -> Hardware:
    """Return what a bridge is: Thunderbolt if all its members are, as slow as the slowest."""
    known = list(members)
    if not known or any(member.kind != "thunderbolt" for member in known):
        return WIRED
    speeds = [member.speed_mbit_s for member in known if member.speed_mbit_s]
    return Hardware("thunderbolt", min(speeds, default=0))


# --- macOS


class _Receptacle(msgspec.Struct):
    receptacle_id_key: str = ""
    receptacle_status_key: str = ""
    current_speed_key: str = ""


class _Bus(msgspec.Struct):
    receptacle_1_tag: _Receptacle = msgspec.field(default_factory=_Receptacle)


class _Profile(msgspec.Struct):
    SPThunderboltDataType: list[_Bus] = []


def parse_hardware_ports(listing: str) -> dict[str, str]:
    r"""Return the port of each device in `networksetup -listallhardwareports`.

    >>> parse_hardware_ports("Hardware Port: Wi-Fi\nDevice: en0\nEthernet Address: 00:00")
    {'en0': 'Wi-Fi'}
    """
    ports = re.findall(r"^Hardware Port: (.+)\nDevice: (\S+)", listing, re.MULTILINE)
    return {device: port for port, device in ports}


def parse_thunderbolt(profile: str) -> dict[str, int]:
    """Return the speeds, in Mbit/s, of the connected ports in `system_profiler`'s JSON.

    >>> port = '{"receptacle_id_key": "1", "receptacle_status_key": "receptacle_connected"'
    >>> bus = '{"receptacle_1_tag": %s, "current_speed_key": "40 Gb/s"}}' % port
    >>> parse_thunderbolt('{"SPThunderboltDataType": [%s]}' % bus)
    {'Thunderbolt 1': 40000}
    """
    try:
        buses = msgspec.json.decode(profile, type=_Profile).SPThunderboltDataType
    except msgspec.MsgspecError:
        return {}
    return {
        f"Thunderbolt {port.receptacle_id_key}": _mbit_s(port.current_speed_key)
        for port in (bus.receptacle_1_tag for bus in buses)
        if port.receptacle_status_key == "receptacle_connected"
    }


def _of_macos(interfaces: Iterable[str]) -> Mapping[str, Hardware]:
    ports = parse_hardware_ports(_run(*_NETWORKSETUP))
    kinds: dict[str, InterfaceKind] = {
        device: _kind_of_port(port) for device, port in ports.items()
    }
    cables: dict[str, int] = {}
    if "thunderbolt" in kinds.values():
        cables = parse_thunderbolt(_run(*_SYSTEM_PROFILER))
    known = {device: Hardware(kind, cables.get(ports[device], 0)) for device, kind in kinds.items()}
    for bridge in interfaces:
        if bridge.startswith("bridge"):
            members = re.findall(r"^\s+member: (\S+)", _run(_IFCONFIG, bridge), re.MULTILINE)
            if members:
                known[bridge] = _bridge_of(known.get(name, WIRED) for name in members)
    return {interface: known.get(interface, WIRED) for interface in interfaces}


def _kind_of_port(port: str) -> InterfaceKind:
    if _WIFI_PORT.match(port):
        return "wifi"
    # "Thunderbolt Ethernet" is an adapter at 1 or 10 Gbit/s
    return "thunderbolt" if re.match("Thunderbolt(?!.*Ethernet)", port) else "wired"


def _run(*command: str) -> str:
    """Return what the command prints; nothing if it fails."""
    try:
        return subprocess.run(  # noqa: S603 - a fixed command of the system's
            command, capture_output=True, check=True, encoding="utf-8", timeout=TIMEOUT_S
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""  # the kind only orders addresses and picks thresholds: all wired works too


def _mbit_s(speed: str) -> int:
    """Return the number in "20.0 Gb/s", "Up to 40 Gb/s" and "80 Gb/s x 1"; 0 if there is none.

    >>> _mbit_s("Up to 40 Gb/s")
    40000
    """
    found = re.search(r"([\d.]+) Gb/s", speed)
    return round(float(found[1]) * 1000) if found else 0
