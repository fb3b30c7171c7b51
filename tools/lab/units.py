"""Numbers as a page or a terminal shows them."""

import math
from collections.abc import Sequence

KIB = 1 << 10
MIB = 1 << 20


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that `percent` % of them do not exceed (nearest rank).

    >>> percentile([4, 1, 3, 2], 75)
    3
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def size_text(nbytes: int) -> str:
    """A size in the unit that a user thinks in.

    >>> size_text(4096), size_text(16 << 20), size_text(100_000_000)
    ('4 KiB', '16 MiB', '95.4 MiB')
    """
    unit, name = (MIB, "MiB") if nbytes >= MIB else (KIB, "KiB")
    return f"{nbytes / unit:.3g} {name}"


def time_text(seconds: float) -> str:
    """A time with three digits, in the unit that fits.

    >>> time_text(0.000123), time_text(0.0123), time_text(2.5)
    ('123 µs', '12.3 ms', '2.5 s')
    """
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 1000:  # noqa: PLR2004 - the next unit
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def seconds_text(seconds: float) -> str:
    """A time in seconds; milliseconds are what can be told apart.

    >>> seconds_text(0.0654), seconds_text(12.345)
    ('0.065', '12.3')
    """
    return f"{seconds:.3f}" if seconds < 10 else f"{seconds:.1f}"  # noqa: PLR2004 - three digits


def count_text(count: float, unit: str = "") -> str:
    """A decimal number with three digits; nothing for 0.

    >>> count_text(25e6), count_text(1234, "B"), count_text(0)
    ('25 M', '1.23 kB', '')
    """
    if not count:
        return ""
    scaled = f"{count / 1e6:.3g} M" if count >= 10**6 else f"{count / 1e3:.3g} k"
    return scaled + unit
