"""O4: messages are delivered once and in order, whatever announcements are lost and repeated."""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pmesh.core.wire.calls import Envelope
from pmesh.ids import JobName, TrainerId
from pmesh.p2p import rules as p2p
from pmesh.p2p.rules import EAGER_ROOM_BYTES, MAX_KEPT, Inbox, Outbox, Transfer, Wanted
from pmesh.p2p.wire import EAGER_BYTES, AnnounceMessage, MessageAddress
from tests.worlds.builders import make_epoch

ANNA, BERT, CARL = SENDERS = TrainerId(0), TrainerId(1), TrainerId(2)
RECEIVER = TrainerId(9)


def envelope(tag: int = 0, nbytes: int = 4) -> Envelope:
    return Envelope(tag, "float32", (nbytes // 4,), nbytes)


def announced(
    inbox: Inbox,
    sender: TrainerId,
    sequence: int,
    *,
    tag: int = 0,
    first: int = 0,
    before: int = -1,
    values: bytes = b"",
) -> Inbox:
    noted, again = p2p.note(
        inbox, sender, sequence, envelope(tag), first=first, before=before, values=values
    )
    assert not again
    return noted


def wanting(inbox: Inbox, call: int, *sources: TrainerId, tag: int = 0) -> Inbox:
    return p2p.want(inbox, call, Wanted(sources, tag))


def under_way(inbox: Inbox) -> dict[int, tuple[TrainerId, int]]:
    return {call: transfer[:2] for call, transfer in inbox.under_way.items()}


def test_messages_of_a_pair_are_numbered_through_and_announced_with_what_comes_before() -> None:
    outbox = Outbox()
    for tag in (5, 7, 5, 5):
        outbox, _ = p2p.keep(outbox, envelope(tag))

    assert [p2p.standing(outbox, s) for s in range(4)] == [(0, -1), (0, -1), (0, 0), (0, 2)]
    outbox = p2p.settle(p2p.settle(outbox, 0), 0)
    assert [p2p.standing(outbox, s) for s in (1, 2, 3)] == [(1, -1), (1, -1), (1, 2)]


def test_so_many_messages_may_wait_for_one_receiver_and_no_more() -> None:
    outbox = Outbox()
    for _ in range(MAX_KEPT):
        outbox, _ = p2p.keep(outbox, envelope())

    with pytest.raises(ValueError, match="256 messages wait already"):
        p2p.keep(outbox, envelope())
    _, sequence = p2p.keep(p2p.settle(outbox, 17), envelope())
    assert sequence == MAX_KEPT


def test_the_values_of_a_small_message_go_with_its_announcement_while_there_is_room() -> None:
    outbox = Outbox()
    for nbytes in (EAGER_BYTES + 4, *[EAGER_BYTES] * (EAGER_ROOM_BYTES // EAGER_BYTES), 0, 4):
        outbox, last = p2p.keep(outbox, envelope(nbytes=nbytes))

    eager = [p2p.is_eager(outbox, sequence) for sequence in outbox.kept]
    assert eager == [False] * (last + 1)
    outbox = p2p.settle(outbox, last)
    assert [p2p.is_eager(outbox, sequence) for sequence in outbox.kept] == [
        False,
        *[True] * (last - 1),
    ]


def test_a_receiver_is_told_what_is_settled_if_a_message_waits_for_long() -> None:
    outbox, _ = p2p.keep(Outbox(), envelope(5))
    outbox, repeated = p2p.keep(outbox, envelope(7))
    outbox, last = p2p.keep(outbox, envelope(7))
    assert not p2p.must_tell(p2p.settle(outbox, last), last, 7)
    for _ in range(MAX_KEPT):
        outbox, last = p2p.keep(outbox, envelope(7))
        outbox = p2p.settle(outbox, last)
    assert not p2p.must_tell(outbox, last, 7)  # the repeated one is kept
    assert p2p.must_tell(p2p.settle(outbox, repeated), repeated, 7)


def test_a_delivered_message_that_is_settled_is_forgotten_and_the_next_of_its_tag_follows() -> None:
    inbox = p2p.deliver(wanting(announced(Inbox(), ANNA, 1, tag=7), 1, ANNA, tag=7), 1)
    inbox = announced(inbox, ANNA, 2, tag=7, before=1)
    assert dict(inbox.sources[ANNA].delivered) == {7: 1}
    inbox = p2p.withdraw(inbox, ANNA, 1)
    assert not inbox.sources[ANNA].delivered
    assert under_way(wanting(inbox, 2, ANNA, tag=7)) == {2: (ANNA, 2)}


def test_values_that_have_come_are_kept_and_others_requested() -> None:
    def brought(inbox: Inbox) -> bytes | None:
        return inbox.under_way[1].values

    inbox = announced(Inbox(), ANNA, 0, values=b"1234")
    assert brought(wanting(inbox, 1, ANNA)) == b"1234"
    assert brought(wanting(announced(inbox, ANNA, 0), 1, ANNA)) == b"1234"
    inbox = announced(Inbox(), ANNA, 0)
    assert brought(wanting(inbox, 1, ANNA)) is None
    assert brought(wanting(announced(inbox, ANNA, 0, values=b"1234"), 1, ANNA)) == b"1234"
    assert brought(wanting(announced(Inbox(), ANNA, 0, values=b"123"), 1, ANNA)) is None


def test_a_sender_that_brings_values_without_end_takes_a_bounded_place() -> None:
    inbox, values = Inbox(), bytes(EAGER_BYTES)
    for sequence in range(2 * EAGER_ROOM_BYTES // EAGER_BYTES):
        large = envelope(nbytes=len(values))
        inbox, _ = p2p.note(inbox, ANNA, sequence, large, first=0, before=-1, values=values)
        inbox, _ = p2p.note(inbox, ANNA, sequence, large, first=0, before=-1, values=values)

    noted = inbox.sources[ANNA].noted.values()
    assert sum(len(each.values or b"") for each in noted) == EAGER_ROOM_BYTES


def test_a_message_waits_for_its_receive_and_a_receive_for_its_message() -> None:
    inbox = announced(Inbox(), ANNA, 0)
    assert under_way(wanting(inbox, 1, ANNA)) == {1: (ANNA, 0)}

    inbox = wanting(Inbox(), 1, ANNA)
    assert under_way(announced(inbox, ANNA, 0)) == {1: (ANNA, 0)}


def test_only_a_receive_of_the_tag_and_the_source_takes_a_message() -> None:
    inbox = announced(Inbox(), ANNA, 0, tag=3)

    assert under_way(wanting(inbox, 1, ANNA, tag=4)) == {}
    assert under_way(wanting(inbox, 1, BERT, tag=3)) == {}


def test_any_takes_the_message_that_was_announced_first() -> None:
    inbox = announced(announced(Inbox(), BERT, 0), ANNA, 0)
    inbox = announced(inbox, BERT, 0)  # again, which does not make it later

    assert under_way(wanting(inbox, 1, *SENDERS)) == {1: (BERT, 0)}


def test_the_receive_that_came_first_takes_the_first_message() -> None:
    inbox = wanting(wanting(Inbox(), 1, *SENDERS), 2, ANNA)
    inbox = announced(announced(inbox, ANNA, 0), ANNA, 1, before=0)

    assert under_way(inbox) == {1: (ANNA, 0)}
    assert under_way(p2p.deliver(inbox, 1)) == {2: (ANNA, 1)}


def test_one_message_at_a_time_comes_from_each_sender() -> None:
    inbox = wanting(wanting(wanting(Inbox(), 1, ANNA), 2, ANNA, tag=1), 3, *SENDERS)
    inbox = announced(announced(inbox, ANNA, 0), ANNA, 1, tag=1)

    assert under_way(inbox) == {1: (ANNA, 0)}
    assert under_way(announced(inbox, BERT, 0)) == {1: (ANNA, 0), 3: (BERT, 0)}


def test_a_message_waits_for_one_before_it_whose_announcement_is_lost() -> None:
    inbox = announced(wanting(Inbox(), 1, ANNA), ANNA, 1, before=0)
    assert under_way(inbox) == {}

    assert under_way(announced(inbox, ANNA, 0)) == {1: (ANNA, 0)}
    assert under_way(announced(inbox, ANNA, 1, first=1)) == {1: (ANNA, 1)}  # it was withdrawn
    assert under_way(announced(inbox, ANNA, 1, first=0)) == {1: (ANNA, 1)}  # among older ones


def test_what_was_delivered_is_acknowledged_again_until_its_sender_has_heard_it() -> None:
    inbox = announced(wanting(Inbox(), 1, ANNA), ANNA, 0, tag=0)
    inbox = wanting(p2p.deliver(inbox, 1), 2, ANNA)

    inbox, again = p2p.note(inbox, ANNA, 0, envelope(), first=0, before=-1)
    assert again
    assert under_way(inbox) == {}
    inbox = announced(inbox, ANNA, 1, first=1)  # it has
    assert inbox.sources[ANNA].delivered == {}
    inbox, again = p2p.note(inbox, ANNA, 0, envelope(), first=0, before=-1)  # a late echo
    assert not again
    assert list(inbox.sources[ANNA].noted) == [1]


def test_a_receive_that_is_given_up_leaves_its_message_to_the_next() -> None:
    inbox = announced(wanting(wanting(Inbox(), 1, ANNA), 2, ANNA), ANNA, 0)

    assert under_way(p2p.give_up(inbox, 1)) == {2: (ANNA, 0)}


def test_a_message_that_is_withdrawn_makes_way_for_the_next() -> None:
    inbox = announced(announced(wanting(Inbox(), 1, ANNA), ANNA, 0), ANNA, 1, before=0)

    inbox = p2p.withdraw(inbox, ANNA, 0)
    assert under_way(inbox) == {1: (ANNA, 1)}
    assert p2p.withdraw(inbox, ANNA, 0) is inbox
    assert p2p.withdraw(inbox, BERT, 0) is inbox


def test_when_a_sender_is_lost_any_goes_on_and_who_waits_for_it_alone_has_no_hope() -> None:
    inbox = wanting(wanting(Inbox(), 1, ANNA, BERT), 2, ANNA)
    inbox = announced(announced(inbox, ANNA, 0), BERT, 0)

    inbox = p2p.lose(inbox, ANNA)
    assert under_way(inbox) == {1: (BERT, 0)}
    assert inbox.hopeless() == (2,)
    assert p2p.lose(inbox, BERT).hopeless() == (1, 2)


def test_a_sender_that_announces_without_end_takes_a_bounded_place() -> None:
    inbox = Inbox()
    for sequence in range(2 * MAX_KEPT):
        inbox = announced(inbox, ANNA, sequence, tag=sequence)

    assert len(inbox.sources[ANNA].noted) == MAX_KEPT
    inbox = announced(inbox, ANNA, 0, tag=77)  # those that are noted are still heard
    assert inbox.sources[ANNA].noted[0].envelope.tag == 77


def values_of(sequence: int) -> bytes:
    """Of every second message, so that the others are requested."""
    return sequence.to_bytes(4, "big") if sequence % 2 else b""


@dataclass
class Sender:
    outbox: Outbox = field(default_factory=Outbox)
    announcements: deque[AnnounceMessage] = field(default_factory=deque)
    """On their way, in order."""
    acknowledgements: deque[int] = field(default_factory=deque)
    withdrawn: set[int] = field(default_factory=set)
    confirmed: set[int] = field(default_factory=set)
    lost: bool = False


Fate: TypeAlias = Literal["arrives", "lost", "late"]
fates = st.sampled_from(get_args(Fate))
senders = st.sampled_from((ANNA, BERT))
tags = st.sampled_from((0, 0, 1))


class LossyLinks(RuleBasedStateMachine):
    """Two senders, one receiver, and links that lose and repeat what they carry."""

    def __init__(self) -> None:
        super().__init__()
        self.inbox = Inbox()
        self.senders = {id_: Sender() for id_ in (ANNA, BERT)}
        self.delivered: dict[TrainerId, list[tuple[int, int]]] = {id_: [] for id_ in (ANNA, BERT)}
        """Tag and sequence of each message, by sender."""
        self.calls_made = 0
        self.wanted: dict[int, Wanted] = {}

    @rule(sender=senders, tag=tags, fate=fates)
    def send(self, sender: TrainerId, tag: int, fate: Fate) -> None:
        at = self.senders[sender]
        if not at.lost:
            at.outbox, sequence = p2p.keep(at.outbox, envelope(tag))
            self.announce(sender, sequence, fate, values=values_of(sequence))

    @rule(sender=senders, fate=fates, data=st.data())
    def announce_again(self, sender: TrainerId, fate: Fate, data: st.DataObject) -> None:
        at = self.senders[sender]
        if at.outbox.kept:
            self.announce(sender, data.draw(st.sampled_from(list(at.outbox.kept))), fate)

    @rule(sender=senders, data=st.data())
    def time_out(self, sender: TrainerId, data: st.DataObject) -> None:
        at = self.senders[sender]
        if at.outbox.kept:
            sequence = data.draw(st.sampled_from(list(at.outbox.kept)))
            at.outbox = p2p.settle(at.outbox, sequence)
            at.withdrawn.add(sequence)

    @rule(sender=senders)
    def what_is_late_arrives(self, sender: TrainerId) -> None:
        at = self.senders[sender]
        if at.announcements:
            self.hear(sender, at.announcements.popleft())
        if at.acknowledgements:
            self.confirm(sender, at.acknowledgements.popleft())

    @rule(sources=st.sampled_from(((ANNA,), (BERT,), (ANNA, BERT))), tag=tags)
    def receive(self, sources: tuple[TrainerId, ...], tag: int) -> None:
        call, self.calls_made = self.calls_made, self.calls_made + 1
        alive = tuple(s for s in sources if not self.senders[s].lost)
        if alive:
            self.wanted[call] = Wanted(alive, tag)
            self.inbox = p2p.want(self.inbox, call, self.wanted[call])

    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        if self.inbox.wanted:
            call = data.draw(st.sampled_from(list(self.inbox.wanted)))
            self.inbox = p2p.give_up(self.inbox, call)

    @rule(fate=fates)
    def lanes_bring_messages(self, fate: Fate) -> None:
        """Those that are under way, unless they are requested, and not kept any more."""
        for call, transfer in self.inbox.under_way.items():
            kept = self.senders[transfer.sender].outbox.kept
            if transfer.sequence in kept or transfer.values is not None:
                self.take(call, transfer, fate)
            else:
                self.inbox = p2p.withdraw(self.inbox, transfer.sender, transfer.sequence)

    @rule(sender=senders)
    def lose(self, sender: TrainerId) -> None:
        at = self.senders[sender]
        if at.lost or any(other.lost for other in self.senders.values()):
            return
        self.senders[sender] = Sender(lost=True, withdrawn=at.withdrawn, confirmed=at.confirmed)
        self.inbox = p2p.lose(self.inbox, sender)
        for call in self.inbox.hopeless():
            self.inbox = p2p.give_up(self.inbox, call)

    @invariant()
    def each_sender_is_asked_for_one_message_at_a_time_that_was_never_delivered(self) -> None:
        asked = [transfer.sender for transfer in self.inbox.under_way.values()]
        assert len(asked) == len(set(asked))
        for call, transfer in self.inbox.under_way.items():
            wanted = self.wanted[call]
            assert transfer.sender in wanted.sources
            assert transfer.envelope.tag == wanted.tag

    @invariant()
    def messages_are_delivered_once_and_in_order(self) -> None:
        for sent in self.delivered.values():
            for tag in (0, 1):
                of_tag = [sequence for t, sequence in sent if t == tag]
                assert of_tag == sorted(set(of_tag))

    @invariant()
    def what_is_confirmed_was_delivered(self) -> None:
        for id_, at in self.senders.items():
            assert at.confirmed <= {sequence for _, sequence in self.delivered[id_]}

    def teardown(self) -> None:
        """The links work again: whoever waits for a message that is kept gets it."""
        for _ in range(2 * len(self.wanted) + 3):
            self.settle_down()
            for call, transfer in list(self.inbox.under_way.items()):
                self.take(call, transfer, "arrives")
        self.settle_down()
        for id_, at in self.senders.items():
            if at.lost:
                continue
            assert set(self.inbox.sources.get(id_, p2p.Source()).noted) == set(at.outbox.kept)
            for kept in at.outbox.kept.values():
                assert not any(
                    w.tag == kept.tag and id_ in w.sources for w in self.inbox.wanted.values()
                )
            settled = set(range(at.outbox.next_sequence)) - set(at.outbox.kept)
            received = {sequence for _, sequence in self.delivered[id_]}
            assert settled == received | at.withdrawn

    def settle_down(self) -> None:
        for id_, at in self.senders.items():
            at.announcements.clear()
            noted = self.inbox.sources.get(id_, p2p.Source()).noted
            for sequence in set(noted) - set(at.outbox.kept):  # asked for in vain
                self.inbox = p2p.withdraw(self.inbox, id_, sequence)
            for _ in range(2):  # the second time without those that were acknowledged
                for sequence in list(at.outbox.kept):
                    self.announce(id_, sequence, "arrives")

    def announce(
        self, sender: TrainerId, sequence: int, fate: Fate, *, values: bytes = b""
    ) -> None:
        at = self.senders[sender]
        if sequence not in at.outbox.kept:
            return
        first, before = p2p.standing(at.outbox, sequence)
        address = MessageAddress(JobName("digits"), make_epoch(1), sender, RECEIVER, sequence)
        said = AnnounceMessage(address, at.outbox.kept[sequence], first, before, values)
        if fate == "arrives":
            self.hear(sender, said)
        elif fate == "late":
            at.announcements.append(said)

    def hear(self, sender: TrainerId, said: AnnounceMessage) -> None:
        sequence = said.address.sequence
        self.inbox, again = p2p.note(
            self.inbox,
            sender,
            sequence,
            said.envelope,
            first=said.first,
            before=said.before,
            values=said.values,
        )
        if again:
            self.confirm(sender, sequence)

    def confirm(self, sender: TrainerId, sequence: int) -> None:
        at = self.senders[sender]
        if sequence not in at.outbox.kept:
            return  # withdrawn since; a later message of its tag may be what was delivered
        assert sequence in {s for _, s in self.delivered[sender]}
        at.outbox = p2p.settle(at.outbox, sequence)
        at.confirmed.add(sequence)

    def take(self, call: int, transfer: Transfer, fate: Fate) -> None:
        at = self.senders[transfer.sender]
        if transfer.values is None:
            assert at.outbox.kept[transfer.sequence] == transfer.envelope
        else:
            assert transfer.values == values_of(transfer.sequence)
        self.inbox = p2p.deliver(self.inbox, call)
        self.delivered[transfer.sender].append((transfer.envelope.tag, transfer.sequence))
        if fate == "arrives":
            self.confirm(transfer.sender, transfer.sequence)
        elif fate == "late":
            at.acknowledgements.append(transfer.sequence)


TestLossyLinks = LossyLinks.TestCase
