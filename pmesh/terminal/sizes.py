"""Numbers of bytes, as people write and read them."""

import re

from pmesh.errors import ConfigError

_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+) *([KMG]?)(?:i?B)?", re.IGNORECASE)


def parse_size(option: str, text: str, *, least: int = 1) -> int:
    """Parse a number of bytes.

    >>> parse_size("--min-size", "1KiB"), parse_size("--min-size", "3m"), parse_size("", "100")
    (1024, 3145728, 100)

    Raises:
        ConfigError: The text is not a size, or the size is below the least.
    """
    found = _SIZE.fullmatch(text.strip())
    size = int(found[1]) * _FACTORS[found[2].upper()] if found else 0
    if size < least:
        raise ConfigError(
            f"{option} must be a number of bytes, at least {least}, such as 4096, 64KiB or "
            f"16MiB, not {text!r}"
        )
    return size


def rounded(nbytes: int) -> str:
    """Format bytes with one digit after the point.

    >>> rounded(100), rounded(1536), rounded(300 << 20)
    ('100 B', '1.5 KiB', '300.0 MiB')
    """
    for unit in ("G", "M", "K"):
        if nbytes >= _FACTORS[unit]:
            return f"{nbytes / _FACTORS[unit]:.1f} {unit}iB"
    return f"{nbytes} B"


_UNIT_STEP = 1000


def bytes_text(count: int) -> str:
    """Format bytes in the largest unit that leaves at least 1.

    >>> bytes_text(999), bytes_text(1_250_000)
    ('999 B', '1.2 MB')
    """
    value, units = float(count), ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= _UNIT_STEP and len(units) > 1:
        value /= _UNIT_STEP
        del units[0]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
