from random import Random

import pytest

from simulation.network import HANDSHAKE_TIMEOUT_S, Conditions, Network, Timeline


class RecordingHost:
    def __init__(self, name: str) -> None:
        self.greeting = name.encode()
        self.events: list[tuple[object, ...]] = []

    def connected(self, peer: int, greeting: bytes) -> None:
        self.events.append(("connected", peer, greeting))

    def unreachable(self, peer: int) -> None:
        self.events.append(("unreachable", peer))

    def received(self, peer: int, channel: str, data: bytes) -> None:
        self.events.append((channel, peer, data))

    def disconnected(self, peer: int) -> None:
        self.events.append(("disconnected", peer))


class TwoHosts:
    """Two connected hosts whose events so far are forgotten."""

    def __init__(self, conditions: Conditions) -> None:
        self.timeline = Timeline()
        self.network: Network[bytes] = Network(self.timeline, Random(1), conditions)  # noqa: S311 - replays
        self.a, self.b = RecordingHost("a"), RecordingHost("b")
        self.network.attach(0, self.a)
        self.network.attach(1, self.b)
        self.network.dial(0, 1)
        self.wait()
        assert self.a.events == [("connected", 1, b"b")]
        assert self.b.events == [("connected", 0, b"a")]
        self.a.events.clear()
        self.b.events.clear()

    def wait(self, duration_s: float = 5.0) -> None:
        self.timeline.run_until(self.timeline.now + duration_s)

    def say(self, *words: bytes) -> None:
        for word in words:
            self.network.send(0, 1, "link", word)


@pytest.fixture
def pair() -> TwoHosts:
    return TwoHosts(Conditions(orderly=0.0))


def test_a_channel_is_first_in_first_out(pair: TwoHosts) -> None:
    words = [bytes([n]) for n in range(50)]
    pair.say(*words)
    pair.wait()
    assert pair.b.events == [("link", 0, word) for word in words]


def test_a_cut_delays_and_its_end_lets_through(pair: TwoHosts) -> None:
    pair.network.cut(0, 1)
    pair.say(b"x")
    pair.network.send(1, 0, "link", b"y")
    pair.wait()
    assert (pair.a.events, pair.b.events) == ([("link", 1, b"y")], [])
    pair.network.heal()
    pair.wait()
    assert pair.b.events == [("link", 0, b"x")]


def test_a_closed_connection_loses_what_was_under_way(pair: TwoHosts) -> None:
    pair.say(b"x")
    pair.network.close(0, 1)
    pair.say(b"y")
    pair.wait()
    assert pair.b.events == [("disconnected", 0)]
    assert pair.a.events == []


def test_an_orderly_close_lets_the_rest_arrive_first() -> None:
    pair = TwoHosts(Conditions(orderly=1.0))
    pair.say(b"x")
    pair.network.close(0, 1)
    pair.wait()
    assert pair.b.events == [("link", 0, b"x"), ("disconnected", 0)]


def test_nobody_hears_of_a_close_through_a_cut(pair: TwoHosts) -> None:
    pair.network.cut(0, 1)
    pair.network.close(0, 1)
    pair.wait()
    assert pair.b.events == []


def test_a_stopped_host_refuses_at_once_and_a_cut_one_by_silence(pair: TwoHosts) -> None:
    pair.network.detach(1)
    pair.wait()
    pair.network.dial(0, 1)
    pair.wait(0.1)
    assert pair.a.events == [("disconnected", 1), ("unreachable", 1)]
    pair.network.attach(1, pair.b)
    pair.network.cut(1, 0)
    pair.network.dial(0, 1)
    pair.wait(HANDSHAKE_TIMEOUT_S / 2)
    assert pair.a.events[2:] == []
    pair.wait()
    assert pair.a.events[2:] == [("unreachable", 1)]


def test_a_frozen_host_reads_everything_in_order_when_it_goes_on(pair: TwoHosts) -> None:
    pair.network.freeze(1)
    pair.say(b"x", b"y")
    pair.wait()
    assert pair.network.is_frozen(1)
    assert pair.b.events == []
    pair.network.thaw(1)
    assert pair.b.events == [("link", 0, b"x"), ("link", 0, b"y")]


def test_single_messages_are_lost_and_repeated_on_lossy_channels_only() -> None:
    pair = TwoHosts(Conditions(loss=0.25, repeats=0.25))
    for number in range(400):
        pair.network.send(0, 1, "link", number.to_bytes(2))
        pair.network.send(0, 1, "lane", number.to_bytes(2))
    pair.wait()
    lane = [event for event in pair.b.events if event[0] == "lane"]
    link = [event for event in pair.b.events if event[0] == "link"]
    assert lane == [("lane", 0, number.to_bytes(2)) for number in range(400)]
    assert 250 < len(set(link)) < 350
    assert 50 < len(link) - len(set(link)) < 150


def test_a_message_that_a_test_aims_at_is_swallowed(pair: TwoHosts) -> None:
    pair.network.swallow = lambda _from, _to, _channel, data: data == b"x"
    pair.say(b"x", b"y")
    pair.wait()
    assert pair.b.events == [("link", 0, b"y")]
