"""S1 to S4: copies of a store while machines come and go, against an executable model."""

from collections.abc import Callable, Iterable

import pytest

from pmesh.errors import ProtocolError
from pmesh.ids import Member
from pmesh.store.rules.replica import (
    AT_ONCE,
    MOST_ASKED_BYTES,
    MOST_UNDER_WAY_BYTES,
    Coordinator,
    Keepers,
    Replica,
)
from pmesh.store.rules.table import REMEMBERED, StoreCopy
from pmesh.store.wire import (
    NO_COPY,
    Add,
    Answer,
    Answered,
    Ask,
    Check,
    CopyAnswer,
    CopyBegins,
    CopyEnds,
    CopyValue,
    Entry,
    Fetch,
    Get,
    GiveUp,
    Have,
    Keys,
    Report,
    Set,
    StoreMessage,
    Wait,
    decode_message_untrusted,
    encode,
)
from tests.store.stores import ID_OF, DirectPost, StoreWorld
from tests.store.stores import make_keepers as keepers
from tests.worlds.builders import ANNA, BERT, CARA, make_roster
from tests.worlds.faults import Faults, Real
from tests.worlds.linearizable import is_linearizable

STEPS = 350


def run(seed: int) -> StoreWorld:
    world = StoreWorld(seed)
    world.run(STEPS)
    world.settle()
    world.ask_all()
    return world


def holds(world: StoreWorld) -> bool:
    """Whether all calls of a settled world are as on one machine, and all copies the same."""
    copies = [machine.replica.copy for machine in world.here()]
    tables = [(copy.position, copy.table.values) for copy in copies if copy is not None]
    return (
        len(tables) == len(copies)
        and all(table == tables[0] for table in tables)
        and not list(world.unanswered())
        and is_linearizable(world.calls)
    )


@pytest.mark.parametrize(
    "seeds",
    [
        *(range(i, i + 50) for i in (0, 50)),
        *(pytest.param(range(i, i + 50), marks=pytest.mark.slow) for i in (100, 150, 200, 250)),
    ],
)
def test_calls_are_as_on_one_machine_whoever_is_lost_and_comes(seeds: range) -> None:
    for seed in seeds:
        assert holds(run(seed)), seed


def test_a_coordinator_that_is_lost_at_any_step_takes_no_answered_call_with_it() -> None:
    for step in range(1, STEPS, 3):
        world = StoreWorld(7)
        world.run(STEPS, kill_at=step)
        world.settle()
        world.ask_all()
        assert holds(world), step


LARGE = bytes(2**20)


def test_a_write_of_a_whole_copy_is_not_carried_out_again() -> None:
    """S3: the coordinator that has carried it out is lost, and only a newcomer has it."""
    post = DirectPost(ANNA, BERT, CARA)
    post.follow(keepers(ANNA, BERT, is_first=True))
    post.ask(BERT, 0, Add("n", 1), out_of_reach=[BERT])
    post.follow(keepers(ANNA, BERT, CARA, number=2), out_of_reach=[BERT])
    copies = [post.replicas[member].copy for member in (BERT, CARA)]
    assert [copy.table.values for copy in copies if copy] == [{}, {"n": b"1"}]
    assert not post.answers

    post.follow(keepers(BERT, CARA, number=3))
    assert post.answers == {(1, 0): 1}
    copies = [post.replicas[member].copy for member in (BERT, CARA)]
    assert [copy.table.values for copy in copies if copy] == [{"n": b"1"}] * 2


def test_the_machine_of_the_oldest_rank_coordinates() -> None:
    found = Keepers.of(make_roster(CARA, ANNA, BERT, ANNA, ids=[3, 7, 2, 4], number=5))
    assert (found.hosts, found.is_first) == ((BERT, CARA, ANNA), True)
    assert found.homes == {2: BERT, 3: CARA, 4: ANNA, 7: ANNA}
    assert not Keepers.of(make_roster(ANNA, number=6)).is_first


