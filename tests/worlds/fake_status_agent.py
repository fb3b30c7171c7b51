"""An agent as `pmesh status`, `events` and `down` see one: a Unix socket that answers.

Run as a program, it stands in for a detached agent: SOCKET, then what to do there.
"""

import contextlib
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import msgspec

from pmesh.agent.events import EventLog, encode_events
from pmesh.agent.schema import (
    DoorStatus,
    EdgeStatus,
    EpochStatus,
    HeldOffStatus,
    JobStatus,
    MemberStatus,
    NewcomerStatus,
    NodeStatus,
    PathStatus,
    PeerStatus,
    RankStatus,
    Status,
    TermsStatus,
    TrafficStatus,
    TurnedAwayStatus,
    ViewStatus,
    encode_status,
)
from pmesh.core.values import Verdict
from pmesh.core.wire.control import (
    AgentEvents,
    AskEvents,
    AskMachines,
    AskPing,
    AskStatus,
    ForgetName,
    Machines,
    Pinged,
    StatusReply,
    Stopping,
    WayTried,
)
from pmesh.core.wire.framing import FrameReader, frame
from pmesh.core.wire.session import Refused, encode
from pmesh.ids import Incarnation, Member, NodeId
from simulation.wire import decode_request_untrusted

IDS = ["a" * 52, "b" * 52, "c" * 52]
NAMES = ["mac-1", "mac-2", "studio"]

PATHS = (
    PathStatus(
        interface="en0",
        remote="en7",
        kind="wired",
        use="in use",
        speed_mbit_s=100,
        rtt_ms=0.5,
        slow="en0 here runs at 100 Mbit/s",
    ),
    PathStatus(interface="en1", remote="en\x1b1", kind="wifi", use="standby", rtt_ms=4.25),
    PathStatus(interface=None, remote="10.0.0.9", kind=None, use="silent"),
)

SNAPSHOT = Status(
    schema=2,
    version="0.1.0",
    protocol=1,
    pid=4242,
    uptime_s=61.5,
    node=NodeStatus(
        id=IDS[0],
        name="mac-1",
        incarnation="0" * 16,
        addresses=("10.0.0.1:24160",),
        compression="auto",
    ),
    view=ViewStatus(
        epoch=EpochStatus(counter=7, leader=IDS[0], incarnation="0" * 16),
        leader=IDS[0],
        members=tuple(
            MemberStatus(
                id=node,
                name=name,
                rank=rank,
                health="healthy" if rank else "self",
                rtt_ms=0.25 * rank if rank else None,
                jitter_ms=0.04 if rank else None,
                silence_s=1.6 if rank == 1 else 0.2,
                loss_percent=2.14 * rank if rank else None,
                addresses=(f"10.0.0.{rank + 1}:24160",),
                interface="en0" if rank else None,
                paths=PATHS if rank else (),
            )
            for rank, (node, name) in enumerate(zip(IDS, NAMES, strict=True))
        ),
        edges=tuple(
            EdgeStatus(sender=IDS[rank], receiver=IDS[(rank + 1) % 3], rtt_ms=0.25 * (rank + 1))
            for rank in range(3)
        ),
    ),
    peers=(
        PeerStatus(
            id="d" * 52,
            name="next\x1b[2J-door",
            state="other_mesh_key",
            addresses=("10.0.0.9:24160",),
            reason="holds another mesh key",
        ),
    ),
    jobs=(
        JobStatus(
            name="digits",
            state="below_min_ranks",
            wait_for=None,
            roster=9,
            stable=40,
            ranks=(
                RankStatus(
                    rank=0,
                    trainer=0,
                    node=IDS[0],
                    name="mac-1",
                    started=42,
                    completed=41,
                    compression="in\x1bt8: why",
                ),
                RankStatus(
                    rank=1,
                    trainer=2,
                    node=IDS[1],
                    name="mac-2",
                    started=42,
                    completed=40,
                    stopped=True,
                ),
            ),
            newcomers=(NewcomerStatus(node=IDS[2], name="stu\x1bdio"),),
            terms=TermsStatus(min_ranks=3, on_loss="continue", quorum="any"),
            losses=("rank 1 (studio) is lost: silent",),
            reason="it has 2 of the 3",
        ),
        JobStatus(
            name="late",
            state="waiting",
            wait_for=3,
            ranks=(),
            newcomers=(NewcomerStatus(node=IDS[0], name="mac-1", program="late.py"),),
        ),
    ),
    traffic=TrafficStatus(
        control_sent_bytes=1500,
        control_received_bytes=999,
        data_sent_bytes=2_500_000,
        data_received_bytes=0,
    ),
    loop_lag_ms=1.25,
    door=DoorStatus(
        accepted=9,
        authenticated=2,
        pending=1,
        garbage=1,
        closed_early=0,
        timed_out=2,
        dropped=1,
        refused=2,
        out_of_files=0,
    ),
    turned_away=TurnedAwayStatus(
        connections=6,
        forged_announcements=0,
        foreign_announcements=0,
        broken_links=2,
        programs=0,
    ),
    held_off=(HeldOffStatus(id="e" * 52, name="a\x1bir", losses=3, back_in_s=7.2),),
)
MINIMAL = msgspec.structs.replace(SNAPSHOT, peers=(), jobs=())

