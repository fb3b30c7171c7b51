"""The carrier over a session whose ends a test chooses."""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from pmesh.core.wire.calls import Envelope
from pmesh.errors import (
    AgentStopped,
    MeshClosed,
    OpTimedOut,
    PmeshError,
    RankLost,
    RunError,
    UsageError,
)
from pmesh.ids import TrainerId
from pmesh.p2p.client.session import Arrived
from pmesh.rpc.client import carrier
from pmesh.rpc.client.carrier import ARRAYS_ASKED, ARRAYS_SENT, BATCHES, Carrier
from pmesh.rpc.client.values import Came
from pmesh.rpc.wire import FRAMES, AnyFrame, Apart, Cancel, decode_untrusted, encode, join
from tests.worlds.faults import Faults
from tests.worlds.scripted_agent import PATIENCE_S

PEER = TrainerId(7)


@dataclass(eq=False)
class RecordingSession:
    """Notes what begins; ends what it is told, in that order."""

    sent: list[tuple[int, Envelope, bytes]] = field(default_factory=list[Any])
    received: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Number and tag of each receive."""
    ends: "queue.SimpleQueue[tuple[int, Any]]" = field(default_factory=queue.SimpleQueue)
    results: dict[int, Any] = field(default_factory=dict[int, Any])
    no_memory: bool = False
    calls: int = 0
    closed: threading.Event = field(default_factory=threading.Event)

    def follow_ends(self) -> None: ...

    def begin_send(self, to: TrainerId, envelope: Envelope, data: Any, timeout_s: float) -> int:  # noqa: ANN401
        assert to == PEER
        assert timeout_s > 0
        if self.no_memory:
            raise UsageError("no memory")
        self.calls += 1
        self.sent.append((self.calls, envelope, data.tobytes()))
        return self.calls

    def begin_receive(
        self, sources: tuple[TrainerId, ...], tag: int, timeout_s: float, *, borrows: bool = False
    ) -> int:
        assert not borrows
        assert sources == (PEER,)
        assert timeout_s > 0
        self.calls += 1
        self.received.append((self.calls, tag))
        return self.calls

    def next_end(self, timeout_s: float) -> int | None:
        try:
            call, result = self.ends.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if call < 0:
            raise result
        self.results[call] = result
        return call

    def end(self, call: int, timeout_s: float) -> Any:  # noqa: ANN401
        assert timeout_s == 0
        result = self.results.pop(call)
        if isinstance(result, Exception):
            raise result
        return result

    def close(self, reason: str) -> None:
        self.closed.set()
        self.ends.put((-1, MeshClosed(reason)))


@dataclass(eq=False)
class RecordedEvents:
    frames: "queue.SimpleQueue[AnyFrame]" = field(default_factory=queue.SimpleQueue)
    losses: "queue.SimpleQueue[str]" = field(default_factory=queue.SimpleQueue)
    cuts: "queue.SimpleQueue[PmeshError]" = field(default_factory=queue.SimpleQueue)
    ticked: threading.Event = field(default_factory=threading.Event)
    fails: bool = False

    def received(self, source: TrainerId, frame: AnyFrame) -> None:
        assert source == PEER
        if self.fails:
            raise ZeroDivisionError("a fault of ours")
        self.frames.put(frame)

    def lost(self, rank: TrainerId, why: RankLost) -> None:
        assert rank == PEER
        self.losses.put(str(why))

    def cut_off(self, why: PmeshError) -> None:
        self.cuts.put(why)

    def tick(self) -> None:
        self.ticked.set()


class CarrierToPeer:
    def __init__(self) -> None:
        self.sessions: list[RecordingSession] = []
        self.events = RecordedEvents()
        self.peers = [PEER]
        self.opened = threading.Semaphore(0)
        self.carrier = Carrier(self.open, lambda: self.peers, self.events)

    def open(self) -> Any:  # noqa: ANN401 - a RecordingSession
        self.sessions.append(RecordingSession())
        self.opened.release()
        return self.sessions[-1]

    @property
    def session(self) -> RecordingSession:
        return self.sessions[-1]

    def tick(self) -> None:
        for _ in range(2):  # the first one may have begun before
            self.events.ticked.clear()
            assert self.events.ticked.wait(PATIENCE_S)


@contextmanager
def world() -> Iterator[CarrierToPeer]:
    made = CarrierToPeer()
    made.carrier.post(PEER, Cancel(0))
    try:
        yield made
    finally:
        made.carrier.close()


def arrived(*numbers: int) -> Arrived:
    data = np.frombuffer(join(encode(Cancel(number)) for number in numbers), np.uint8)
    return Arrived(PEER, Envelope(FRAMES, "uint8", data.shape, data.size), data)


def test_frames_are_handled_in_the_order_of_the_receives_not_of_their_ends() -> None:
    with world() as made:
        (first, _), (second, _) = made.session.received[:2]
        made.session.ends.put((second, arrived(2, 3)))
        made.session.ends.put((first, arrived(1)))
        found = [made.events.frames.get(timeout=PATIENCE_S) for _ in range(3)]
    assert found == [Cancel(1), Cancel(2), Cancel(3)]


def test_frames_share_a_message_while_others_are_on_the_way() -> None:
    with world() as made:
        for number in range(1, 50):
            made.carrier.post(PEER, Cancel(number))
        sent = made.session.sent
        assert len(sent) == BATCHES
        made.session.ends.put((sent[0][0], None))
        made.tick()
        assert len(sent) == BATCHES + 1
    batches = [decode_untrusted(data) for _, _, data in sent]
    assert [frame for batch in batches for frame in batch] == [Cancel(i) for i in range(50)]


def test_frames_for_which_there_is_no_memory_are_sent_later() -> None:
    with world() as made:
        made.session.no_memory = True
        made.carrier.post(PEER, Cancel(1))
        with pytest.raises(UsageError, match="no memory"):
            made.carrier.post(PEER, Cancel(2), [(2**32, np.zeros(9, np.uint8))])
        made.session.no_memory = False
        made.tick()
        assert list(decode_untrusted(made.session.sent[-1][2])) == [Cancel(1), Cancel(2)]


@pytest.mark.parametrize("result", [None, UsageError("no memory"), OpTimedOut("late")])
def test_an_array_that_was_not_sent_for_want_of_memory_is_reported(result: Any) -> None:  # noqa: ANN401
    failures = list[str]()
    with world() as made:
        for failed in (None, lambda error: failures.append(str(error))):
            made.carrier.post(
                PEER, Cancel(1), [(2**32, np.zeros(9, np.uint8))], timeout_s=5, failed=failed
            )
            call = next(n for n, e, _ in reversed(made.session.sent) if e.tag == 2**32)
            made.session.ends.put((call, result))
        made.tick()
    assert failures == (["no memory"] if isinstance(result, UsageError) else [])


@pytest.mark.parametrize("size", [9, 8, None])
def test_an_array_comes_whole_or_not_at_all(size: int | None) -> None:
    came = queue.SimpleQueue[Came]()
    with world() as made:
        made.carrier.receive(PEER, [Apart(2**32, 9)], 5.0, [came.put])
        (call,) = (number for number, tag in made.session.received if tag == 2**32)
        data: Any = np.zeros(size or 0, np.uint8)
        result: Any = Arrived(PEER, Envelope(2**32, "uint8", (9,), 9), data)
        made.session.ends.put((call, OpTimedOut("late") if size is None else result))
        found = cast("Any", came.get(timeout=PATIENCE_S))
    assert (found is data) == (size == 9)


def test_of_many_arrays_a_few_are_received_at_a_time_in_their_order() -> None:
    apart = [Apart(2**32 + i, 9) for i in range(ARRAYS_ASKED + 3)]
    came = queue.SimpleQueue[Came]()
    with world() as made:
        made.carrier.receive(PEER, apart, 60.0, [came.put] * len(apart))
        asked = made.session.received
        assert [tag for _, tag in asked if tag != FRAMES] == [a.tag for a in apart[:ARRAYS_ASKED]]
        for call, tag in list(asked):
            if tag != FRAMES:
                made.session.ends.put((call, OpTimedOut("late")))
        assert [came.get(timeout=PATIENCE_S) for _ in range(ARRAYS_ASKED)] == [None] * ARRAYS_ASKED
        made.tick()
        assert [tag for _, tag in asked if tag != FRAMES] == [a.tag for a in apart]


def test_an_array_for_which_there_is_no_memory_ends_its_call_and_nothing_else() -> None:
    came = queue.SimpleQueue[Came]()
    with world() as made:
        made.carrier.receive(PEER, [Apart(2**32, 9)], 5.0, [came.put])
        (call,) = (number for number, tag in made.session.received if tag == 2**32)
        made.session.ends.put((call, UsageError("no memory")))
        assert str(came.get(timeout=PATIENCE_S)) == "no memory"
        made.tick()
        assert made.events.cuts.empty()


def test_more_arrays_than_may_be_on_the_way_are_refused_until_some_have_arrived() -> None:
    x = np.zeros(9, np.uint8)
    with world() as made:
        made.carrier.post(PEER, Cancel(1), [(2**32 + i, x) for i in range(ARRAYS_SENT)])
        with pytest.raises(UsageError, match="at most 3072 large arrays are on the way"):
            made.carrier.post(PEER, Cancel(2), [(2**33, x)])
        call = next(number for number, envelope, _ in made.session.sent if envelope.tag == 2**32)
        made.session.ends.put((call, None))
        made.tick()
        made.carrier.post(PEER, Cancel(3), [(2**33, x)])
        assert made.session.sent[-1][1].tag == 2**33


def test_a_lost_rank_is_reported_once_and_stays_lost_until_it_is_gone() -> None:
    with world() as made:
        for call, _ in made.session.received[:2]:
            made.session.ends.put((call, RankLost("rank 7 is lost")))
        assert made.events.losses.get(timeout=PATIENCE_S) == "rank 7 is lost"
        made.tick()
        with pytest.raises(RankLost, match="rank 7 is lost"):
            made.carrier.post(PEER, Cancel(1))
        assert made.events.losses.empty()
        made.session.ends.put((made.session.sent[0][0], RankLost("its batch")))
        made.peers.clear()
        made.tick()
        made.carrier.post(PEER, Cancel(1))  # nobody would: its number is never given again


@pytest.mark.parametrize("how", ["agent", "fault"])
def test_a_session_that_has_ended_is_followed_by_another(how: str) -> None:
    with world() as made:
        assert made.opened.acquire(timeout=PATIENCE_S)
        first = made.session
        if how == "agent":
            first.ends.put((-1, AgentStopped("no agent")))
        else:
            made.events.fails = True
            first.ends.put((first.received[0][0], arrived(1)))
        why = made.events.cuts.get(timeout=PATIENCE_S)
        assert isinstance(why, AgentStopped if how == "agent" else RunError)
        assert first.closed.is_set()
        assert made.opened.acquire(timeout=PATIENCE_S)
        made.carrier.post(PEER, Cancel(2))
        assert list(decode_untrusted(made.session.sent[-1][2])) == [Cancel(2)]


def test_garbage_of_another_rank_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    with world() as made:
        (first, _), (second, _) = made.session.received[:2]
        data: Any = np.frombuffer(b"garbage", np.uint8)
        made.session.ends.put((first, Arrived(PEER, Envelope(FRAMES, "uint8", (7,), 7), data)))
        made.session.ends.put((second, arrived(1)))
        assert made.events.frames.get(timeout=PATIENCE_S) == Cancel(1)
    assert "a rank has sent what is no call" in caplog.text


def test_a_trainer_that_is_not_in_its_job_yet_tries_again(faults: Faults) -> None:
    faults.limit(carrier, "TICK_S", 0.01)
    tries, opened = list[int](), threading.Event()
    session = RecordingSession()

    def open_session() -> Any:  # noqa: ANN401 - a RecordingSession
        tries.append(0)
        if len(tries) == 1:
            raise UsageError("call mesh.sync first")
        opened.set()
        return session

    none: Callable[[], list[TrainerId]] = list
    made = Carrier(open_session, none, RecordedEvents())
    made.start()
    made.start()
    assert opened.wait(PATIENCE_S)
    made.close()
    assert session.closed.wait(PATIENCE_S)
    with pytest.raises(MeshClosed, match="it was closed"):
        made.post(PEER, Cancel(1))
    made.start()
