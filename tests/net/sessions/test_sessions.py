import array
import errno
import os
import socket
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from pmesh.core.wire.control import AskStatus, StatusReply, StopAgent, Stopping
from pmesh.core.wire.framing import FrameReader, frame
from pmesh.core.wire.session import ArenaGranted, DropArena, encode
from pmesh.core.wire.trainer import Leave
from pmesh.errors import AgentAlreadyRunning, ConfigError, ProtocolError
from pmesh.net.sessions import sessions
from pmesh.net.sessions.arenas import create_arena
from pmesh.net.sessions.sessions import (
    MAX_VISITORS,
    PeerCredentials,
    Session,
    SessionCounters,
    serve_sessions,
)
from simulation.wire import ANY_REQUESTS, AnyReply, decode_reply_untrusted
from tests.worlds.faults import Faults, Real
from tests.worlds.system import be_on

# ruff: noqa: ASYNC240 - looking at a temporary directory blocks for microseconds


ASK = frame(encode(AskStatus()))


async def echo(session: Session) -> None:
    """Answers each AskStatus with a StatusReply, until the program leaves."""
    first = await session.receive(ANY_REQUESTS)
    session.stay()
    if isinstance(first, Leave):
        return
    await session.send(StatusReply(json=b"{}"))
    while not isinstance(await session.receive(ANY_REQUESTS), Leave):
        await session.send(StatusReply(json=b"{}"))


@asynccontextmanager
async def serving(
    path: Path, handler: Callable[[Session], Awaitable[object]] = echo
) -> AsyncGenerator[SessionCounters]:
    counters = SessionCounters()
    async with trio.open_nursery() as nursery:

        async def serve(*, task_status: trio.TaskStatus[None]) -> None:
            await serve_sessions(path, handler, counters=counters, task_status=task_status)

        await nursery.start(serve)
        yield counters
        nursery.cancel_scope.cancel()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.sock"


async def reply_on(stream: trio.SocketStream) -> AnyReply:
    reader = FrameReader(max_bytes=1 << 20)
    while (message := reader.next_message_untrusted()) is None:
        data = await stream.receive_some()
        assert data, "the server closed the session"
        reader.receive_data(data)
    return decode_reply_untrusted(message)


async def test_a_request_is_answered_on_its_own_session(path: Path) -> None:
    async with serving(path), await trio.open_unix_socket(path) as stream:
        for _ in range(3):
            await stream.send_all(ASK)
            assert await reply_on(stream) == StatusReply(json=b"{}")


async def test_requests_arrive_whole_however_they_are_cut(path: Path) -> None:
    received: list[object] = []
    done = trio.Event()

    async def collect(session: Session) -> None:
        received.extend([await session.receive(ANY_REQUESTS) for _ in range(3)])
        done.set()

    async with serving(path, collect), await trio.open_unix_socket(path) as stream:
        data = b"".join(frame(encode(m)) for m in (AskStatus(), DropArena(5), StopAgent()))
        for i in range(0, len(data), 3):
            await stream.send_all(data[i : i + 3])
        await done.wait()
    assert received == [AskStatus(), DropArena(5), StopAgent()]


async def test_the_socket_is_the_users_alone_and_goes_with_the_server(path: Path) -> None:
    async with serving(path):
        assert path.lstat().st_mode & 0o777 == 0o600
    assert not path.exists()


async def test_a_session_knows_the_pid_of_its_program(path: Path) -> None:
    pids: list[int] = []

    async def note(session: Session) -> None:
        pids.append(session.pid)
        await session.send(Stopping(pid=0))

    async with serving(path, note), await trio.open_unix_socket(path) as stream:
        await stream.send_all(ASK)
        await reply_on(stream)
    assert pids == [os.getpid()]


async def test_a_socket_left_by_a_killed_agent_is_replaced_silently(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    assert path.exists()
    async with serving(path), await trio.open_unix_socket(path) as stream:
        await stream.send_all(ASK)
        await reply_on(stream)


async def test_a_live_agents_socket_is_left_alone(path: Path) -> None:
    async with serving(path):
        with pytest.raises(AgentAlreadyRunning, match="pmesh down"):
            await serve_sessions(path, echo, counters=SessionCounters())
        async with await trio.open_unix_socket(path) as stream:
            await stream.send_all(ASK)
            await reply_on(stream)


async def test_a_live_agent_with_a_full_queue_is_not_taken_for_dead(
    path: Path, faults: Faults
) -> None:
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(path))

        def full(self: socket.socket, address: str) -> int:
            del self, address
            return errno.EAGAIN

        faults.instead(socket.socket, "connect_ex", full)
        with pytest.raises(AgentAlreadyRunning):
            await serve_sessions(path, echo, counters=SessionCounters())
    assert path.exists()


