"""Keys in alphabetical order, so that those with a prefix are found without a full search."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

BLOCK = 1024  # keys; adding one moves at most so many


class Names:
    """A sorted set of keys, in blocks that stay small."""

    def __init__(self) -> None:
        self._blocks: list[list[str]] = []

    def add(self, name: str) -> None:
        """Add a key, which must be new."""
        if not self._blocks:
            self._blocks.append([])
        index = self._block_of(name)
        block = self._blocks[index]
        insort(block, name)
        if len(block) > BLOCK:
            self._blocks[index : index + 1] = [block[: BLOCK // 2], block[BLOCK // 2 :]]

    def remove(self, name: str) -> None:
        """Remove a key, which must be present."""
        index = self._block_of(name)
        block = self._blocks[index]
        del block[bisect_left(block, name)]
        if not block:
            del self._blocks[index]

    def beginning_with(self, prefix: str) -> Iterator[str]:
        """Yield the keys with this prefix, in order."""
        first = self._block_of(prefix)
        for i in range(first, len(self._blocks)):
            block = self._blocks[i]
            for j in range(bisect_left(block, prefix) if i == first else 0, len(block)):
                if not block[j].startswith(prefix):
                    return
                yield block[j]

    def _block_of(self, name: str) -> int:
        return max(bisect_right(self._blocks, name, key=_first) - 1, 0)


def _first(block: list[str]) -> str:
    return block[0] if block else ""
