"""One machine's copy of a store: its table, the answers it remembers, and its last entries."""

from collections import deque
from collections.abc import Collection, Iterator

from pmesh.core.store.table import Table
from pmesh.core.wire.store import (
    MAX_STORE_BYTES,
    Answer,
    CopyAnswer,
    CopyBegins,
    CopyEnds,
    CopyValue,
    Entry,
    StoreMessage,
)
from pmesh.errors import ProtocolError
from pmesh.ids import TrainerId

MAX_ANSWERS = 64 * 1024  # a trainer waits for few at a time


class Copy:
    """What all entries up to `position` have made of a store that began empty.

    The answers to writes are kept until their trainers have got them, so that a write that is
    asked for again, after a view change, is not carried out twice (S3).
    """

    def __init__(self, position: int = 0) -> None:
        self.table = Table()
        self.position = position
        self.answers: dict[TrainerId, dict[int, Answer]] = {}
        self._log = deque[Entry]()
        self._received_answers = 0

    def apply(self, entry: Entry) -> Answer | None:
        """Carry out the next entry; return its answer, None if it has no command."""
        self.position = entry.position
        self._log.append(entry)
        self.settle(entry.stable)
        kept = self.answers.get(entry.trainer, {})
        for call in [call for call in kept if call < entry.open_from]:
            del kept[call]
        if entry.command is None:
            return None
        answer, changed = self.table.write(entry.command)
        if changed:
            self.answers.setdefault(entry.trainer, {})[entry.call] = answer
        return answer

    def answer_to(self, trainer: TrainerId, call: int) -> Answer | None:
        """Return the answer to a write that was carried out before; None if it was not."""
        return self.answers.get(trainer, {}).get(call)

    def settle(self, stable: int) -> None:
        """Forget entries that every copy has."""
        while self._log and self._log[0].position <= stable:
            self._log.popleft()

    def forget_all_but(self, trainers: Collection[TrainerId]) -> None:
        """Forget answers to trainers that are lost: they ask for nothing again."""
        self.answers = {t: kept for t, kept in self.answers.items() if t in trainers}

    def what_follows(self, position: int) -> Iterator[StoreMessage]:
        """Return what brings a copy at this position to ours: entries, or else a whole copy.

        The values are those of now, also if more is written while they travel.
        """
        if self.position - len(self._log) <= position:
            return iter([entry for entry in self._log if entry.position > position])
        return iter(self._whole())

    def _whole(self) -> list[StoreMessage]:
        values = [CopyValue(key, value) for key, value in self.table.values.items()]
        answers = [
            CopyAnswer(trainer, call, answer)
            for trainer, kept in self.answers.items()
            for call, answer in kept.items()
        ]
        return [CopyBegins(self.position), *values, *answers, CopyEnds()]

    def receive_untrusted(self, part: CopyValue | CopyAnswer) -> None:
        """Take a part of a whole copy. Raises ProtocolError if there are more than a store has."""
        if isinstance(part, CopyValue):
            self.table.put(part.key, part.value)
        else:
            self.answers.setdefault(part.trainer, {})[part.call] = part.answer
            self._received_answers += 1
        is_long = isinstance(part, CopyAnswer) and isinstance(part.answer.value, bytes | tuple)
        too_many = self._received_answers > MAX_ANSWERS or self.table.nbytes > MAX_STORE_BYTES
        if is_long or too_many:
            raise ProtocolError("a copy of a store that is larger than any may be")
