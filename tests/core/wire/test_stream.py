"""Two ends of a stream: each byte once, in order, whatever is lost on the way."""

import itertools
import math
from collections import deque
from random import Random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pmesh.core.wire.stream import AGAIN_S, PART_BYTES, SELDOM_S, WINDOW_BYTES, Part, Stream
from pmesh.errors import ProtocolError
from tests.worlds.examples import examples

BEGIN = 7  # of one direction


def move(one: Stream, other: Stream) -> bytes:
    """Bring what one sends to the other, which consumes it, and the acknowledgements back."""
    came = b""
    while parts := list(one.parts(now=0.0)):
        for part in parts:
            data = other.receive_untrusted(part, now=0.0)
            other.consume(len(data))
            came += data
        for part in other.parts(now=0.0):
            one.receive_untrusted(part, now=0.0)
    return came


def test_a_write_of_any_size_arrives_in_small_parts() -> None:
    one, other = Stream(), Stream()
    data = Random(1).randbytes(3 * WINDOW_BYTES + 5)  # noqa: S311 - any bytes
    one.write(data)
    first = list(one.parts(now=0.0))
    assert [len(part.data) for part in first] == [PART_BYTES] * (WINDOW_BYTES // PART_BYTES)
    one.resume()
    assert (one.written, one.acknowledged) == (len(data), 0)
    assert move(one, other) == data
    assert one.is_acknowledged
    assert one.acknowledged == len(data)


def test_a_consumer_that_stops_holds_up_its_stream() -> None:
    one, other = Stream(), Stream()
    one.write(bytes(2 * WINDOW_BYTES))
    for part in one.parts(now=0.0):
        other.receive_untrusted(part, now=0.0)
    assert not list(other.parts(now=0.0))
    assert not list(one.parts(now=0.1))
    other.consume(10)
    (read,) = other.parts(now=0.1)
    assert read == Part(0, 10)
    one.receive_untrusted(read, now=0.1)
    assert [len(part.data) for part in one.parts(now=0.1)] == [10]


def test_a_stream_may_have_a_smaller_window_and_smaller_parts() -> None:
    one, other = (Stream(window_bytes=250, part_bytes=100) for _ in range(2))
    one.write(bytes(300))
    assert [len(part.data) for part in one.parts(now=0.0)] == [100, 100, 50]
    assert one.room == -50
    one.resume()
    assert move(one, other) == bytes(300)
    assert (other.received, other.read, one.acknowledged) == (300, 300, 300)
    with pytest.raises(ProtocolError, match="do not fit the window"):
        other.receive_untrusted(Part(300, 0, bytes(251)), now=0.0)


def test_what_nobody_acknowledges_is_repeated_ever_more_rarely() -> None:
    one = Stream()
    one.write(b"x")
    (first,) = one.parts(now=0.0)
    times = [0.0]
    for tick in range(1, 200):
        for part in one.parts(now=tick / 10):
            assert part == first
            times.append(tick / 10)
    pauses = [b - a for a, b in itertools.pairwise(times)]
    wanted = [AGAIN_S, 2 * AGAIN_S, 4 * AGAIN_S, 8 * AGAIN_S, SELDOM_S, SELDOM_S]
    assert pauses[: len(wanted)] == pytest.approx(wanted, abs=0.11)


def test_where_links_lose_nothing_only_a_new_link_has_parts_repeated() -> None:
    one = Stream(again_s=math.inf)
    one.write(b"x")
    (first,) = one.parts(now=0.0)
    assert not list(one.parts(now=1e9))
    one.resume()
    assert list(one.parts(now=1e9)) == [first]


def test_a_repetition_is_acknowledged_again() -> None:
    one, other = Stream(), Stream()
    one.write(b"abc")
    (part,) = one.parts(now=0.0)
    other.consume(len(other.receive_untrusted(part, now=0.0)))
    lost = list(other.parts(now=0.0))
    assert other.receive_untrusted(part, now=1.0) == b""
    assert list(other.parts(now=1.0)) == lost == [Part(0, 3)]


def test_of_a_part_that_is_cut_anew_only_the_new_bytes_are_received() -> None:
    one, other = Stream(), Stream()
    one.write(b"abc")
    (part,) = one.parts(now=0.0)
    assert other.receive_untrusted(part, now=0.0) == b"abc"
    other.consume(1)
    (read,) = other.parts(now=0.0)
    one.receive_untrusted(read, now=0.0)
    one.write(b"d")
    one.resume()
    (again,) = one.parts(now=0.0)
    assert again == Part(1, 0, b"bcd")
    assert other.receive_untrusted(again, now=0.0) == b"d"


def test_what_follows_a_lost_part_is_not_received_before_it() -> None:
    one, other = Stream(), Stream()
    one.write(bytes(PART_BYTES) + b"abc")
    _, later = one.parts(now=0.0)
    assert other.receive_untrusted(later, now=0.0) == b""
    one.resume()
    assert move(one, other) == bytes(PART_BYTES) + b"abc"


def test_an_end_that_comes_by_itself_is_acknowledged() -> None:
    one, other = Stream(), Stream()
    one.write(b"abc")
    assert move(one, other) == b"abc"
    one.close()
    (end,) = one.parts(now=0.0)
    assert other.receive_untrusted(end, now=0.0) == b""
    assert list(other.parts(now=0.0)) == [Part(0, 4)]


@pytest.mark.parametrize("data", [b"", b"abc", bytes(WINDOW_BYTES)])
def test_the_end_comes_behind_the_last_byte_and_is_acknowledged(data: bytes) -> None:
    one, other = Stream(), Stream()
    one.write(data)
    one.close()
    one.close()
    assert move(one, other) == data
    assert other.has_ended
    assert one.is_acknowledged
    assert not list(one.parts(now=1e9))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Part(0, BEGIN + 1), "beyond what was sent"),
        (Part(1, 0, bytes(WINDOW_BYTES)), "do not fit the window"),
        (Part(2**61, 0, b"x"), "do not fit the window"),
        (Part(0, 0, bytes(WINDOW_BYTES), ends=True), "do not fit the window"),
    ],
)
def test_what_no_honest_end_sends_is_a_protocol_error(part: Part, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        Stream(begin=BEGIN).receive_untrusted(part, now=0.0)


@pytest.mark.parametrize("part", [Part(2, 0, b"x"), Part(0, 0, b"abcd"), Part(2, 0, ends=True)])
def test_nothing_may_follow_the_end(part: Part) -> None:
    stream = Stream()
    stream.receive_untrusted(Part(0, 0, b"a", ends=True), now=0.0)
    with pytest.raises(ProtocolError, match="after the end"):
        stream.receive_untrusted(part, now=0.0)


class _StreamEnd:
    """One end, with what its user has written, received and not consumed."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.wrote = self.came = b""
        self.unconsumed = 0
        self.closed = False
        self.wire = deque[Part]()


SIDES = st.sampled_from([0, 1])
FATE_TIMES = {"comes": 1, "is lost": 0, "comes twice": 2}
FATES = st.sampled_from(list(FATE_TIMES))


class StreamMachine(RuleBasedStateMachine):
    """Any interleaving of writes, reads, losses, repetitions, late parts and new links."""

    def __init__(self) -> None:
        super().__init__()
        self.random = Random(1)  # noqa: S311 - any bytes
        self.now = 0.0
        self.ends = _StreamEnd(Stream(begin=BEGIN)), _StreamEnd(Stream(far_begin=BEGIN))
        self.old: list[tuple[int, Part]] = []

    @rule(side=SIDES, nbytes=st.sampled_from([1, 100, PART_BYTES - 1, PART_BYTES, WINDOW_BYTES]))
    def write(self, side: int, nbytes: int) -> None:
        end = self.ends[side]
        if end.stream.room >= nbytes and not end.closed:
            data = self.random.randbytes(nbytes)
            end.stream.write(data)
            end.wrote += data

    @rule(side=SIDES)
    def close(self, side: int) -> None:
        if len(self.ends[side].wrote) > 2 * WINDOW_BYTES:
            self.ends[side].closed = True
            self.ends[side].stream.close()

    @rule(side=SIDES)
    def send(self, side: int) -> None:
        end = self.ends[side]
        end.wire.extend(end.stream.parts(now=self.now))

    @rule(side=SIDES, fates=st.lists(FATES, min_size=1, max_size=8))
    def receive(self, side: int, fates: list[str]) -> None:
        wire = self.ends[1 - side].wire
        for fate in fates[: len(wire)]:
            part = wire.popleft()
            for _ in range(FATE_TIMES[fate]):
                self._take(side, part)

    def _take(self, side: int, part: Part) -> None:
        self.old = [*self.old[-20:], (side, part)]
        end = self.ends[side]
        data = end.stream.receive_untrusted(part, now=self.now)
        end.came += data
        end.unconsumed += len(data)

    @rule(side=SIDES, nbytes=st.sampled_from([1, 99, PART_BYTES, WINDOW_BYTES]))
    def consume(self, side: int, nbytes: int) -> None:
        end = self.ends[side]
        nbytes = min(nbytes, end.unconsumed)
        end.stream.consume(nbytes)
        end.unconsumed -= nbytes

    @precondition(lambda self: self.old)
    @rule(data=st.data())
    def take_twice(self, data: st.DataObject) -> None:
        self._take(*data.draw(st.sampled_from(self.old)))

    @rule()
    def relink(self) -> None:
        for end in self.ends:
            end.wire.clear()
            end.stream.resume()

    @rule(seconds=st.sampled_from([0.1, AGAIN_S, SELDOM_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def every_byte_has_come_once_and_in_order(self) -> None:
        for one, other in (self.ends, self.ends[::-1]):
            assert one.wrote.startswith(other.came)
            assert not other.stream.has_ended or (one.closed and other.came == one.wrote)

    @invariant()
    def at_most_a_window_is_kept_and_at_most_a_window_waits(self) -> None:
        for one, other in (self.ends, self.ends[::-1]):
            assert one.stream.room >= 0
            assert other.unconsumed <= WINDOW_BYTES

    def teardown(self) -> None:
        """Over a link that loses nothing any more, all comes."""
        self.relink()
        for _ in range(20):
            for side, end in enumerate(self.ends):
                self.consume(side, WINDOW_BYTES)
                self.send(side)
                self.receive(1 - side, ["comes"] * len(end.wire))
        for one, other in (self.ends, self.ends[::-1]):
            assert other.came == one.wrote
            assert one.stream.is_acknowledged
            assert other.stream.has_ended == one.closed


TestAnyInterleaving = StreamMachine.TestCase
TestAnyInterleaving.settings = examples(60, stateful_step_count=40)
