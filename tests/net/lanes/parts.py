"""Parts of an op that send and receive bodies over a lane."""

import pytest

from pmesh.net.lanes.executor import THREADS_FROM_BYTES
from pmesh.net.lanes.lane import Lane, Steps
from tests.worlds.lanes import header

SIZES = {"tasks": 0, "threads": THREADS_FROM_BYTES}

either_way = pytest.mark.parametrize("moving_bytes", SIZES.values(), ids=SIZES)


def send_all(lane: Lane, bodies: list[bytes], *, first: int = 0, roster: int = 1) -> Steps:
    yield from lane.flushes()
    for segment, body in enumerate(bodies[first:], first):
        yield from lane.sends(header(len(body), segment=segment, roster=roster), body)


def receive_all(lane: Lane, sizes: list[int], into: list[bytes], *, roster: int = 1) -> Steps:
    for segment in range(len(into), len(sizes)):
        body = bytearray(sizes[segment])
        yield from lane.receives(
            header(len(body), segment=segment, roster=roster), memoryview(body)
        )
        into.append(bytes(body))
