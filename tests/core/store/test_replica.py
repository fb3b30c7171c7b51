"""S1 to S4: copies of a store while machines come and go, against an executable model."""

from collections import deque
from collections.abc import Callable, Collection, Iterable

import pytest

from pmesh.core.store.copy import Copy
from pmesh.core.store.replica import (
    MOST_UNDER_WAY_BYTES,
    Finished,
    Keepers,
    Output,
    Replica,
)
from pmesh.core.wire.store import (
    NO_COPY,
    Add,
    Answer,
    Answered,
    Ask,
    Check,
    Command,
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
)
from pmesh.errors import ProtocolError
from pmesh.ids import Member, TrainerId
from tests.worlds.builders import ANNA, BERT, CARA, make_roster
from tests.worlds.linearizable import is_linearizable
from tests.worlds.stores import World

STEPS = 350


def run(seed: int, **options: bool) -> World:
    world = World(seed, **options)
    world.run(STEPS)
    world.settle()
    world.ask_all()
    return world


def holds(world: World) -> bool:
    """Whether all calls of a settled world are as on one machine, and all copies the same."""
    copies = [machine.replica.copy for machine in world.here()]
    tables = [(copy.position, copy.table.values) for copy in copies if copy is not None]
    return (
        len(tables) == len(copies)
        and all(table == tables[0] for table in tables)
        and not list(world.unanswered())
        and is_linearizable(world.calls)
    )


@pytest.mark.parametrize("seeds", [range(i, i + 50) for i in range(0, 300, 50)])
def test_calls_are_as_on_one_machine_whoever_is_lost_and_comes(seeds: range) -> None:
    for seed in seeds:
        assert holds(run(seed)), seed


def test_a_coordinator_that_is_lost_at_any_step_takes_no_answered_call_with_it() -> None:
    for step in range(1, STEPS, 3):
        world = World(7)
        world.run(STEPS, kill_at=step)
        world.settle()
        world.ask_all()
        assert holds(world), step


class Post:
    """Brings messages between copies at once, but to those that are out of reach."""

    def __init__(self, *members: Member) -> None:
        self.replicas = {member: Replica(member) for member in members}
        self.answers: dict[tuple[int, int], object] = {}

    def follow(self, keepers: Keepers, *, out_of_reach: Collection[Member] = ()) -> None:
        outputs = [(m, o) for m in keepers.hosts for o in self.replicas[m].follow(keepers)]
        self.carry(outputs, out_of_reach)

    def ask(
        self, member: Member, call: int, command: Command, out_of_reach: Collection[Member] = ()
    ) -> None:
        outputs = self.replicas[member].ask(ID_OF[member], call, command)
        self.carry([(member, output) for output in outputs], out_of_reach)

    def carry(
        self, outputs: Iterable[tuple[Member, Output]], out_of_reach: Collection[Member] = ()
    ) -> None:
        queue = deque(outputs)
        while queue:
            sender, output = queue.popleft()
            if isinstance(output, Finished):
                self.answers[output.trainer, output.call] = output.answer.value
            elif output.to not in out_of_reach:
                came = self.replicas[output.to].receive_untrusted(sender, output.message)
                queue.extend((output.to, o) for o in came)


LARGE = bytes(2**20)
ID_OF = {ANNA: TrainerId(0), BERT: TrainerId(1), CARA: TrainerId(2)}


def keepers(*members: Member, is_first: bool = False) -> Keepers:
    return Keepers(members, {ID_OF[m]: m for m in members}, is_first=is_first)


def test_a_write_of_a_whole_copy_is_not_carried_out_again() -> None:
    """S3: the coordinator that has carried it out is lost, and only a newcomer has it."""
    post = Post(ANNA, BERT, CARA)
    post.follow(keepers(ANNA, BERT, is_first=True))
    post.ask(BERT, 0, Add("n", 1), out_of_reach=[BERT])
    post.follow(keepers(ANNA, BERT, CARA), out_of_reach=[BERT])
    copies = [post.replicas[member].copy for member in (BERT, CARA)]
    assert [copy.table.values for copy in copies if copy] == [{}, {"n": b"1"}]
    assert not post.answers

    post.follow(keepers(BERT, CARA))
    assert post.answers == {(1, 0): 1}
    copies = [post.replicas[member].copy for member in (BERT, CARA)]
    assert [copy.table.values for copy in copies if copy] == [{"n": b"1"}] * 2