def test_when_all_who_had_a_copy_are_lost_the_store_begins_empty() -> None:
    post = DirectPost(ANNA, BERT)
    post.follow(keepers(ANNA, BERT))
    post.ask(BERT, 0, Keys(""))
    assert post.answers == {(1, 0): ()}


def test_a_side_without_a_quorum_orders_nothing() -> None:
    """V10."""
    post = DirectPost(ANNA)
    post.replicas[ANNA].allow(may_order=False)
    post.follow(keepers(ANNA, is_first=True))
    post.ask(ANNA, 0, Add("n", 1))
    assert not post.answers
    post.note(post.replicas[ANNA].allow(may_order=True))
    assert post.answers == {(0, 0): 1}


def test_a_call_that_was_given_up_is_not_answered_and_leaves_nothing() -> None:
    post = DirectPost(ANNA, BERT)
    post.follow(keepers(ANNA, BERT, is_first=True))
    post.ask(BERT, 0, Wait(("a", "b")))
    post.ask(BERT, 1, Get("a"))
    post.ask(BERT, 2, Get("c"))
    post.replicas[ANNA].allow(may_order=False)
    post.ask(BERT, 3, Add("n", 1))
    for call in (0, 2, 3, 3):
        post.give_up(BERT, call)
    post.replicas[ANNA].allow(may_order=True)
    for call, key in enumerate("abc"):
        post.ask(ANNA, call, Set(key, b"1"))
    post.ask(ANNA, 3, Keys("n"))
    assert post.answers == {(1, 1): b"1", (0, 0): None, (0, 1): None, (0, 2): None, (0, 3): ()}


def position_of(replica: Replica) -> int:
    assert replica.copy is not None
    return replica.copy.position


def test_the_coordinator_orders_no_more_than_the_copies_can_take() -> None:
    post = DirectPost(ANNA, BERT)
    post.follow(keepers(ANNA, BERT, is_first=True))
    for call in range(6):
        post.ask(ANNA, call, Set(str(call), bytes(2**20)), out_of_reach=[BERT])
    assert position_of(post.replicas[ANNA]) == MOST_UNDER_WAY_BYTES // 2**20
    post.note(post.replicas[ANNA].receive_untrusted(BERT, Have(1)))
    assert position_of(post.replicas[ANNA]) == MOST_UNDER_WAY_BYTES // 2**20 + 1
    assert list(post.answers) == [(0, 0)]


def test_answers_that_a_machine_does_not_read_stop_the_coordinator_and_not_its_memory() -> None:
    anna = Replica(ANNA)
    anna.follow(keepers(ANNA, BERT, is_first=True))
    anna.receive_untrusted(BERT, Report(0, 0))
    anna.receive_untrusted(BERT, Ask(ID_OF[BERT], 0, Set("k", LARGE)))
    for call in range(1, 2000):
        anna.receive_untrusted(BERT, Ask(ID_OF[BERT], call, Get("k")))
        anna.receive_untrusted(BERT, Have(position_of(anna)))
    kept = 0
    while (data := anna.take(BERT)) is not None:
        kept += len(data)
    assert MOST_UNDER_WAY_BYTES < kept < 3 * MOST_UNDER_WAY_BYTES
    assert position_of(anna) < 20


def test_a_coordinator_does_a_bounded_part_of_its_work_in_one_turn() -> None:
    anna = Replica(ANNA)
    anna.allow(may_order=False)
    anna.follow(keepers(ANNA, is_first=True))
    for call in range(3 * AT_ONCE):
        anna.ask(ID_OF[ANNA], call, Check(("k",)))
    finished = len(anna.allow(may_order=True))
    while anna.has_work:
        ended = len(anna.go_on())
        assert ended <= AT_ONCE
        finished += ended
    assert finished == 3 * AT_ONCE