async def test_a_file_in_the_way_is_named_and_kept(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(ConfigError, match="is not a socket"):
        await serve_sessions(path, echo, counters=SessionCounters())
    assert path.read_text() == "precious"


async def test_a_path_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "none" / "agent.sock"
    with pytest.raises(ConfigError, match=str(missing)):
        await serve_sessions(missing, echo, counters=SessionCounters())


async def test_a_socket_that_another_agent_has_made_meanwhile_is_not_removed(path: Path) -> None:
    async with serving(path):
        path.unlink()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
            made = path.lstat().st_ino
    assert path.lstat().st_ino == made


async def test_another_user_is_refused(path: Path, faults: Faults) -> None:
    def stranger(connection: object) -> PeerCredentials:
        del connection
        return PeerCredentials(pid=1, uid=os.getuid() + 1)

    faults.instead(sessions, "credentials_of", stranger)
    async with serving(path) as counters, await trio.open_unix_socket(path) as stream:
        assert await stream.receive_some() == b""
        assert counters == SessionCounters(accepted=1, refused=1)


async def test_who_is_gone_before_it_is_looked_at_does_no_harm(path: Path, faults: Faults) -> None:
    async with serving(path):
        with faults.fail(sessions, "credentials_of", OSError(errno.ENOTCONN, "gone")):
            async with await trio.open_unix_socket(path) as stream:
                assert await stream.receive_some() == b""
        async with await trio.open_unix_socket(path) as stream:
            await stream.send_all(ASK)
            await reply_on(stream)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xff\xff\xff",  # 4 GiB
        frame(b""),
        frame(b"GET / HTTP/1.1"),
        frame(encode(StatusReply(json=b"a reply is not a request"))),
    ],
)
async def test_garbage_ends_its_own_session_and_no_other(path: Path, garbage: bytes) -> None:
    async with serving(path) as counters, await trio.open_unix_socket(path) as good:
        await good.send_all(ASK)
        await reply_on(good)
        for before in (b"", ASK):  # as the first thing, and after a request
            async with await trio.open_unix_socket(path) as bad:
                await bad.send_all(before)
                if before:
                    await reply_on(bad)
                await bad.send_all(garbage)
                with pytest.raises((AssertionError, trio.BrokenResourceError)):
                    await reply_on(bad)
        await good.send_all(ASK)
        await reply_on(good)
        assert counters == SessionCounters(accepted=3, garbage=2)


