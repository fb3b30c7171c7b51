"""Adapts `mesh.store` to the `Store` of `torch.distributed`."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from pmesh.errors import PmeshError
from pmesh.store.client import Store
from pmesh.torch.library import dist

T = TypeVar("T")


class MeshStore(dist.Store):  # type: ignore[misc] # torch has no types here
    """A store in the agents of the job. It needs no address, and no server can be lost.

    It is linearizable, and keeps its values while any rank of the job remains; see `pmesh.Store`.
    Calls raise `torch.distributed.DistStoreError` with the message of pmesh.
    """

    def __init__(self, store: Store, prefix: str = "") -> None:
        """`prefix` is put before every key."""
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._store = store
        self._prefix = prefix

    def clone(self) -> "MeshStore":
        """Return this store: any thread may call it."""
        return self

    def set(self, key: str, value: bytes | str) -> None:
        """Set the key's value."""
        self._do(lambda: self._store.set(self._prefix + key, _bytes(value), self._timeout_s))

    def get(self, key: str) -> bytes:
        """Return the key's value as soon as it has one."""
        return self._do(lambda: self._store.get(self._prefix + key, self._timeout_s))

    def add(self, key: str, value: int) -> int:
        """Add to a number and return the sum."""
        return self._do(lambda: self._store.add(self._prefix + key, value, self._timeout_s))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Replace the value if it is the expected one; return the one that it has now.

        For a key that is not set return `expected`, unless that is empty, as in TCPStore.
        """
        before, after = _bytes(expected), _bytes(desired)
        found = self._do(
            lambda: self._store.compare_set(self._prefix + key, before, after, self._timeout_s)
        )
        return before if found is None else found

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all of these keys are set."""
        seconds = timeout.total_seconds() if timeout else self._timeout_s
        named = [self._prefix + key for key in keys]
        self._do(lambda: self._store.wait(named, max(seconds, 1e-3)))

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all of these keys are set."""
        named = [self._prefix + key for key in keys]
        return self._do(lambda: self._store.check(named, self._timeout_s))

    def delete_key(self, key: str) -> bool:
        """Remove the key; return True if it was set."""
        return self._do(lambda: self._store.delete(self._prefix + key, self._timeout_s))

    deleteKey = delete_key  # noqa: N815 - a PrefixStore in C++ calls this name

    def num_keys(self) -> int:
        """Return how many keys are set."""
        return len(self._do(lambda: self._store.keys(self._prefix, self._timeout_s)))

    getNumKeys = num_keys  # noqa: N815 - as above

    def list_keys(self) -> list[str]:
        """Return all keys."""
        keys = self._do(lambda: self._store.keys(self._prefix, self._timeout_s))
        return [key.removeprefix(self._prefix) for key in keys]

    def has_extended_api(self) -> bool:
        """Return True: the store has `append`, `multi_get` and `multi_set`."""
        return True

    def append(self, key: str, value: bytes | str) -> None:
        """Append bytes to the key's value."""
        self._do(lambda: self._store.append(self._prefix + key, _bytes(value), self._timeout_s))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of these keys as soon as all are set."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        """Set the keys' values, one after another."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    @property
    def _timeout_s(self) -> float:
        timeout: timedelta = self.timeout
        return max(timeout.total_seconds(), 1e-3)

    def _do(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except PmeshError as e:
            raise dist.DistStoreError(f"{type(e).__name__}: {e}") from e


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
