"""How long ops took: a rank's latest ones in order, and counts of all that an agent has run.

Messages between two ranks are noted among the ops of each.
"""

from bisect import bisect_left
from collections.abc import Iterator
from struct import Struct
from typing import Annotated, Final, NamedTuple, TypeAlias, cast

import msgspec
from msgspec import Meta

from pmesh.core.ops.kinds import KINDS
from pmesh.ids import JobName, TrainerId

KEPT: Final = 16_384
"""Ops of one rank: a minute of 270 each second, in 0.75 MB."""
SIZES: Final = (4 << 10, 256 << 10, 16 << 20)
"""Bounds in bytes of small ops, of those that a thread runs, of a bucket, and of what is larger."""
DURATIONS_S: Final = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)

MESSAGES: Final = frozenset({"send", "recv"})
"""The kinds of an OpTime that are no collectives."""

_RECORD: Final = Struct("<qdQffBBqi")  # an OpTime in seconds; no object that Python would collect
_Record: TypeAlias = tuple[int, float, int, float, float, int, int, int, int]
_KINDS: Final = (*KINDS, *sorted(MESSAGES))
_NUMBERS: Final = {kind: number for number, kind in enumerate(_KINDS)}

_Microseconds = Annotated[int, Meta(ge=0, le=2**62)]


class OpTime(msgspec.Struct, frozen=True, array_like=True):
    """One op or message of one rank, from the call's arrival at the agent to its reply."""

    op: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    """Of a message: its number among all from its sender to its receiver."""
    began_us: _Microseconds
    """By the agent's monotonic clock."""
    nbytes: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    """Of the rank's values, or of all parts."""
    took_us: _Microseconds
    receiving_us: _Microseconds
    """How long this rank waited for bytes of a record that had begun to come; 0 for small ops.

    Of a `recv`: how long it took from when the message was known here.
    """
    kind: Annotated[str, Meta(max_length=16, pattern=r"^[a-z_]+\Z")]
    """One of KINDS or MESSAGES; a later version may know others."""
    completed: bool
    peer: Annotated[int, Meta(ge=-1, le=2**32 - 1)] = -1
    """The trainer to which or from which a message went; -1 if there was none."""
    tag: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = -1
    """Of a message; -1 if it is one of pmesh itself, as the calls of `mesh.rpc` are."""


class EndedMessage(NamedTuple):
    """A message that one rank has sent or received, or has given up; the fields are OpTime's."""

    kind: str
    nbytes: int
    op: int = 0
    peer: int = -1
    tag: int = -1


class RankTimes:
    """The latest ops of one rank.

    The bytes of records lie in one buffer, so that what is kept costs Python's collector nothing.
    """

    def __init__(self, job: JobName, run: int, trainer: TrainerId) -> None:
        self.job = job
        self.run = run
        """The counter of the epoch in which the job began: others of that name have others."""
        self.trainer = trainer
        self.rank = self.pid = -1
        """As they were at the last op."""
        self.count = 0
        """How many ops were noted, of which the last KEPT are here."""
        self._records = bytearray()

    @property
    def key(self) -> tuple[JobName, int, TrainerId]:
        """What no other rank of the mesh has."""
        return self.job, self.run, self.trainer

    def note(
        self,
        op: int,
        kind: str,
        nbytes: int,
        *,
        began_s: float,
        took_s: float,
        receiving_s: float,
        completed: bool,
        peer: int = -1,
        tag: int = -1,
    ) -> None:
        """Note an op that has ended; the times are the agent's, in seconds."""
        record = _RECORD.pack(
            op, began_s, nbytes, took_s, receiving_s, _NUMBERS[kind], completed, peer, tag
        )
        if self.count < KEPT:
            self._records += record
        else:
            place = self.count % KEPT * _RECORD.size
            self._records[place : place + _RECORD.size] = record
        self.count += 1

    def after(self, count: int, *, since_us: int) -> Iterator[tuple[int, OpTime]]:
        """Yield what was noted after the first `count` ops and ended at `since_us` or later.

        Each comes with the number of ops that were noted up to it.
        """
        kept = range(max(count, self.count - KEPT, 0), self.count)
        for number in kept[bisect_left(kept, since_us, key=self._ended_us) :]:
            op, began_s, nbytes, took_s, receiving_s, kind, completed, *message = self._read(number)
            yield (
                number + 1,
                OpTime(
                    op,
                    int(began_s * 1e6),
                    nbytes,
                    int(took_s * 1e6),
                    max(0, int(receiving_s * 1e6)),  # after a view there are fewer lanes
                    _KINDS[kind],
                    bool(completed),
                    *message,
                ),
            )

    def _ended_us(self, number: int) -> int:
        _, began_s, _, took_s, *_ = self._read(number)
        return int(began_s * 1e6) + int(took_s * 1e6)

    def _read(self, number: int) -> _Record:
        place = number % KEPT * _RECORD.size
        return cast("_Record", _RECORD.unpack_from(self._records, place))


class Durations:
    """How many ops took how long."""

    def __init__(self) -> None:
        self.counts = [0] * (len(DURATIONS_S) + 1)
        """For each of DURATIONS_S, then for what took longer."""
        self.total_s = 0.0


class DurationCounts:
    """The durations of ops by kind and size."""

    def __init__(self) -> None:
        self.by_kind: dict[tuple[str, int], Durations] = {}
        """By kind, and the place in SIZES of the least bound that an op's bytes are within."""

    def note(self, kind: str, nbytes: int, took_s: float) -> None:
        """Note an op that has completed."""
        key = kind, bisect_left(SIZES, nbytes)
        durations = self.by_kind.get(key)
        if durations is None:
            durations = self.by_kind[key] = Durations()
        durations.counts[bisect_left(DURATIONS_S, took_s)] += 1
        durations.total_s += took_s
