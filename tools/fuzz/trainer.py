"""A local program that lies to its agent: sessions that begin like a trainer's and go astray.

    $ python -m tools.fuzz.trainer SOCKET SEED LOG [CASE]

LOG gets all that is said. Of the CASE the messages are sent first.
"""

import contextlib
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import msgspec
import trio
from msgspec.structs import replace

from pmesh.core.values import Comparison
from pmesh.core.wire.calls import Call, Envelope
from pmesh.core.wire.control import AskEvents, AskPing, AskStatus, StopAgent
from pmesh.core.wire.framing import FrameReader, frame
from pmesh.core.wire.session import (
    MAX_REQUEST_BYTES,
    MAX_SESSION_MESSAGE_BYTES,
    SESSION_VERSION,
    DropArena,
    WantArena,
    encode,
)
from pmesh.core.wire.trainer import (
    ENTERS,
    ComparesStates,
    Compresses,
    Connect,
    Leave,
    ReportsNumbers,
    StartOp,
)
from pmesh.ids import JobName, OpNumber, TrainerId
from pmesh.invites.wire import Invite
from pmesh.launches.wire.messages import AskLaunches
from pmesh.members.wire import AskMembers, RemoveMachine, RotateKey
from pmesh.p2p.wire import Attach, ReceiveMessage, SendMessage
from pmesh.store import wire as store
from pmesh.store.wire import Add, Get, Keys, Set, StoreCall, Wait
from simulation.wire import AnyRequest, decode_reply_untrusted, decode_request_untrusted
from tools.fuzz.corpus import KeptCase, MessageRecorder, load
from tools.fuzz.liar import Liar

REQUESTS = tuple(kind for kind in get_args(AnyRequest) if kind is not StopAgent)  # which is obeyed
PAUSE_S = 0.05
Tell = Callable[[tuple[int, Any]], None]
"""Called with each request before it is sent, and the number of its session."""

JOB = JobName("a lie")
ARENA_BYTES = 4096
LIAR, NOBODY = "liar", "nobody"
ROTATES_EVERY = 3  # rounds of all sessions
BROKEN = (trio.BrokenResourceError, trio.ClosedResourceError, OSError)


def new_liar(seed: int) -> Liar:
    """One that speaks to the agent of this machine."""
    room = MAX_REQUEST_BYTES
    return Liar(seed, REQUESTS, lambda r: decode_request_untrusted(encode(r)), room=room)


def honest_sessions() -> Iterator[tuple[AnyRequest, ...]]:
    """What programs say, by session; a job of one rank runs while its messages travel."""
    me, sync = TrainerId(0), Call("sync", "int64", (8,))
    ops = [
        StartOp(OpNumber(number), call, dtype, count, arena, 5.0)  # type: ignore[arg-type] # a name of a dtype
        for number, (call, dtype, count, arena) in enumerate(
            [
                (sync, "int64", 8, 0),
                (Call("all_reduce", "float32", (100,), "sum"), "float32", 100, 0),
                (Call("broadcast", "float32", (100,), root=0), "float32", 100, 0),
                (Call("barrier", "float32", (0,)), "float32", 0, -1),
            ]
        )
    ]
    entering = StartOp(OpNumber(ENTERS), sync, "int64", 8, 0, 1.0)
    connect, want = Connect(SESSION_VERSION, JOB, 1, 2.0, "liar.py"), WantArena(ARENA_BYTES)
    commands = (Set("x", b"x"), Add("n", 1), Get("x"), Keys(""), Wait(("never",)))
    calls: list[tuple[int, store.Command]] = list(enumerate(commands))
    attach, envelope = Attach(SESSION_VERSION, JOB, me), Envelope(0, "float32", (100,), 400)
    numbers = ReportsNumbers({"loss": 0.5})
    compares = ComparesStates(Comparison(OpNumber(0), 1, "0" * 32, 2, 1, (me,)))
    for number in itertools.count():
        yield (connect, want, *ops, Compresses("int8"), numbers, compares, DropArena(0), Leave())
        yield (connect, want, entering)
        yield (AskStatus(),)
        yield (AskEvents(-1),)
        yield (AskPing("mac-1"),)
        yield (connect, *[WantArena(size) for size in (0, 1, 1 << 20)], *ops)
        yield (attach, want, SendMessage(0, me, envelope, 0, 2.0), ReceiveMessage(1, (me,), 0, 2.0))
        yield (connect, want, *ops[:1])
        yield (
            attach,
            *[StoreCall(n, store.encode(c), more=False, timeout_s=2.0) for n, c in calls],
        )
        yield (AskLaunches(),)
        yield (Invite(),)
        yield (AskMembers(),)
        yield (RemoveMachine(NOBODY, out=True),)
        if number % ROTATES_EVERY == ROTATES_EVERY - 1:
            yield (RotateKey((NOBODY,) * (number % 2)),)


