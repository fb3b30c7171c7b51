"""What an object keeps: whatever grows without end, or stays for ever, is seen there."""

from collections import deque
from collections.abc import Iterator
from weakref import WeakValueDictionary


def kept(owner: object) -> dict[str, int]:
    """How many entries each table of an object has, by its name without an underscore."""
    tables = (dict, list, set, deque, bytearray, WeakValueDictionary)
    return {n.lstrip("_"): len(x) for n, x in _attributes(owner) if isinstance(x, tables)}


def _attributes(owner: object) -> Iterator[tuple[str, object]]:
    yield from getattr(owner, "__dict__", {}).items()
    for kind in type(owner).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(owner, name):
                yield name, getattr(owner, name)
