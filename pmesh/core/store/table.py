"""The keys and values of one store, and what each command does to them.

The same commands in the same order make the same table, and have the same answers, on every
machine.
"""

from typing import assert_never

from pmesh.core.wire.store import (
    KEY_OVERHEAD_BYTES,
    MAX_STORE_BYTES,
    MAX_VALUE_BYTES,
    Add,
    Answer,
    Append,
    Check,
    CompareSet,
    Delete,
    Get,
    Keys,
    Read,
    Set,
    Wait,
    Write,
)

_INT64 = range(-(2**63), 2**63)


class Table:
    """The values by key."""

    def __init__(self, *, most_bytes: int = MAX_STORE_BYTES) -> None:
        self.values: dict[str, bytes] = {}
        self.nbytes = 0
        """What keys and values take, with KEY_OVERHEAD_BYTES for each."""
        self._most_bytes = most_bytes

    def write(self, command: Write) -> tuple[Answer, bool]:
        """Carry out a command; return its answer, and True if anything may have changed."""
        match command:
            case Set(key, value):
                return self._put(key, value, Answer())
            case Add(key, amount):
                return self._add(key, amount)
            case CompareSet(key, expected, desired):
                held = self.values.get(key)
                if (b"" if held is None else held) != expected:
                    return Answer(held), False
                return self._put(key, desired, Answer(value=True))
            case Append(key, value):
                return self._put(key, self.values.get(key, b"") + value, Answer())
            case Delete(key):
                found = key in self.values
                self._drop(key)
                return Answer(found), found
            case _:
                assert_never(command)

    def missing(self, command: Read) -> str | None:
        """Return a key that the command has to wait for; None if it can be answered now."""
        match command:
            case Get(key):
                return None if key in self.values else key
            case Wait(keys):
                return next((key for key in keys if key not in self.values), None)
            case Check() | Keys():
                return None
            case _:
                assert_never(command)

    def read(self, command: Read) -> Answer:
        """Answer a command for which no key is missing."""
        match command:
            case Get(key):
                return Answer(self.values[key])
            case Wait():
                return Answer()
            case Check(keys):
                return Answer(all(key in self.values for key in keys))
            case Keys(prefix):
                return self._keys(prefix)
            case _:
                assert_never(command)

    def _keys(self, prefix: str) -> Answer:
        names = tuple(sorted(key for key in self.values if key.startswith(prefix)))
        if sum(len(name.encode()) for name in names) > MAX_VALUE_BYTES:
            text = f"{len(names)} keys of the job's store take more than {MAX_VALUE_BYTES} bytes"
            return Answer(refused=f"{text}: name a longer prefix")
        return Answer(names)

    def put(self, key: str, value: bytes) -> None:
        """Set a value without a check: it comes from a table that has made them."""
        self._drop(key)
        self.values[key] = value
        self.nbytes += _size(key, value)

    def _drop(self, key: str) -> None:
        value = self.values.pop(key, None)
        if value is not None:
            self.nbytes -= _size(key, value)

    def _add(self, key: str, amount: int) -> tuple[Answer, bool]:
        held = self.values.get(key, b"0")
        try:
            total = int(held) + amount
        except ValueError:
            return Answer(refused=f"key {key!r} holds no number that add could add to"), False
        if total not in _INT64:
            return Answer(refused=f"key {key!r} would hold {total}, beyond 64 bits"), False
        return self._put(key, b"%d" % total, Answer(total))

    def _put(self, key: str, value: bytes, answer: Answer) -> tuple[Answer, bool]:
        if len(value) > MAX_VALUE_BYTES:
            text = f"key {key!r} would hold {len(value)} bytes; a value has at most"
            return Answer(refused=f"{text} {MAX_VALUE_BYTES}"), False
        held = self.values.get(key)
        before = 0 if held is None else _size(key, held)
        after = self.nbytes - before + _size(key, value)
        if after > self._most_bytes and after > self.nbytes:
            text = f"the job's store is full: with key {key!r} it would take {after} bytes of at"
            return Answer(refused=f"{text} most {self._most_bytes}; delete keys"), False
        self.put(key, value)
        return answer, True


def _size(key: str, value: bytes) -> int:
    return len(key.encode()) + len(value) + KEY_OVERHEAD_BYTES