def test_keys_are_listed_for_one_call_in_a_turn_as_there_may_be_many() -> None:
    anna = Replica(ANNA)
    anna.follow(keepers(ANNA, is_first=True))
    for call in range(8):
        anna.ask(ID_OF[ANNA], call, Set(f"key-{call}", b""))
    anna.allow(may_order=False)
    for call in range(8, 16):
        anna.ask(ID_OF[ANNA], call, Keys("key-"))
    turns = [anna.allow(may_order=True)]
    while anna.has_work:
        turns.append(anna.go_on())
    assert max(map(len, turns)) == 1
    answers = [ended.answer for turn in turns for ended in turn]
    assert answers == [Answer(tuple(f"key-{n}" for n in range(8)))] * 8


def test_a_machine_asks_for_no_more_than_the_coordinator_keeps_for_it() -> None:
    """Whatever its trainers do, nobody takes it for one that floods."""
    post = DirectPost(ANNA, BERT)
    post.follow(keepers(ANNA, BERT, is_first=True))
    asked = 0
    bert, wait = post.replicas[BERT], Wait(tuple(map(str, range(1024))))
    while bert.has_room(wait):
        post.ask(BERT, asked, wait)
        asked += 1
    assert 32 < asked < MOST_ASKED_BYTES // 2**18
    for call in range(asked):
        post.give_up(BERT, call)
    assert bert.has_room(Set("k", LARGE))
    post.ask(BERT, asked, Add("n", 1))
    assert post.answers == {(1, asked): 1}


def test_what_is_asked_for_and_given_up_meanwhile_is_not_kept_for_a_coordinator() -> None:
    bert = Replica(BERT)
    bert.follow(keepers(ANNA, BERT, is_first=True))
    for call in range(1000):
        bert.ask(ID_OF[BERT], call, Set("k", LARGE))
        bert.give_up(ID_OF[BERT], call)
    assert bert.take(ANNA) == encode(Report(0, 0))
    assert bert.take(ANNA) is None


def test_writes_beyond_those_whose_answers_are_remembered_wait_at_their_machine() -> None:
    """S3."""
    post = DirectPost(ANNA, BERT, CARA)
    post.follow(keepers(ANNA, BERT, CARA, is_first=True))
    for call in range(3 * REMEMBERED):
        post.ask(BERT, call, Add("n", 1), out_of_reach=[CARA])
        if 0 < call < REMEMBERED:
            post.give_up(BERT, call)
    assert position_of(post.replicas[ANNA]) == position_of(post.replicas[BERT]) == REMEMBERED
    post.follow(keepers(BERT, CARA, number=2))
    assert post.answers[1, 0] == 1  # of its first time
    assert len(post.answers) == 2 * REMEMBERED + 1
    assert post.answers[1, 3 * REMEMBERED - 1] == 3 * REMEMBERED


@pytest.mark.slow
def test_a_call_that_waits_makes_no_write_dearer_and_a_newcomer_gets_a_small_copy() -> None:
    """B7: nothing grows with the number of writes."""
    post = DirectPost(ANNA, BERT, CARA)
    post.follow(keepers(ANNA, BERT, is_first=True))
    post.ask(ANNA, 0, Get("never"))
    post.ask(BERT, 0, Get("never"))
    for call in range(1, 70_001):
        post.ask(BERT, call, Add("n", 1))
    for member in (ANNA, BERT):
        copy = post.replicas[member].copy
        assert copy is not None
        assert {len(kept) for kept in copy.answers.values()} == {REMEMBERED}
        assert len(list(copy.parts())) == 1 + 1 + REMEMBERED + 1
    post.follow(keepers(ANNA, BERT, CARA, number=2))
    post.ask(CARA, 0, Set("never", b"1"))
    assert (post.answers[1, 70_000], post.answers[0, 0], post.answers[1, 0]) == (70_000, b"1", b"1")


