"""PointToPoint between two ranks, with real agents and real trainers."""

import json

import pytest

from tests.e2e.harness import Fleet, StartedAgent

pytestmark = pytest.mark.slow

# Each rank sends to all others at once, and receives from ANY; then a rank goes.
TRAINER = """
import json
import numpy as np
import pmesh
from pmesh.p2p.client.calls import ANY

with pmesh.connect(job="messages", wait_for=3) as mesh:
    others = [rank for rank in range(3) if rank != mesh.rank]
    x = np.arange(300_000) + mesh.rank
    handles = [mesh.send(x, to, tag=4, async_op=True) for to in others]
    got = {}
    for _ in others:
        array = mesh.recv(ANY, tag=4)
        got[int(mesh.last_source)] = [int(array[0]), array.size]
    for handle in handles:
        handle.wait()
    total = int(mesh.all_reduce(np.array(1)))
    after = None
    if mesh.rank == 0:
        try:
            mesh.recv(2, tag=5)
        except pmesh.RankLost as e:
            after = str(e)
        mesh.send(x[:1], 1, tag=6)
    elif mesh.rank == 1:
        after = int(mesh.recv(0, tag=6)[0])
    print(json.dumps([mesh.rank, sorted(got.items()), total, after]), flush=True)
"""


def test_ranks_send_to_each_other_and_go_on_when_one_leaves(
    fleet: Fleet, ring: list[StartedAgent]
) -> None:
    one, other, _ = ring
    trainers = [fleet.start_trainer(at, TRAINER) for at in (one, one, other)]
    said = sorted(json.loads(t.await_end().splitlines()[-1]) for t in trainers)

    for rank, (own, got, total, after) in enumerate(said):
        others = [r for r in range(3) if r != rank]
        assert (own, got, total) == (rank, [[r, [r, 300_000]] for r in others], 3)
        if rank == 0:
            assert after.startswith("rank 2 (mac-")
            assert after.endswith("has left the job")
        else:
            assert after == (0 if rank == 1 else None)