async def test_who_says_nothing_is_closed_after_a_while(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    del autojump_clock
    async with serving(path) as counters, await trio.open_unix_socket(path) as stream:
        start = trio.current_time()
        assert await stream.receive_some() == b""
        assert trio.current_time() - start == sessions.VISIT_S
        assert counters == SessionCounters(accepted=1, silent=1)


async def test_who_has_spoken_once_may_be_silent_for_long(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    del autojump_clock
    async with serving(path), await trio.open_unix_socket(path) as stream:
        await stream.send_all(ASK)
        await reply_on(stream)
        await trio.sleep(3600)
        await stream.send_all(ASK)
        await reply_on(stream)


async def test_many_that_never_speak_push_each_other_out_and_nobody_else(path: Path) -> None:
    async with serving(path) as counters, await trio.open_unix_socket(path) as good:
        await good.send_all(ASK)
        await reply_on(good)
        silent = [await trio.open_unix_socket(path) for _ in range(MAX_VISITORS + 3)]
        for stream in silent[:3]:
            assert await stream.receive_some() == b""
        await good.send_all(ASK)
        await reply_on(good)
        assert counters.silent == 3
        await silent[-1].send_all(ASK)  # the youngest is still there
        await reply_on(silent[-1])
        for stream in silent:
            await stream.aclose()


async def test_who_does_not_read_its_answer_is_closed_after_a_while(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async def answer_at_length(session: Session) -> None:
        await session.receive(ANY_REQUESTS)
        await session.send(StatusReply(json=bytes(2**20 - 100)))

    del autojump_clock
    async with serving(path, answer_at_length) as counters:
        stream = await trio.open_unix_socket(path)
        await stream.send_all(ASK)
        await trio.sleep(sessions.VISIT_S + 0.1)
        assert counters.silent == 1
        await stream.aclose()


async def test_who_is_pushed_out_while_it_decides_to_stay_is_gone(path: Path) -> None:
    ended = trio.Event()

    async def stay_late(session: Session) -> None:
        try:
            with trio.CancelScope(shield=True):
                await session.receive(ANY_REQUESTS)
            session.stay()
            await trio.sleep_forever()
        finally:
            ended.set()

    async with serving(path, stay_late):
        late = await trio.open_unix_socket(path)
        others = [await trio.open_unix_socket(path) for _ in range(MAX_VISITORS)]
        await trio.testing.wait_all_tasks_blocked()
        await late.send_all(ASK)
        await ended.wait()
        for stream in (late, *others):
            await stream.aclose()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.EIO])
async def test_a_system_out_of_descriptors_costs_the_oldest_visitor_and_a_moment(
    path: Path,
    faults: Faults,
    autojump_clock: trio.testing.MockClock,
    number: int,
) -> None:
    failures = list[OSError]()

    async def accept(real: Real, listener: trio.SocketListener) -> object:
        await trio.lowlevel.wait_readable(listener.socket)
        if failures:
            raise failures.pop()
        return await real(listener)

    faults.around(trio.SocketListener, "accept", accept)
    async with serving(path) as counters, await trio.open_unix_socket(path) as good:
        await good.send_all(ASK)
        await reply_on(good)
        async with await trio.open_unix_socket(path) as silent:
            await trio.testing.wait_all_tasks_blocked()
            failures += [OSError(number, "too many")] * 2
            async with await trio.open_unix_socket(path) as late:
                assert await silent.receive_some() == b""
                await late.send_all(ASK)
                await reply_on(late)
        assert (counters.out_of_files, counters.silent) == (2, 1)
        assert autojump_clock.current_time() < 1
        await good.send_all(ASK)  # who stays is not pushed out
        await reply_on(good)


async def test_a_broken_listener_ends_the_server(path: Path, faults: Faults) -> None:
    faults.fail(trio.SocketListener, "accept", OSError(errno.EBADF, "bad file descriptor"))
    with pytest.raises(ExceptionGroup) as caught:
        await serve_sessions(path, echo, counters=SessionCounters())
    assert caught.group_contains(OSError, match="bad file")


async def test_a_bug_in_a_handler_is_not_hidden(path: Path) -> None:
    async def broken(session: Session) -> None:
        raise ZeroDivisionError(session)

    async def meet_the_bug() -> None:
        async with serving(path, broken), await trio.open_unix_socket(path) as stream:
            await stream.send_all(ASK)
            await trio.sleep_forever()

    with pytest.raises(ExceptionGroup) as caught:
        await meet_the_bug()
    assert caught.group_contains(ZeroDivisionError)


class MacSocket:
    """A Unix socket as macOS has it: only getsockopt, answered from sys/ucred.h."""

    def __init__(self, *, version: int = 0) -> None:
        self._version = version

    def getsockopt(self, level: int, option: int, buffersize: int, /) -> bytes:
        assert level == 0  # SOL_LOCAL
        if option == 1:  # LOCAL_PEERCRED
            assert buffersize == 76  # sizeof(struct xucred)
            groups = array.array("I", [20, 12] + [0] * 14).tobytes()
            return struct.pack("=IIhxx", self._version, 501, 2) + groups
        assert (option, buffersize) == (2, 4)  # LOCAL_PEERPID
        return (4321).to_bytes(4, "little")


def test_on_macos_the_kernel_is_asked_in_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    be_on(monkeypatch, "darwin")
    assert sessions.credentials_of(MacSocket()) == PeerCredentials(pid=4321, uid=501)
    with pytest.raises(OSError, match="version 1"):
        sessions.credentials_of(MacSocket(version=1))


async def connected() -> tuple[Session, socket.socket]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(5)
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
    return Session(stream, PeerCredentials(1, 1)), theirs


async def test_a_descriptor_comes_with_the_last_byte_of_its_message() -> None:
    session, program = await connected()
    arena = create_arena("output", 3, 65536)
    arena.memory[:2] = b"hi"
    grant = ArenaGranted(arena=3, kind="output", nbytes=65536)
    await session.send(StatusReply(json=b"before"))
    await session.send(grant, (arena.descriptor,))
    await session.send(StatusReply(json=b"after"))
    whole = b"".join(
        frame(encode(m)) for m in (StatusReply(json=b"before"), grant, StatusReply(json=b"after"))
    )
    upto = whole.index(frame(encode(StatusReply(json=b"after"))))
    received = b""
    while len(received) < len(whole):
        data, descriptors, _, _ = socket.recv_fds(program, 1, 4)
        received += data
        assert bool(descriptors) == (len(received) == upto)
        for descriptor in descriptors:
            assert os.pread(descriptor, 2, 0) == b"hi"
            os.close(descriptor)
    assert received == whole
    arena.close()
    program.close()
    await session.aclose()


async def test_replies_of_several_tasks_are_not_mixed() -> None:
    session, program = await connected()
    arena = create_arena("output", 0, 65536)
    grant = ArenaGranted(arena=0, kind="output", nbytes=65536)
    long = StatusReply(json=b"x" * 500_000)
    received: list[AnyReply] = []

    def read() -> None:
        reader = FrameReader(max_bytes=1 << 20)
        while len(received) < 6:
            data, descriptors, _, _ = socket.recv_fds(program, 65536, 4)
            for descriptor in descriptors:
                os.close(descriptor)
            reader.receive_data(data)
            while (message := reader.next_message_untrusted()) is not None:
                received.append(decode_reply_untrusted(message))

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(session.send, long)
            nursery.start_soon(session.send, grant, (arena.descriptor,))
        await trio.to_thread.run_sync(read)
    assert (
        sorted(type(reply).__name__ for reply in received)
        == ["ArenaGranted"] * 3 + ["StatusReply"] * 3
    )
    arena.close()
    program.close()
    await session.aclose()


async def test_sending_to_a_program_that_is_gone_says_so() -> None:
    session, program = await connected()
    program.close()
    for descriptors in ((), (0,)):
        with pytest.raises(trio.BrokenResourceError):
            await session.send(Stopping(pid=1), descriptors)
    await session.aclose()


async def test_a_program_that_goes_away_ends_the_channel() -> None:
    session, program = await connected()
    program.sendall(ASK[:-1])
    program.close()
    with pytest.raises(trio.EndOfChannel):
        await session.receive(ANY_REQUESTS)
    await session.aclose()


async def test_a_reset_ends_the_channel_too() -> None:
    session, program = await connected()
    await session.send(StatusReply(json=b"unread"))
    program.close()  # with data unread: Linux reports a reset
    with pytest.raises(trio.EndOfChannel):
        await session.receive(ANY_REQUESTS)
    await session.aclose()


async def test_trainer_gone_sees_the_end_behind_an_unread_message() -> None:
    session, program = await connected()
    assert not session.trainer_gone()
    program.sendall(ASK)
    assert not session.trainer_gone()
    program.close()
    assert session.trainer_gone()
    assert await session.receive(ANY_REQUESTS) == AskStatus()
    await session.aclose()
    assert session.trainer_gone()


async def test_garbage_raises_exactly_protocol_error() -> None:
    session, program = await connected()
    program.sendall(frame(b"\x00garbage"))
    with pytest.raises(ProtocolError):
        await session.receive(ANY_REQUESTS)
    program.close()
    await session.aclose()


async def test_a_reply_for_which_there_is_no_room_waits_for_it() -> None:
    session, program = await connected()
    program.settimeout(0)
    ahead, reply = StatusReply(json=b"x" * 2_000_000), frame(encode(StatusReply(json=b"y")))
    received = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.send, ahead)  # fills the socket's buffer
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.send, StatusReply(json=b"y"))
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(5):
            while not (data := program.recv(1 << 20)).endswith(reply):
                received += len(data)
                await trio.lowlevel.wait_readable(program)
    assert 0 < received < 2_000_000
    program.close()
    await session.aclose()


async def test_who_is_cancelled_sends_nothing() -> None:
    session, program = await connected()
    program.settimeout(0)
    with trio.CancelScope() as scope:
        scope.cancel()
        await session.send(StatusReply(json=b"late"))
    with pytest.raises(BlockingIOError):
        program.recv(1)
    program.close()
    await session.aclose()
