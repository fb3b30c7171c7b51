"""Calls among ranks that give up and are lost, over wires that keep the order."""

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pmesh.ids import TrainerId
from pmesh.rpc.rules.calls import CallKey, Calls, RequestOutcome, Service
from pmesh.rpc.rules.deal import AHEAD, Deal

RANKS = tuple(map(TrainerId, range(3)))
THREADS, WAITING, ROOM = 2, 3, 100


@dataclass
class CallsOfRank:
    calls: Calls = field(default_factory=Calls)
    service: Service = field(
        default_factory=lambda: Service(threads=THREADS, waiting=WAITING, room_bytes=ROOM)
    )
    begun: dict[int, TrainerId] = field(default_factory=dict[int, TrainerId])
    keeping: set[int] = field(default_factory=set[int])
    ended: Counter[int] = field(default_factory=Counter[int])
    held: set[tuple[TrainerId, int]] = field(default_factory=set[tuple[TrainerId, int]])
    ran: Counter[CallKey] = field(default_factory=Counter[CallKey])
    running: list[CallKey] = field(default_factory=list[CallKey])
    lost: bool = False


ranks = st.sampled_from(RANKS)


class RanksInMemory(RuleBasedStateMachine):
    """What the driver does, without threads: frames are tuples in a queue for each pair."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = {rank: CallsOfRank() for rank in RANKS}
        self.wires = {(a, b): deque[tuple[str, int, int]]() for a in RANKS for b in RANKS}

    def tell(self, source: TrainerId, to: TrainerId, what: str, number: int, more: int = 0) -> None:
        if not self.nodes[to].lost:
            self.wires[source, to].append((what, number, more))

    @rule(caller=ranks, callee=ranks, keeps=st.booleans(), nbytes=st.sampled_from([1, 60]))
    def call(self, caller: TrainerId, callee: TrainerId, nbytes: int, *, keeps: bool) -> None:
        node = self.nodes[caller]
        if node.lost or self.nodes[callee].lost:
            return
        number = node.calls.begin(callee, deadline=0.0)
        node.begun[number] = callee
        if keeps:
            node.keeping.add(number)
        self.tell(caller, callee, "call", number, nbytes)

    @rule(caller=ranks, data=st.data())
    def give_up(self, caller: TrainerId, data: st.DataObject) -> None:
        node = self.nodes[caller]
        if node.lost or not node.begun:
            return
        number = data.draw(st.sampled_from(list(node.begun)))
        callee = node.calls.give_up(number)
        if callee is not None:
            assert callee == node.begun[number]
            node.ended[number] += 1
            self.tell(caller, callee, "cancel", number)

    @rule(source=ranks, to=ranks)
    def deliver(self, source: TrainerId, to: TrainerId) -> None:
        wire, node = self.wires[source, to], self.nodes[to]
        if not wire or node.lost:
            return
        what, number, more = wire.popleft()
        if what in ("call", "repeated"):
            self.ask(source, to, number, more, again=what == "repeated")
        elif what == "cancel":
            node.service.cancel(CallKey(source, number))
        elif what == "release":
            assert node.service.release(source, number)
            assert not node.service.release(source, number)
        elif not node.calls.end(number, source):
            if what == "kept":
                self.tell(to, source, "release", more)
        else:
            node.ended[number] += 1
            if what == "kept":
                node.held.add((source, more))

    def ask(
        self, source: TrainerId, to: TrainerId, number: int, nbytes: int, *, again: bool
    ) -> None:
        """Let a request arrive, and then once more, which no wire would do."""
        arrays = 1 if nbytes > 50 else 0
        answer = self.nodes[to].service.request(
            CallKey(source, number), nbytes=nbytes, arrays=arrays
        )
        assert again == (answer is RequestOutcome.REPEATED)
        if answer is RequestOutcome.FULL:
            self.tell(to, source, "answer", number)
        if not again:
            self.wires[source, to].appendleft(("repeated", number, nbytes))

    @rule(caller=ranks, callee=ranks)
    def an_array_arrives(self, caller: TrainerId, callee: TrainerId) -> None:
        node = self.nodes[callee]
        if not node.lost and not self.nodes[caller].lost:
            for number in self.nodes[caller].begun:
                node.service.arrived(CallKey(caller, number))

    @rule(callee=ranks)
    def start(self, callee: TrainerId) -> None:
        node = self.nodes[callee]
        call = None if node.lost else node.service.start()
        if call is not None:
            node.running.append(call)
            node.ran[call] += 1

    @rule(callee=ranks)
    def finish(self, callee: TrainerId) -> None:
        node = self.nodes[callee]
        if node.lost or not node.running:
            return
        call = node.running.pop(0)
        kept = None
        if call.number in self.nodes[call.caller].keeping:
            kept = node.service.keep(call)
        if node.service.finish(call):
            what = ("kept", kept) if kept is not None else ("answer", 0)
            self.tell(callee, call.caller, what[0], call.number, what[1])
        else:
            assert kept is None

    @rule(holder=ranks, data=st.data())
    def let_go(self, holder: TrainerId, data: st.DataObject) -> None:
        node = self.nodes[holder]
        if node.held and not node.lost:
            owner, reference = data.draw(st.sampled_from(sorted(node.held)))
            node.held.remove((owner, reference))
            self.tell(holder, owner, "release", reference)

    @rule(rank=ranks)
    def lose(self, rank: TrainerId) -> None:
        if sum(not node.lost for node in self.nodes.values()) == 1:
            return
        self.nodes[rank].lost = True
        for other, node in self.nodes.items():
            self.wires[rank, other].clear()
            self.wires[other, rank].clear()
            if not node.lost:
                for number in node.calls.lose([rank]):
                    node.ended[number] += 1
                never, references = node.service.lose(rank)
                assert all(call.caller == rank and not node.ran[call] for call in never)
                assert all(isinstance(each, int) for each in references)
                assert not any(node.service.holds(rank, each) for each in references)
                node.held = {(owner, ref) for owner, ref in node.held if owner != rank}

    @invariant()
    def bounds_hold(self) -> None:
        for node in self.nodes.values():
            assert node.service.running == len(node.running) <= THREADS
            assert len(node.service) <= THREADS + WAITING
            assert set(node.ran.values()) <= {1}
            assert set(node.ended.values()) <= {1}

    def teardown(self) -> None:
        """Let everything end that can: then each call has ended once, and nothing is kept."""
        alive = [(rank, node) for rank, node in self.nodes.items() if not node.lost]
        for _ in range(3 * len(RANKS) * (10 + sum(len(node.begun) for _, node in alive))):
            for rank, node in alive:
                for owner, reference in node.held:
                    self.tell(rank, owner, "release", reference)
                node.held.clear()
                self.start(rank)
                self.finish(rank)
                for other, _ in alive:
                    self.an_array_arrives(other, rank)
                    self.deliver(other, rank)
                    self.deliver(other, rank)
        for _, node in alive:
            assert all(node.ended[number] == 1 for number in node.begun)
            assert (len(node.calls), len(node.service), node.service.held) == (0, 0, 0)


TestRanksInMemory = RanksInMemory.TestCase


def test_a_full_service_says_so_by_number_and_by_bytes() -> None:
    service = Service(threads=1, waiting=1, room_bytes=10)
    caller = RANKS[0]
    assert service.request(CallKey(caller, 0), nbytes=50, arrays=0) is RequestOutcome.TAKEN  # alone
    assert service.request(CallKey(caller, 1), nbytes=1, arrays=0) is RequestOutcome.FULL
    assert service.start() == CallKey(caller, 0)
    assert service.start() is None
    assert service.finish(CallKey(caller, 0))
    for number in (2, 3):
        assert service.request(CallKey(caller, number), nbytes=1, arrays=0) is RequestOutcome.TAKEN
    assert service.request(CallKey(caller, 4), nbytes=1, arrays=0) is RequestOutcome.FULL


def test_a_call_waits_for_its_arrays_and_a_cancelled_one_needs_none() -> None:
    service = Service(threads=1, waiting=9, room_bytes=10)
    first, second = CallKey(RANKS[0], 0), CallKey(RANKS[0], 1)
    service.request(first, nbytes=1, arrays=2)
    service.request(second, nbytes=1, arrays=1)
    assert service.arrived(first)
    assert service.start() is None
    assert service.cancel(first)
    assert not service.arrived(first)
    assert service.arrived(second)
    assert not service.arrived(second)
    assert service.start() == second
    assert not service.is_cancelled(second)
    assert not service.cancel(second)  # it runs
    assert service.is_cancelled(second)
    assert not service.cancel(CallKey(RANKS[0], 7))


def test_a_cancelled_call_never_runs_and_one_that_runs_is_told() -> None:
    service = Service(threads=1, waiting=1, room_bytes=ROOM)
    runs, waits = CallKey(RANKS[0], 0), CallKey(RANKS[0], 1)
    for call in (runs, waits):
        assert service.request(call, nbytes=1, arrays=0) is RequestOutcome.TAKEN
    assert service.start() == runs
    assert service.callers == RANKS[:1]
    assert service.cancel(waits)
    assert not service.cancel(runs)
    assert service.is_cancelled(runs)
    assert service.keep(runs) is None
    assert not service.finish(runs)
    assert service.start() is None
    assert len(service) == 0


def test_a_reference_is_freed_once_by_its_holder_or_with_it() -> None:
    service = Service(threads=1, waiting=1, room_bytes=ROOM)
    call = CallKey(RANKS[0], 0)
    service.request(call, nbytes=1, arrays=0)
    service.start()
    one, other = service.keep(call), service.keep(call)
    assert one is not None
    assert not service.release(RANKS[1], one)
    assert service.release(RANKS[0], one)
    assert not service.release(RANKS[0], one)
    assert service.lose(RANKS[0]) == ([], {other})
    assert service.held == 0


def test_calls_that_are_overdue_or_cut_off_end() -> None:
    calls = Calls()
    first, second, third = (calls.begin(RANKS[i], deadline=float(i)) for i in range(3))
    assert len(calls) == 3
    assert calls.overdue(1.0) == [first, second]
    assert not calls.end(first, RANKS[1])  # an answer to another rank's call
    assert calls.end(first, RANKS[0])
    assert calls.lose_all() == [second, third]
    assert calls.give_up(second) is None


# --- map


@given(
    st.integers(0, 40),
    st.lists(st.sampled_from(["done", "lose", "refuse", "retry", "join"]), max_size=120),
    st.randoms(use_true_random=False),
)
def test_each_item_is_used_once_while_machines_are_lost_and_full(
    items: int, fates: list[str], random: "st.DataObject"
) -> None:
    deal, ranks = Deal(items), list(RANKS)
    deal.join(RANKS)
    has, used = dict[int, TrainerId](), Counter[int]()
    late, newcomers = list[tuple[TrainerId, int]](), count(len(RANKS))
    fates = [*fates, *["done", "retry"] * (3 * items + 3)]
    for fate in fates:
        for dealt in deal.deal():
            assert dealt.item not in has
            has[dealt.item] = dealt.rank
        assert all(n <= AHEAD for n in Counter(has.values()).values())
        if fate == "retry":
            deal.retry()
        elif fate == "lose" and len(ranks) > 1:
            rank = ranks.pop(random.randrange(len(ranks)))  # type: ignore[attr-defined]
            late += [(rank, item) for item, of in has.items() if of == rank]
            has = {item: of for item, of in has.items() if of != rank}
            deal.lose(rank)
            deal.join([rank])
        elif fate == "join":
            ranks.append(TrainerId(next(newcomers)))
            deal.join(ranks)
        elif has:
            item = random.choice(sorted(has))  # type: ignore[attr-defined]
            rank = has.pop(item)
            if fate == "refuse":
                deal.refused(rank, item)
            else:
                assert deal.done(rank, item)
                assert not deal.done(rank, item)
                used[item] += 1
        assert deal.under_way == len(has)
    assert deal.ranks == tuple(ranks)
    assert not any(deal.done(rank, item) for rank, item in late)
    assert deal.is_done
    assert used == Counter(range(items))


@pytest.mark.parametrize("speeds", [(1, 1, 2, 4), (1, 8)])
def test_unequal_machines_are_busy_until_nearly_the_end(speeds: tuple[int, ...]) -> None:
    ranks = tuple(map(TrainerId, range(len(speeds))))
    deal, speed = Deal(400), dict(zip(ranks, speeds, strict=True))
    deal.join(ranks)
    queues = {rank: deque[int]() for rank in ranks}
    ends = dict[TrainerId, float]()
    now = 0.0
    while not deal.is_done:
        for rank, item in deal.deal():
            queues[rank].append(item)
            if rank not in ends:
                ends[rank] = now + 1 / speed[rank]
        rank = min(ends, key=ends.__getitem__)
        now = ends.pop(rank)
        assert deal.done(rank, queues[rank].popleft())
        if queues[rank]:
            ends[rank] = now + 1 / speed[rank]
    assert 400 / now >= 0.9 * sum(speeds)


def test_a_rank_that_was_full_gets_work_again_once_another_has_returned_some() -> None:
    deal = Deal(9)
    deal.join(RANKS[:2])
    dealt = deal.deal()
    full = next(each for each in dealt if each.rank == RANKS[0])
    deal.refused(*full)
    deal.refused(*full)
    assert not [each for each in deal.deal() if each.rank == RANKS[0]]
    assert deal.done(RANKS[1], next(each.item for each in dealt if each.rank == RANKS[1]))
    assert [each for each in deal.deal() if each.rank == RANKS[0]]
