"""Contents on their way from one machine to another, which pulls what it lacks.

The contents that a machine has asked for are one stream of bytes (`pmesh.core.wire.stream`), in the
order of its question. Both ends cut it into slices of contents in the same way.
"""

from collections.abc import Sequence
from typing import NamedTuple

from pmesh.launches.wire.tree import Content


class Slice(NamedTuple):
    """Some bytes of a content."""

    content: Content
    start: int
    nbytes: int


class Cutter:
    """Cuts the stream of some contents into slices."""

    def __init__(self, contents: Sequence[Content]) -> None:
        self.total = sum(content.nbytes for content in contents)
        self.left = self.total
        """The bytes of the stream that no slice has yet."""
        self._contents = iter(contents)
        self._rest: Slice | None = None

    def cut(self, nbytes: int) -> list[Slice]:
        """Return the slices of the next bytes, at most those that are left."""
        slices: list[Slice] = []
        self.left -= nbytes
        while nbytes > 0:
            if self._rest is None:
                content = next(self._contents)
                self._rest = Slice(content, 0, content.nbytes)
            content, start, left = self._rest
            size = min(nbytes, left)
            slices.append(Slice(content, start, size))
            self._rest = Slice(content, start + size, left - size) if size < left else None
            nbytes -= size
        return slices