def spare(request: Any) -> Any:  # noqa: ANN401 - of the same kind
    """Return a request that removes no honest machine: the agent obeys its programs."""
    match request:
        case RemoveMachine(name=str(name), out=True) if name != NOBODY:
            return replace(request, name=LIAR)
        case RotateKey(without=tuple(names)):
            return replace(request, without=tuple(n if n == NOBODY else LIAR for n in names))
        case _:
            return request


async def lie_to_agent(path: Path, liar: Liar, *, tell: Tell = lambda _: None) -> None:
    """Session after session, until cancelled."""

    def sessions() -> Iterator[Iterator[Any]]:
        for session in honest_sessions():
            yield (spare(s) for r in session for s in (*liar.say(r), *liar.interrupt()))

    await _hold(path, liar, enumerate(sessions()), tell)


async def _replay(path: Path, liar: Liar, case: KeptCase, tell: Tell) -> None:
    """The case's sessions, as `lie_to_agent` has told of them."""
    sessions: dict[int, list[msgspec.Raw]] = defaultdict(list)
    for message in case.messages:
        number, request = msgspec.msgpack.decode(message, type=tuple[int, msgspec.Raw])
        sessions[number].append(request)
    await _hold(path, liar, iter([(n, iter(s)) for n, s in sessions.items()]), tell)


async def _hold(
    path: Path, liar: Liar, sessions: Iterator[tuple[int, Iterator[Any]]], tell: Tell
) -> None:
    """Two sessions at a time, until there are no more."""

    async def go_on() -> None:
        for number, said in sessions:
            await _speak(path, liar, said, partial(tell_of, number))

    def tell_of(number: int, request: object) -> None:
        tell((number, request))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(go_on)
        nursery.start_soon(go_on)


async def _speak(
    path: Path, liar: Liar, requests: Iterator[Any], tell: Callable[[Any], None]
) -> None:
    """One session, until all is said or the agent has ended it."""
    with contextlib.suppress(*BROKEN):
        async with await trio.open_unix_socket(path) as stream, trio.open_nursery() as nursery:
            nursery.start_soon(_learn, stream, liar)
            with contextlib.suppress(*BROKEN):
                last: object = None
                for request in requests:
                    tell(request)
                    if request is not last:  # many of one are sent at once
                        await trio.sleep(PAUSE_S)
                    await stream.send_all(frame(msgspec.msgpack.encode(request)))
                    last = request
                await trio.sleep(liar.dice.choice((0, PAUSE_S, 1)))
            nursery.cancel_scope.cancel()
    await trio.sleep(PAUSE_S)


async def _learn(stream: trio.SocketStream, liar: Liar) -> None:
    """The numbers that the agent has given; what it has sent along is closed by the kernel."""
    reader = FrameReader(max_bytes=MAX_SESSION_MESSAGE_BYTES)
    with contextlib.suppress(*BROKEN):
        async for data in stream:
            reader.receive_data(data)
            while (reply := reader.next_message_untrusted()) is not None:
                liar.learn(decode_reply_untrusted(reply))


async def _main(path: str, seed: str, log: str, replay: str = "") -> None:
    liar, tell = new_liar(int(seed)), MessageRecorder(Path(log), msgspec.msgpack.encode)
    if replay:
        await _replay(Path(path), liar, load(Path(replay)), tell)
    await lie_to_agent(Path(path), liar, tell=tell)


if __name__ == "__main__":
    trio.run(partial(_main, *sys.argv[1:]))
