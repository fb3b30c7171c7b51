"""How many Python frames one `all_reduce` enters, in the trainer's thread and in the agent.

Counted is each entry of a frame whose code is in `pmesh/`: calls of functions, and re-entries of
generators and coroutines that were suspended. So each layer between the socket and the plan counts
once for the call and once for each wait. Frames of trio, numpy and of generated `__init__`s do not
count. The numbers are the least of several ops: other tasks of the agent may run during an op.
"""

import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType

import numpy as np
import pytest

import pmesh
from pmesh.agent.jobs.ranks import LocalRank
from pmesh.client.session.connection import AgentConnection
from pmesh.testing import SimulatedMesh
from simulation.wire import decode_request_untrusted
from tests.worlds.village_ops import use_lanes

WARM_UP, OPS, SIZE = 5, 20, 2
MOST_IN_CLIENT = 48
MOST_UNTIL_SENT = 23
MOST_IN_AGENT = {"in memory": 93, "over lanes": 100}
"""For each of the two ranks of an agent."""

_ROOT = str(Path(pmesh.__file__).parent) + "/"


class Entries(list[CodeType]):
    """The code of each frame that was entered."""

    def note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_ROOT):
            self.append(frame.f_code)


@contextmanager
def counting_the_agent() -> Iterator[Entries]:
    """Note the frames of threads of an agent that starts in this block."""
    entries = Entries()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if threading.current_thread().name.startswith("simulated-agent"):
            entries.note(frame, event, argument)

    threading.setprofile(note)
    try:
        yield entries
    finally:
        threading.setprofile(None)


def reduce_often(mesh: pmesh.Mesh, together: threading.Barrier) -> list[Entries]:
    """Return the frames of each call; no rank begins one before both have ended the last one."""
    sys.setprofile(None)
    values, calls = np.ones(1000, np.float32), list[Entries]()
    for _ in range(WARM_UP):
        mesh.all_reduce(values)
    for _ in range(OPS):
        entries = Entries()
        together.wait()
        sys.setprofile(entries.note)
        mesh.all_reduce(values)
        sys.setprofile(None)
        calls.append(entries)
    together.wait()
    return calls


def ops_of(entries: Entries) -> list[list[CodeType]]:
    """Cut the agent's frames where it has read the first request of each op."""
    decodes = [i for i, code in enumerate(entries) if code is decode_request_untrusted.__code__]
    return [entries[begin:end] for begin, end in pairwise(decodes[::SIZE])][-OPS:]


def by_module(entries: Sequence[CodeType], ranks: int) -> str:
    counts = Counter(code.co_filename.removeprefix(_ROOT) for code in entries)
    rows = [f"{count / ranks:6.1f} {module}" for module, count in counts.most_common()]
    return "\n".join([f"{len(entries) / ranks:6.1f} in all", *rows])


@pytest.mark.parametrize("road", MOST_IN_AGENT)
def test_an_all_reduce_enters_few_frames(monkeypatch: pytest.MonkeyPatch, road: str) -> None:
    if road == "over lanes":
        use_lanes(monkeypatch)
    monkeypatch.setattr(LocalRank, "has_all_here", False)  # else the library does it
    together = threading.Barrier(SIZE)
    with counting_the_agent() as of_agent:
        of_ranks = SimulatedMesh(SIZE).run(lambda mesh: reduce_often(mesh, together))
    in_client = min((call for calls in of_ranks for call in calls), key=len)
    until_sent = in_client.index(AgentConnection.send.__code__)
    in_agent = min(ops_of(of_agent), key=len)
    print("client\n" + by_module(in_client, 1))  # noqa: T201 - for who makes it more or fewer
    print("client, until it sends\n" + by_module(in_client[:until_sent], 1))  # noqa: T201
    print("agent, for each rank\n" + by_module(in_agent, SIZE))  # noqa: T201
    assert len(in_client) <= MOST_IN_CLIENT
    assert until_sent <= MOST_UNTIL_SENT
    assert len(in_agent) / SIZE <= MOST_IN_AGENT[road]
