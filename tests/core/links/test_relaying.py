"""What a member forwards between two others, and what it refuses."""

import pytest

from pmesh.core.links.relaying import MAX_RELAYED, WINDOW_BYTES, Forwarding, Onward
from pmesh.core.wire.relays import Relay
from pmesh.ids import NodeId

ADA, CARA = NodeId(b"a" * 32), NodeId(b"c" * 32)


def sent(
    far: NodeId, number: int = 1, *, data: bytes = b"", read: int = 0, ends: bool = False
) -> Relay:
    return Relay(far, number, to_forward=True, data=data, read=read, ends=ends)


def opened() -> Forwarding:
    forwarding = Forwarding()
    forwarding.forward(ADA, sent(CARA, data=b"hello"), reachable=True)
    return forwarding


def test_bytes_go_to_the_other_end_with_the_name_of_their_sender() -> None:
    forwarding = Forwarding()
    onward = forwarding.forward(ADA, sent(CARA, data=b"hello"), reachable=True)
    assert onward == Onward(CARA, Relay(ADA, 1, data=b"hello"))
    answer = forwarding.forward(CARA, sent(ADA, data=b"hi", read=5), reachable=True)
    assert answer == Onward(ADA, Relay(CARA, 1, data=b"hi", read=5))


@pytest.mark.parametrize(
    ("sender", "message"),
    [
        (CARA, sent(ADA, data=b"hello")),
        (ADA, sent(CARA, read=1)),
        (ADA, sent(ADA, data=b"hello")),
    ],
    ids=["the larger node opens", "nothing to send", "oneself"],
)
def test_what_opens_no_connection_is_answered_by_its_end(sender: NodeId, message: Relay) -> None:
    forwarding = Forwarding()
    onward = forwarding.forward(sender, message, reachable=True)
    assert onward == Onward(sender, Relay(message.far, 1, ends=True))
    assert len(forwarding) == 0


def test_nothing_is_forwarded_to_whom_no_direct_path_leads() -> None:
    onward = Forwarding().forward(ADA, sent(CARA, data=b"hello"), reachable=False)
    assert onward == Onward(ADA, Relay(CARA, 1, ends=True))


def test_the_end_of_an_unknown_connection_is_not_answered() -> None:
    assert Forwarding().forward(ADA, sent(CARA, ends=True), reachable=True) is None


def test_a_connection_is_over_when_both_ends_have_ended() -> None:
    forwarding = opened()
    assert forwarding.forward(ADA, sent(CARA, ends=True), reachable=True) is not None
    late = forwarding.forward(CARA, sent(ADA, data=b"late"), reachable=True)
    assert late == Onward(ADA, Relay(CARA, 1, data=b"late"))
    assert forwarding.forward(CARA, sent(ADA, ends=True), reachable=True) is not None
    assert len(forwarding) == 0


def test_a_new_connection_replaces_the_one_before() -> None:
    forwarding = opened()
    assert forwarding.forward(ADA, sent(CARA, 2, data=b"anew"), reachable=True) is not None
    onward = forwarding.forward(CARA, sent(ADA, 1, data=b"old"), reachable=True)
    assert onward == Onward(CARA, Relay(ADA, 1, ends=True))
    assert len(forwarding) == 1


def check_ended(forwarding: Forwarding, sender: NodeId, message: Relay) -> None:
    """The message ends the connection: the far end learns of it, the sender by its next message."""
    far = message.far
    assert forwarding.forward(sender, message, reachable=True) == Onward(
        far, Relay(sender, message.number, ends=True)
    )
    again = forwarding.forward(sender, message, reachable=True)
    assert again == Onward(sender, Relay(far, message.number, ends=True))
    for end, other in ((sender, far), (far, sender)):
        assert forwarding.forward(end, sent(other, ends=True), reachable=True) is None
    assert len(forwarding) == 0


def test_a_connection_ends_when_one_end_exceeds_its_window() -> None:
    forwarding = opened()
    forwarding.forward(ADA, sent(CARA, data=bytes(WINDOW_BYTES - 5)), reachable=True)
    check_ended(forwarding, ADA, sent(CARA, data=b"x"))


def test_a_number_given_twice_brings_the_blame_to_nobody() -> None:
    """CARA's answers to the first connection arrive when the second one has its number."""
    forwarding = opened()
    forwarding.forward(ADA, sent(CARA, 2, data=b"x"), reachable=True)
    forwarding.forward(ADA, sent(CARA, 1, data=b"x"), reachable=True)
    check_ended(forwarding, CARA, sent(ADA, 1, read=5))


def test_what_was_read_may_be_sent_again() -> None:
    forwarding = opened()
    for _ in range(3):
        forwarding.forward(CARA, sent(ADA, data=bytes(WINDOW_BYTES)), reachable=True)
        forwarding.forward(ADA, sent(CARA, read=WINDOW_BYTES), reachable=True)


def test_a_connection_ends_when_one_end_has_read_what_nobody_sent() -> None:
    check_ended(opened(), CARA, sent(ADA, read=6))


def test_when_an_end_is_lost_the_others_learn_of_it() -> None:
    forwarding, bert = opened(), NodeId(b"b" * 32)
    forwarding.forward(ADA, sent(bert, data=b"hello"), reachable=True)
    assert forwarding.forget(CARA) == [Onward(ADA, Relay(CARA, 1, ends=True))]
    assert forwarding.forget(ADA) == [Onward(bert, Relay(ADA, 1, ends=True))]
    assert forwarding.forget(ADA) == []


def test_what_was_on_its_way_when_an_end_was_lost_opens_nothing_and_breaks_no_rule() -> None:
    """The lost end may be back before the other one has heard of its loss."""
    forwarding = opened()
    forwarding.forward(CARA, sent(ADA, data=b"hi"), reachable=True)
    forwarding.forget(CARA)
    end = Relay(CARA, 1, ends=True)
    for message in (sent(CARA, data=b"and"), sent(CARA, read=2)):
        assert forwarding.forward(ADA, message, reachable=True) == Onward(ADA, end)
    assert forwarding.forward(ADA, sent(CARA, ends=True), reachable=True) is None
    assert len(forwarding) == 0


def test_after_an_end_was_lost_a_new_connection_opens_also_if_the_old_one_was_not_ended() -> None:
    forwarding = opened()
    forwarding.forget(CARA)
    onward = forwarding.forward(ADA, sent(CARA, 2, data=b"anew"), reachable=True)
    assert onward == Onward(CARA, Relay(ADA, 2, data=b"anew"))


def test_of_a_connection_whose_ends_are_both_lost_nothing_stays() -> None:
    forwarding = opened()
    forwarding.forget(CARA)
    forwarding.forget(ADA)
    assert len(forwarding) == 0


def test_the_connections_of_one_end_are_limited() -> None:
    forwarding = Forwarding()
    for number in range(MAX_RELAYED):
        far = NodeId(bytes([200 + number]) * 32)
        forwarding.forward(ADA, sent(far, data=b"hello"), reachable=True)
    onward = forwarding.forward(ADA, sent(CARA, data=b"hello"), reachable=True)
    assert onward == Onward(ADA, Relay(CARA, 1, ends=True))
    assert len(forwarding) == MAX_RELAYED
