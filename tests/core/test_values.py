import msgspec
from msgspec.structs import replace

from pmesh.core.values import Roster, Seat, Terms, Verdict, View
from pmesh.ids import Epoch, Member, TrainerId
from tests.worlds.builders import (
    ANNA,
    BERT,
    CARA,
    DIGITS,
    FACES,
    make_epoch,
    make_member,
    make_roster,
    make_seat,
    make_trainer,
    make_view,
    unsigned,
)

EMPTY = View(make_epoch(1), ())


def view_of(*seats: Seat, counter: int = 9) -> View:
    return View(make_epoch(counter), seats)


def test_members_are_in_ring_order() -> None:
    assert make_view(3, CARA, ANNA, BERT).members == (CARA, ANNA, BERT)
    assert EMPTY.members == ()


def test_who_was_admitted_earlier_is_more_senior_wherever_it_sits() -> None:
    view = view_of(make_seat(ANNA, 7), make_seat(BERT, 2), make_seat(CARA, 5))
    assert view.by_seniority == (BERT, CARA, ANNA)


def test_of_two_admitted_together_the_smaller_node_id_is_more_senior() -> None:
    view = view_of(make_seat(CARA, 2), make_seat(BERT, 2), make_seat(ANNA, 3))
    assert view.by_seniority == (BERT, CARA, ANNA)


def test_a_view_with_more_members_is_heavier_whatever_its_epoch() -> None:
    assert make_view(1, ANNA, BERT).weight > make_view(9, CARA).weight


def test_of_two_views_of_one_size_the_later_epoch_is_heavier() -> None:
    assert make_view(2, ANNA).weight > make_view(1, BERT).weight
    assert make_view(2, BERT).weight > make_view(2, ANNA).weight


def test_a_member_has_its_seat_and_nobody_else_has_one() -> None:
    view = make_view(3, ANNA, BERT)
    assert view.seat_of(BERT) == view.seats[1]
    assert view.seat_of(CARA) is None


def test_a_restarted_agent_has_no_seat_until_it_is_admitted_anew() -> None:
    assert make_view(3, ANNA, BERT).seat_of(make_member("b", incarnation=99)) is None


def test_a_view_remembers_what_each_continuing_member_had_before() -> None:
    view = view_of(make_seat(ANNA, 1, previous=make_epoch(4)), make_seat(BERT, 9))
    assert view.previous_epoch_of(ANNA) == make_epoch(4)
    assert view.previous_epoch_of(BERT) is None
    assert view.previous_epoch_of(CARA) is None


def test_a_job_is_found_by_its_name() -> None:
    digits, faces = make_roster(ANNA), make_roster(ANNA, job=FACES)
    view = make_view(3, ANNA, rosters=[digits, faces])
    assert view.roster_of(FACES) == faces
    assert view.roster_of(DIGITS) == digits
    assert EMPTY.roster_of(DIGITS) is None


def test_an_agent_that_met_nobody_is_alone_the_first_in_its_view() -> None:
    roster = make_roster(ANNA)
    view = View.of_one(ANNA, unsigned("mac-a"), make_epoch(1), [roster])
    assert view == View(
        make_epoch(1), (Seat(ANNA, unsigned("mac-a"), make_epoch(1), previous=None),), (roster,)
    )
    assert View.of_one(ANNA, unsigned("mac-a"), make_epoch(1)).rosters == ()


HURT = make_roster(CARA, ANNA, ids=[2, 7], lost_holders=[make_trainer(4, BERT)])
"""Trainers 2 and 7 are left; trainer 4 is lost, and its agent holds a result."""


def test_a_rank_is_a_place_in_the_ring_and_a_trainer_keeps_its_number() -> None:
    assert HURT.ids == (2, 7)
    assert HURT.ids is HURT.ids, "each rank's report on each op asks for them"
    assert replace(HURT, trainers=HURT.trainers[:1]).ids == (2,)
    assert [HURT.rank_of(TrainerId(id_)) for id_ in (2, 4, 7)] == [0, None, 1]


def test_a_trainer_is_found_by_its_number_also_when_only_its_agent_lives() -> None:
    assert HURT.trainer(TrainerId(7)) == make_trainer(7, ANNA)
    assert HURT.trainer(TrainerId(4)) == make_trainer(4, BERT)
    assert HURT.trainer(TrainerId(3)) is None


def test_a_trainer_is_described_by_its_rank_while_it_has_one() -> None:
    assert HURT.describe(TrainerId(7)) == "rank 1 (mac-a)"
    assert HURT.describe(TrainerId(4)) == "a lost rank (mac-b)"
    assert HURT.describe(TrainerId(3)) == "a lost rank"


def test_a_member_may_have_several_trainers() -> None:
    roster = make_roster(ANNA, BERT, ANNA)
    assert [t.id for t in roster.trainers_at(ANNA)] == [0, 2]
    assert [t.slot for t in roster.trainers_at(ANNA)] == [0, 1]
    assert [t.id for t in roster.trainers_at(BERT)] == [1]
    assert roster.trainers_at(CARA) == ()


def test_of_two_trainers_terms_the_stricter_holds_in_each_point() -> None:
    lax, strict = Terms(), Terms(3, "raise", "majority")
    assert lax.joined_with(strict) == strict.joined_with(lax) == strict
    assert lax.joined_with(lax) == lax
    mixed = Terms(2, "raise", "any").joined_with(Terms(4, "continue", "majority"))
    assert mixed == Terms(4, "raise", "majority")


def test_values_can_be_compared_and_hashed_but_not_changed() -> None:
    def one(member: Member) -> tuple[Epoch, Roster, View]:
        return make_epoch(1, member), make_roster(member), make_view(1, member)

    assert {one(ANNA), one(ANNA), one(BERT)} == {one(BERT), one(ANNA)}
    assert make_trainer(0, ANNA) != make_trainer(0, ANNA, slot=1)


def test_a_verdict_is_printable_whoever_has_made_it() -> None:
    """It is never refused: an honest agent may have been told such a thing by its own trainer."""
    evil, printed = "a\x1b]0;x\x07\npmesh: b\u202e", "a�]0;x� pmesh: b�"
    assert Verdict("OpMismatch", evil).message == printed
    sent = msgspec.msgpack.encode(["OpMismatch", evil, []])
    assert msgspec.msgpack.decode(sent, type=Verdict) == Verdict("OpMismatch", printed)
    assert Verdict("RankLost", "mac is löst →").message == "mac is löst →"
