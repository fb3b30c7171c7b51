"""Two ends of a pipe: every message once, in order, whatever is lost on the way."""

from collections import deque
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.wire.stream import PART_BYTES, SELDOM_S, WINDOW_BYTES, Part
from pmesh.errors import ProtocolError
from pmesh.ids import TrainerId
from pmesh.store.rules import pipe as pipe_
from pmesh.store.rules.pipe import MESSAGES_AT_ONCE
from pmesh.store.wire import Entry, Have, Set, StoreMessage, encode


class QueuedPipe(pipe_.Pipe):
    """An end with a queue."""

    def __init__(self) -> None:
        self.queue = deque[StoreMessage]()
        super().__init__(lambda: encode(self.queue.popleft()) if self.queue else None)

    def send(self, message: StoreMessage) -> None:
        self.queue.append(message)


def entry(position: int, size: int = 10) -> Entry:
    return Entry(position, TrainerId(0), position, Set("k", bytes(size)))


def move(one: QueuedPipe, other: QueuedPipe, *, now: float = 0.0) -> list[StoreMessage]:
    """Bring all that one sends to the other, and what that answers back."""
    came = list[StoreMessage]()
    while parts := list(one.parts(now=now)):
        for part in parts:
            came += other.receive_untrusted(part, now=now)
        for part in other.parts(now=now):
            came += one.receive_untrusted(part, now=now)
    return came


def test_messages_of_any_size_come_whole_and_in_order() -> None:
    one, other = QueuedPipe(), QueuedPipe()
    sent = [entry(i, size) for i, size in enumerate([0, 1_000_000, 5, PART_BYTES, 3])]
    for message in sent:
        one.send(message)
    assert move(one, other) == sent


def test_messages_are_made_when_there_is_room_and_some_at_a_time() -> None:
    one, other = QueuedPipe(), QueuedPipe()
    one.queue += [Have(0)] * (MESSAGES_AT_ONCE + 1) + [entry(1, WINDOW_BYTES)] * 3
    (part,) = one.parts(now=0)
    assert (len(one.queue), one.has_more) == (4, True)
    came = list(other.receive_untrusted(part, now=0))
    assert came == [Have(0)] * MESSAGES_AT_ONCE
    rest = list(one.parts(now=0))
    assert (len(one.queue), one.has_more) == (2, False)
    came = [message for part in rest for message in other.receive_untrusted(part, now=0)]
    (read,) = other.parts(now=0)
    assert not list(one.receive_untrusted(read, now=0))
    assert came + move(one, other) == [Have(0)] + [entry(1, WINDOW_BYTES)] * 3


@given(st.integers(0, 10_000))
def test_both_directions_survive_any_losses(seed: int) -> None:
    random = Random(seed)  # noqa: S311 - it decides what is lost
    ends = QueuedPipe(), QueuedPipe()
    sent: list[list[StoreMessage]] = [[], []]
    came: list[list[StoreMessage]] = [[], []]
    wires: list[list[Part]] = [[], []]
    for step in range(400):
        now, side = step / 10, random.randrange(2)
        if step < 100:
            kinds: list[StoreMessage] = [Have(step), entry(step, random.choice([5, 50_000]))]
            message = random.choice(kinds)
            ends[side].send(message)
            sent[side].append(message)
        wires[side] += ends[side].parts(now=now)
        while wires[side] and random.random() < 0.9:
            part = wires[side].pop(0)
            if step > 300 or random.random() < 0.9:
                came[1 - side] += ends[1 - side].receive_untrusted(part, now=now)
    for later in range(40):
        for side in range(2):
            for part in ends[side].parts(now=1000.0 + SELDOM_S * later):
                came[1 - side] += ends[1 - side].receive_untrusted(part, now=1000.0)
    assert came == sent[::-1]


def test_what_no_honest_machine_sends_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="beyond what was sent"):
        list(QueuedPipe().receive_untrusted(Part(0, 1, b""), now=0))
    with pytest.raises(ProtocolError, match="claims"):
        list(QueuedPipe().receive_untrusted(Part(0, 0, b"\xff" * 4), now=0))
    with pytest.raises(ProtocolError, match="not of a store"):
        list(QueuedPipe().receive_untrusted(Part(0, 0, b"\x00\x00\x00\x01\xc0"), now=0))