def test_a_whole_copy_is_made_as_it_is_sent_and_nothing_is_written_meanwhile() -> None:
    post = DirectPost(ANNA, BERT)
    post.follow(keepers(ANNA, is_first=True))
    for call in range(2000):
        post.ask(ANNA, call, Set(f"{call:04}", b""))
    post.follow(keepers(ANNA, BERT, number=2), out_of_reach=[ANNA])
    anna = post.replicas[ANNA]
    anna.receive_untrusted(BERT, Report(NO_COPY, 0))
    post.ask(ANNA, 2000, Set("late", b""), out_of_reach=[BERT, ANNA])
    assert position_of(anna) == 0


def test_false_reports_and_copies_lead_to_no_position_that_cannot_be_sent() -> None:
    """B5: the coordinator counts from 1 under each roster, whatever others claim."""
    last = 2**62
    post = DirectPost(ANNA, BERT)
    post.follow(keepers(ANNA, BERT, CARA, is_first=True), out_of_reach=[CARA])
    anna = post.replicas[ANNA]
    anna.receive_untrusted(CARA, Report(last, last))
    assert decode_message_untrusted(anna.take(CARA) or b"") == Fetch()
    for message in (CopyBegins(), CopyValue("k", b"1"), CopyEnds()):
        anna.receive_untrusted(CARA, message)
    anna.receive_untrusted(CARA, Have(0))
    post.ask(BERT, 0, Add("n", 1))
    anna.receive_untrusted(CARA, Have(1))
    post.carry()
    assert post.answers == {(1, 0): 1}
    post.follow(keepers(ANNA, BERT, number=2))
    post.ask(BERT, 1, Keys(""))
    assert post.answers[1, 1] == ("k", "n")


ANSWER = Answer(value=True)


@pytest.mark.parametrize(
    ("to", "flood", "text"),
    [
        (ANNA, [Report(0, 0)], "reports twice"),
        (ANNA, [Have(2)], "it has entry 2 of a store, of which it was sent 0"),
        (ANNA, [Ask(ID_OF[BERT], 0, Get("k"))] * 2, "asks twice for call 0"),
        (
            ANNA,
            (Ask(ID_OF[BERT], i, Wait(tuple(map(str, range(1024))))) for i in range(64)),
            "more than 16777216 bytes at a time",
        ),
        (BERT, [Fetch(), Fetch()], "fetches a copy of a store twice"),
        (BERT, [Fetch(), CopyEnds()], "does not wait for its end"),
        (BERT, [CopyEnds(), Entry(2, ID_OF[ANNA], 0, None)], "not the next"),
        (BERT, [CopyEnds(), Entry(1, ID_OF[CARA], 0, None)], "of no rank"),
        (BERT, [CopyBegins(), *(CopyValue(str(i), LARGE) for i in range(70))], "larger than any"),
        (BERT, [CopyBegins(), CopyAnswer(ID_OF[ANNA], 0, Answer(LARGE))], "no write has"),
        (BERT, [CopyBegins(), CopyAnswer(ID_OF[ANNA], 0, Answer(refused="x"))], "no write has"),
    ],
)
def test_what_no_machine_sends_whatever_others_sent_it_ends_the_link(
    to: Member, flood: Iterable[StoreMessage], text: str
) -> None:
    replica, sender = Replica(to), BERT if to == ANNA else ANNA
    replica.follow(keepers(ANNA, BERT, is_first=True))
    if to == ANNA:
        replica.receive_untrusted(BERT, Report(0, 0))

    def receive_all() -> None:
        for message in flood:
            replica.receive_untrusted(sender, message)

    with pytest.raises(ProtocolError, match=text):
        receive_all()


def test_a_machine_has_nothing_of_a_copy_that_is_not_sent() -> None:
    anna = Replica(ANNA)
    anna.follow(keepers(ANNA, BERT, is_first=True))
    with pytest.raises(ProtocolError, match="of which it was sent -1"):
        anna.receive_untrusted(BERT, Have(0))
    anna.receive_untrusted(BERT, Report(NO_COPY, 0))
    with pytest.raises(ProtocolError, match="of which it was sent -1"):
        anna.receive_untrusted(BERT, Have(0))


