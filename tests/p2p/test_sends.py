"""Which sends may be under way, and in which order those follow that wait."""

import numpy as np
import pytest

from pmesh.core.wire.calls import Envelope
from pmesh.ids import TrainerId
from pmesh.p2p.client import sends as module
from pmesh.p2p.client.sends import Send, Sends
from tests.worlds.faults import Faults

A, B = TrainerId(1), TrainerId(2)


@pytest.fixture(autouse=True)
def few(faults: Faults) -> None:
    faults.limit(module, "MAX_SENDS", 4)


def send(call: int, to: TrainerId = A) -> Send:
    return Send(call, to, Envelope(0, "uint8", (1,), 1), np.full(1, call, np.uint8), 1.0)


def test_each_receiver_may_have_half_of_what_the_others_leave() -> None:
    sends = Sends()
    assert [sends.begin(send(call)) for call in range(3)] == [True, True, False]
    assert [sends.begin(send(call, B)) for call in (3, 4)] == [True, False]


def test_those_that_wait_follow_in_order_and_nobody_overtakes_them() -> None:
    sends = Sends()
    waiting = [send(call) for call in range(4)]
    assert [sends.begin(each) for each in waiting] == [True, True, False, False]
    assert sends.next() is None
    sends.ended(0)
    assert not sends.begin(send(4))  # though there is room
    assert sends.next() is waiting[2]
    sends.started(waiting[2])
    sends.ended(1)
    assert sends.next() is waiting[3]


def test_what_waits_is_a_copy() -> None:
    sends = Sends()
    data = np.zeros(1, np.uint8)
    for call in range(3):
        last = Send(call, A, Envelope(0, "uint8", (1,), 1), data, 1.0)
        sends.begin(last)
    data[:] = 7
    assert last.data.tolist() == [0]


def test_without_memory_a_send_waits_while_others_are_under_way_and_else_fails() -> None:
    sends = Sends()
    first, second = send(0), send(1)
    assert sends.begin(first)
    assert sends.begin(second)
    assert sends.put_back(second)
    assert sends.next() is second
    assert sends.put_back(second)  # there is still none
    sends.ended(0)
    assert sends.next() is second
    assert not sends.put_back(second)
    assert not sends.queued


def test_the_end_of_what_was_no_send_changes_nothing() -> None:
    sends = Sends()
    sends.ended(9)
    assert sends.begin(send(0))
