"""HOST:PORT, as people write it."""

from pmesh.core.wire.link import Address

DEFAULT_PORT = 24160  # outside 32768 to 65535, which kernels give to outgoing connections
_MAX_PORT = 65535  # 16 bits


def parse_host_port(text: str) -> tuple[str, int]:
    """Split HOST:PORT, [V6]:PORT, :PORT or HOST. Raises ValueError with the reason.

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
        raise ValueError("a host must not contain spaces")
    try:
        host.encode("idna")  # as Python does before it looks a name up
    except UnicodeError as e:
        raise ValueError(
            f"{host!r} can't be the name of a host: each part between dots has 1 to 63 letters"
        ) from e
    if not colon:
        if host.isdecimal():  # getaddrinfo would read it as an IPv4 address of 32 bits
            raise ValueError(f"a port without a host is written :{host}")
        return host, DEFAULT_PORT
    if not (port.isascii() and port.isdecimal() and int(port) <= _MAX_PORT):
        raise ValueError("a port must be a number from 0 to 65535")
    return host, int(port)


def host_port_text(host: str, port: int) -> str:
    """The inverse of `parse_host_port`.

    >>> host_port_text("::1", 24160)
    '[::1]:24160'
    """
    return str(Address(host, port))


def next_to(host: str, port: int) -> str:
    """Return HOST:PORT of another port of this host, for a message.

    >>> next_to("", 24160), next_to("::1", 65535)
    (':24161', '[::1]:65534')
    """
    return host_port_text(host, port + (1 if port < _MAX_PORT else -1))
