"""The values of settings, from whatever layer: flags, variables and TOML give text or typed values.

Each parser raises ValueError with what the value must be; `load_settings` adds where it stands.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, TypeAlias, cast, get_args

from pmesh.compression.schemes import NAMES
from pmesh.core.messages import Address

DEFAULT_PORT = 24160  # outside 32768 to 65535, which kernels hand out to outgoing connections
LONGEST_NAME_BYTES = 63  # as a DNS label, and so that one TXT string holds it

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]


class Listen(NamedTuple):
    """Where the agent listens."""

    host: str = ""
    """Empty: at all addresses."""
    port: int = DEFAULT_PORT
    """0: one that the system picks."""


EVERYWHERE: Final = Listen()


def parse_host_port(text: str) -> tuple[str, int]:
    """Split HOST:PORT, [V6]:PORT, :PORT or HOST; ValueError says what is wrong.

    >>> parse_host_port("mac-1.local:7000"), parse_host_port("[fe80::1%en0]"), parse_host_port(":0")
    (('mac-1.local', 7000), ('fe80::1%en0', 24160), ('', 0))
    """
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or rest[:1] not in ("", ":"):
            raise ValueError("an IPv6 address is written [ADDRESS]:PORT")
        colon, port = rest[:1], rest[1:]
    else:
        host, colon, port = text.partition(":")
        if ":" in port:
            raise ValueError("an IPv6 address is written [ADDRESS]:PORT")
    if any(character.isspace() or not character.isprintable() for character in host):
        raise ValueError("a host has no spaces")
    if not colon:
        return host, DEFAULT_PORT
    if not (port.isascii() and port.isdecimal() and int(port) <= 65535):  # noqa: PLR2004 - 16 bits
        raise ValueError("a port is a number from 0 to 65535")
    return host, int(port)


def host_port_text(host: str, port: int) -> str:
    """The reverse of `parse_host_port`.

    >>> host_port_text("::1", 24160)
    '[::1]:24160'
    """
    return str(Address(host, port))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("must be text")  # noqa: TRY004 - one exception for every bad value
    return value


def _name(value: object) -> str:
    text = _text(value).strip()
    if not text or not text.isprintable() or len(text.encode()) > LONGEST_NAME_BYTES:
        raise ValueError(f"a name is 1 to {LONGEST_NAME_BYTES} bytes of printable text")
    return text


def _listen(value: object) -> Listen:
    return Listen(*parse_host_port(_text(value)))


def _peers(value: object) -> tuple[Address, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, (list, tuple)):
        raise ValueError("must be a list of HOST:PORT")  # noqa: TRY004 - likewise
    return tuple(_peer(item) for item in cast("list[object]", value))


def _peer(value: object) -> Address:
    host, port = parse_host_port(_text(value))
    if not host or not port:
        raise ValueError("a peer is HOST:PORT")
    return Address(host, port)


def _truth(value: object) -> bool:
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if isinstance(value, str):
        value = words.get(value.lower())
    if not isinstance(value, bool):
        raise ValueError("must be true or false")  # noqa: TRY004 - likewise
    return value


def _count(value: object) -> int:
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("must be a number, 0 or more")
    return value


def _compression(value: object) -> str:
    text = _text(value).strip().lower()
    if text in ("", "none"):
        return ""
    if text not in NAMES:
        raise ValueError(f"must be none or one of {', '.join(NAMES)}")
    return text


def _log_level(value: object) -> LogLevel:
    text = _text(value).lower()
    if text not in get_args(LogLevel):
        raise ValueError(f"must be one of {', '.join(get_args(LogLevel))}")
    return cast("LogLevel", text)


def _path(value: object) -> Path:
    return Path(value if isinstance(value, Path) else _text(value)).expanduser()


PARSERS: Final[Mapping[str, Callable[[object], object]]] = MappingProxyType(
    {
        "name": _name,
        "listen": _listen,
        "peers": _peers,
        "mdns": _truth,
        "min_peers": _count,
        "compression": _compression,
        "log_level": _log_level,
        "log_json": _truth,
        "key_file": _path,
    }
)