WAYS = (
    WayTried(
        interface="en5",
        remote="en0",
        kind="wired",
        address="10.0.0.2:24160",
        speed_mbit_s=1000,
        mbit_s=941,
        rtt_ms=0.314,
    ),
    WayTried(
        interface="en1",
        remote="en\x1b1",
        kind="wifi",
        address="10.1.0.2:24160",
        why_not="no answer in 3 s",
    ),
    WayTried(
        interface="bridge0", kind="thunderbolt", why_not="mac-2 has no address in 10.9.0.0/16"
    ),
    Pinged(interface="en5", remote="en0", why="wired is better than wifi"),
)
NOBODY = (Refused(Verdict("UsageError", "no other machine is called 'x'; there are mac-2")),)

Answer = Callable[[socket.socket], None]


def make_chronicle(incarnation: int = 1) -> EventLog:
    """Of an agent at whose start it was noon; an event happens every second."""
    noon, seconds = datetime(2026, 11, 22, 12, tzinfo=UTC), itertools.count()
    event_log = EventLog(
        Member(NodeId(b"a" * 32), Incarnation(incarnation)),
        "mac-1",
        clock=lambda: 0.0,
        wall_clock=lambda: noon + timedelta(seconds=next(seconds)),
        listener=lambda _: None,
    )
    event_log.note("agent started", "mac-1 is up")
    return event_log


def answer_status(connection: socket.socket, pid: int) -> None:
    """Say that the agent is this process, whatever was asked."""
    connection.recv(4096)
    status = msgspec.structs.replace(SNAPSHOT, pid=pid)
    connection.sendall(frame(encode(StatusReply(encode_status(status)))))


def answer_with(event_log: EventLog) -> Answer:
    """Answer one request as the agent of these events does."""
    return partial(answer_well, event_log=event_log)


def answer_well(connection: socket.socket, event_log: EventLog | None = None) -> None:
    """Answer one request as an agent does."""
    reader = FrameReader(max_bytes=1 << 20)
    while (message := reader.next_message_untrusted()) is None:
        data = connection.recv(4096)
        if not data:
            return
        reader.receive_data(data)
    match decode_request_untrusted(message):
        case AskStatus():
            connection.sendall(frame(encode(StatusReply(encode_status(SNAPSHOT)))))
        case AskEvents(after):
            page = (event_log or make_chronicle()).since(after)
            connection.sendall(frame(encode(AgentEvents(encode_events(page)))))
        case AskPing(name):
            for reply in WAYS if name == "mac-2" else NOBODY:
                connection.sendall(frame(encode(reply)))
        case AskMachines(names):
            ids = tuple(IDS[NAMES.index(name)] for name in names)
            connection.sendall(frame(encode(Machines(ids))))
        case ForgetName():
            connection.sendall(frame(encode(Machines((IDS[1],)))))
        case _:
            connection.sendall(frame(encode(Stopping(pid=2**22 + 1))))  # above any pid


@contextlib.contextmanager
def agent_at(path: Path, *answers: Answer) -> Iterator[None]:
    """Answer one connection by each of `answers`, in order; nobody can connect any more then."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            for left, answer in zip(range(len(answers) - 1, -1, -1), answers, strict=True):
                connection, _ = listener.accept()
                if not left:  # before the answer: who has it may ask again at once
                    path.unlink()
                    listener.close()
                with connection, contextlib.suppress(OSError):
                    answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield
        thread.join(timeout=10)
        assert not thread.is_alive(), "fewer connections came than answers were given"


def _run_detached(path: Path, deed: str) -> None:
    sys.stderr.write(f"{os.environ['PMESH_NAME']} {os.getsid(0) == os.getpid()}\n")
    if deed == "fail":
        sys.exit("PortTaken: 24160")
    if deed == "come second":
        while path.exists():
            time.sleep(0.01)
        sys.exit("AgentAlreadyRunning: another was faster")
    if deed == "end":
        sys.exit(0)
    if deed == "serve":
        answer = partial(answer_status, pid=os.getpid())
        with agent_at(path, answer, answer):
            pass
    else:
        time.sleep(60)


if __name__ == "__main__":
    _run_detached(Path(sys.argv[1]), sys.argv[2])
