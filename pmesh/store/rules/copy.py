"""One machine's copy of a store: a table, and the answers to the last writes."""

from collections.abc import Collection, Iterator

from pmesh.errors import ProtocolError
from pmesh.ids import TrainerId
from pmesh.store.rules.table import Table
from pmesh.store.wire import (
    MAX_STORE_BYTES,
    Answer,
    CopyAnswer,
    CopyBegins,
    CopyEnds,
    CopyValue,
    Entry,
    StoreMessage,
)

REMEMBERED = 64
"""S3: how many answers to writes are kept for each trainer. From the oldest write without an answer
on, a machine asks for no more writes than this."""


class Copy:
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