def test_the_machine_of_the_oldest_rank_coordinates() -> None:
    found = Keepers.of(make_roster(CARA, ANNA, BERT, ANNA, ids=[3, 7, 2, 4], number=5))
    assert (found.hosts, found.is_first) == ((BERT, CARA, ANNA), True)
    assert found.homes == {2: BERT, 3: CARA, 4: ANNA, 7: ANNA}
    assert not Keepers.of(make_roster(ANNA, number=6)).is_first


def test_when_all_who_had_a_copy_are_lost_the_store_begins_empty() -> None:
    post = Post(ANNA, BERT)
    post.follow(keepers(ANNA, BERT))
    post.ask(BERT, 0, Keys(""))
    assert post.answers == {(1, 0): ()}


def test_a_side_without_a_quorum_orders_nothing() -> None:
    """V10."""
    post = Post(ANNA)
    post.replicas[ANNA].allow(may_order=False)
    post.follow(keepers(ANNA, is_first=True))
    post.ask(ANNA, 0, Add("n", 1))
    assert not post.answers
    outputs = post.replicas[ANNA].allow(may_order=True)
    post.carry([(ANNA, output) for output in outputs])
    assert post.answers == {(0, 0): 1}


def test_a_call_that_was_given_up_is_not_answered_and_leaves_nothing() -> None:
    post = Post(ANNA, BERT)
    post.follow(keepers(ANNA, BERT, is_first=True))
    post.ask(BERT, 0, Wait(("a", "b")))
    post.ask(BERT, 1, Get("a"))
    post.ask(BERT, 2, Get("c"))
    post.replicas[ANNA].allow(may_order=False)
    post.ask(BERT, 3, Add("n", 1))
    for call in (0, 2, 3):
        given_up = post.replicas[BERT].give_up(ID_OF[BERT], call)
        post.carry([(BERT, output) for output in given_up])
    assert post.replicas[BERT].give_up(ID_OF[BERT], 0) == ()
    post.replicas[ANNA].allow(may_order=True)
    for call, key in enumerate("abc"):
        post.ask(ANNA, call, Set(key, b"1"))
    post.ask(ANNA, 3, Keys("n"))
    assert post.answers == {(1, 1): b"1", (0, 0): None, (0, 1): None, (0, 2): None, (0, 3): ()}


def test_the_coordinator_orders_no_more_than_the_copies_can_take() -> None:
    post = Post(ANNA, BERT)
    post.follow(keepers(ANNA, BERT, is_first=True))
    for call in range(6):
        post.ask(ANNA, call, Set(str(call), bytes(2**20)), out_of_reach=[BERT])
    copy = post.replicas[ANNA].copy
    assert copy is not None
    assert copy.position == MOST_UNDER_WAY_BYTES // 2**20
    came = post.replicas[ANNA].receive_untrusted(BERT, Have(1))
    post.carry([(ANNA, output) for output in came], out_of_reach=[BERT])
    assert copy.position == MOST_UNDER_WAY_BYTES // 2**20 + 1
    assert list(post.answers) == [(0, 0)]


@pytest.mark.parametrize(
    ("to", "flood", "text"),
    [
        (
            ANNA,
            (Ask(ID_OF[BERT], i, 0, Set("k", LARGE)) for i in range(20)),
            "too many store calls",
        ),
        (BERT, (CopyValue(str(i), LARGE) for i in range(70)), "larger than any"),
        (BERT, (CopyAnswer(ID_OF[ANNA], i, Answer(i)) for i in range(2**17)), "larger than any"),
        (BERT, [CopyAnswer(ID_OF[ANNA], 0, Answer(LARGE))], "larger than any"),
    ],
)
def test_what_would_take_more_memory_than_any_store_ends_the_link(
    to: Member, flood: Iterable[StoreMessage], text: str
) -> None:
    replica, sender = Replica(to), BERT if to == ANNA else ANNA
    replica.follow(keepers(ANNA, BERT, is_first=True))

    def receive_all() -> None:
        for message in (CopyBegins(0), *flood):
            replica.receive_untrusted(sender, message)

    with pytest.raises(ProtocolError, match=text):
        receive_all()


