"""Each message between agents is within its bound, by arithmetic."""

import typing

import msgspec
import pytest

from pmesh.core.values import (
    MAX_JOB_BYTES,
    MAX_JOBS,
    MAX_MEMBERS,
    MAX_REPORTS,
    MAX_ROSTERS_BYTES,
    MAX_SEAT_BYTES,
    MAX_TRAINERS,
    MAX_VIEW_BYTES,
    Seat,
    Terms,
    View,
    nbytes_of,
)
from pmesh.core.views.room import ADMITTED_BYTES, SHARE_BYTES
from pmesh.core.wire import link, views
from pmesh.core.wire.views import (
    MAX_PRIMARIES,
    MAX_REQUESTS_BYTES,
    MAX_WAITING,
    Candidate,
    Commit,
    Flushed,
    Heartbeat,
    KnownPrimary,
    MeasuredEdge,
    Propose,
    RankProgress,
    TellView,
)
from pmesh.ids import (
    MAX_COUNTER,
    MAX_NAME,
    Epoch,
    Incarnation,
    JobName,
    Member,
    NodeId,
    Slot,
    TrainerId,
)
from simulation.wire import AnyPathMessage
from tests.worlds.builders import (
    ANNA,
    LARGEST_COMPARISON,
    make_view,
    unsigned,
)

LONGEST_NAME = "\N{CAT FACE}" * MAX_NAME  # of four bytes each
LONGEST_JOB = JobName("j" * MAX_JOB_BYTES)
ANY_MEMBER = Member(NodeId(bytes(32)), Incarnation(2**63 - 1))
LATE = Epoch(MAX_COUNTER, NodeId(bytes(32)), Incarnation(2**63 - 1))
LARGEST = 2**62


CUT_WHEN_MADE = {
    link.Hello: "the addresses of one machine take 8 KiB (addresses.announced_*)",
    link.KnownPeers: "one Hello in each",
    Heartbeat: "own entries, each with a bound (test_the_largest_heartbeat)",
    TellView: "MAX_VIEW_BYTES, which limits.check_view demands and leader.decide keeps",
    views.Superseded: "the same",
    Propose: "the same, and test_the_largest_proposal",
    Commit: "the same, and test_the_largest_commit",
    Flushed: "the same, and room.fit_answer",
}


def worst_bytes(info: msgspec.inspect.Type) -> float:  # noqa: PLR0911, C901 - one arm for each kind
    """How many bytes a value may take that decoding accepts."""
    match info:
        case msgspec.inspect.NoneType() | msgspec.inspect.BoolType():
            return 1
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            return 9
        case msgspec.inspect.StrType(max_length=most):
            return 5 + 4 * (float("inf") if most is None else most)
        case msgspec.inspect.BytesType(max_length=most):
            return 5 + (float("inf") if most is None else most)
        case msgspec.inspect.LiteralType(values=values):
            return max(nbytes_of(value) for value in values)
        case msgspec.inspect.VarTupleType(item_type=item, max_length=most):
            return 5 + worst_bytes(item) * (float("inf") if most is None else most)
        case msgspec.inspect.TupleType(item_types=types):
            return 5 + sum(map(worst_bytes, types))
        case msgspec.inspect.DictType(key_type=key, value_type=value, max_length=most):
            each = worst_bytes(key) + worst_bytes(value)
            return 5 + each * (float("inf") if most is None else most)
        case msgspec.inspect.UnionType(types=types):
            return max(map(worst_bytes, types))
        case (
            msgspec.inspect.StructType(fields=fields)
            | msgspec.inspect.NamedTupleType(fields=fields)
        ):
            named = 1 if getattr(info, "array_like", True) else 64
            return 14 + sum(named + worst_bytes(field.type) for field in fields)
        case _:
            raise NotImplementedError(info)


