"""Two sides of a partition settle one job; where they meet, a rank knows its own."""

import msgspec

from pmesh.core.rosters import is_same_history
from pmesh.core.views import Verdict
from pmesh.ids import Rank

from .builders import ANNA, BERT, CARA, make_epoch, make_roster

ONE, OTHER = Rank(0), Rank(1)
OURS = make_roster(ANNA, BERT, CARA, number=7)


def lost(*ranks: Rank) -> tuple[Verdict, ...]:
    return (Verdict("RankLost", "gone", ranks),)


def test_the_same_roster_is_the_same_history() -> None:
    assert is_same_history(OURS, make_roster(ANNA, BERT, CARA, number=7), ONE)


def test_a_roster_settled_later_continues_ours() -> None:
    later = msgspec.structs.replace(OURS, number=9, lost=lost(OTHER))
    assert is_same_history(OURS, later, ONE)


def test_another_run_of_the_job_does_not() -> None:
    assert not is_same_history(OURS, make_roster(ANNA, born=make_epoch(8), number=8), ONE)


def test_what_the_other_side_settled_under_our_number_does_not() -> None:
    theirs = msgspec.structs.replace(OURS, lost=lost(OTHER))
    assert not is_same_history(OURS, theirs, ONE)


def test_what_was_settled_before_ours_does_not() -> None:
    theirs = msgspec.structs.replace(OURS, number=6)
    assert not is_same_history(OURS, theirs, ONE)


def test_a_roster_in_which_we_are_lost_does_not() -> None:
    theirs = msgspec.structs.replace(OURS, number=9, lost=lost(ONE))
    assert not is_same_history(OURS, theirs, ONE)


def test_whom_we_know_to_be_lost_goes_on_as_a_witness() -> None:
    ours = msgspec.structs.replace(OURS, lost=lost(ONE))
    theirs = msgspec.structs.replace(OURS, number=9, lost=lost(ONE))
    assert is_same_history(ours, theirs, ONE)
