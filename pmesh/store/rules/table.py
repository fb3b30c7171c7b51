"""The keys and values of one store, what each command does to them, and a machine's whole copy.

On every machine the same commands in the same order give the same table and the same answers.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterator
from typing import assert_never

from pmesh.errors import ProtocolError
from pmesh.ids import TrainerId
from pmesh.store.wire import (
    KEY_OVERHEAD_BYTES,
    MAX_STORE_BYTES,
    MAX_VALUE_BYTES,
    Add,
    Answer,
    Append,
    Check,
    CompareSet,
    CopyAnswer,
    CopyBegins,
    CopyEnds,
    CopyValue,
    Delete,
    Entry,
    Get,
    Keys,
    Read,
    Set,
    StoreMessage,
    Wait,
    Write,
)

BLOCK = 1024  # keys in a block of names; adding one moves at most so many
_INT64 = range(-(2**63), 2**63)
_MOST_DIGITS = 64  # enough for 64 bits and spaces: a longer text would take long to parse
_NAME_BYTES = 16  # overhead of a name in an answer, on the network and in memory


class Table:
    """A store's values by key."""

    def __init__(self, *, most_bytes: int = MAX_STORE_BYTES) -> None:
        self.values: dict[str, bytes | bytearray] = {}
        """A value that is appended to is a bytearray, so that an append does not copy it."""
        self.nbytes = 0
        """The bytes of all keys and values, with KEY_OVERHEAD_BYTES for each key."""
        self._names = Names()
        self._most_bytes = most_bytes

    def write(self, command: Write, *, answers: bool = True) -> tuple[Answer, bool]:
        """Carry out a command. Return its answer, and True if anything may have changed.

        Only a coordinator sets `answers`; elsewhere no value is copied for an answer.
        """
        match command:
            case Set(key, value):
                return self._put(key, value, Answer())
            case Add(key, amount):
                return self._add(key, amount)
            case CompareSet(key, expected, desired):
                if self.values.get(key, b"") != expected:
                    return Answer(self._value(key) if answers else None), False
                return self._put(key, desired, Answer(value=True))
            case Append(key, value):
                return self._append(key, value)
            case Delete(key):
                found = key in self.values
                self._drop(key)
                return Answer(found), found
            case _:
                assert_never(command)

    def read(self, command: Read) -> Answer:
        """Return the answer to a command. If it waits for keys, they must be set."""
        match command:
            case Get(key):
                return Answer(self._value(key))
            case Wait():
                return Answer()
            case Check(keys):
                return Answer(all(key in self.values for key in keys))
            case Keys(prefix):
                return self._keys(prefix)
            case _:
                assert_never(command)

    def _value(self, key: str) -> bytes | None:
        """Return a value as bytes, which no later append changes."""
        value = self.values.get(key)
        if isinstance(value, bytearray):
            value = self.values[key] = bytes(value)
        return value

    def _keys(self, prefix: str) -> Answer:
        names, nbytes = list[str](), 0
        for some in self._names.beginning_with(prefix):
            names += some
            nbytes += len("".join(some).encode()) + _NAME_BYTES * len(some)
            if nbytes > MAX_VALUE_BYTES:
                text = f"the keys of the job's store that begin with {prefix!r} take more than"
                return Answer(refused=f"{text} {MAX_VALUE_BYTES} bytes: name a longer prefix")
        return Answer(tuple(names))

    def put(self, key: str, value: bytes) -> None:
        """Set a value without checks: the table that it comes from has made them."""
        held = self.values.get(key)
        if held is None:
            self._names.add(key)
        else:
            self.nbytes -= _size(key, len(held))
        self.values[key] = value
        self.nbytes += _size(key, len(value))

    def _drop(self, key: str) -> None:
        value = self.values.pop(key, None)
        if value is not None:
            self._names.remove(key)
            self.nbytes -= _size(key, len(value))

    def _add(self, key: str, amount: int) -> tuple[Answer, bool]:
        held = self.values.get(key, b"0")
        try:
            total = int(held[: _MOST_DIGITS + 1]) + amount
        except ValueError:
            total = None
        if total is None or len(held) > _MOST_DIGITS:
            return Answer(refused=f"key {key!r} holds no number that add could add to"), False
        if total not in _INT64:
            return Answer(refused=f"key {key!r} would hold {total}, beyond 64 bits"), False
        return self._put(key, b"%d" % total, Answer(total))

    def _append(self, key: str, value: bytes) -> tuple[Answer, bool]:
        held = self.values.get(key)
        if held is None:
            return self._put(key, value, Answer())
        refused = self._refused(key, len(held) + len(value))
        if refused is not None:
            return refused, False
        if isinstance(held, bytes):
            held = self.values[key] = bytearray(held)
        held += value
        self.nbytes += len(value)
        return Answer(), True

    def _put(self, key: str, value: bytes, answer: Answer) -> tuple[Answer, bool]:
        refused = self._refused(key, len(value))
        if refused is not None:
            return refused, False
        self.put(key, value)
        return answer, True

    def _refused(self, key: str, nbytes: int) -> Answer | None:
        """Return a refusal if the key can't hold so many bytes, or else None."""
        if nbytes > MAX_VALUE_BYTES:
            text = f"key {key!r} would hold {nbytes} bytes; a value has at most"
            return Answer(refused=f"{text} {MAX_VALUE_BYTES}")
        held = self.values.get(key)
        before = 0 if held is None else _size(key, len(held))
        after = self.nbytes - before + _size(key, nbytes)
        if after > self._most_bytes and after > self.nbytes:
            text = f"the job's store is full: with key {key!r} it would take {after} bytes of at"
            return Answer(refused=f"{text} most {self._most_bytes}; delete keys")
        return None


