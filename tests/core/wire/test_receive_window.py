"""The receiver's window of a lane over several connections."""

import pytest

from pmesh.core.wire.subflows import (
    ACK_BYTES,
    ACK_EARLY_BYTES,
    ACK_RECORDS,
    Ack,
    ReceiveWindow,
    frame_bytes,
)
from pmesh.errors import ProtocolError
from tests.core.wire.frames import frame

pytestmark = pytest.mark.usefixtures("windows")


def receiving(*indices: int, **limits: int) -> ReceiveWindow:
    made = ReceiveWindow(**limits)
    for index in indices or (0,):
        made.add(index)
    return made


def bring(window: ReceiveWindow, number: int, *, index: int = 0, body_bytes: int = 0) -> bool:
    made = frame(number, body_bytes)
    window.read(index, len(made))
    return window.arrived_untrusted(index, made)


def test_records_come_out_in_order_and_what_came_twice_once() -> None:
    window = receiving()
    assert [bring(window, number) for number in (1, 1, 0, 0, 2, 1)] == [True, False] * 2 + [
        True,
        False,
    ]
    for number in range(3):
        assert window.first == frame(number)
        assert window.opened() == frame(number)
    assert window.first is None


def test_nobody_can_make_the_receiver_keep_more_than_a_window() -> None:
    window = receiving(window_records=4, window_bytes=3 * frame_bytes(100))
    for number in (1, 2, 3):
        assert bring(window, number, body_bytes=100)
    with pytest.raises(ProtocolError, match="beyond the window"):
        window.needs_untrusted(4)
    window = receiving(window_bytes=3 * frame_bytes(100))
    for number in (1, 2, 3):
        assert bring(window, number, body_bytes=100)
    with pytest.raises(ProtocolError, match="more than the window"):
        bring(window, 4)


def test_little_that_has_been_read_is_acknowledged_later_much_at_once() -> None:
    window = receiving()
    assert window.owing == []
    window.read(0, 100)
    assert not window.is_due(0, waiting=True)
    assert window.owing == [0]
    window.read(0, ACK_EARLY_BYTES)
    assert not window.is_due(0, waiting=False)
    assert window.is_due(0, waiting=True)
    assert window.acknowledge(0, waiting=True) == Ack(100 + ACK_EARLY_BYTES, 0, waiting=True)
    assert window.owing == []
    assert not window.is_due(0, waiting=True)
    window.read(0, ACK_BYTES)
    assert window.is_due(0, waiting=False)
    window.drop(0)
    assert window.owing == []


def test_many_small_records_are_acknowledged() -> None:
    window = receiving()
    for number in range(ACK_RECORDS):
        assert not window.is_due(0, waiting=False)
        bring(window, number)
    assert window.is_due(0, waiting=False)
    assert window.acknowledge(0, waiting=False).wanted == ACK_RECORDS


def test_what_fills_a_gap_is_acknowledged_at_once_however_small() -> None:
    """Else the sender might wait for room in its window."""
    window = receiving(0, 1)
    for number in (1, 2):
        bring(window, number, index=1, body_bytes=100_000)
    window.acknowledge(1, waiting=True)
    bring(window, 0)
    assert not window.is_due(1, waiting=True)  # there is nothing new to say of that one
    assert window.is_due(0, waiting=True)
    assert window.acknowledge(0, waiting=True).wanted == 3


def test_each_subflow_is_told_what_is_lacked_for_another_may_be_lost_with_what_it_was_told() -> (
    None
):
    window = receiving(0, 1)
    window.read(0, frame_bytes(0))
    bring(window, 0)
    assert window.owing == [0, 1]
    assert window.acknowledge(0, waiting=True).wanted == 1
    assert window.owing == [1]
    assert not window.is_due(1, waiting=True)  # there is time
    assert window.acknowledge(1, waiting=True).wanted == 1
    assert window.owing == []