KINDS: tuple[type[AnyPathMessage], ...] = typing.get_args(AnyPathMessage)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_of_message_fits_by_its_fields_or_is_cut_when_it_is_made(
    kind: type[AnyPathMessage],
) -> None:
    """A new kind fails here: bound its fields, or say where it is cut and test that."""
    fits = worst_bytes(msgspec.inspect.type_info(kind)) <= kind.most_bytes
    assert fits or kind in CUT_WHEN_MADE or is_of_launches(kind)


def is_of_launches(kind: type) -> bool:
    """Their bounds are in `pmesh.launches.wire.messages`; nobody passes them on."""
    return kind.__module__ == "pmesh.launches.wire.messages"


MEMBERS = tuple(
    Member(NodeId(bytes([i]) * 32), Incarnation(2**63 - 1 - i)) for i in range(MAX_MEMBERS)
)
PRIMARY = KnownPrimary(LONGEST_JOB, LATE, LATE, in_force=True)
WAITS = Candidate(LONGEST_JOB, Slot(2**62), MAX_TRAINERS, Terms(1024, "continue", "majority"))


def bytes_beside_the_view(message: Propose | Commit | Flushed) -> int:
    view = message.base if isinstance(message, Propose) else message.view
    return nbytes_of(message) - nbytes_of(view)


VIEW = make_view(5, ANNA)


def test_the_largest_view_is_within_its_bound() -> None:
    seat = Seat(ANY_MEMBER, unsigned(LONGEST_NAME), LATE, LATE)
    assert nbytes_of(seat) <= MAX_SEAT_BYTES
    empty = View(LATE, (seat,) * MAX_MEMBERS, ())
    assert nbytes_of(empty) + MAX_ROSTERS_BYTES <= MAX_VIEW_BYTES


def test_the_largest_proposal_is_within_its_bound() -> None:
    jobs = (LONGEST_JOB,) * MAX_JOBS
    proposal = Propose(LATE, VIEW, MEMBERS, MEMBERS, jobs)
    assert bytes_beside_the_view(proposal) + MAX_VIEW_BYTES <= Propose.most_bytes


def test_the_largest_commit_is_within_its_bound() -> None:
    costs = tuple((1000,) * MAX_MEMBERS for _ in MEMBERS)
    assert bytes_beside_the_view(Commit(VIEW, costs)) + MAX_VIEW_BYTES <= Commit.most_bytes


def test_a_flush_answer_has_room_for_its_ranks_beside_the_largest_of_all_else() -> None:
    answer = Flushed(
        LATE, unsigned(LONGEST_NAME), VIEW, (), (WAITS,) * MAX_WAITING, (PRIMARY,) * MAX_PRIMARIES
    )
    rest = Flushed.most_bytes - MAX_VIEW_BYTES - bytes_beside_the_view(answer)
    assert rest >= 56 * 1024


def test_the_largest_heartbeat_is_within_its_bound() -> None:
    progress = RankProgress(
        *(LONGEST_JOB, MAX_COUNTER, TrainerId(LARGEST), LARGEST, LARGEST, 2**64 - 1, LARGEST),
        reports={f"{number:0>24}": 1.0 for number in range(MAX_REPORTS)},
        comparison=LARGEST_COMPARISON,
    )
    beat = Heartbeat(
        view=LATE,
        promised=LATE,
        flushed=True,
        acting=True,
        needs_epoch=True,
        heard={m.incarnation: MeasuredEdge(2**62, 2**32) for m in MEMBERS},
        waiting=(WAITS,) * MAX_WAITING,
        progress=(progress,) * MAX_WAITING,
        sent_us=2**62,
        echo_us=2**62,
        held_us=2**62,
        in_force=(PRIMARY,) * MAX_JOBS,
        silent=tuple(m.incarnation for m in MEMBERS),
        cpu_percent=100,
        memory_percent=100,
    )
    assert nbytes_of(beat) + MAX_REQUESTS_BYTES <= Heartbeat.most_bytes


def test_the_shares_leave_room_for_what_view_changes_add() -> None:
    assert SHARE_BYTES < ADMITTED_BYTES < MAX_ROSTERS_BYTES