def _size(key: str, nbytes: int) -> int:
    return len(key.encode()) + nbytes + KEY_OVERHEAD_BYTES


class Names:
    """A sorted set of keys, in blocks that stay small.

    Those with a prefix are found without a full search.
    """

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

    def beginning_with(self, prefix: str) -> Iterator[list[str]]:
        """Yield the keys with this prefix, in order, some at a time."""
        for i in range(self._block_of(prefix), len(self._blocks)):
            block = self._blocks[i]
            begin = bisect_left(block, prefix)
            end = bisect_left(block, 1, begin, key=lambda name: not name.startswith(prefix))
            yield block[begin:end]
            if end < len(block):
                return

    def _block_of(self, name: str) -> int:
        return max(bisect_right(self._blocks, name, key=_first) - 1, 0)


def _first(block: list[str]) -> str:
    return block[0] if block else ""


REMEMBERED = 64
"""S3: how many answers to writes are kept for each trainer. From the oldest write without an answer
on, a machine asks for no more writes than this."""


class StoreCopy:
    """The result of all entries so far, applied to an empty store."""

    def __init__(self) -> None:
        self.table = Table()
        self.roster = 0
        """The number of the last roster under which all copies were made equal."""
        self.position = 0
        """The number of entries applied since then."""
        self.answers: dict[TrainerId, dict[int, Answer]] = {}

    def begin(self, roster: int) -> None:
        """Note that all copies are equal under this roster."""
        self.roster, self.position = roster, 0

    def apply(self, entry: Entry, *, answers: bool) -> Answer | None:
        """Carry out the next entry. Return its answer, or None if it has no command."""
        self.position = entry.position
        if entry.command is None:
            return None
        answer, changed = self.table.write(entry.command, answers=answers)
        if changed:
            self._remember(entry.trainer, entry.call, answer)
        return answer

    def _remember(self, trainer: TrainerId, call: int, answer: Answer) -> None:
        kept = self.answers.setdefault(trainer, {})
        kept[call] = answer
        if len(kept) > REMEMBERED:
            del kept[next(iter(kept))]

    def answer_to(self, trainer: TrainerId, call: int) -> Answer | None:
        """Return the answer to a write; None if the write was not carried out before."""
        return self.answers.get(trainer, {}).get(call)

    def forget_all_but(self, trainers: Collection[TrainerId]) -> None:
        """Forget the answers to all other trainers: they are lost and never ask again."""
        self.answers = {t: kept for t, kept in self.answers.items() if t in trainers}

    def parts(self) -> Iterator[StoreMessage]:
        """Yield a whole copy, one key at a time. Nothing may be written until the end."""
        yield CopyBegins()
        for key, value in self.table.values.items():
            yield CopyValue(key, bytes(value))
        for trainer, kept in self.answers.items():
            for call, answer in kept.items():
                yield CopyAnswer(trainer, call, answer)
        yield CopyEnds()

    def receive_untrusted(self, part: CopyValue | CopyAnswer) -> None:
        """Take a part of a whole copy. Raises ProtocolError for a part that no copy has."""
        if isinstance(part, CopyValue):
            self.table.put(part.key, part.value)
            if self.table.nbytes > MAX_STORE_BYTES:
                raise ProtocolError("a copy of a store that is larger than any may be")
            return
        if part.answer.refused or isinstance(part.answer.value, bytes | tuple):
            raise ProtocolError("a copy of a store with an answer that no write has")
        self._remember(part.trainer, part.call, part.answer)