def test_answers_of_a_copy_are_no_more_than_any_machine_remembers() -> None:
    copy = StoreCopy()
    for call in range(1000):
        copy.receive_untrusted(CopyAnswer(ID_OF[ANNA], call, ANSWER))
    assert list(copy.answers[ID_OF[ANNA]]) == list(range(1000 - REMEMBERED, 1000))


def test_messages_out_of_their_place_change_nothing() -> None:
    post = DirectPost(ANNA, BERT)
    assert post.replicas[BERT].ask(ID_OF[BERT], 0, Add("n", 1)) == ()  # there is no roster yet
    assert post.replicas[BERT].take(ANNA) is None
    post.replicas[BERT].ask(ID_OF[BERT], 1, Add("n", 1))
    post.give_up(BERT, 1)
    post.follow(keepers(ANNA, BERT, is_first=True))
    assert post.answers == {(1, 0): 1}
    anna, bert = post.replicas[ANNA], post.replicas[BERT]
    answered = Answered(ID_OF[BERT], 0, Answer())
    message: StoreMessage
    for message in (CopyBegins(), CopyValue("n", b"2"), CopyEnds(), Fetch(), answered):
        assert bert.receive_untrusted(ANNA, message) == ()
        assert anna.receive_untrusted(BERT, message) == ()
    assert anna.receive_untrusted(BERT, Entry(7, ID_OF[BERT], 0, None)) == ()
    for asked in (Ask(ID_OF[ANNA], 9, Add("n", 1)), GiveUp(ID_OF[ANNA], 9)):
        assert anna.receive_untrusted(BERT, asked) == ()
        assert bert.receive_untrusted(ANNA, asked) == ()
    cara = Replica(CARA)
    cara.follow(keepers(ANNA, BERT, CARA, number=2))
    for message in (Fetch(), CopyValue("n", b"2"), CopyEnds(), Entry(1, ID_OF[ANNA], 0, None)):
        assert cara.receive_untrusted(ANNA, message) == ()
    assert cara.copy is None
    post.ask(BERT, 1, Get("n"))
    assert post.answers[1, 1] == b"1"


def answers_at_once(faults: Faults) -> None:
    """S1: before every machine has the entry."""

    def order(real: Real, self: Replica, lead: Coordinator, asked: Ask) -> None:
        real(self, lead, asked)
        if lead.unanswered:
            self._answer(lead)

    faults.around(Replica, "_order", order)


def reads_its_own_copy(faults: Faults) -> None:
    """S1: the coordinator answers a read without asking whether its roster is in force."""

    def order(real: Real, self: Replica, lead: Coordinator, asked: Ask) -> None:
        assert lead.copy is not None
        command, table = asked.command, lead.copy.table
        if isinstance(command, Check | Keys) or (
            isinstance(command, Get) and command.key in table.values
        ):
            home = lead.keepers.homes[asked.trainer]
            self._tell(home, Answered(asked.trainer, asked.call, table.read(command)))
        else:
            real(self, lead, asked)

    faults.around(Replica, "_order", order)


def waits_for_no_report(faults: Faults) -> None:
    """S2: the coordinator goes on with what it has itself."""

    def compare(self: Replica, lead: Coordinator) -> None:
        if self.copy is not None and lead.copy is None:
            came, lead.reports = lead.reports, dict.fromkeys(lead.keepers.hosts, (0, 0))
            self._begin_to_order(lead, self.copy)
            lead.reports = came

    faults.instead(Replica, "_compare_reports", compare)


def forgets_answers(faults: Faults) -> None:
    """S3: a write that is asked for again is carried out again."""
    faults.skip(StoreCopy, "answer_to")


@pytest.mark.slow
@pytest.mark.parametrize(
    "break_it",
    [answers_at_once, reads_its_own_copy, waits_for_no_report, forgets_answers],
)
def test_whoever_breaks_a_rule_is_found_out(
    faults: Faults, break_it: Callable[[Faults], None]
) -> None:
    break_it(faults)
    assert any(not holds(run(seed)) for seed in range(400))
