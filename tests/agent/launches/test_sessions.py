"""What local programs are shown of a launch."""

from pathlib import Path
from typing import cast

from pmesh.agent.launches.sessions import serve_launch
from pmesh.core.launches.lines import NOTE, OUT, STARTER, read_lines
from pmesh.core.wire.launches import Command, FollowLaunch, Launch, LaunchLines, LaunchTerms
from pmesh.net.local.sessions import Session
from pmesh.net.local.spool import Spool
from tests.agent.launches.test_router import launches_in


class FakeSession:
    def __init__(self) -> None:
        self.sent: list[object] = []

    async def send(self, reply: object) -> None:
        self.sent.append(reply)


async def test_lines_that_a_reader_was_too_slow_for_are_counted(tmp_path: Path) -> None:
    async with launches_in(tmp_path) as here:
        there = (here.view.seats[1].name,)
        launch = here.launches.start(
            Launch("night", Command(("true",), "/"), LaunchTerms(), on=there)
        )
        launch.spool = Spool(tmp_path / "spool", segment_bytes=1, segments=2)
        for number in range(4):
            launch.spool.append(b"0 0 o line %d\n" % number)
        session = FakeSession()
        await serve_launch(cast("Session", session), FollowLaunch("night"), here.launches)
        data = b"".join(reply.data for reply in session.sent if isinstance(reply, LaunchLines))
        lines = [(line.seat, line.kind, line.text) for line in read_lines(data)]
        gone = 2 * len(b"0 0 o line 0\n")
        assert lines == [
            (STARTER, NOTE, b"%d bytes of output are not kept any more" % gone),
            (0, OUT, b"line 2"),
            (0, OUT, b"line 3"),
        ]
