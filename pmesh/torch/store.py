"""`mesh.store` as the `Store` that `torch.distributed` wants."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from pmesh.client.calls.store import Store
from pmesh.errors import PmeshError
from pmesh.torch.library import dist

T = TypeVar("T")


class MeshStore(dist.Store):  # type: ignore[misc] # torch has no types here
    """Keys and values in the agents of the job: there is no address to type, and no server to lose.

    They are linearizable, and stay while any rank of the job is there: see `pmesh.Store`. Calls
    raise `torch.distributed.DistStoreError` with the message of pmesh.
    """

    def __init__(self, store: Store, prefix: str = "") -> None:
        """`prefix` is put before every key."""
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._store = store
        self._prefix = prefix

    def clone(self) -> "MeshStore":
        """The same store, for another thread: any thread may call this one."""
        return self

    def set(self, key: str, value: bytes | str) -> None:
        """Give the key a value."""
        self._do(lambda: self._store.set(self._prefix + key, _bytes(value), self._timeout_s))

    def get(self, key: str) -> bytes:
        """Return the key's value as soon as it has one."""
        return self._do(lambda: self._store.get(self._prefix + key, self._timeout_s))

    def add(self, key: str, value: int) -> int:
        """Add to a number and return the sum."""
        return self._do(lambda: self._store.add(self._prefix + key, value, self._timeout_s))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Replace the value if it is the expected one; return the one that it has now.

        As in TCPStore that is `expected` for a key that is not set, unless `expected` is empty.
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
        """Return whether all of these keys are set."""
        named = [self._prefix + key for key in keys]
        return self._do(lambda: self._store.check(named, self._timeout_s))

    def delete_key(self, key: str) -> bool:
        """Remove the key; return whether it was set."""
        return self._do(lambda: self._store.delete(self._prefix + key, self._timeout_s))

    deleteKey = delete_key  # noqa: N815 - what a PrefixStore in C++ calls

    def num_keys(self) -> int:
        """Return how many keys are set."""
        return len(self._do(lambda: self._store.keys(self._prefix, self._timeout_s)))

    getNumKeys = num_keys  # noqa: N815 - as above

    def list_keys(self) -> list[str]:
        """Return all keys."""
        keys = self._do(lambda: self._store.keys(self._prefix, self._timeout_s))
        return [key.removeprefix(self._prefix) for key in keys]

    def has_extended_api(self) -> bool:
        """Return whether there are `append`, `multi_get` and `multi_set`: there are."""
        return True

    def append(self, key: str, value: bytes | str) -> None:
        """Put bytes behind the key's value."""
        self._do(lambda: self._store.append(self._prefix + key, _bytes(value), self._timeout_s))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of all of these keys as soon as they are set."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        """Give each key its value, one after the other."""
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
