"""One machine of a job lies to the copies of its store: what it makes of the honest ones."""

from collections.abc import Callable
from random import Random
from typing import get_args

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pmesh.errors import ProtocolError
from pmesh.ids import Member, TrainerId
from pmesh.store.rules.replica import MOST_ASKED_BYTES, MOST_UNDER_WAY_BYTES
from pmesh.store.rules.table import REMEMBERED
from pmesh.store.wire import (
    Add,
    Answer,
    Answered,
    Append,
    Ask,
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
from tests.store.stores import ID_OF, DirectPost, make_keepers
from tests.worlds.builders import ANNA, BERT, CARA, DORA
from tests.worlds.examples import examples
from tests.worlds.strategies import values_of

HONEST, LIAR = (ANNA, BERT, CARA), DORA
KEYS = st.sampled_from(["a", "b"])
TRAINERS = st.sampled_from([*ID_OF.values(), TrainerId(9)])
NUMBERS = st.integers(0, 3) | st.just(2**62)
VALUES = st.sampled_from([b"", b"1"]) | st.just(2**20).map(bytes)
WRITES = (
    st.builds(Add, KEYS, st.just(1))
    | st.builds(Set, KEYS, VALUES)
    | st.builds(Append, KEYS, VALUES)
)
COMMANDS: st.SearchStrategy[Command] = (
    WRITES | st.builds(Get, KEYS) | st.builds(Wait, st.tuples(KEYS, KEYS)) | st.just(Keys(""))
)
ANSWERS = st.builds(Answer, st.none() | st.booleans() | NUMBERS | VALUES)
PLAUSIBLE: st.SearchStrategy[StoreMessage] = st.one_of(
    st.builds(Report, st.integers(-1, 3) | NUMBERS, NUMBERS),
    st.builds(Have, NUMBERS),
    st.builds(Ask, TRAINERS, st.integers(0, 2**20), COMMANDS),
    st.builds(GiveUp, TRAINERS, NUMBERS),
    st.builds(Entry, st.integers(1, 3) | NUMBERS, TRAINERS, NUMBERS, st.none() | WRITES),
    st.builds(Answered, TRAINERS, NUMBERS, ANSWERS),
    st.builds(CopyValue, KEYS, VALUES),
    st.builds(CopyAnswer, TRAINERS, NUMBERS, ANSWERS),
    st.sampled_from([Fetch(), CopyBegins(), CopyEnds()]),
)
ANYTHING = PLAUSIBLE | st.sampled_from(get_args(StoreMessage)).flatmap(values_of)


class OneMachineLies(RuleBasedStateMachine):
    """The honest ones exchange their messages at once; a ProtocolError among them is a failure."""

    def __init__(self) -> None:
        super().__init__()
        self.post = DirectPost(*HONEST)
        self.number = 0
        self.calls = 0
        self.deaf = set[Member]()
        """Machines that have ended their link with the liar."""

    @initialize(seed=st.integers(0, 23))
    def begin(self, seed: int) -> None:
        self.change(seed, stays=True)

    @rule(seed=st.integers(0, 23), stays=st.sampled_from([True, True, False]))
    def change(self, seed: int, *, stays: bool) -> None:
        hosts = [*HONEST, LIAR] if stays else list(HONEST)
        Random(seed).shuffle(hosts)  # noqa: S311 - it decides who coordinates
        self.number += 1
        is_first = self.number == 1
        self.post.follow(make_keepers(*hosts, number=self.number, is_first=is_first))
        if not stays:
            self.deaf = set(HONEST)

    @rule(to=st.sampled_from(HONEST), messages=st.lists(ANYTHING, min_size=1, max_size=8))
    def lie(self, to: Member, messages: list[StoreMessage]) -> None:
        for message in messages:
            self.tell(to, lambda: message)  # noqa: B023 - called at once

    @precondition(lambda self: len(self.deaf) < len(HONEST))
    @rule(to=st.sampled_from(HONEST), command=COMMANDS)
    def flood(self, to: Member, command: Command) -> None:
        for _ in range(200):
            self.calls += 1
            self.tell(to, lambda: Ask(ID_OF[LIAR], self.calls, command))

    def tell(self, to: Member, message: Callable[[], StoreMessage]) -> None:
        if to not in self.deaf:
            try:
                self.post.note(self.post.replicas[to].receive_untrusted(LIAR, message()))
            except ProtocolError:
                self.deaf.add(to)
            self.post.carry()

    @rule(member=st.sampled_from(HONEST), command=COMMANDS)
    def ask(self, member: Member, command: Command) -> None:
        self.calls += 1
        if self.post.replicas[member].has_room(command):
            self.post.ask(member, self.calls, command)

    @rule(member=st.sampled_from(HONEST))
    def give_up_the_last(self, member: Member) -> None:
        self.post.give_up(member, self.calls)

    @rule(member=st.sampled_from(HONEST))
    def read(self, member: Member) -> None:
        while self.post.replicas[member].take(LIAR) is not None:
            pass

    @invariant()
    def what_is_kept_is_bounded(self) -> None:
        for replica in self.post.replicas.values():
            kept = [out.nbytes for out in replica._outgoing.values()]  # noqa: SLF001
            assert max(kept, default=0) < 3 * MOST_UNDER_WAY_BYTES
            lead = replica._coordinator  # noqa: SLF001
            if lead is not None and LIAR not in self.deaf:
                assert lead.under_way_bytes < 2 * MOST_UNDER_WAY_BYTES
                assert lead.asked_bytes[LIAR] < MOST_ASKED_BYTES + 2**22
            if replica.copy is not None:
                assert all(len(kept) <= REMEMBERED for kept in replica.copy.answers.values())

    def teardown(self) -> None:
        if self.number:
            self.change(0, stays=False)
            self.calls += 1
            for member in HONEST:
                self.post.ask(member, self.calls, Add("last", 1))
                assert (ID_OF[member], self.calls) in self.post.answers


OneMachineLies.TestCase.settings = examples(60, stateful_step_count=25)
TestOneMachineLies = OneMachineLies.TestCase
