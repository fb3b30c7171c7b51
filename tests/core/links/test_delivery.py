"""A link's messages over paths that fail: in order, and each once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.core.links.delivery import PREFIX_BYTES, Delivery, pack, unpack_untrusted
from pmesh.core.wire.channels import encode
from pmesh.core.wire.link import Leaving
from pmesh.core.wire.probes import Ping
from pmesh.core.wire.views import Refuse
from pmesh.errors import ProtocolError
from tests.worlds.builders import make_epoch

LEAVING = encode(Leaving())


def message(number: int) -> Refuse:
    return Refuse(make_epoch(number + 1), make_epoch(1))


class TwoAgents:
    """Two agents with two paths between them."""

    def __init__(self) -> None:
        self.ends = (Delivery(), Delivery())
        self.sent, self.used = [0, 0], [0, 0]
        self.got: tuple[list[object], list[object]] = ([], [])
        self.arriving: dict[tuple[int, int], list[bytes]] = {
            (end, path): [] for end in (0, 1) for path in (0, 1)
        }
        """Under way to this end on this path."""

    def do(self, me: int, action: str) -> None:
        path = self.used[me]
        match action:
            case "send":
                packet = self.ends[me].send(encode(message(self.sent[me])))
                self.arriving[1 - me, path].append(packet)
                self.sent[me] += 1
            case "change path":
                self.used[me] = 1 - path
                self.arriving[1 - me, 1 - path] += self.ends[me].packets_again()
            case "lose path":
                self.arriving[1 - me, path].clear()
                self.do(me, "change path")
            case _:
                self.take(me, int(action[-1]))

    def take(self, me: int, path: int) -> None:
        if self.arriving[me, path]:
            packet = unpack_untrusted(self.arriving[me, path].pop(0))
            if self.ends[me].receive_untrusted(packet):
                self.got[me].append(packet.message)

    def take_all(self, me: int) -> None:
        for path in (0, 1):
            while self.arriving[me, path]:
                self.take(me, path)


ACTIONS = st.sampled_from(["send", "take 0", "take 1", "change path", "lose path"])


@given(st.lists(st.tuples(st.integers(0, 1), ACTIONS), max_size=200))
def test_all_messages_arrive_in_order_and_once_whatever_becomes_of_the_paths(
    history: list[tuple[int, str]],
) -> None:
    two = TwoAgents()
    for me, action in history:
        two.do(me, action)
    for me in (0, 1):  # at the end all is quiet, and each acknowledges what it has
        two.do(me, "change path")
        two.take_all(1 - me)
        two.do(1 - me, "send")
        two.take_all(me)
    two.do(1, "send")
    two.take_all(0)
    for me in (0, 1):
        assert two.got[1 - me] == [encode(message(number)) for number in range(two.sent[me])]
    assert list(two.ends[0].packets_again()) == []


def test_what_is_acknowledged_is_forgotten() -> None:
    delivery = Delivery()
    for _ in range(3):
        delivery.send(LEAVING)
    assert delivery.exceeds(2, 1000)
    assert delivery.exceeds(3, 2)
    assert not delivery.exceeds(3, 1000)
    assert delivery.receive_untrusted(unpack_untrusted(pack(1, 2, LEAVING)))
    assert not delivery.exceeds(1, len(LEAVING))
    assert [unpack_untrusted(again)[:2] for again in delivery.packets_again()] == [(3, 1)]


def test_a_message_of_the_path_itself_has_no_place_in_the_order() -> None:
    delivery = Delivery()
    for _ in range(2):
        assert delivery.receive_untrusted(unpack_untrusted(pack(0, 0, encode(Ping(5)))))
    assert delivery.received == 0


@pytest.mark.parametrize(("number", "acknowledged"), [(1, 1), (2, 0), (2**64 - 1, 0)])
def test_numbers_that_no_honest_peer_would_send_are_refused(number: int, acknowledged: int) -> None:
    with pytest.raises(ProtocolError):
        Delivery().receive_untrusted(unpack_untrusted(pack(number, acknowledged, LEAVING)))


@pytest.mark.parametrize("size", [0, PREFIX_BYTES - 1, PREFIX_BYTES])
def test_a_packet_that_is_too_short_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError):
        unpack_untrusted(bytes(size))
