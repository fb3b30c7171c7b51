"""`mesh.store`: keys and values that the ranks of a job share."""

from collections.abc import Callable, Iterable
from operator import index
from typing import Protocol, SupportsIndex, cast

from pmesh.client.calls.queue import check_timeout
from pmesh.client.calls.reducing import DEFAULT_TIMEOUT_S
from pmesh.client.calls.traceback import make_public
from pmesh.errors import UsageError
from pmesh.store.wire import (
    MAX_KEY_BYTES,
    MAX_KEYS,
    MAX_VALUE_BYTES,
    Add,
    Answer,
    Append,
    Check,
    Command,
    CompareSet,
    Delete,
    Get,
    Keys,
    Set,
    Wait,
)


class StoreSession(Protocol):
    """Carries commands to the agent."""

    def ask_store(self, command: Command, timeout_s: float) -> Answer:
        """Run a command in the job's store and return its answer; raise PmeshError if it fails."""
        ...


_INT64 = range(-(2**63), 2**63)


class Store:
    """A few keys and values for all ranks of a job. Get it as `mesh.store`.

    It is linearizable: each call takes effect at one instant between its start and its end, the
    same for all ranks. Every machine with a rank of the job keeps a copy, and a call returns once
    all copies have its change. So no value is lost as long as one rank that could read it is left.
    The store is gone when its job ends.

    Any thread of any rank may call, at any time, also during collectives. A newcomer to a running
    job may call after its first `mesh.sync`. Keys are text of at most 1 KiB in UTF-8, values are
    bytes, at most 1 MiB. All keys and values of a job take at most 64 MiB; each key counts 128
    bytes more. It is meant for addresses, names and small results; arrays go through collectives.

    Every call takes `timeout_s` (1800 s). It raises:

    - UsageError if a key or a value is too large or the store is full; if the machine's ranks wait
      for more than 256 calls each, or for more than 16 MiB together, where each call counts 512
      bytes more and each key 256; and on a newcomer that has not called `mesh.sync`.
    - OpTimedOut if the time is over. A call that changes something may still do so.
    - HistorySuperseded if the job has continued without this rank, and AgentStopped if there is no
      agent; the next `mesh.sync` brings the rank back to the job.
    """

    def __init__(self, attached: Callable[[], StoreSession]) -> None:
        """`attached` returns the trainer's second connection to its agent."""
        self._attached = attached

    def set(self, key: str, value: bytes | bytearray, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Give the key a value, whatever it had before."""
        self._ask(Set(_key(key), _value(value)), timeout_s)

    def get(self, key: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> bytes:
        """Return the key's value, as soon as some rank has set it.

        Raises OpTimedOut if no rank has set it within `timeout_s`.
        """
        return cast("bytes", self._ask(Get(_key(key)), timeout_s).value)

    def wait(self, keys: Iterable[str], timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Wait until all of these keys, at most 1,024, are set at the same time.

        Raises OpTimedOut if they are not set within `timeout_s`.
        """
        self._ask(Wait(_keys(keys)), timeout_s)

    def add(self, key: str, amount: SupportsIndex = 1, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """Add to a number, 0 if the key is not set, and return the sum.

        The number is stored as text: `get` returns `b"12"`. Raises UsageError if the key's value
        is not a number, or the sum takes more than 64 bits.
        """
        return cast("int", self._ask(Add(_key(key), _int64(amount)), timeout_s).value)

    def compare_set(
        self,
        key: str,
        expected: bytes,
        desired: bytes,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> bytes | None:
        """Replace the key's value if it is the expected one.

        Args:
            key: The key.
            expected: The value that it must have; empty also matches a key that is not set.
            desired: The new value.
            timeout_s: For the whole call.

        Returns:
            The key's value after the call: `desired` if it was replaced, otherwise the value that
            differs from `expected`, or None if the key is not set.
        """
        command = CompareSet(_key(key), _value(expected), _value(desired))
        answer = self._ask(command, timeout_s).value
        return desired if answer is True else cast("bytes | None", answer)

    def append(
        self, key: str, value: bytes | bytearray, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Append bytes to the key's value; if the key is not set, set it to them."""
        self._ask(Append(_key(key), _value(value)), timeout_s)

    def delete(self, key: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> bool:
        """Remove the key; return False if it was not set."""
        return cast("bool", self._ask(Delete(_key(key)), timeout_s).value)

    def check(self, keys: Iterable[str], timeout_s: float = DEFAULT_TIMEOUT_S) -> bool:
        """Return True if all of these keys, at most 1,024, are set."""
        return cast("bool", self._ask(Check(_keys(keys)), timeout_s).value)

    def keys(self, prefix: str = "", timeout_s: float = DEFAULT_TIMEOUT_S) -> list[str]:
        """Return all keys that begin with the prefix, in alphabetical order.

        Raises UsageError if they take more than 1 MiB, where each counts 16 bytes more; then pass
        a longer prefix.
        """
        names = cast("tuple[str, ...]", self._ask(Keys(_key(prefix)), timeout_s).value)
        return list(names)

    def _ask(self, command: Command, timeout_s: float) -> Answer:
        answer = self._attached().ask_store(command, check_timeout(timeout_s))
        if answer.refused:
            raise UsageError(answer.refused)
        return answer


make_public(Store)


def _key(key: str) -> str:
    try:
        size = len(key.encode())
    except (AttributeError, UnicodeEncodeError) as e:
        raise UsageError(f"a key is text in Unicode, not {key!r}") from e
    if size > MAX_KEY_BYTES:
        raise UsageError(f"a key has at most {MAX_KEY_BYTES} bytes in UTF-8, not {size}")
    return key


def _int64(amount: SupportsIndex) -> int:
    try:
        number = int(index(amount))  # of numpy, or a bool, too
    except TypeError:
        number = None
    if number is None or number not in _INT64:  # a range compares what is no plain int one by one
        raise UsageError(f"an amount is an integer of 64 bits, not {amount!r}")
    return number


def _keys(keys: Iterable[str]) -> tuple[str, ...]:
    if isinstance(keys, str):
        raise UsageError(f"keys is a list of keys, not the text {keys!r}")
    try:
        found = iter(keys)
    except TypeError:
        raise UsageError(f"keys is a list of keys, not {keys!r}") from None
    names = tuple(map(_key, found))
    if len(names) > MAX_KEYS:
        raise UsageError(f"at most {MAX_KEYS} keys at a time, not {len(names)}")
    return names


def _value(value: object) -> bytes:
    """Return the value as bytes; raise UsageError for text, or if it is too large."""
    if not isinstance(value, bytes | bytearray):
        raise UsageError(f"a value is bytes, not {type(value).__name__}: encode it")
    if len(value) > MAX_VALUE_BYTES:
        raise UsageError(f"a value has at most {MAX_VALUE_BYTES} bytes, not {len(value)}")
    return bytes(value)
