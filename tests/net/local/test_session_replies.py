"""One session, with the program's end in the test's hands: replies, descriptors and the end."""

import os
import socket

import pytest
import trio
import trio.testing

from pmesh.core.wire.framing import FrameReader, frame
from pmesh.core.wire.local import (
    ArenaGranted,
    AskStatus,
    Reply,
    Status,
    Stopping,
    decode_reply_untrusted,
    encode,
)
from pmesh.errors import ProtocolError
from pmesh.net.local.arenas import create_arena
from pmesh.net.local.sessions import PeerCredentials, Session

ASK = frame(encode(AskStatus()))


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
    await session.send(Status(json=b"before"))
    await session.send(grant, (arena.descriptor,))
    await session.send(Status(json=b"after"))
    whole = b"".join(
        frame(encode(m)) for m in (Status(json=b"before"), grant, Status(json=b"after"))
    )
    upto = whole.index(frame(encode(Status(json=b"after"))))
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
    long = Status(json=b"x" * 500_000)
    received: list[Reply] = []

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
        sorted(type(reply).__name__ for reply in received) == ["ArenaGranted"] * 3 + ["Status"] * 3
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
        await session.receive()
    await session.aclose()


async def test_a_reset_ends_the_channel_too() -> None:
    session, program = await connected()
    await session.send(Status(json=b"unread"))
    program.close()  # with data unread: Linux reports a reset
    with pytest.raises(trio.EndOfChannel):
        await session.receive()
    await session.aclose()


async def test_trainer_gone_sees_the_end_behind_an_unread_message() -> None:
    session, program = await connected()
    assert not session.trainer_gone()
    program.sendall(ASK)
    assert not session.trainer_gone()
    program.close()
    assert session.trainer_gone()
    assert await session.receive() == AskStatus()
    await session.aclose()
    assert session.trainer_gone()


async def test_garbage_raises_exactly_protocol_error() -> None:
    session, program = await connected()
    program.sendall(frame(b"\x00garbage"))
    with pytest.raises(ProtocolError):
        await session.receive()
    program.close()
    await session.aclose()


async def test_a_reply_for_which_there_is_no_room_waits_for_it() -> None:
    session, program = await connected()
    program.settimeout(0)
    ahead, reply = Status(json=b"x" * 2_000_000), frame(encode(Status(json=b"y")))
    received = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.send, ahead)  # fills the socket's buffer
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.send, Status(json=b"y"))
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
        await session.send(Status(json=b"late"))
    with pytest.raises(BlockingIOError):
        program.recv(1)
    program.close()
    await session.aclose()