def test_messages_out_of_their_place_change_nothing() -> None:
    post = Post(ANNA, BERT)
    assert post.replicas[BERT].ask(ID_OF[BERT], 0, Add("n", 1)) == ()  # there is no roster yet
    post.follow(keepers(ANNA, BERT, is_first=True))
    assert post.answers == {(1, 0): 1}
    anna, bert = post.replicas[ANNA], post.replicas[BERT]
    strange = Entry(7, ID_OF[ANNA], 0, 0, 0, None)
    answered = Answered(ID_OF[BERT], 0, Answer())
    for message in (strange, CopyEnds(), CopyValue("n", b"2"), answered):
        assert bert.receive_untrusted(ANNA, message) == ()
    for asked in (Ask(ID_OF[ANNA], 9, 0, Add("n", 1)), GiveUp(ID_OF[ANNA], 9)):
        assert anna.receive_untrusted(BERT, asked) == ()
        assert bert.receive_untrusted(ANNA, asked) == ()
    assert anna.receive_untrusted(BERT, Report(1)) == ()
    early = Replica(ANNA)
    assert early.follow(keepers(ANNA, BERT, is_first=True)) == ()
    assert early.receive_untrusted(BERT, Have(9)) == ()
    assert Replica(CARA).receive_untrusted(ANNA, Fetch(NO_COPY)) == ()
    post.ask(BERT, 1, Get("n"))
    assert post.answers[1, 1] == b"1"


def answers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """S1: before every machine has the entry."""
    real = Replica._order  # noqa: SLF001

    def order(self: Replica, lead: object, copy: Copy, asked: object) -> None:
        real(self, lead, copy, asked)  # type: ignore[arg-type]
        have = lead.have  # type: ignore[attr-defined]
        lead.have = {}  # type: ignore[attr-defined]
        self._answer(lead)  # type: ignore[arg-type]
        lead.have = have  # type: ignore[attr-defined]

    monkeypatch.setattr(Replica, "_order", order)


def reads_its_own_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """S1: the coordinator answers a read without asking whether its roster is in force."""
    real = Replica._order  # noqa: SLF001

    def order(self: Replica, lead: object, copy: Copy, asked: Ask) -> None:
        command = asked.command
        if isinstance(command, Get | Check | Keys) and copy.table.missing(command) is None:
            answer = copy.table.read(command)
            home = self._keepers.homes[asked.trainer]  # type: ignore[union-attr]
            self._tell(home, Answered(asked.trainer, asked.call, answer))
        else:
            real(self, lead, copy, asked)  # type: ignore[arg-type]

    monkeypatch.setattr(Replica, "_order", order)


def waits_for_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """S2: the coordinator goes on with what it has itself."""

    def compare(self: Replica, lead: object) -> None:
        keepers = self._keepers
        if keepers is not None and self.copy is not None and not lead.orders:  # type: ignore[attr-defined]
            lead.reports = dict.fromkeys(keepers.hosts, -1) | {self.me: 0}  # type: ignore[attr-defined]
            self._begin_to_order(lead, self.copy)  # type: ignore[arg-type]

    monkeypatch.setattr(Replica, "_compare_reports", compare)


def forgets_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3: a write that is asked for again is carried out again."""
    monkeypatch.setattr(Copy, "answer_to", lambda *_: None)


@pytest.mark.parametrize(
    "break_it",
    [answers_at_once, reads_its_own_copy, waits_for_no_report, forgets_answers],
)
def test_whoever_breaks_a_rule_is_found_out(
    monkeypatch: pytest.MonkeyPatch, break_it: Callable[[pytest.MonkeyPatch], None]
) -> None:
    break_it(monkeypatch)
    assert any(not holds(run(seed)) for seed in range(400))


def test_a_copy_that_is_kept_over_a_gap_is_found_out() -> None:
    """S4: one history of a thousand shows it; these are around the first."""
    assert any(not holds(run(seed, keeps_copies_over_gaps=True)) for seed in range(1290, 1320))
